"""Queues: order whatever holds them, bounds on what is kept, and replies that are believed only where they fit."""

import pytest
from heart import NOTHING, SPIN, Queue, eventually, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.server.limits import MAX_RETAINED
from wsgrad.server.outstanding import ANSWER_NBYTES, InvalidReply, Outstanding, Sent, Transfer
from wsgrad.server.port import renumber
from wsgrad.server.usage import Usage
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import decode, encode

WAIT = "void wait(int *p) { for (volatile long i = 0; i < 100000000; i++) ; *p += 1; }"  # about a quarter of a second


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


async def test_what_comes_behind_a_program_waits_until_it_is_compiled(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4))
        for index in range(5):
            source = f"/* {id(client)} */ void add(int *p) {{ *p = *p * 10 + {index}; }}"
            queue.program(index, source, "add", "p")
            queue.launches([index, 0, 1], 1)
        assert int.from_bytes(await queue.read(1, 0, 4), "little") == 1234


async def test_a_session_compiles_while_its_queue_is_busy(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, WAIT.replace("100000000", "4000000000"), "wait", "p")
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        number = queue.launches([0, 0, 1], 1)
        queue.program(1, f"/* {id(client)} */" + NOTHING, "nothing", "")
        await client.next(m.Compiled, where=lambda message: message.program == 1)
        assert queue.acked < number


async def test_reads_beyond_what_may_be_kept_wait_until_the_client_has_seen_some(server):
    count, size = 400, m.INLINE_BYTES
    assert count * size > MAX_RETAINED
    async with server.client() as client, server.client() as other:
        client.sees = False
        queue = await client.open()
        queue.batch(c.Alloc(1, size))
        numbers = [queue.batch(c.Read(1, 0, size)) for _ in range(count)]
        fits = MAX_RETAINED // (size + ANSWER_NBYTES)
        for number in numbers[:fits]:
            message, _ = await client.next(m.ReadData)
            assert message.number == number
        # Another session is served meanwhile, and nothing more comes here.
        second = await other.open()
        second.batch(c.Alloc(1, 4))
        assert await second.read(1, 0, 4) == bytes(4)
        assert not any(isinstance(message, m.ReadData) for message, _ in client._kept)
        client.sees = True
        client.send(m.Seen(client.link.received))
        for number in numbers[fits:]:
            message, _ = await client.next(m.ReadData)
            assert message.number == number


async def test_one_batch_that_asks_for_more_than_may_be_kept_is_answered_in_pieces(server):
    async with server.client() as client:
        queue = await client.open()
        size = m.INLINE_BYTES
        last = queue.batch(c.Alloc(1, size), *(c.Read(1, 0, size) for _ in range(600)))
        for number in range(2, last + 1):
            message, data = await client.next(m.ReadData)
            assert (message.number, len(data)) == (number, size)


async def test_thousands_of_messages_wait_for_a_busy_node_and_come_in_order(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, WAIT, "wait", "p")
        queue.program(1, "void append(int *p, int n) { p[1] = p[1] * 31 + n; }", "append", "pi")
        queue.batch(c.Alloc(1, 8))
        await queue.done()
        queue.launches([0, 0, 1], 1)
        expected = 0
        for index in range(3000):
            queue.launches([1, 0, 1, index], 1)
            expected = (expected * 31 + index) & 0xFFFFFFFF
        data = await queue.read(1, 0, 8)
        assert int.from_bytes(data[:4], "little") == 1
        assert int.from_bytes(data[4:], "little") == expected


async def test_a_client_that_sends_far_beyond_its_window_loses_its_session(cache):
    limits = {"max_queue_size": 1 << 20, "launch_seconds": 60}
    async with serving(cache, **limits) as server, server.client() as client:
        queue = await client.open()
        queue.program(0, SPIN, "spin", "p")
        queue.program(1, NOTHING, "nothing", "")
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        queue.launches([0, 0, 1], 1)
        for _ in range(200):
            queue.launches([1, 0] * 8000, 8000)
        closed = await client.wait_closed()
        assert closed.code == 1008
        assert "without acknowledgement" in closed.reason
        assert "--max-queue-size" in closed.reason


async def test_refusals_that_a_busy_node_can_not_take_yet_take_no_more_memory_than_what_was_sent(server):
    async with server.client() as client, server.client() as other:
        queue, second = await client.open(), await other.open()
        queue.program(0, WAIT.replace("100000000", "400000000"), "wait", "p")
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        queue.launches([0, 0, 1], 1)
        first = queue.next
        for _ in range(400):
            queue.batch(*[c.Read(9, 0, 4)] * 60)
        (session, _) = server.hub._sessions.values()
        second.batch(c.Alloc(1, 4))
        await eventually(lambda: client.link.unsent_bytes == 0 and session._queues[1]._in.held > 400 * 60)
        assert await second.read(1, 0, 4) == bytes(4)
        assert len(session._queues[1]._feed._items) < 1200
        failed = await queue.failure()
        assert failed.number == first
        queue.batch(c.Clear(first))
        assert await queue.read(1, 0, 4) == b"\1\0\0\0"


async def test_an_aborted_upload_counts_as_done(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 3 << 20))
        number = queue.batch(c.Upload(5, 1, 0, 3 << 20))
        client.send(m.Chunk(1, 5, 0), b"\1" * (1 << 20))
        client.send(m.Abort(1, 5))
        queue.batch(c.Write(1, 0, b"after"))
        assert await queue.read(1, 0, 6) == b"after\1"
        assert queue.acked >= number


async def test_an_aborted_download_stops_and_the_queue_goes_on(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 64 << 20), c.Download(5, 1, 0, 64 << 20), c.Read(1, 0, 1))
        await client.next(m.Chunk)
        client.send(m.Abort(1, 5))
        await client.next(m.ReadData)
        await queue.done()
        queue.batch(c.Download(5, 1, 0, 10))
        _, data = await client.next(m.Chunk, where=lambda message: message.offset == 0)
        assert data == bytes(10)


async def test_a_download_behind_a_busy_command_may_be_aborted_before_it_starts(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, WAIT, "wait", "p")
        queue.batch(c.Alloc(1, 4 << 20))
        await queue.done()
        queue.launches([0, 0, 1], 1)
        queue.batch(c.Download(5, 1, 0, 4 << 20))
        client.send(m.Abort(1, 5))
        assert await queue.read(1, 0, 1) == b"\1"


@given(
    st.one_of(
        st.builds(m.Ack, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 53) - 1)),
        st.builds(m.Compiled, st.integers(0, (1 << 32) - 1), st.integers(0, 300), st.booleans(), st.text(max_size=30)),
        st.builds(m.Attach, st.integers(0, (1 << 32) - 1), st.just(1), st.just(2), st.just({"x": [1, {"y": 2}]})),
    ),
    st.integers(0, (1 << 32) - 1),
)
@settings(max_examples=100, deadline=None)
def test_a_message_with_another_queue_number_is_otherwise_the_same(message, number):
    array = m.message_array(message)
    assert decode(renumber(encode(array), number)) == [array[0], number, *array[2:]]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.lists(st.sampled_from(["read", "timed", "download", "plain"]), max_size=4)),
        st.tuples(st.just("ack"), st.integers(0, 40)),
        st.tuples(st.just("read"), st.integers(0, 40), st.integers(0, 3)),
        st.tuples(st.just("answered"), st.integers(0, 40), st.integers(0, 3)),
        st.tuples(st.just("result"), st.integers(0, 40), st.one_of(st.floats(), st.none(), st.text(max_size=2))),
        st.tuples(
            st.just("chunk"), st.integers(0, 40), st.sampled_from([0, 1, 1 << 20]), st.sampled_from([1, 1 << 20])
        ),
        st.tuples(st.just("failed"), st.integers(0, 40)),
        st.tuples(
            st.just("restart"),
        ),
    ),
    max_size=40,
)


@given(ACTIONS)
@settings(max_examples=200, deadline=None)
def test_any_replies_are_taken_or_refused_and_reservations_come_out_even(actions):
    outstanding = Outstanding(Usage())
    number = reserved = held = 0
    for action in actions:
        try:
            match action:
                case ("send", kinds):
                    message = Sent(number + 1, number + 1 + len(kinds), 7, b"")
                    for kind in kinds:
                        number += 1
                        match kind:
                            case "read":
                                message.reads.append((number, number % 3))
                            case "timed":
                                message.timed.append(number)
                            case "download":
                                outstanding.downloads[number] = Transfer(number, number, (1 << 20) + 1)
                    number += 1
                    reserved += message.reserved
                    held += 7
                    outstanding.add(message)
                case ("ack", upto):
                    done, freed = outstanding.ack(upto)
                    held -= done
                    reserved -= freed
                case ("read", which, nbytes):
                    reserved -= outstanding.read(which, nbytes) + nbytes + ANSWER_NBYTES
                case ("answered", which, nbytes):
                    done = outstanding.answered(which, nbytes)
                    if done is not None:
                        held -= done
                        reserved -= nbytes + ANSWER_NBYTES
                case ("result", which, value):
                    reserved -= outstanding.result(which, value) + ANSWER_NBYTES
                case ("chunk", transfer, offset, nbytes):
                    outstanding.chunk(transfer, offset, nbytes)
                case ("failed", which):
                    outstanding.failed(which)
                case ("restart",):
                    reserved -= outstanding.restart(number)
                    held = 0
        except InvalidReply:
            reserved -= outstanding.restart(number)
            held = 0
        assert reserved >= 0
        assert held >= 0
        assert outstanding.acked <= outstanding.sent <= number
    reserved -= outstanding.restart(number)
    assert reserved == 0


async def test_a_download_may_be_asked_for_before_the_device_has_opened(server):
    async with server.client() as client:
        client.queues[1] = queue = Queue(client, 1)
        client.send(m.Open(1, "box/cpu/0", {}))
        queue.batch(c.Alloc(1, 3 << 20))
        assert await queue.download(1, 0, 3 << 20) == bytes(3 << 20)
        queue.reopen()
        queue.batch(c.Alloc(1, 3 << 20))
        assert await queue.download(1, 0, 3 << 20) == bytes(3 << 20)
