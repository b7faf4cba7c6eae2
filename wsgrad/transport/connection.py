"""The sans-IO connection: bytes of a peer in, whole wsgrad messages out, and back; it reads no socket and never waits.

A message is one binary WebSocket message that holds a CBOR array, its head `[kind, …]`, and for some kinds exactly one
CBOR byte string behind it, its bulk. A driver asks where the next bytes should go, receives them there and reports how
many came. Once the head is known, that place is the bulk's own destination, so a payload is never copied on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor
from wsgrad.transport.frames import (
    BINARY,
    CLOSE,
    MAX_HEADER_NBYTES,
    PING,
    Closed,
    Framing,
    apply_mask,
    copy_masked,
    frame_header,
    masked_bytes,
)
from wsgrad.transport.received import Received as Received

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_BULK = 1 << 20
_STAGING_NBYTES = 1 << 16
# Where bulk is likely next, only so much is read ahead of its destination: enough for a header and a head.
_PEEK_NBYTES = 512
_BULK_IS_LARGE = 1 << 15
# Up to here a message that is all there is taken in one go.
_SMALL_NBYTES = 1 << 12
# Below this, one write of a joined copy is cheaper than a gathering write of two pieces.
_JOIN_NBYTES = 1 << 14

# Up to here it is first offered to the shortcut.
_SHORT_NBYTES = 64

# What the next payload byte of the open message belongs to.
_HEAD: Final = 0
_BULK_HEAD: Final = 1
_BULK: Final = 2
_NOTHING: Final = 3

_EMPTY = memoryview(b"")


Event: TypeAlias = Received | Closed
Destination: TypeAlias = Callable[[list[object], int], memoryview | None]
Shortcut: TypeAlias = Callable[[bytes], Received | None]


def _no_destination(head: list[object], nbytes: int) -> None:
    return None


class Connection:
    """One end of a WebSocket connection after its opening handshake.

    Not safe for threads; the driver serialises. Frames that `encode`, `ping` and `close` return must be written whole
    and in that order, with what `take_control` returns only between them.
    """

    def __init__(
        self,
        *,
        client: bool,
        bulk_kinds: frozenset[int],
        max_bulk: int | Callable[[int], int] = MAX_BULK,
        destination: Destination = _no_destination,
        shortcut: Shortcut | None = None,
    ) -> None:
        """Creates an end.

        Args:
            client: whether we are the client, whose frames are masked.
            bulk_kinds: the kinds whose head is followed by a byte string.
            max_bulk: the most bytes of a bulk, for all kinds or by kind.
            destination: called as `destination(head, nbytes)` before a payload is received. It returns a writable view
                of exactly `nbytes` bytes, or None for fresh memory; it may raise ProtocolError. What is in the view is
                undefined until the message has come whole.
            shortcut: tried first on the payload of a message of up to 64 bytes that came whole. What it returns is the
                message; its bulk then lies in fresh memory, and `destination` is not asked.
        """
        most = max_bulk if isinstance(max_bulk, int) else max(map(max_bulk, bulk_kinds), default=0)
        self._framing = Framing(client=client, max_nbytes=cbor.MAX_NBYTES + 9 + most)
        self._bulk_kinds = bulk_kinds
        self._max_bulk = max_bulk
        self._destination = destination
        self._shortcut = shortcut
        self._staging = memoryview(bytearray(_STAGING_NBYTES))
        self._start = 0  # staged bytes not yet worked off: after each update only a part of a header or control frame
        self._end = 0
        self._peek = False
        self._frame_left = 0
        self._frame_done = 0
        self._expects = _HEAD
        self._partial = bytearray()  # of the head or of the bulk's head, where it comes in pieces
        self._need = 1
        self._head: list[object] = []
        self._raw = b""
        self._nbytes = 0
        self._bulk: memoryview | None = None
        self._into = _EMPTY  # the same as the bulk, or empty
        self._filled = 0
        self._error: ProtocolError | None = None
        self._scratch = _EMPTY

    # -- receiving --

    def get_buffer(self) -> memoryview:
        """Returns where the next bytes must be received; never empty.

        Raises:
            ProtocolError: the peer broke the protocol behind the events that the last update returned.
        """
        if self._error is not None:
            self._raise_error()
        if self._frame_left and self._expects == _BULK:
            return self._into[self._filled : self._filled + self._frame_left]
        if self._start:
            rest = self._end - self._start
            if rest:
                self._staging[:rest] = bytes(self._staging[self._start : self._end])
            self._start = 0
            self._end = rest
        if self._peek:
            return self._staging[self._end : self._end + _PEEK_NBYTES]
        return self._staging[self._end :]

    def buffer_updated(self, nbytes: int) -> list[Event]:
        """Takes note that `nbytes` bytes were received at the start of the view that `get_buffer` returned last.

        Returns:
            What they completed. After a `Closed`, and after an error, everything is ignored.

        Raises:
            ProtocolError: the peer broke the protocol. The close frame that tells it waits in `take_control`. Where
                messages came whole before the fault, they are returned and the next `get_buffer` raises.
        """
        events: list[Event] = []
        if self._framing.close_received:
            return events
        try:
            if self._frame_left and self._expects == _BULK:
                self._bulk_received(nbytes, events)
            else:
                self._end += nbytes
                self._parse(events)
        except ProtocolError as exc:
            self._framing.fail(exc)
            self.let_go()
            if not events:
                raise
            self._error = exc
        return events

    def feed(self, data: ReadableBuffer) -> list[Event]:
        """Does `get_buffer` and `buffer_updated` for bytes that are already in memory, with one copy of them."""
        view = memoryview(data).cast("B")
        events: list[Event] = []
        while len(view):
            if self._error is not None and events:
                break
            buffer = self.get_buffer()
            n = min(len(buffer), len(view))
            buffer[:n] = view[:n]
            view = view[n:]
            events += self.buffer_updated(n)
        return events

    def eof(self) -> list[Event]:
        """Takes note that the peer's bytes have ended.

        Raises:
            ProtocolError: as `get_buffer` does.
        """
        self._raise_error()
        if self._framing.close_received:
            return []
        self._framing.close_received = True
        self.let_go()
        return [Closed(1006, "the connection ended without a close frame")]

    def release(self, owner: object) -> None:
        """Receives nothing more into memory of `owner`, the object that a destination's view was made of.

        What is still to come of the message goes into fresh memory, and so is the whole of it when it is reported.
        """
        if owner is not None and self._into.obj is owner:
            self._bulk = self._into = np.empty(len(self._into), np.uint8).data

    @property
    def closed(self) -> bool:
        """Whether nothing more will be received: closed by the peer, broken, or ended."""
        return self._framing.close_received

    @property
    def frames(self) -> int:
        return self._framing.count

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def let_go(self) -> None:
        """Lets go of memory that is not ours: nothing more will be received into it. Idempotent."""
        self._frame_left = 0
        self._start = self._end = 0
        self._into = _EMPTY
        self._bulk = None

    def _bulk_received(self, nbytes: int, events: list[Event]) -> None:
        filled = self._filled
        key = self._framing.key
        if key is not None:
            apply_mask(self._into[filled : filled + nbytes], key, self._frame_done)
        self._filled = filled + nbytes
        self._frame_left -= nbytes
        self._frame_done += nbytes
        if not self._frame_left:
            self._peek = True
            if self._framing.fin:
                self._finish(events)

    def _parse(self, events: list[Event]) -> None:
        framing = self._framing
        staging = self._staging
        position = self._start
        end = self._end
        while True:
            if not self._frame_left:
                payload = framing.read_header(staging, position, end)
                if not payload:
                    break
                nbytes = framing.nbytes
                if framing.opcode >= CLOSE:
                    if end - payload < nbytes:
                        break
                    position = payload + nbytes
                    closed = framing.control_frame(self._unmasked(payload, position, 0).tobytes())
                    if closed is not None:
                        self.let_go()
                        events.append(closed)
                        return
                    continue
                position = payload
                if framing.opcode == BINARY:
                    if nbytes <= _SMALL_NBYTES and framing.fin and end - payload >= nbytes:
                        position = payload + nbytes
                        events.append(self._whole_message(bytes(self._unmasked(payload, position, 0))))
                        continue
                    self._open_message()
                elif nbytes > len(self._into) - self._filled and self._expects == _BULK:
                    raise _too_much_behind()
                self._frame_left = nbytes
                self._frame_done = 0
            n = min(self._frame_left, end - position)
            if n:
                self._frame_left -= n
                self._consume(self._unmasked(position, position + n, self._frame_done))
                self._frame_done += n
                position += n
            if self._frame_left:
                break
            if framing.fin:
                self._finish(events)
        self._start = position

    def _whole_message(self, data: bytes) -> Received:
        """A small message that came whole in one frame, as nearly all commands and answers do: no state to keep."""
        self._peek = False
        if self._shortcut is not None and len(data) <= _SHORT_NBYTES and (received := self._shortcut(data)) is not None:
            return received
        try:
            end = cbor.scan(data)
        except cbor.NeedMore:
            raise _inside_head() from None
        raw = data[:end]
        head = _checked_head(raw)
        if head[0] not in self._bulk_kinds:
            if end != len(data):
                raise _too_much_behind()
            return Received(head, None, end, raw)
        parsed = cbor.read_bytes_head(data, end)
        if parsed is None:
            raise _inside_head()
        nbytes, start = parsed
        into = self._bulk_destination(head, nbytes, len(data) - start, whole=True)
        into[:] = data[start:]
        return Received(head, into, len(data), raw)

    def _unmasked(self, start: int, end: int, phase: int) -> memoryview:
        view = self._staging[start:end]
        key = self._framing.key
        if key is not None:
            apply_mask(view, key, phase)
        return view

    def _open_message(self) -> None:
        self._framing.in_message = True
        self._expects = _HEAD
        self._nbytes = 0
        self._need = 1
        self._bulk = None
        self._into = _EMPTY
        self._filled = 0

    def _finish(self, events: list[Event]) -> None:
        self._framing.in_message = False
        if self._expects == _BULK:
            if self._filled != len(self._into):
                raise ProtocolError(f"the message ends after {self._filled} of {len(self._into)} bytes of its bulk")
        elif self._expects != _NOTHING:
            raise _inside_head()
        events.append(Received(self._head, self._bulk, self._nbytes, self._raw))
        self._peek = len(self._into) >= _BULK_IS_LARGE
        self._into = _EMPTY
        self._bulk = None

    def _consume(self, payload: memoryview) -> None:
        """Works off staged payload of the open message; `_frame_left` counts what follows it in the frame."""
        if self._expects == _HEAD:
            payload = self._consume_head(payload)
        if self._expects == _BULK_HEAD and payload:
            payload = self._consume_bulk_head(payload)
        if not payload:
            return
        if self._expects == _BULK:
            filled = self._filled + len(payload)
            if filled > len(self._into):
                raise _too_much_behind()
            self._into[self._filled : filled] = payload
            self._filled = filled
            self._peek = True
        else:
            raise _too_much_behind()

    def _consume_head(self, payload: memoryview) -> memoryview:
        partial = self._partial
        if not partial:
            try:
                end = cbor.scan(payload)
            except cbor.NeedMore as exc:
                partial += payload
                self._need = exc.need
                return payload[:0]
            self._head_complete(bytes(payload[:end]))
            return payload[end:]
        while True:
            taken = self._need - len(partial)
            partial += payload[:taken]
            payload = payload[taken:]
            if len(partial) < self._need:
                return payload
            try:
                # `_need` never lies beyond the head's end, so the head ends exactly where the collected bytes do.
                cbor.scan(partial)
            except cbor.NeedMore as exc:
                self._need = exc.need
                continue
            raw = bytes(partial)
            partial.clear()
            self._head_complete(raw)
            return payload

    def _head_complete(self, raw: bytes) -> None:
        head = _checked_head(raw)
        self._raw = raw
        self._head = head
        self._nbytes = len(raw)
        self._expects = _BULK_HEAD if head[0] in self._bulk_kinds else _NOTHING

    def _consume_bulk_head(self, payload: memoryview) -> memoryview:
        partial = self._partial
        before = len(partial)
        partial += payload[:9]
        parsed = cbor.read_bytes_head(partial, 0)
        if parsed is None:
            return payload[:0]
        nbytes, end = parsed
        partial.clear()
        payload = payload[end - before :]
        here = len(payload) + self._frame_left
        into = self._bulk_destination(self._head, nbytes, here, whole=self._framing.fin)
        self._nbytes += end + nbytes
        self._bulk = self._into = into
        self._expects = _BULK
        return payload

    def _bulk_destination(self, head: list[object], nbytes: int, here: int, *, whole: bool) -> memoryview:
        """Where a bulk of `nbytes` goes, of which `here` are in this frame, which may be the message's whole rest."""
        kind = head[0]
        assert isinstance(kind, int)
        limit = self._max_bulk if isinstance(self._max_bulk, int) else self._max_bulk(kind)
        if nbytes > limit:
            raise ProtocolError(
                f"a bulk of {nbytes} bytes is over the limit of {limit} bytes for messages of kind {kind}",
                close_code=1009,
                details={"nbytes": nbytes, "limit": limit, "kind": kind},
            )
        if here > nbytes:
            raise _too_much_behind()
        if here < nbytes and whole:
            raise ProtocolError(f"a bulk announces {nbytes} bytes, but its message holds only {here}")
        into = self._destination(head, nbytes)
        if into is None:
            return np.empty(nbytes, np.uint8).data
        if into.nbytes != nbytes or into.format != "B" or into.ndim != 1 or into.readonly:
            raise ValueError(f"the destination of a bulk must be {nbytes} writable bytes, not {into!r}")
        return into

    # -- sending --

    def encode(self, head: bytes, bulk: ReadableBuffer | None = None) -> list[bytes | memoryview]:
        """Makes one message of an encoded head and, for kinds that carry it, a contiguous bulk.

        Returns:
            What to write, in order. A memoryview among it is the bulk's own memory or a scratch of the connection: it
            must be written, or copied, before either is used again, the scratch by the next `encode`.

        Raises:
            ConnectionLost: the connection is closing.
        """
        framing = self._framing
        if framing.close_sent or framing.close_received:
            framing.check_open()
        if bulk is None:
            prefix = head
            body = _EMPTY
        else:
            body = memoryview(bulk)
            body = body.cast("B") if body.nbytes else _EMPTY
            prefix = head + cbor.bytes_head(len(body))
        total = len(prefix) + len(body)
        key = framing.new_key() if framing.client else None
        header = frame_header(BINARY, total, key)
        if total < _JOIN_NBYTES:
            payload = prefix + body if len(body) else prefix
            return [header + (payload if key is None else masked_bytes(payload, key))]
        if key is None:
            return [header + prefix, body] if len(body) else [header + prefix]
        # The bulk is aligned to a cache line, so that masking it goes by whole words.
        start = -(-(MAX_HEADER_NBYTES + len(prefix)) // 64) * 64
        if len(self._scratch) < start + len(body):
            self._scratch = np.empty(start + len(body), np.uint8).data
        frame = header + masked_bytes(prefix, key)
        first = start - len(frame)
        self._scratch[first:start] = frame
        copy_masked(body, self._scratch[start : start + len(body)], key, len(prefix))
        return [self._scratch[first : start + len(body)]]

    def ping(self, payload: bytes = b"") -> bytes:
        """Returns a ping frame; the payload holds at most 125 bytes.

        Raises:
            ConnectionLost: the connection is closing.
        """
        self._framing.check_open()
        if len(payload) > 125:
            raise ValueError(f"a ping's payload of {len(payload)} bytes is over the 125 that RFC 6455 allows")
        return self._framing.whole_frame(PING, payload)

    def close(self, code: int, reason: str = "") -> bytes:
        """Returns our close frame, or nothing if one was made before; the reason is cut to 123 bytes."""
        return self._framing.close(code, reason)

    def take_control(self) -> bytes:
        """Returns pongs and close frames that answer the peer, to be written before all else but inside no frame."""
        framing = self._framing
        return framing.take_control() if framing.owes_control else b""

    @property
    def owes_control(self) -> bool:
        """Whether `take_control` has something."""
        return self._framing.owes_control


def _checked_head(raw: bytes) -> list[object]:
    head = cbor.decode_scanned(raw)
    if not isinstance(head, list) or not head or type(head[0]) is not int:
        raise ProtocolError("a message must begin with an array whose first element is its kind, an integer")
    return head


def _inside_head() -> ProtocolError:
    return ProtocolError("the message ends inside its head")


def _too_much_behind() -> ProtocolError:
    return ProtocolError("a message holds bytes behind its head or its bulk that belong to neither")
