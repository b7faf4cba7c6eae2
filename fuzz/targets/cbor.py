"""CBOR in the subset of the wire: what `scan` and `decode` take is what cbor2 reads, and both agree."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import cbor2

from fuzz.choices import Choices
from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 96

_VECTORS = Path(__file__).parent.parent.parent / "tests" / "vectors.json"


def seeds() -> Iterator[bytes]:
    """The vectors that Python and the browser share."""
    vectors = json.loads(_VECTORS.read_text(encoding="utf-8"))
    for vector in (*vectors["valid"], *vectors["invalid"]):
        if len(vector["hex"]) < 200:
            yield b"\0" + bytes.fromhex(vector["hex"])


def check(data: bytes) -> None:
    """Scan and decode agree with each other, with every prefix, and with cbor2 read from a stream."""
    if not data:
        return
    if data[0] & 1:
        made = Choices(data[1:]).value()
        encoded = _encoded(made)
        if encoded is not None:
            assert same(cbor.decode(encoded), made), made
            _compare(encoded)
        return
    _compare(data[1:])


def _encoded(value: object) -> bytes | None:
    if not fits(value):
        return None
    return cbor.encode(value)


def fits(value: object) -> bool:
    """Whether all integers in it fit 64 bits, as the subset asks."""
    if isinstance(value, list):
        return all(map(fits, value))
    if isinstance(value, dict):
        return all(fits(key) and fits(item) for key, item in value.items())
    return type(value) is not int or -(1 << 63) <= value < 1 << 64


def _compare(data: bytes) -> None:
    try:
        end = cbor.scan(data)
    except cbor.NeedMore as more:
        assert more.need > len(data), (data, more.need)
        _refuses(data)
        return
    except ProtocolError:
        _refuses(data)
        return
    assert 0 < end <= len(data)
    for cut in {0, end // 2, end - 1}:
        try:
            cbor.scan(data[:cut])
        except cbor.NeedMore as more:
            assert cut < more.need <= end, (data, cut, more.need, end)
        else:
            raise AssertionError(f"{data[:cut]!r} was enough, and so was {data[:end]!r}")
    stream = io.BytesIO(data)
    try:
        theirs = cbor2.load(stream)
    except cbor2.CBORDecodeError as exc:
        _refuses(data[:end])
        assert isinstance(exc, cbor2.CBORDecodeError)
        return
    try:
        ours = cbor.decode(data[:end])
    except ProtocolError as exc:
        assert "duplicate" in str(exc).lower() or "invalid" in str(exc), (data, exc)
        return
    assert same(ours, theirs), (ours, theirs)
    assert same(cbor.decode(cbor.encode(ours)), ours), ours
    if data[0] >> 5 == 2:
        head = cbor.read_bytes_head(data, 0)
        assert head is not None
        assert head[0] + head[1] == end
        assert data[head[1] : end] == ours


def _refuses(data: bytes) -> None:
    try:
        cbor.decode(data)
    except ProtocolError:
        return
    raise AssertionError(f"decode takes {data!r}, which scan does not")


def same(a: object, b: object) -> bool:
    """Equal, of the same types, with NaN equal to NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        assert isinstance(b, list)
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        assert isinstance(b, float)
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b
