"""The CBOR of the wire (RFC 8949, a strict subset) of Python's side; it knows no message, and only it uses cbor2.

The subset: integers within 64 bits, byte and text strings, arrays, maps with integer or text keys, floats, false, true,
null; every length definite, no tags, no duplicate keys. `scan` checks that before cbor2 sees a byte, because cbor2
believes an announced length, follows nesting, and by itself turns tags into dates, regular expressions and big numbers.
"""

from __future__ import annotations

import cbor2

from wsgrad.errors import ProtocolError

MAX_NBYTES = 64 * 1024
"""An item longer than this is refused: a message's head is small, bulk travels outside it."""
MAX_ITEMS = 16 * 1024
MAX_DEPTH = 16


class NeedMore(Exception):
    """The item is fine so far, but truncated.

    Attributes:
        need: no shorter data can hold the whole item; scanning again earlier is wasted time.
    """

    def __init__(self, need: int) -> None:
        super().__init__(need)
        self.need = need


def _one_byte_steps() -> list[int]:
    """Returns, by initial byte, how far the next item is where that byte alone tells, else 0."""
    steps = [0] * 256
    for major in (0x00, 0x20):
        for n in range(24):
            steps[major + n] = 1
        for n, size in ((24, 2), (25, 3), (26, 5), (27, 9)):
            steps[major + n] = size
    # A negative number of 8 bytes may be below -2**63, so its next byte must be looked at.
    steps[0x3B] = 0
    for major in (0x40, 0x60):
        for n in range(24):
            steps[major + n] = 1 + n
    steps[0x80] = steps[0xA0] = 1  # empty array, empty map
    for simple, size in ((20, 1), (21, 1), (22, 1), (25, 3), (26, 5), (27, 9)):  # false, true, null, floats
        steps[0xE0 + simple] = size
    return steps


_STEPS = _one_byte_steps()


def scan(
    data: bytes | bytearray | memoryview,
    start: int = 0,
    *,
    max_items: int = MAX_ITEMS,
    max_depth: int = MAX_DEPTH,
    max_nbytes: int = MAX_NBYTES,
) -> int:
    """Checks the one item that begins at `start`, building nothing.

    Args:
        data: unsigned bytes.
        start: where the item begins.
        max_items: the most items, counting keys, values and containers.
        max_depth: the deepest nesting of arrays and maps that hold something.
        max_nbytes: the most bytes of the encoded item.

    Returns:
        The offset behind the item.

    Raises:
        NeedMore: the data ends before the item does.
        ProtocolError: the item is outside the subset or over a limit.
    """
    try:
        end, _ = _scan(data, start, start + max_nbytes, max_items - 1, max_depth, 0)
    except NeedMore as exc:
        if exc.need - start <= max_nbytes:
            raise
        end = exc.need
    if end - start > max_nbytes:
        raise ProtocolError(
            f"a CBOR item of at least {end - start} bytes is over the limit of {max_nbytes} bytes", close_code=1009
        )
    return end


def _scan(
    data: bytes | bytearray | memoryview, p: int, limit: int, budget: int, depth: int, tail: int
) -> tuple[int, int]:
    """Scans one item at `p`, behind which at least `tail` more bytes must come.

    Returns:
        The offset behind the item, and what is left of the budget of items.
    """
    end = len(data)
    steps = _STEPS
    left = 1  # items still to come in the open container, the one at p included
    outer: list[int] = []  # the same count for each container around it
    extra = 0
    try:
        while True:
            byte = data[p]
            step = steps[byte]
            if step:
                p += step
            elif 0x80 < byte < 0x98:
                n = byte - 0x80
                budget -= n
                if budget < 0 or len(outer) >= depth:
                    raise _too_big(budget)
                outer.append(left)
                left = n
                p += 1
                continue
            else:
                extra = _argument_size(byte)
                after = p + 1 + extra
                n = int.from_bytes(data[p + 1 : after], "big") if extra else byte & 0x1F
                if after > end:
                    data[end]  # truncated: the IndexError below says so
                extra = 0
                major = byte >> 5
                if major == 1:
                    if n >> 63:
                        raise ProtocolError(f"a CBOR integer of {-1 - n} does not fit 64 bits")
                    p = after
                elif major < 4:
                    p = after + n
                    if p > limit:
                        raise NeedMore(p + tail)
                elif major == 4:
                    budget -= n
                    if budget < 0 or (n and len(outer) >= depth):
                        raise _too_big(budget)
                    p = after
                    if n:
                        outer.append(left)
                        left = n
                        continue
                else:
                    budget -= 2 * n
                    if budget < 0 or (n and len(outer) >= depth):
                        raise _too_big(budget)
                    p = after
                    rest = tail + left - 1 + sum(outer) - len(outer)
                    for i in range(n):
                        behind = rest + 2 * (n - i) - 1
                        if p < end and data[p] >> 5 not in (0, 1, 3):
                            raise ProtocolError("a CBOR map's key is neither an integer nor a text")
                        p, budget = _scan(data, p, limit, budget, 0, behind)
                        p, budget = _scan(data, p, limit, budget, depth - len(outer) - 1, behind - 1)
            left -= 1
            while not left:
                if not outer:
                    if p > end:
                        raise NeedMore(p + tail)
                    return p, budget
                left = outer.pop() - 1
    except IndexError:
        raise NeedMore(p + extra + left + sum(outer) - len(outer) + tail) from None


def _too_big(budget: int) -> ProtocolError:
    return ProtocolError("a CBOR item holds too many items" if budget < 0 else "a CBOR item is nested too deeply")


def _argument_size(byte: int) -> int:
    """Returns how many bytes of argument follow an initial byte that `_STEPS` can't decide alone."""
    info = byte & 0x1F
    if byte >= 0xE0:
        raise ProtocolError(f"the CBOR simple value or break 0x{byte:02x} is not allowed")
    if byte >= 0xC0:
        raise ProtocolError("CBOR tags are not allowed")
    if info == 31:
        raise ProtocolError("CBOR items of indefinite length are not allowed")
    if info > 27:
        raise ProtocolError(f"the CBOR initial byte 0x{byte:02x} is reserved")
    return 1 << (info - 24) if info > 23 else 0


def decode(data: bytes | bytearray | memoryview, *, max_items: int = MAX_ITEMS, max_depth: int = MAX_DEPTH) -> object:
    """Decodes exactly one item with nothing behind it.

    Raises:
        ProtocolError: it is truncated, followed by something, outside the subset or over a limit.
    """
    raw = bytes(data)
    try:
        end = scan(raw, max_items=max_items, max_depth=max_depth, max_nbytes=1 << 62)
    except NeedMore as exc:
        raise ProtocolError(f"a CBOR item is truncated: {len(raw)} bytes, at least {exc.need} needed") from None
    if end != len(raw):
        raise ProtocolError(f"{len(raw) - end} bytes follow a CBOR item that should be the last")
    return decode_scanned(raw)


def decode_scanned(raw: bytes) -> object:
    """Decodes one item whose whole extent `scan` has approved; only texts and duplicate keys are still unchecked."""
    try:
        # A fresh decoder per call: a reused one has leaked shared values between messages in older versions.
        return cbor2.loads(raw, allow_indefinite=False, allow_duplicate_keys=False)
    except (cbor2.CBORDecodeError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"a CBOR item is invalid: {exc}") from exc


def encode(obj: object) -> bytes:
    """Encodes one item. Only types of the subset may stand in it; a bulk memoryview has no place here.

    Raises:
        TypeError: something in it has no form in CBOR.
    """
    try:
        return cbor2.dumps(obj)
    except cbor2.CBOREncodeError as exc:
        raise TypeError(f"cannot be encoded as CBOR: {exc}") from exc


def bytes_head(nbytes: int) -> bytes:
    """Returns the head of a byte string of `nbytes` bytes in its shortest form; the payload itself follows it."""
    if nbytes < 24:
        return bytes((0x40 | nbytes,))
    if nbytes < 1 << 8:
        return bytes((0x58, nbytes))
    if nbytes < 1 << 16:
        return b"\x59" + nbytes.to_bytes(2, "big")
    if nbytes < 1 << 32:
        return b"\x5a" + nbytes.to_bytes(4, "big")
    return b"\x5b" + nbytes.to_bytes(8, "big")


def read_bytes_head(view: bytes | bytearray | memoryview, offset: int) -> tuple[int, int] | None:
    """Reads the head of a byte string.

    Returns:
        The string's length and where its payload begins, or None if the data ends inside the head.

    Raises:
        ProtocolError: something else than a byte string of definite length stands there.
    """
    if offset >= len(view):
        return None
    byte = view[offset]
    info = byte & 0x1F
    if byte >> 5 != 2 or info > 27:
        raise ProtocolError(f"a byte string of definite length must follow the head, not the initial byte 0x{byte:02x}")
    if info < 24:
        return info, offset + 1
    after = offset + 1 + (1 << (info - 24))
    if after > len(view):
        return None
    return int.from_bytes(view[offset + 1 : after], "big"), after
