"""Messages through two connections wired together, and through wsproto's and websockets' own protocol cores."""

import gc
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import websockets.frames
import websockets.protocol
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.server import ServerProtocol
from websockets.uri import parse_uri
from wsproto.connection import Connection as StockConnection
from wsproto.connection import ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong

from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor
from wsgrad.transport.connection import Closed, Connection, Received

BULK = 9
KINDS = frozenset({BULK})


def end(*, client: bool, **options) -> Connection:
    return Connection(client=client, bulk_kinds=KINDS, **options)


def joined(parts) -> bytes:
    return b"".join(bytes(part) for part in parts)


def feed_in_chunks(connection: Connection, data: bytes, sizes) -> list:
    """Receives as a socket would: at most what the buffer holds, at most the next size."""
    view = memoryview(data)
    events = []
    sizes = iter(sizes)
    while view:
        buffer = connection.get_buffer()
        n = min(len(buffer), len(view), next(sizes, len(view)))
        buffer[:n] = view[:n]
        events += connection.buffer_updated(n)
        view = view[n:]
    return events


# A message as the tests write it: the fields behind the kind, and the bulk or None.
MESSAGES = st.lists(
    st.tuples(
        st.lists(
            st.one_of(st.integers(0, 2**40), st.text(max_size=5), st.lists(st.integers(0, 300), max_size=8)), max_size=5
        ),
        st.one_of(
            st.none(),
            st.binary(max_size=60),
            st.integers(100, 90_000).map(lambda n: bytes(range(256)) * (n // 256 + 1)),
        ),
    ),
    max_size=5,
)
CHUNKS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 70_000)), max_size=60)


def head_of(message) -> list:
    fields, bulk = message
    return [2 if bulk is None else BULK, *fields]


def seen(event: Received):
    return event.head, None if event.bulk is None else bytes(event.bulk)


@pytest.mark.parametrize("client", [True, False])
@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES, chunks=CHUNKS)
def test_messages_arrive_as_sent_however_they_are_cut(client, messages, chunks):
    sender, receiver = end(client=client), end(client=not client)
    data = b"".join(joined(sender.encode(cbor.encode(head_of(m)), m[1])) for m in messages)
    events = feed_in_chunks(receiver, data, chunks)
    assert [seen(e) for e in events] == [(head_of(m), m[1]) for m in messages]
    for event in events:
        bulk = b"" if event.bulk is None else cbor.bytes_head(len(event.bulk)) + event.bulk
        assert cbor.decode(event.raw) == event.head
        assert event.nbytes == len(event.raw) + len(bulk)


def stock_ends(*, ours_is_client: bool):
    return StockConnection(ConnectionType.SERVER if ours_is_client else ConnectionType.CLIENT)


def websockets_end(*, ours_is_client: bool):
    core = (
        ServerProtocol(max_size=None) if ours_is_client else ClientProtocol(parse_uri("ws://localhost/"), max_size=None)
    )
    core.state = websockets.protocol.State.OPEN
    core.parser = core.parse()
    next(core.parser)
    return core


@pytest.mark.parametrize("client", [True, False])
@settings(max_examples=40, deadline=None)
@given(messages=MESSAGES, chunks=CHUNKS, ping=st.binary(max_size=125))
def test_wsproto_and_websockets_read_what_we_write(client, messages, chunks, ping):
    ours = end(client=client)
    payloads = []
    data = ours.ping(ping)
    for message in messages:
        data += joined(ours.encode(cbor.encode(head_of(message)), message[1]))
        tail = b"" if message[1] is None else cbor.bytes_head(len(message[1])) + message[1]
        payloads.append(cbor.encode(head_of(message)) + tail)
    data += ours.close(4001, "done")

    stock = stock_ends(ours_is_client=client)
    other = websockets_end(ours_is_client=client)
    position = 0
    for size in [*chunks, len(data)]:
        stock.receive_data(data[position : position + size])
        other.receive_data(data[position : position + size])
        position += size
    got, partial, controls = [], b"", []
    for event in stock.events():
        if isinstance(event, BytesMessage):
            partial += bytes(event.data)
            if event.message_finished:
                got.append(partial)
                partial = b""
        else:
            controls.append(event)
    assert got == payloads
    assert isinstance(controls[0], Ping)
    assert bytes(controls[0].payload) == ping
    assert isinstance(controls[-1], CloseConnection)
    assert (controls[-1].code, controls[-1].reason) == (4001, "done")

    frames = other.events_received()
    assert [f.data for f in frames if f.opcode is websockets.frames.Opcode.BINARY] == payloads
    assert frames[0].data == ping
    assert (other.close_rcvd.code, other.close_rcvd.reason) == (4001, "done")


@pytest.mark.parametrize("core", ["wsproto", "websockets"])
@pytest.mark.parametrize("client", [True, False])
@settings(max_examples=40, deadline=None)
@given(
    messages=MESSAGES, chunks=CHUNKS, cuts=st.lists(st.integers(0, 70_000), max_size=6), ping=st.binary(max_size=125)
)
def test_we_read_what_wsproto_and_websockets_fragment(client, core, messages, chunks, cuts, ping):
    """The stock end cuts each message at random, with a ping between its fragments; we answer and it understands."""
    ours = end(client=client)
    stock = stock_ends(ours_is_client=client) if core == "wsproto" else None
    other = websockets_end(ours_is_client=client) if core == "websockets" else None
    data = b""
    for message in messages:
        tail = b"" if message[1] is None else cbor.bytes_head(len(message[1])) + message[1]
        payload = cbor.encode(head_of(message)) + tail
        points = sorted({0, len(payload), *(c for c in cuts if c < len(payload))})
        pieces = [payload[a:b] for a, b in pairwise(points)]
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            if stock:
                data += stock.send(BytesMessage(data=piece, message_finished=last))
                data += stock.send(Ping(payload=ping)) if not last else b""
            else:
                (other.send_binary if i == 0 else other.send_continuation)(piece, fin=last)
                if not last:
                    other.send_ping(ping)
                data += b"".join(other.data_to_send())
    events = feed_in_chunks(ours, data, chunks)
    assert [seen(e) for e in events] == [(head_of(m), m[1]) for m in messages]

    pong = ours.take_control()
    if stock:
        data = stock.send(CloseConnection(code=1001, reason="off"))
        stock.receive_data(pong)
        assert [bytes(e.payload) for e in stock.events() if isinstance(e, Pong)] == ([ping] if pong else [])
    else:
        other.receive_data(pong)
        assert [f.data for f in other.events_received()] == ([ping] if pong else [])
        other.send_close(1001, "off")
        data = b"".join(other.data_to_send())
    assert ours.feed(data) == [Closed(1001, "off")]
    if stock:
        stock.receive_data(ours.take_control())
        assert [e.code for e in stock.events()] == [1001]
    else:
        other.receive_data(ours.take_control())
        other.receive_eof()
        assert other.state is websockets.protocol.State.CLOSED


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400), client=st.booleans(), chunks=CHUNKS)
def test_any_bytes_give_events_or_a_protocol_error(data, client, chunks):
    connection = end(client=client)
    try:
        for event in [*feed_in_chunks(connection, data, chunks), *connection.eof()]:
            assert isinstance(event, Received | Closed)
    except ProtocolError:
        assert connection.closed
        assert b"\x88" in connection.take_control()


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=300), fins=st.lists(st.integers(1, 20), max_size=8))
def test_any_payload_in_well_formed_frames_gives_a_message_or_a_protocol_error(payload, fins):
    stock = StockConnection(ConnectionType.SERVER)
    data, view = b"", payload
    for size in fins:
        data += stock.send(BytesMessage(data=view[:size], message_finished=False))
        view = view[size:]
    data += stock.send(BytesMessage(data=view, message_finished=True))
    connection = end(client=True)
    try:
        events = connection.feed(data)
    except ProtocolError:
        return
    [received] = events
    tail = b"" if received.bulk is None else payload[len(payload) - len(received.bulk) :]
    assert payload.startswith(received.raw)
    assert received.bulk is None or received.bulk == tail


def test_endless_announcements_keep_memory_flat():
    """One frame may announce 2^62 bytes, a head 2^32 items, a bulk 2^60 bytes: nothing is set aside for them."""
    frame = b"\x82\x7f" + (1 << 62).to_bytes(8, "big")
    gc.collect()
    tracemalloc.start()
    try:
        for payload in (
            b"\x9a\xff\xff\xff\xff",
            b"\x5b\x7f" + b"\xff" * 7,
            b"\x81" * 40_000,
            b"\x82\x09\x01\x5b\x10" + bytes(7),
            b"\x81\x02" + b"\x00" * 40_000,
        ):
            connection = end(client=True)
            with pytest.raises(ProtocolError):
                connection.feed(frame + payload)
            del connection
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 512 * 1024


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("fragment", [1, 7, 131_000, 1 << 20])
def test_bulk_lands_in_its_destination_across_fragments(client, fragment):
    nbytes = 300_001 if fragment > 7 else 3_001
    target = bytearray(nbytes + 10)
    asked = []

    def destination(head, n):
        asked.append((head, n))
        return memoryview(target)[5 : 5 + n]

    bulk = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8).tobytes()
    payload = cbor.encode([BULK, 4]) + cbor.bytes_head(nbytes) + bulk
    stock = stock_ends(ours_is_client=client)
    pieces = [payload[i : i + fragment] for i in range(0, len(payload), fragment)]
    data = b"".join(
        stock.send(BytesMessage(data=piece, message_finished=i == len(pieces) - 1)) for i, piece in enumerate(pieces)
    )
    connection = end(client=client, destination=destination)
    [received] = connection.feed(data)
    assert asked == [([BULK, 4], nbytes)]
    assert received.bulk.obj is target
    assert target == bytes(5) + bulk + bytes(5)


def test_large_bulk_is_received_without_a_copy_on_the_way():
    target = memoryview(bytearray(1 << 20))
    connection = end(client=True, destination=lambda head, n: target)
    message = joined(end(client=False).encode(cbor.encode([BULK]), bytes(1 << 20)))
    data = memoryview(message * 2)
    staged = 0
    while data:
        buffer = connection.get_buffer()
        n = min(len(buffer), len(data))
        staged += n if buffer.obj is not target.obj else 0
        buffer[:n] = data[:n]
        connection.buffer_updated(n)
        data = data[n:]
    assert staged <= (1 << 16) + 1024


def test_destination_of_the_wrong_size_is_our_own_bug():
    connection = end(client=True, destination=lambda head, n: memoryview(bytearray(n + 1)))
    with pytest.raises(ValueError, match="destination"):
        connection.feed(joined(end(client=False).encode(cbor.encode([BULK]), b"abc")))


def test_destination_may_refuse_the_message():
    def destination(head, nbytes):
        raise ProtocolError("no such transfer", close_code=1008)

    connection = end(client=False, destination=destination)
    with pytest.raises(ProtocolError, match="no such transfer"):
        connection.feed(joined(end(client=True).encode(cbor.encode([BULK]), b"abc")))
    assert b"no such transfer" in connection.take_control()


def test_nothing_keeps_the_destination_once_its_message_is_done():
    target = bytearray(100_000)
    connection = end(client=True, destination=lambda head, n: memoryview(target))
    events = connection.feed(joined(end(client=False).encode(cbor.encode([BULK]), bytes(100_000))))
    del events
    target.clear()  # raises BufferError while any view is left

    target = bytearray(100_000)
    connection = end(client=True, destination=lambda head, n: memoryview(target))
    connection.feed(joined(end(client=False).encode(cbor.encode([BULK]), bytes(100_000)))[:90_000])
    connection.eof()
    target.clear()


def test_limit_may_depend_on_the_kind():
    sender = end(client=False)
    connection = Connection(client=True, bulk_kinds=frozenset({8, 9}), max_bulk=lambda kind: 10 * kind)
    assert len(connection.feed(joined(sender.encode(cbor.encode([9]), bytes(90))))) == 1
    with pytest.raises(ProtocolError, match="over the limit of 80 bytes"):
        connection.feed(joined(sender.encode(cbor.encode([8]), bytes(90))))


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 16_000, 17_000, 65_500, 65_536, 1_000_003])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_bulk_of_any_size_and_alignment_is_sent_whole(client, nbytes, offset):
    bulk = np.arange(nbytes + offset, dtype=np.uint8)[offset:]
    before = bulk.tobytes()
    sender = end(client=client)
    [received] = end(client=not client).feed(joined(sender.encode(cbor.encode([BULK, "x"]), bulk)))
    assert received.bulk == before
    assert bulk.tobytes() == before


def test_server_sends_large_bulk_from_its_own_memory():
    bulk = np.zeros(1 << 20, np.float32)
    parts = end(client=False).encode(cbor.encode([BULK]), bulk)
    assert parts[1].obj is bulk


def test_clients_scratch_is_reused_and_no_larger_than_needed():
    sender = end(client=True)
    [first] = sender.encode(cbor.encode([BULK]), bytes(1 << 20))
    [second] = sender.encode(cbor.encode([BULK]), bytes(1 << 20))
    assert first.obj is second.obj
    assert first.obj.nbytes < (1 << 20) + 256


def test_client_masks_each_frame_with_another_key():
    sender = end(client=True)
    keys = {joined(sender.encode(cbor.encode([2])))[2:6] for _ in range(3000)}
    assert len(keys) > 2990
