"""A client written from docs/protocol.md alone, which imports nothing of wsgrad, against a real server process."""

import io
import json
import os
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import urlsplit

import cbor2
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, Request

HELLO, WELCOME, REFUSED, SEEN, BYE = 0, 1, 4, 7, 8
BATCH, LAUNCHES, PROGRAM, CHUNK, OPEN = 16, 17, 18, 19, 22
RESULT, READ_DATA, FAILED = 33, 34, 35
ALLOC, UPLOAD, READ = 1, 5, 6
BULK = {17, 18, 19, 25, 34, 42, 45, 52, 56}
SOURCE = b"void triple(float *x, int n) { for (int i = 0; i < n; i++) x[i] *= 3; }"


class Link:
    """One connection of a session; `sent` and `received` are the session's numbered messages."""

    def __init__(self, url, token, sent=(), received=0):
        where = urlsplit(url)
        self.socket = socket.create_connection((where.hostname, where.port), 10)
        self.ws = WSConnection(ConnectionType.CLIENT)
        self.data, self.messages = bytearray(), []
        self.sent, self.received = list(sent), received
        headers = [("authorization", f"Bearer {token}")]
        request = Request(where.netloc, "/v1/client", subprotocols=["wsgrad.v1"], extra_headers=headers)
        self.socket.sendall(self.ws.send(request))
        self.subprotocol = None
        while self.subprotocol is None:
            self.listen()

    def send(self, *message, bulk=None):
        data = cbor2.dumps(message) + (b"" if bulk is None else cbor2.dumps(bulk))
        if message[0] >= 16:
            self.sent.append(data)
        self.send_bytes(data)

    def send_bytes(self, data):
        self.socket.sendall(self.ws.send(BytesMessage(data)))

    def listen(self):
        data = self.socket.recv(1 << 16)
        assert data, "the server has closed"
        self.ws.receive_data(data)
        for event in self.ws.events():
            if isinstance(event, BytesMessage):
                self.data += event.data
                if event.message_finished:
                    self.messages.append(bytes(self.data))
                    self.data.clear()
            else:
                assert isinstance(event, AcceptConnection), event
                self.subprotocol = event.subprotocol

    def next(self):
        while not self.messages:
            self.listen()
        stream = io.BytesIO(self.messages.pop(0))
        message = cbor2.load(stream)
        self.received += message[0] >= 16
        return message, cbor2.load(stream) if message[0] in BULK else None

    def until(self, kind):
        while True:
            message, bulk = self.next()
            assert message[0] not in (REFUSED, FAILED), message
            if message[0] == kind:
                return message, bulk


@contextmanager
def running_server():
    """Start a server process; it lives no longer than the pipe that it says its address on."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--ready-fd", str(writer)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")}
    process = subprocess.Popen(command, pass_fds=(writer,), env=variables)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            yield json.loads(lines.readline())
    finally:
        process.terminate()
        process.wait(15)


def test_a_client_from_the_document_alone_works_and_resumes():
    with running_server() as ready:
        link = Link(ready["url"], ready["token"])
        assert link.subprotocol == "wsgrad.v1"
        link.send(HELLO, 1, "second client", None, 0, {})
        (_, version, key, received, info), _ = link.until(WELCOME)
        assert (version, received) == (1, 0)
        cpu = next(device["id"] for device in info["devices"] if device["kind"] == "cpu")

        link.send(OPEN, 1, cpu, {})
        assert link.until(RESULT)[0][1:3] == [1, 0]
        link.send(BATCH, 1, 1, [[ALLOC, 1, 16], [UPLOAD, 1, 1, 0, 16]])
        link.send(CHUNK, 1, 1, 0, bulk=struct.pack("<4f", 1, 2, 3, 4))
        link.send(PROGRAM, 1, 3, 1, "c", "triple", "triple", "pi", [0], False, {}, bulk=SOURCE)
        link.send(LAUNCHES, 1, 4, 2, bulk=struct.pack("<8I", 1, 0, 1, 4, 1, 0, 1, 4))
        link.send(BATCH, 1, 6, [[READ, 1, 0, 16]])
        message, data = link.until(READ_DATA)
        assert message[1:3] == [1, 6]
        assert struct.unpack("<4f", data) == (9, 18, 27, 36)
        link.send(SEEN, link.received)

        # Whether the server gets the launch of command 7 before the connection breaks, it runs once.
        link.send(LAUNCHES, 1, 7, 1, bulk=struct.pack("<4I", 1, 0, 1, 4))
        link.send(BATCH, 1, 8, [[READ, 1, 0, 16]])
        link.socket.close()

        again = Link(ready["url"], ready["token"], link.sent, link.received)
        again.send(HELLO, 1, "second client", key, link.received, {})
        (_, _, resumed, received, _), _ = again.until(WELCOME)
        assert resumed == key
        assert 6 <= received <= len(again.sent) == 8
        for lost in again.sent[received:]:
            again.send_bytes(lost)
        message, data = again.until(READ_DATA)
        assert message[1:3] == [1, 8]
        assert struct.unpack("<4f", data) == (27, 54, 81, 108)
        again.send(BATCH, 1, 9, [[READ, 1, 4, 4]])
        assert again.until(READ_DATA)[1] == struct.pack("<f", 54)
        again.send(BYE)
        again.socket.close()

        late = Link(ready["url"], ready["token"])
        late.send(HELLO, 1, "second client", key, again.received, {})
        assert late.next()[0][0] == REFUSED
        late.socket.close()
