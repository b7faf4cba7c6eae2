"""A session wired to a test's own server end through two real protocol cores, without sockets."""

from __future__ import annotations

from wsgrad.client.core import Session
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.link import Link
from wsgrad.transport.messages import BULK_KINDS, Hello, Message, Seen, Welcome, message_array, parse_message

KEY = bytes(range(16))


class Wire:
    """`heard` holds what the client said, in order, each with its bulk; `say` answers."""

    def __init__(self, *, limits: dict[str, object] | None = None, debug: bool = False) -> None:
        self.session = Session(agent="test", debug=debug)
        self.heard: list[tuple[Message, bytes | None]] = []
        self.received = 0
        self.link = Link()
        self._limits = limits or {}
        self.connect()

    def connect(self) -> None:
        """A (new) connection, welcomed."""
        self.client = Connection(client=True, bulk_kinds=BULK_KINDS, destination=self.session.destination)
        self.server = Connection(client=False, bulk_kinds=BULK_KINDS)
        self.session.release = self.client.release
        hello = self.session.hello()
        self._to_server(self.client.encode(hello))
        message, _ = self.heard.pop()
        assert isinstance(message, Hello)
        assert message.key == self.session.key
        info = {"devices": [{"id": "n/cpu/0", "kind": "cpu", "dialects": ["c"]}], "limits": self._limits}
        self.link.resume(message.received)
        self._to_client(self.server.encode(encode(message_array(Welcome(1, KEY, self.received, info)))))
        self._deliver()

    def cut(self, *, lose: int = 0) -> None:
        """The connection drops; the last `lose` messages on their way to the server are lost."""
        outgoing = []
        while (message := self.session.link.pop()) is not None:
            outgoing.append(message)
        for message in outgoing[: len(outgoing) - lose]:
            self._to_server(self.client.encode(message.head, message.bulk))
        self.session.detached()

    def pump(self) -> list[tuple[Message, bytes | None]]:
        """Bring everything that the client has to say; returns and remembers it."""
        start = len(self.heard)
        while (message := self.session.link.pop()) is not None:
            self._to_server(self.client.encode(message.head, message.bulk))
        return self.heard[start:]

    def flush(self) -> list[tuple[Message, bytes | None]]:
        """The same for everything that was issued."""
        self.session.flush()
        return self.pump()

    def say(self, message: Message, bulk: bytes | None = None) -> None:
        """The server says something."""
        self.link.push(encode(message_array(message)), bulk, numbered=message.KIND >= 16)
        self._deliver()

    def _deliver(self) -> None:
        while (message := self.link.pop()) is not None:
            self._to_client(self.server.encode(message.head, message.bulk))

    def _to_server(self, frames: list[bytes | memoryview]) -> None:
        for event in self.server.feed(b"".join(frames)):
            assert isinstance(event, Received)
            message = parse_message(event.head)
            if isinstance(message, Seen):
                self.link.seen(message.count)
                continue
            if message.KIND >= 16:
                self.received += 1
            self.heard.append((message, None if event.bulk is None else bytes(event.bulk)))

    def _to_client(self, frames: list[bytes | memoryview]) -> None:
        for event in self.client.feed(b"".join(frames)):
            assert isinstance(event, Received)
            self.session.handle(event)
