"""The frames of RFC 6455 after the opening handshake, both roles, binary messages; no buffers and no I/O in here.

Here are the rules between single frames: headers, masking, order of fragments, control frames, the closing handshake,
and for each fault of a peer the close code that answers it. What a message means, and where its bytes go, is the
business of `connection`. Extensions are not negotiated, so reserved bits are faults, and text is refused.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np

from wsgrad.errors import ConnectionLost, ProtocolError

CONTINUATION = 0x0
TEXT = 0x1
BINARY = 0x2
CLOSE = 0x8
PING = 0x9
PONG = 0xA

MAX_HEADER_NBYTES = 14
_MAX_CONTROL_NBYTES = 125
# Codes of RFC 6455 section 7.4 and IANA's registry that may stand in a close frame, below the free range 3000-4999.
_CLOSE_CODES = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014})
# Up to here Python's big integers mask faster than numpy, whose calls cost some microseconds each (measured).
_SMALL_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over: by the peer's close frame, or with 1006 because its bytes ended without one."""

    code: int
    reason: str


def apply_mask(view: memoryview, key: bytes, phase: int = 0) -> None:
    """Masks or unmasks bytes in place.

    Args:
        view: writable unsigned bytes at any address.
        key: the frame's four key bytes.
        phase: how many payload bytes of the frame came before `view`.
    """
    n = len(view)
    phase &= 3
    if phase:
        key = key[phase:] + key[:phase]
    if n <= _SMALL_NBYTES:
        view[:] = _masked_small(view, key)
        return
    data = np.frombuffer(view, np.uint8)
    # Words at an odd address cost numpy three times as much (measured), so the bytes before an aligned one go first.
    skip = -data.__array_interface__["data"][0] & 7
    if skip:
        view[:skip] = _masked_small(view[:skip], key)
        turn = skip & 3
        key = key[turn:] + key[:turn]
    tail = skip + ((n - skip) & ~7)
    words = data[skip:tail].view(np.uint64)
    np.bitwise_xor(words, _key_word(key), out=words)
    if tail < n:
        view[tail:] = _masked_small(view[tail:], key)


def copy_masked(source: memoryview, target: memoryview, key: bytes, phase: int = 0) -> None:
    """Writes the masked bytes of `source` into `target`, which is as long, in one pass where both are aligned."""
    n = len(source)
    if n > _SMALL_NBYTES:
        tail = n & ~7
        from_words = np.frombuffer(source[:tail], np.uint8).view(np.uint64)
        to_words = np.frombuffer(target[:tail], np.uint8).view(np.uint64)
        if from_words.flags.aligned and to_words.flags.aligned:
            turn = phase & 3
            key = key[turn:] + key[:turn]
            np.bitwise_xor(from_words, _key_word(key), out=to_words)
            if tail < n:
                target[tail:] = _masked_small(source[tail:], key)
            return
    target[:] = source
    apply_mask(target, key, phase)


def masked_bytes(data: bytes, key: bytes) -> bytes:
    """Returns a masked copy of a payload from its first byte on."""
    if len(data) <= _SMALL_NBYTES:
        return _masked_small(data, key)
    copy = bytearray(data)
    apply_mask(memoryview(copy), key)
    return bytes(copy)


def _masked_small(data: bytes | memoryview, key: bytes) -> bytes:
    n = len(data)
    repeated = (key * ((n >> 2) + 1))[:n]
    return (int.from_bytes(data, "little") ^ int.from_bytes(repeated, "little")).to_bytes(n, "little")


def _key_word(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key * 2, sys.byteorder))


def frame_header(opcode: int, nbytes: int, key: bytes | None) -> bytes:
    """Returns the header of a frame that is a whole message; with a key it announces a masked payload."""
    first = 0x80 | opcode
    mask_bit = 0x80 if key is not None else 0
    if nbytes < 126:
        head = bytes((first, mask_bit | nbytes))
    elif nbytes < 1 << 16:
        head = bytes((first, mask_bit | 126)) + nbytes.to_bytes(2, "big")
    else:
        head = bytes((first, mask_bit | 127)) + nbytes.to_bytes(8, "big")
    return head + key if key is not None else head


class Framing:
    """The state between the frames of one connection: who we are, the open message, and how far closing has got.

    Attributes:
        fin, opcode, nbytes, key: the last header that `read_header` accepted; `key` is None where nothing is masked.
        count: headers that were accepted so far.
        in_message: between the first and the last frame of a message; the caller keeps it.
        close_sent: our close frame was made; nothing may be sent after it.
        close_received: the peer's was received, or the connection failed; nothing after it counts.
    """

    __slots__ = (
        "_close",
        "_keys",
        "_keys_used",
        "_max_nbytes",
        "_pong",
        "client",
        "close_received",
        "close_sent",
        "count",
        "fin",
        "in_message",
        "key",
        "nbytes",
        "opcode",
    )

    def __init__(self, *, client: bool, max_nbytes: int) -> None:
        """Begin.

        Args:
            client: whether we are the client.
            max_nbytes: the most bytes of any message, and so of a frame.
        """
        self.client = client
        self._max_nbytes = max_nbytes
        self.fin = True
        self.opcode = BINARY
        self.nbytes = 0
        self.count = 0
        self.key: bytes | None = None
        self.in_message = False
        self.close_sent = False
        self.close_received = False
        self._pong: bytes | None = None
        self._close: bytes | None = None
        self._keys = b""
        self._keys_used = 0

    def read_header(self, buffer: bytearray | memoryview, start: int, end: int) -> int:
        """Reads the frame header at `start` into the attributes, and checks that it may come now.

        Returns:
            Where the payload begins, or 0 if the bytes up to `end` do not hold the whole header.

        Raises:
            ProtocolError: with the close code that answers the fault.
        """
        if end - start < 2:
            return 0
        first = buffer[start]
        second = buffer[start + 1]
        if first & 0x70:
            raise ProtocolError("reserved bits of a frame are set, but no extension was agreed on")
        opcode = first & 0x0F
        fin = first >= 0x80
        masked = second >= 0x80
        if masked is self.client:
            raise ProtocolError("a server's frame must not be masked" if masked else "a client's frame must be masked")
        nbytes = second & 0x7F
        if opcode > BINARY:
            if not CLOSE <= opcode <= PONG:
                raise ProtocolError(f"the frame's opcode 0x{opcode:x} is reserved")
            if not fin:
                raise ProtocolError("a control frame must not be fragmented")
            if nbytes > _MAX_CONTROL_NBYTES:
                raise ProtocolError(f"a control frame's payload must not exceed {_MAX_CONTROL_NBYTES} bytes")
        elif opcode == BINARY:
            if self.in_message:
                raise ProtocolError("a new message began before the last fragment of the one before")
        elif opcode == TEXT:
            raise ProtocolError("text messages are not accepted", close_code=1003)
        elif not self.in_message:
            raise ProtocolError("a continuation frame came without a message to continue")
        position = start + 2
        if nbytes > 125:
            size = 2 if nbytes == 126 else 8
            position += size
            if position > end:
                return 0
            nbytes = int.from_bytes(buffer[start + 2 : position], "big")
            if nbytes < (126 if size == 2 else 1 << 16):
                raise ProtocolError(f"a frame's length of {nbytes} is not in its shortest form")
            if nbytes >> 63:
                raise ProtocolError("a frame's length has its highest bit set")
            if nbytes > self._max_nbytes:
                limit = self._max_nbytes
                raise ProtocolError(f"a frame of {nbytes} bytes is over the limit of {limit} bytes", close_code=1009)
        if masked:
            position += 4
            if position > end:
                return 0
            self.key = bytes(buffer[position - 4 : position])
        elif position > end:
            return 0
        self.fin = fin
        self.opcode = opcode
        self.nbytes = nbytes
        self.count += 1
        return position

    def control_frame(self, payload: bytes) -> Closed | None:
        """Handles the unmasked payload of the control frame whose header was read last.

        Returns:
            How the peer closed, if it was a close frame.
        """
        if self.opcode == PING:
            # The newest ping answers for those before it (RFC 6455 section 5.5.3), so a flood of pings takes no memory.
            self._pong = payload
            return None
        if self.opcode == PONG:
            return None
        closed = _parse_close(payload)
        self.close_received = True
        if not self.close_sent:
            self._queue_close(payload[:2])
        return closed

    def fail(self, error: ProtocolError) -> None:
        """Ends receiving because of a fault of the peer and queues the close frame that tells it."""
        self.close_received = True
        if not self.close_sent:
            self._queue_close(_close_payload(error.close_code, str(error)))

    @property
    def owes_control(self) -> bool:
        """Whether control frames wait to be written."""
        return self._pong is not None or self._close is not None

    def take_control(self) -> bytes:
        """Returns the control frames that wait to be written, and forgets them."""
        out = b""
        if self._pong is not None:
            # Pings that came before the peer's close are still answered before ours; after our close nothing is.
            if self._close is not None or not self.close_sent:
                out = self.whole_frame(PONG, self._pong)
            self._pong = None
        if self._close is not None:
            out += self._close
            self._close = None
        return out

    def close(self, code: int, reason: str) -> bytes:
        """Returns our close frame, or nothing if one was made before; the reason is cut to what fits."""
        if self.close_sent:
            return b""
        self.close_sent = True
        return self.whole_frame(CLOSE, _close_payload(code, reason))

    def whole_frame(self, opcode: int, payload: bytes) -> bytes:
        """Returns an unfragmented frame, masked if we are the client."""
        if not self.client:
            return frame_header(opcode, len(payload), None) + payload
        key = self.new_key()
        return frame_header(opcode, len(payload), key) + masked_bytes(payload, key)

    def check_open(self) -> None:
        """Raises ConnectionLost if no message may be sent any more."""
        if self.close_sent or self.close_received:
            raise ConnectionLost("the connection is closing; nothing more can be sent on it")

    def new_key(self) -> bytes:
        """Returns four unpredictable bytes."""
        used = self._keys_used
        if used == len(self._keys):
            self._keys = os.urandom(4096)  # a system call a frame would cost more than masking a small one
            used = 0
        self._keys_used = used + 4
        return self._keys[used : used + 4]

    def _queue_close(self, payload: bytes) -> None:
        self.close_sent = True
        self._close = self.whole_frame(CLOSE, payload)


def _close_payload(code: int, reason: str) -> bytes:
    text = reason.encode("utf-8", "replace")[: _MAX_CONTROL_NBYTES - 2].decode(errors="ignore").encode()
    return code.to_bytes(2, "big") + text.decode("utf-8", "ignore").encode()


def _parse_close(payload: bytes) -> Closed:
    if not payload:
        return Closed(1005, "")
    if len(payload) == 1:
        raise ProtocolError("a close frame's payload must be empty or begin with a two-byte code")
    code = int.from_bytes(payload[:2], "big")
    if code not in _CLOSE_CODES and not 3000 <= code < 5000:
        raise ProtocolError(f"the close code {code} must not be sent")
    try:
        return Closed(code, payload[2:].decode())
    except UnicodeDecodeError as exc:
        raise ProtocolError("a close frame's reason is not valid UTF-8", close_code=1007) from exc
