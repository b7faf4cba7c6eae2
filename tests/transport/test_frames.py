"""Frame rules on their own: masking at every alignment, and the close code that answers each fault of a peer."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.errors import ConnectionLost, ProtocolError
from wsgrad.transport import cbor, frames
from wsgrad.transport.connection import Closed, Connection

KEY = bytes.fromhex("a1b2c3d4")


def slow_mask(data: bytes, key: bytes, phase: int) -> bytes:
    return bytes(byte ^ key[(phase + i) & 3] for i, byte in enumerate(data))


@pytest.mark.parametrize("nbytes", [*range(20), 511, 512, 513, 520, 527, 4099])
def test_mask_is_right_at_every_alignment_and_phase(nbytes):
    data = bytes((i * 37 + 11) & 255 for i in range(nbytes))
    for phase in range(4):
        expected = slow_mask(data, KEY, phase)
        for offset in range(9):
            memory = bytearray(b"\xee" * offset + data + b"\xee" * 9)
            frames.apply_mask(memoryview(memory)[offset : offset + nbytes], KEY, phase)
            assert memory == b"\xee" * offset + expected + b"\xee" * 9
            target = bytearray(b"\xee" * (nbytes + 18))
            frames.copy_masked(memoryview(data), memoryview(target)[offset : offset + nbytes], KEY, phase)
            assert target == b"\xee" * offset + expected + b"\xee" * (18 - offset)
    assert frames.masked_bytes(data, KEY) == slow_mask(data, KEY, 0)


@settings(max_examples=50, deadline=None)
@given(
    data=st.binary(min_size=2000, max_size=3000),
    key=st.binary(min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 2000)),
)
def test_masking_in_pieces_is_masking_at_once(data, key, cuts):
    memory = bytearray(data)
    points = sorted({0, len(data), *cuts})
    for start, end in pairwise(points):
        frames.apply_mask(memoryview(memory)[start:end], key, start)
    assert memory == slow_mask(data, key, 0)


def masked(first: int, payload: bytes, *, length: bytes | None = None) -> bytes:
    """Returns a client's frame with any first byte, and any length field."""
    field = bytes((0x80 | len(payload),)) if length is None else bytes((0x80 | length[0],)) + length[1:]
    return bytes((first,)) + field + KEY + slow_mask(payload, KEY, 0)


def server() -> Connection:
    return Connection(client=False, bulk_kinds=frozenset({9}), max_bulk=1000)


HEAD = cbor.encode([2, 1])
FAULTS = {
    "reserved bit 1": (1002, masked(0xC2, HEAD)),
    "reserved bit 2": (1002, masked(0xA2, HEAD)),
    "reserved bit 3": (1002, masked(0x92, HEAD)),
    "reserved data opcode": (1002, masked(0x83, HEAD)),
    "reserved control opcode": (1002, masked(0x8B, b"")),
    "text": (1003, masked(0x81, b"hello")),
    "unmasked": (1002, b"\x82" + bytes((len(HEAD),)) + HEAD),
    "fragmented ping": (1002, masked(0x09, b"")),
    "ping of 126 bytes": (1002, masked(0x89, b"x" * 126, length=b"\x7e\x00\x7e")),
    "continuation of nothing": (1002, masked(0x80, HEAD)),
    "message within a message": (1002, masked(0x02, HEAD[:1]) + masked(0x82, HEAD)),
    "16-bit length below 126": (1002, masked(0x82, HEAD, length=b"\x7e\x00\x03")),
    "64-bit length below 65536": (1002, masked(0x82, HEAD, length=b"\x7f" + (65535).to_bytes(8, "big"))),
    "64-bit length with its highest bit": (1002, masked(0x82, b"", length=b"\x7f" + (1 << 63).to_bytes(8, "big"))),
    "close payload of one byte": (1002, masked(0x88, b"\x03")),
    "close reason not UTF-8": (1007, masked(0x88, b"\x03\xe8\xff")),
    "empty message": (1002, masked(0x82, b"")),
    "head ends early": (1002, masked(0x82, HEAD[:-1])),
    "head is no array": (1002, masked(0x82, b"\x05")),
    "head is an empty array": (1002, masked(0x82, b"\x80")),
    "kind is no integer": (1002, masked(0x82, cbor.encode(["2"]))),
    "kind is a boolean": (1002, masked(0x82, cbor.encode([True]))),
    "bytes behind a message without bulk": (1002, masked(0x82, HEAD + b"\x00")),
    "bulk missing": (1002, masked(0x82, cbor.encode([9]))),
    "bulk is a text": (1002, masked(0x82, cbor.encode([9]) + b"\x61a")),
    "bulk shorter than announced": (1002, masked(0x82, cbor.encode([9]) + b"\x42a")),
    "bulk longer than announced": (1002, masked(0x82, cbor.encode([9]) + b"\x41ab")),
    "bulk ends early over fragments": (1002, masked(0x02, cbor.encode([9]) + b"\x42a") + masked(0x80, b"")),
    "bulk too long over fragments": (1002, masked(0x02, cbor.encode([9]) + b"\x42a") + masked(0x80, b"bc")),
    "bulk over the limit": (1009, masked(0x02, cbor.encode([9]) + cbor.bytes_head(1001))),
    "head over the limit": (1009, masked(0x02, b"\x82\x00" + cbor.bytes_head(70_000))),
    **{
        f"close code {code}": (1002, masked(0x88, code.to_bytes(2, "big")))
        for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535)
    },
}


def is_faulty(data: bytes) -> bool:
    try:
        server().feed(data)
    except ProtocolError:
        return True
    return False


@pytest.mark.parametrize("one_by_one", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_answered_with_its_close_code(name, one_by_one):
    code, data = FAULTS[name]
    connection = server()
    if one_by_one:
        faulty = next(i for i in range(len(data)) if is_faulty(data[: i + 1]))
        assert all(connection.feed(data[i : i + 1]) == [] for i in range(faulty))
        data = data[faulty : faulty + 1]
    with pytest.raises(ProtocolError) as caught:
        connection.feed(data)
    assert caught.value.close_code == code
    reply = connection.take_control()
    assert reply[0] == 0x88
    assert reply[1] == len(reply) - 2 <= 125
    assert int.from_bytes(reply[2:4], "big") == code
    assert connection.closed
    # Nothing behind the fault counts, whatever it is.
    assert connection.feed(masked(0x82, HEAD)) == []
    assert connection.take_control() == b""
    with pytest.raises(ConnectionLost):
        connection.encode(HEAD)


def test_over_the_limit_names_the_limit_in_the_close_reason():
    connection = server()
    with pytest.raises(ProtocolError):
        connection.feed(masked(0x02, cbor.encode([9]) + cbor.bytes_head(1 << 40)))
    assert b"limit of 1000 bytes" in connection.take_control()


def test_masked_frame_of_a_server_is_refused():
    connection = Connection(client=True, bulk_kinds=frozenset())
    with pytest.raises(ProtocolError, match="masked"):
        connection.feed(masked(0x82, HEAD))
    assert connection.take_control()[1] & 0x80


@pytest.mark.parametrize("code", [1000, 1001, 1003, 1007, 1008, 1009, 1011, 1012, 1014, 3000, 4999])
def test_close_is_reported_and_echoed_once(code):
    connection = server()
    reason = "bye é"
    assert connection.feed(masked(0x88, code.to_bytes(2, "big") + reason.encode())) == [Closed(code, reason)]
    assert connection.take_control() == b"\x88\x02" + code.to_bytes(2, "big")
    assert connection.close(1000) == b""
    assert connection.eof() == []


def test_close_without_a_code_is_answered_without_one():
    connection = server()
    assert connection.feed(masked(0x88, b"")) == [Closed(1005, "")]
    assert connection.take_control() == b"\x88\x00"


def test_own_close_lets_messages_under_way_arrive_and_is_not_repeated():
    connection = server()
    assert connection.close(1001, "x" * 200) == b"\x88\x7d\x03\xe9" + b"x" * 123
    with pytest.raises(ConnectionLost):
        connection.encode(HEAD)
    with pytest.raises(ConnectionLost):
        connection.ping()
    events = connection.feed(masked(0x82, HEAD) + masked(0x89, b"late") + masked(0x88, b"\x03\xe8"))
    assert events[0].head == [2, 1]
    assert events[1:] == [Closed(1000, "")]
    assert connection.take_control() == b""


def test_close_reason_is_cut_at_a_whole_character():
    frame = server().close(1011, "é" * 100)
    assert frame[4:].decode() == "é" * 61


def test_end_without_a_close_frame_is_1006():
    connection = server()
    assert connection.feed(masked(0x82, HEAD)[:5]) == []
    [closed] = connection.eof()
    assert closed.code == 1006
    assert connection.eof() == []


def test_ping_is_answered_between_fragments_and_the_newest_answers_for_all():
    connection = server()
    data = masked(0x02, HEAD[:2]) + masked(0x89, b"one") + masked(0x89, b"two") + masked(0x80, HEAD[2:])
    [received] = connection.feed(data)
    assert received.head == [2, 1]
    assert connection.take_control() == b"\x8a\x03two"
    assert connection.take_control() == b""


def test_flood_of_pings_nobody_reads_takes_no_memory():
    connection = server()
    flood = masked(0x89, b"x" * 125) * 500
    for _ in range(20):
        assert connection.feed(flood) == []
    assert len(connection.take_control()) == 127


def test_messages_before_a_fault_are_delivered_before_it_is_raised():
    connection = server()
    [received] = connection.feed(masked(0x82, HEAD) + masked(0x81, b"text"))
    assert received.head == [2, 1]
    with pytest.raises(ProtocolError, match="text"):
        connection.get_buffer()
    assert connection.eof() == []
    assert connection.take_control()[:4] == b"\x88" + bytes((len("text messages are not accepted") + 2,)) + b"\x03\xeb"


def test_own_ping_carries_at_most_125_bytes():
    connection = server()
    assert connection.ping(b"a" * 125)[:2] == b"\x89\x7d"
    with pytest.raises(ValueError, match="125"):
        connection.ping(b"a" * 126)
