"""The strict CBOR subset: what is accepted comes back as it was, the rest is a named error that costs nothing."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor

KEYS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.text(max_size=8))
LEAVES = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.binary(max_size=300),
    st.text(max_size=40),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=30), st.dictionaries(KEYS, inner, max_size=6)),
    max_leaves=40,
)


@settings(max_examples=150, deadline=None)
@given(value=VALUES, before=st.binary(max_size=3), behind=st.binary(max_size=3))
def test_scan_finds_the_end_of_whatever_encode_made(value, before, behind):
    raw = cbor.encode(value)
    assert cbor.decode(raw) == value
    assert cbor.scan(before + raw + behind, len(before)) == len(before) + len(raw)
    assert cbor.scan(memoryview(before + raw + behind), len(before)) == len(before) + len(raw)


@settings(max_examples=100, deadline=None)
@given(value=VALUES, data=st.data())
def test_truncated_item_asks_for_more_but_never_for_too_much(value, data):
    raw = cbor.encode(value)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(cbor.NeedMore) as caught:
        cbor.scan(raw[:cut])
    assert cut < caught.value.need <= len(raw)
    with pytest.raises(ProtocolError, match="truncated"):
        cbor.decode(raw[:cut])


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_protocol_error(raw):
    try:
        value = cbor.decode(raw)
    except ProtocolError:
        return
    assert cbor.decode(cbor.encode(value)) == value or "nan" in repr(value)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("2^32 items", bytes.fromhex("9affffffff")),
        ("2^63 bytes", bytes.fromhex("5b8000000000000000")),
        ("2^63 bytes of text", bytes.fromhex("7b7fffffffffffffff")),
        ("2^32 pairs", bytes.fromhex("baffffffff")),
        ("40 KB of nested arrays", b"\x81" * 40_000),
        ("40 KB of nested maps", b"\xa1\x00" * 20_000),
        ("40 KB of nested long-form arrays", b"\x98\x01" * 20_000),
        ("40 KB of arrays of two", b"\x82\x00" * 20_000),
        ("item over the limit of bytes", b"\x99\x20\x00" + b"\x1b\x00\x00\x00\x00\x00\x00\x00\x01" * 0x2000),
    ],
)
def test_announcement_beyond_the_limits_is_refused_with_flat_memory(name, raw):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            cbor.scan(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("c11a514b67b0", "tags"),
        ("d81c80", "tags"),
        ("c249010000000000000000", "tags"),
        ("9f01ff", "indefinite"),
        ("bf6161 01ff", "indefinite"),
        ("5f4101ff", "indefinite"),
        ("7f6161ff", "indefinite"),
        ("1c", "reserved"),
        ("5d", "reserved"),
        ("ff", "simple value"),
        ("f7", "simple value"),
        ("f0", "simple value"),
        ("f820", "simple value"),
        ("3b8000000000000000", "64 bits"),
        ("62c328", "invalid"),
        ("a2010a010b", "Duplicate"),
        ("a2010a18010b", "Duplicate"),
        ("a1f500", "key"),
        ("a18000", "key"),
        ("a14100 00", "key"),
        ("0000", "follow"),
        ("8201", "truncated"),
    ],
)
def test_outside_the_subset_is_refused(raw, words):
    with pytest.raises(ProtocolError, match=words):
        cbor.decode(bytes.fromhex(raw.replace(" ", "")))


def test_limits_are_exact():
    assert cbor.decode(b"\x81" * 4 + b"\x00", max_depth=4) == [[[[0]]]]
    with pytest.raises(ProtocolError, match="deeply"):
        cbor.decode(b"\x81" * 5 + b"\x00", max_depth=4)
    assert cbor.decode(b"\xa1\x00" * 3 + b"\xa1\x00\x00", max_depth=4) == {0: {0: {0: {0: 0}}}}
    with pytest.raises(ProtocolError, match="deeply"):
        cbor.decode(b"\xa1\x00" * 4 + b"\x81\x00", max_depth=4)
    assert cbor.decode(bytes.fromhex("830102a10304"), max_items=6) == [1, 2, {3: 4}]
    with pytest.raises(ProtocolError, match="too many"):
        cbor.decode(bytes.fromhex("830102a10304"), max_items=5)


def test_dribbled_item_is_scanned_a_bounded_number_of_times():
    """A peer that sends a byte at a time must not make each byte cost a scan of all before it."""
    for value in ([2**40] * 2000, [["x" * 30, [1, [2, {i: [2**63]}]]] for i in range(1000)]):
        raw = cbor.encode(value)
        scans, have = 0, 1
        while True:
            scans += 1
            try:
                cbor.scan(raw[:have])
                break
            except cbor.NeedMore as exc:
                have = max(exc.need, have + 1)
        assert scans < 400


@pytest.mark.parametrize("nbytes", [0, 1, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**40])
def test_byte_string_head_is_read_as_written_and_never_early(nbytes):
    head = cbor.bytes_head(nbytes)
    assert cbor.read_bytes_head(b"\x00" + head, 1) == (nbytes, 1 + len(head))
    for cut in range(len(head)):
        assert cbor.read_bytes_head(head[:cut], 0) is None


def test_byte_string_head_is_the_shortest_form():
    for nbytes in (0, 23, 24, 255, 256, 65536):
        assert cbor.encode(bytes(nbytes)).startswith(cbor.bytes_head(nbytes))


@pytest.mark.parametrize("raw", [b"\x00", b"\x60", b"\x5f", b"\x5c", b"\x80", b"\xc1"])
def test_anything_but_a_byte_string_after_the_head_is_refused(raw):
    with pytest.raises(ProtocolError, match="byte string"):
        cbor.read_bytes_head(raw, 0)


def test_unencodable_object_is_a_type_error():
    with pytest.raises(TypeError, match="object"):
        cbor.encode([object()])
