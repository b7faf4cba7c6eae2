"""One connection of a blocking client: a non-blocking socket, its `Connection`, and what the socket has not taken yet.

It moves bytes until the socket would block; who calls it when, and what happens after an error, is its driver's affair.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from typing import TYPE_CHECKING, Protocol

from wsgrad.transport import express
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.frames import Closed
from wsgrad.transport.messages import BULK_KINDS, Ping, Pong

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from wsgrad.errors import WsgradError
    from wsgrad.transport.link import Link

_GATHER_NBYTES = 1 << 16
_GATHER_COUNT = 64
_RECEIVE_NBYTES = 2 << 20
"""So much is received at once, so that other threads get a turn."""


class Served(Protocol):
    """The session, as far as a connection serves it."""

    link: Link
    attached: bool
    refused: WsgradError | None
    release: Callable[[object], None] | None

    def hello(self) -> bytes: ...
    def handle(self, received: Received) -> None: ...
    def destination(self, head: list[object], nbytes: int) -> memoryview | None: ...


class Channel:
    """From the end of the opening handshake to the socket's end.

    Attributes:
        last_received: `time.monotonic()` of the last bytes.
        pinged: whether a heartbeat was sent since.
    """

    def __init__(self, sock: socket.socket, session: Served) -> None:
        self.last_received = time.monotonic()
        self.pinged = False
        self._socket = sock
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._gathers = hasattr(sock, "sendmsg") and not self._encrypted
        self._session = session
        self._connection = Connection(
            client=True,
            bulk_kinds=BULK_KINDS,
            destination=session.destination,
            shortcut=express.received,
        )
        session.release = self._connection.release
        self._out: list[bytes | memoryview] = []
        self._hello: bytes | None = session.hello()
        self._pong: bytes | None = None
        self._ping_token = 0

    @property
    def stuck(self) -> bool:
        """Whether the socket has to become writable first."""
        return bool(self._out)

    @property
    def loaded(self) -> bool:
        """Whether there may be something to send."""
        return bool(
            self._session.link or self._connection.owes_control or self._hello is not None or self._pong is not None
        )

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def detach(self) -> int:
        """The descriptor, which nobody closes from now on."""
        return self._socket.detach()

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.pinged = True
        self._ping_token = (self._ping_token + 1) & 0xFFFFFFFF
        self._session.link.push(encode([Ping.KIND, self._ping_token]), numbered=False)

    def send(self) -> None:
        """Send what the socket takes.

        Raises:
            OSError: the connection is broken.
        """
        out = self._out
        while out or (self.loaded and self._load()):
            try:
                count = self._socket.sendmsg(out) if len(out) > 1 and self._gathers else self._socket.send(out[0])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            if count == len(out[0]) and len(out) == 1:
                out.clear()
                continue
            done = 0
            for buffer in out:
                if count < len(buffer):
                    break
                count -= len(buffer)
                done += 1
            del out[:done]
            if count:
                out[0] = memoryview(out[0])[count:]

    def receive(self) -> Closed | None:
        """Receive what is there and hand it to the session; returns how the connection ended, if it did.

        Raises:
            OSError: the connection is broken.
            ProtocolError: the peer breaks the rules.
        """
        connection, total = self._connection, 0
        while total < _RECEIVE_NBYTES:
            buffer = connection.get_buffer()
            try:
                count = self._socket.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            self.last_received = time.monotonic()
            self.pinged = False
            closed = self._handle(connection.buffer_updated(count) if count else connection.eof())
            if closed is not None:
                return closed
            if not count:
                return Closed(1006, "the server left without closing")
            total += count
            if count < len(buffer) and not self._encrypted:
                break
        return None

    def feed(self, data: bytes) -> Closed | None:
        """The same for bytes that came behind the handshake."""
        return self._handle(self._connection.feed(data)) if data else None

    def last_words(self, code: int, reason: str) -> None:
        """Tell the server why, if the socket takes it and no frame is half sent."""
        if not self._out:
            frame = self._connection.take_control() or self._connection.close(code, reason)
            if frame:
                with contextlib.suppress(OSError):
                    self._socket.send(frame)

    def _load(self) -> bool:
        """Put the next frames into `_out`; False: there are none."""
        connection, session, out = self._connection, self._session, self._out
        control = connection.take_control()
        if control:
            out.append(control)
            return True
        if connection.closed:
            return False
        nbytes = 0
        while nbytes < _GATHER_NBYTES and len(out) < _GATHER_COUNT:
            bulk = None
            if self._hello is not None:
                head, self._hello = self._hello, None
            elif not session.attached:
                break
            elif self._pong is not None:
                head, self._pong = self._pong, None
            elif (outgoing := session.link.pop()) is not None:
                head, bulk = outgoing.head, outgoing.bulk
            else:
                break
            frame = connection.encode(head, bulk)
            out.extend(frame)
            if type(frame[-1]) is not bytes:
                break  # it lies in the connection's scratch, which the next one uses again
            nbytes += len(frame[0])
        return bool(out)

    def _handle(self, events: Sequence[Received | Closed]) -> Closed | None:
        session = self._session
        for event in events:
            if isinstance(event, Closed):
                return event
            kind = event.head[0]
            if kind == Ping.KIND:
                # The newest answer stands for all before it: any sign of life will do.
                self._pong = encode([Pong.KIND, *event.head[1:2]])
            elif kind != Pong.KIND:
                session.handle(event)
                if session.refused is not None:
                    break
        return None
