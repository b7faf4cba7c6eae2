"""Drives one sans-IO `Connection` over a trio stream: reads, writes, heartbeats, the close; knows nothing of sessions.

On plain TCP the driver reads and writes the descriptor itself, without blocking: a message that the socket takes at
once costs no task switch, and bulk lands where the owner wants it. On any other stream (TLS, memory streams, systems
without `readv`) it uses `receive_some` and `send_all`. One task writes what could not be written at once, so a frame is
never cut while the connection lives.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import trio

from wsgrad.errors import ProtocolError
from wsgrad.transport import express
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.frames import Closed
from wsgrad.transport.messages import BULK_KINDS, Ping, Pong, message_array, parse_message
from wsgrad.transport.timing import CLOSE_SECONDS, DEAD_SECONDS, PING_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.transport.connection import Destination, Event
    from wsgrad.transport.link import Link

MAX_UNSENT = 1 << 18
"""The most bytes of messages without a number that may wait when a ping comes from a peer that doesn't read."""
_LOST_UNSENT = 1 << 20
"""With more of them the connection is over, whatever the peer sends: nothing else bounds them."""

_STEP = 1 << 20  # the most bytes, and rounds of small messages, written without giving other tasks a turn
_STEP_ROUNDS = 4
_GATHER = 1 << 16  # small messages written together
_GATHER_COUNT = 64
_BUSY_FRAMES = 32  # reads shrink until they hold about so many frames, for the other tasks' sake
_MIN_READ = 1 << 9
_FIRST_READ = 1 << 12
_MAX_READ = 1 << 20
_TLS_STEP = 1 << 17
_KEPT_NBYTES = 64  # what keeping a message costs besides its bytes
_NOTSENT_LOWAT = 1 << 19

_Bytes: TypeAlias = bytes | memoryview


class TrioConnection:
    """One WebSocket connection after its opening handshake. `run` is its lifetime and closes the stream at its end.

    Attributes:
        peer: who is at the other end, for logs.
        link: where numbered messages come from; set by the owner when a session attaches, None before and after.
        destination: where bulk goes, as in `Connection`; settable at any time for connections of `from_stream`.
        last_received: `trio.current_time()` of the last bytes.
        kinds: set to a dict, it counts the messages handled by kind, for logs.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        connection: Connection,
        *,
        leftover: bytes = b"",
        peer: str | None = None,
        ping_seconds: float = PING_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
    ) -> None:
        self.peer = peer_of(stream) if peer is None else peer
        self.link: Link | None = None
        self.destination: Destination | None = None
        self.last_received = trio.current_time()
        self.kinds: dict[int, int] | None = None
        self._stream = stream
        self._connection = connection
        self._leftover = leftover
        self._ping_seconds = ping_seconds
        self._dead_seconds = dead_seconds
        self._fd = _prepare(stream)
        self._unsent: deque[tuple[bytes, _Bytes | None]] = deque()
        self._unsent_bytes = 0
        self._pending: list[_Bytes] = []  # the rest of frames that the socket has not taken
        self._writer_busy = False
        self._dispatching = False
        self._work = trio.Event()
        self._flushed = trio.Event()
        self._reading = trio.CancelScope()
        self._closing: tuple[int, str] | None = None
        self._close_sent = False
        self._ended: Closed | None = None

    @classmethod
    def from_stream(
        cls,
        stream: trio.abc.Stream,
        *,
        client: bool,
        max_bulk: int | Callable[[int], int],
        leftover: bytes = b"",
        peer: str | None = None,
    ) -> TrioConnection:
        """Make the `Connection` too, one that asks the attribute `destination`, for owners that know it only later."""

        def destination(head: list[object], nbytes: int) -> memoryview | None:
            return driven.destination(head, nbytes) if driven.destination is not None else None

        connection = Connection(
            client=client,
            bulk_kinds=BULK_KINDS,
            max_bulk=max_bulk,
            destination=destination,
            shortcut=express.received,
        )
        driven = cls(stream, connection, leftover=leftover, peer=peer)
        return driven

    def __repr__(self) -> str:
        state = "closed" if self._ended else "closing" if self._closing else "open"
        return f"<TrioConnection {self.peer} {state}>"

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent: `close` was called, or the connection is over."""
        return self._closing is not None or self._ended is not None

    @property
    def why_ended(self) -> str:
        """Why it is over, in words; nothing while it is not."""
        return "" if self._ended is None else self._ended.reason or f"close code {self._ended.code}"

    def send(self, head: bytes, bulk: _Bytes | None = None) -> None:
        """Send a message without a number, before what the link holds. After a close nothing happens.

        A peer that reads none of them is left in the end, as if its connection had broken.

        `head` is the encoded array; `bulk` may not change before it is written.
        """
        if self.closed:
            return
        self._unsent.append((head, bulk))
        self._unsent_bytes += len(head) + (len(bulk) if bulk is not None else 0) + _KEPT_NBYTES
        self.wake()
        if bulk is None and self._unsent_bytes > _LOST_UNSENT:
            self._end("the peer does not read what it is sent")

    def wake(self) -> None:
        """The link has something to send: what the socket takes is written now, the rest by the writer task.

        Inside of `handle` the writing comes after the last message that was received together, for all of them at once.
        """
        if self._writer_busy or self._dispatching or self._ended is not None:
            return
        if self._fd >= 0 and self._pump():
            return
        self._writer_busy = True
        self._work.set()

    def close(self, code: int, reason: str) -> None:
        """Close after what was sent so far (the link's messages too: set `link` to None where they belong elsewhere).

        `handle` is not called any more, and `run` returns after the peer's answer or 2 s. Idempotent.
        """
        if self.closed:
            return
        self._closing = (code, reason)
        self._reading.deadline = trio.current_time() + CLOSE_SECONDS
        self.wake()

    @trio.lowlevel.enable_ki_protection
    async def run(self, handle: Callable[[Received], None]) -> Closed:
        """Read until the connection is over and close the stream; `handle` gets each message but heartbeats.

        `handle` must not block. Whatever else than `ProtocolError` it raises ends the connection with code 1011.

        Returns:
            The peer's close code and reason; our own where the peer did not answer a close; 1006 where the connection
            ended without one.

        Raises:
            ProtocolError: by the peer or out of `handle`, after a close frame with its code was sent.
        """
        error: Exception | None = None
        closed = Closed(1006, "the connection ended")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._beat)
                try:
                    with self._reading:
                        closed = await self._read(handle)
                    if self._reading.cancelled_caught:
                        closed = self._ended or Closed(*(self._closing or (1006, "the connection ended")))
                    elif self._closing is not None and closed.code == self._closing[0] and not closed.reason:
                        closed = Closed(*self._closing)  # the peer answered our close: the reason is ours
                except Exception as exc:
                    error = exc
                    code = exc.close_code if isinstance(exc, ProtocolError) else 1011
                    reason = str(exc) if isinstance(exc, ProtocolError) else "internal error"
                    await self._refuse(code, reason)
                else:
                    if closed.code != 1006:
                        await self._flush()
                nursery.cancel_scope.cancel()
        finally:
            self._ended = self._ended or closed
            self._fd = -1
            # However it ended: what is half received or not sent yet may lie in a ring that is unmapped now.
            self._connection.let_go()
            self._pending.clear()
            self._unsent.clear()
            self.link = None
            await trio.aclose_forcefully(self._stream)
        if error is not None:
            raise error
        return closed

    # -- writing ------------------------------------------------------------------------------------------------------

    def _load(self) -> bool:
        """Put the next frames into `_pending`. False: there are none."""
        connection, pending = self._connection, self._pending
        control = connection.take_control()
        if control:
            pending.append(control)
            return True
        if self._close_sent or connection.closed:
            return False
        nbytes = 0
        while nbytes < _GATHER and len(pending) < _GATHER_COUNT:
            if self._unsent:
                head, bulk = self._unsent.popleft()
                self._unsent_bytes -= len(head) + (len(bulk) if bulk is not None else 0) + _KEPT_NBYTES
            elif self.link is not None and (outgoing := self.link.pop()) is not None:
                head, bulk = outgoing.head, outgoing.bulk
            else:
                break
            frame = connection.encode(head, bulk)
            pending.extend(frame)
            if type(frame[-1]) is not bytes:
                break  # a masked bulk lies in the connection's scratch, which the next encode uses again
            nbytes += len(frame[0])
        if pending:
            return True
        if self._closing is not None:
            self._close_sent = True
            pending.append(connection.close(*self._closing))  # not empty: the connection is not closed
            return True
        return False

    @property
    def _loaded(self) -> bool:
        """Whether there may be something to send."""
        return bool(
            self.link or self._unsent or self._connection.owes_control or (self._closing and not self._close_sent)
        )

    def _pump(self) -> bool:
        """Write to the descriptor what it takes. True: all is written; False: the writer task goes on."""
        written = rounds = 0
        while self._pending or (self._loaded and self._load()):
            try:
                count = os.writev(self._fd, self._pending)
            except BlockingIOError:
                return False
            except OSError as exc:
                self._end(f"sending failed: {exc.strerror}")
                return True
            written += count
            rounds += 1
            self._consume(count)
            if self._pending or written >= _STEP or rounds >= _STEP_ROUNDS:
                return False
        return True

    def _consume(self, count: int) -> None:
        pending = self._pending
        if len(pending) == 1 and count == len(pending[0]):
            pending.clear()
            return
        index = 0
        for buffer in pending:
            size = len(buffer)
            if count < size:
                break
            count -= size
            index += 1
        del pending[:index]
        if count:
            pending[0] = memoryview(pending[0])[count:]

    @trio.lowlevel.enable_ki_protection
    async def _write(self) -> None:
        while self._ended is None:
            if not self._writer_busy:
                self._flushed.set()
                await self._work.wait()
            self._work = trio.Event()
            try:
                if self._fd >= 0:
                    await trio.lowlevel.wait_writable(self._fd)
                    self._writer_busy = not self._pump()
                else:
                    await self._send_all()
                    self._writer_busy = False
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                self._end(f"sending failed: {exc.__cause__ or exc}")
        self._flushed.set()

    async def _send_all(self) -> None:
        pending = self._pending
        while self._load():
            if sum(map(len, pending)) <= _TLS_STEP:
                data = b"".join(pending)
                pending.clear()
                await self._stream.send_all(data)
            else:
                for buffer in pending:
                    view = memoryview(buffer)
                    for start in range(0, len(view), _TLS_STEP):
                        await self._stream.send_all(view[start : start + _TLS_STEP])
                pending.clear()

    async def _flush(self) -> None:
        """Give the last frames (the answer to a close) a moment to leave."""
        self._flushed = trio.Event()
        self.wake()
        with trio.move_on_after(CLOSE_SECONDS):
            while self._writer_busy and self._ended is None:
                await self._flushed.wait()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, handle: Callable[[Received], None]) -> Closed:
        connection = self._connection
        leftover = memoryview(self._leftover)
        while leftover:
            buffer = connection.get_buffer()
            count = min(len(buffer), len(leftover))
            buffer[:count] = leftover[:count]
            leftover = leftover[count:]
            if (closed := self._dispatch(connection.buffer_updated(count), handle)) is not None:
                return closed
            await trio.lowlevel.checkpoint()
        self._leftover = b""
        return await (self._read_descriptor(handle) if self._fd >= 0 else self._read_stream(handle))

    async def _read_descriptor(self, handle: Callable[[Received], None]) -> Closed:
        fd, connection, limit = self._fd, self._connection, _FIRST_READ
        readable = trio.lowlevel.wait_readable
        await readable(fd)
        while True:
            buffer = connection.get_buffer()[:limit]
            try:
                count = os.readv(fd, (buffer,))
            except BlockingIOError:
                await readable(fd)
                continue
            except OSError as exc:
                return Closed(1006, f"the connection broke: {exc.strerror}")
            self.last_received = trio.current_time()
            frames = connection.frames
            events = connection.buffer_updated(count) if count else connection.eof()
            if (closed := self._dispatch(events, handle)) is not None:
                return closed
            if not count:
                return Closed(1006, "the peer left without closing")
            limit = _next_limit(limit, count, connection.frames - frames)
            if count == len(buffer):
                await trio.lowlevel.checkpoint()
            else:
                await readable(fd)

    async def _read_stream(self, handle: Callable[[Received], None]) -> Closed:
        connection, stream, limit = self._connection, self._stream, _FIRST_READ
        while True:
            buffer = connection.get_buffer()
            try:
                data = await stream.receive_some(min(len(buffer), limit, _TLS_STEP))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                return Closed(1006, f"the connection broke: {exc.__cause__ or exc}")
            self.last_received = trio.current_time()
            count = len(data)
            buffer[:count] = data
            frames = connection.frames
            events = connection.buffer_updated(count) if count else connection.eof()
            limit = _next_limit(limit, count, connection.frames - frames)
            if (closed := self._dispatch(events, handle)) is not None:
                return closed
            if not count:
                return Closed(1006, "the peer left without closing")

    def _dispatch(self, events: list[Event], handle: Callable[[Received], None]) -> Closed | None:
        self._dispatching = True
        try:
            for event in events:
                if isinstance(event, Closed):
                    return event
                kind = event.head[0]
                assert isinstance(kind, int)  # by the connection
                if kind == Ping.KIND:
                    self._answer_ping(event)
                elif kind == Pong.KIND:
                    parse_message(event.head)
                elif self._closing is None:
                    if self.kinds is not None:
                        self.kinds[kind] = self.kinds.get(kind, 0) + 1
                    handle(event)
        finally:
            self._dispatching = False
        self.wake()
        return None

    def _answer_ping(self, event: Received) -> None:
        message = parse_message(event.head)
        assert isinstance(message, Ping)
        if self._unsent_bytes > MAX_UNSENT:
            raise ProtocolError("the peer sends pings but does not read the answers", close_code=1008)
        self.send(encode(message_array(Pong(message.token))))

    # -- the end ------------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def _beat(self) -> None:
        token = 0
        pinged_at = self.last_received
        while True:
            wake_at = min(
                max(self.last_received, pinged_at) + self._ping_seconds, self.last_received + self._dead_seconds
            )
            await trio.sleep_until(wake_at)
            now = trio.current_time()
            if now - wake_at > 1.0:
                self.last_received = now  # this process was stopped: the peer's silence is not its fault
            if now - self.last_received >= self._dead_seconds:
                self._end(f"nothing was received for {self._dead_seconds:g} s")
                return
            if now - max(self.last_received, pinged_at) >= self._ping_seconds:
                pinged_at = now
                token = (token + 1) & 0xFFFFFFFF
                self.send(encode(message_array(Ping(token))))

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = Closed(1006, reason)
        self._reading.cancel()
        self._work.set()

    async def _refuse(self, code: int, reason: str) -> None:
        """Say why, then read and throw away for a moment: closing with unread bytes would reset the reason away."""
        self.link = None
        self._unsent.clear()
        if self._closing is None:
            self._closing = (code, reason)
        await self._flush()
        with trio.move_on_after(CLOSE_SECONDS):
            try:
                if isinstance(self._stream, trio.SocketStream):
                    await self._stream.send_eof()
                while self._ended is None and await self._stream.receive_some(_MAX_READ):
                    pass
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass


def peer_of(stream: trio.abc.Stream) -> str:
    """The peer's address as `host:port` (IPv6 in brackets), or what kind of stream it is."""
    while isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    if not isinstance(stream, trio.SocketStream):
        return type(stream).__name__
    try:
        host, port = stream.socket.getpeername()[:2]
    except (OSError, ValueError):
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _next_limit(limit: int, count: int, frames: int) -> int:
    """How much to read next, after a read of `count` bytes held so many frames."""
    if frames > _BUSY_FRAMES:
        return max(_MIN_READ, count * _BUSY_FRAMES // frames)
    return 2 * limit if limit < _MAX_READ and 2 * frames <= _BUSY_FRAMES else limit


def _prepare(stream: trio.abc.Stream) -> int:
    """The descriptor to read and write without trio's stream, or -1."""
    if not isinstance(stream, trio.SocketStream) or not hasattr(os, "readv"):
        return -1
    # trio wakes a writer only when less than 16 KiB are unsent, for the sake of streams that are cancelled in a send.
    if hasattr(trio.socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):
            stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT)
    return stream.socket.fileno()
