"""The fixed forms of a small read: they mean what the general forms mean, and nothing else is taken for them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor, express
from wsgrad.transport.commands import Read, command_array
from wsgrad.transport.connection import Connection
from wsgrad.transport.messages import BULK_KINDS, Batch, ReadData, message_array

U32 = st.integers(0, (1 << 32) - 1)
NUMBERS = st.integers(0, (1 << 53) - 1)
DATA = st.binary(max_size=express.MAX_DATA)


def ends(*, client_sends):
    """Who sends, and two receivers of which only one knows the short way."""
    sender = Connection(client=client_sends, bulk_kinds=BULK_KINDS)
    return sender, [
        Connection(client=not client_sends, bulk_kinds=BULK_KINDS, shortcut=shortcut)
        for shortcut in (express.received, None)
    ]


def outcome(connection, frame):
    try:
        (event,) = connection.feed(frame)
    except ProtocolError as exc:
        return str(exc)
    return event.head, None if event.bulk is None else bytes(event.bulk), event.nbytes, event.raw


@given(U32, NUMBERS, U32, U32)
def test_a_request_is_the_batch_of_one_read(queue, number, buffer, nbytes):
    packed = express.request(queue, number, buffer, nbytes)
    assert cbor.decode(packed) == message_array(Batch(queue, number, [command_array(Read(buffer, 0, nbytes))]))
    assert express.read_request(packed) == express.Request(queue, number, buffer, nbytes)
    sender, receivers = ends(client_sends=True)
    frame = b"".join(sender.encode(packed))
    short, general = (outcome(receiver, frame) for receiver in receivers)
    assert short == general


@given(U32, NUMBERS, NUMBERS, DATA)
def test_an_answer_is_the_data_of_a_read(queue, number, acked, data):
    packed = express.answer(queue, number, acked, data)
    end = cbor.scan(packed)
    assert cbor.decode(packed[:end]) == message_array(ReadData(queue, number, acked))
    assert cbor.decode(packed[end:]) == data
    assert express.read_answer(packed) == express.Answer(queue, number, acked, data)
    sender, receivers = ends(client_sends=False)
    frame = b"".join(sender.encode(packed[:end], data))
    short, general = (outcome(receiver, frame) for receiver in receivers)
    assert short == general


def test_the_head_of_an_answer_is_its_beginning():
    assert express.answer(3, 9, 9, b"data").startswith(express.answer_head(3, 9))


@settings(max_examples=300)
@given(
    st.sampled_from([express.request(7, 1 << 40, 3, 4), express.answer(7, 1 << 40, 5, b"data")]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3),
    st.integers(-3, 3),
)
def test_what_is_only_similar_is_read_the_general_way(packed, changes, growth):
    """Any bytes mean the same with and without the short way, faults included."""
    payload = bytearray(packed)
    for position, byte in changes:
        payload[position % len(payload)] = byte
    payload = payload[:growth] if growth < 0 else payload + bytes(growth)
    sender, receivers = ends(client_sends=True)
    frame = b"".join(sender.encode(bytes(payload)))
    short, general = (outcome(receiver, frame) for receiver in receivers)
    assert short == general


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_a_request_in_pieces_is_the_same_message(pieces):
    sender, receivers = ends(client_sends=True)
    frame = b"".join(sender.encode(express.request(1, 2, 3, 4)))
    for receiver in receivers:
        events = []
        for start in range(0, len(frame), -(-len(frame) // pieces)):
            events += receiver.feed(frame[start : start - (-len(frame) // pieces)])
        assert [event.head for event in events] == [[16, 1, 2, [[6, 3, 0, 4]]]]
