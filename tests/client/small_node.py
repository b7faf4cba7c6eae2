"""A node that dials in, joins, and then says only what a test lets it say; it runs nothing."""

import contextlib

from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.dial import dial
from wsgrad.transport.url import parse_endpoint

TAB = {"kind": "browser", "dialects": ["wgsl"], "memory": 1 << 30}


class SmallNode:
    """For `with`."""

    def __init__(self, url, token, name, *, label=None, secret=None, **device):
        device = TAB | {"label": name if label is None else label} | device
        endpoint = parse_endpoint(url)
        self._socket, leftover = dial(endpoint, route="/v1/node", token=token, cafile=None, timeout=10)
        self._socket.settimeout(10)
        self._connection = Connection(client=True, bulk_kinds=m.BULK_KINDS)
        self._pending = self._connection.feed(leftover)
        self.say(m.Join(m.VERSION, "small", name, secret, [device]))
        self.joined = self.hear(m.Joined)

    def say(self, message):
        for buffer in self._connection.encode(encode(m.message_array(message)), None):
            self._socket.sendall(buffer)

    def hear(self, kind):
        """The next message of this kind."""
        while True:
            while not self._pending:
                nbytes = self._socket.recv_into(self._connection.get_buffer())
                assert nbytes, "the server has left"
                self._pending = self._connection.buffer_updated(nbytes)
            received = self._pending.pop(0)
            assert isinstance(received, Received), received
            message = m.parse_message(received.head)
            if isinstance(message, kind):
                return message

    def present(self, label, *, paused=False, memory=0):
        self.say(m.Present(label, paused, memory))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self.say(m.Bye())
        self._socket.close()
