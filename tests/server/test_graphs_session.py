"""Graphs of a session as a client of the raw protocol sees them: what it may send, and what becomes of it."""

import struct

import pytest
from heart import ADD, NOTHING, serving

from wsgrad.graph.items import Access, Device, Fill, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.server import graphs
from wsgrad.server.local import LocalPort
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode

ONE, TWO = Device(0, 0), Device(0, 1)


def filling(nbytes=8, value=7, count=1):
    """A graph that fills buffer 0."""
    recording = Recording()
    buffer = recording.buffer(ONE, nbytes, memory="x")
    for _ in range(count):
        recording.add(Fill(ONE, Range(buffer, 0, nbytes), bytes([value])))
    return part_array(Plan(recording).parts[0])


def record(client, graph, array, queues=((0, 1),), bindings=((0, 0),)):
    client.send(m.Record(graph, [list(p) for p in queues], [list(p) for p in bindings], []), encode(array))


def run(client, graph, *queues, bindings=(), values=()):
    numbers = []
    for queue in queues:
        numbers.append([queue.number, queue.next])
        queue.next += 1
    client.send(m.Run(graph, numbers, [list(row) for row in bindings], list(values), 0))
    return [number for _, number in numbers]


async def read(client, queue, buffer, nbytes):
    number = queue.batch(c.Read(buffer, 0, nbytes))
    _, data = await client.next(m.ReadData, where=lambda message: message.number == number)
    return data


async def test_a_graph_runs_in_the_order_of_its_queue_and_is_forgotten_behind_its_runs(cache):
    async with serving(cache) as server, server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(0, 8))
        record(client, 1, filling())
        queue.batch(c.Fill(0, 0, 8, b"\1"))
        run(client, 1, queue)
        client.send(m.Forget(1))
        queue.batch(c.Fill(0, 0, 4, b"\2"))
        assert await read(client, queue, 0, 8) == b"\2\2\2\2\7\7\7\7"
        run(client, 1, queue)
        assert (await client.wait_closed()).code == 1002


async def test_a_short_run_is_waited_for_and_a_long_one_only_now_and_then(cache, monkeypatch):
    waited = []
    expect_answer = LocalPort.expect_answer
    monkeypatch.setattr(LocalPort, "expect_answer", lambda port: (waited.append(port), expect_answer(port)))
    monkeypatch.setattr("wsgrad.server.local._EXPECT_SECONDS", 1.0)
    async with serving(cache) as server, server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(0, 8))
        record(client, 1, filling())
        await queue.done()
        for _ in range(3):
            run(client, 1, queue)
            await queue.done()
        assert len(waited) == 3
        monkeypatch.setattr(LocalPort, "expect_answer", lambda port: waited.append(port))  # and it has taken too long
        for _ in range(50):
            run(client, 1, queue)
            await queue.done()
        assert len(waited) == 5
        assert await read(client, queue, 0, 8) == b"\7" * 8


@pytest.mark.parametrize("count", [1, 2000])
async def test_large_parts_are_checked_aside_and_hold_only_their_own_runs(cache, count):
    async with serving(cache, devices=("cpu", "cpu")) as server, server.client() as client:
        queue, other = await client.open(), await client.open("box/cpu/1", 2)
        for each in (queue, other):
            each.batch(c.Alloc(0, 8))
        array = filling(count=count)
        assert (len(encode(array)) > graphs._QUICK_NBYTES) == (count > 1)
        record(client, 1, array)
        run(client, 1, queue)
        assert await read(client, other, 0, 8) == bytes(8)
        assert await read(client, queue, 0, 8) == b"\7" * 8


BAD = {
    "no array": 3,
    "an array of another shape": [1, 2],
    "a wait on what comes later": [0, [[0, [], [[0, 0, 8]], [[[1, [2, 0, b"1"], [2]]], [], []]]], [[0, 0, 8]], []],
    "a slot outside its buffer": [0, [[0, [], [[0, 4, 8]], [[[1, [2, 0, b"1"], []]], [], []]]], [[0, 0, 8]], []],
    "a device without a queue": [0, [[5, [], [[0, 0, 8]], [[[1, [2, 0, b"1"], []]], [], []]]], [[0, 5, 8]], []],
    "half a transfer": [0, [[0, [], [[0, 0, 8]], [[], [[1, [3, 0, 0, 1], []]], []]]], [[0, 0, 8]], []],
    "a transfer to another server": [0, [[0, [], [[0, 0, 8]], [[], [[1, [3, 0, 1, 0], []]], []]]], [[0, 0, 8]], []],
}


@pytest.mark.parametrize("what", BAD)
async def test_a_part_that_is_refused_fails_its_runs_and_nothing_else(cache, what):
    async with serving(cache) as server, server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(0, 8))
        record(client, 1, BAD[what])
        [number] = run(client, 1, queue)
        failed, _ = await client.next(m.Failed)
        assert failed.number == number
        assert failed.details["graph"] == 1
        queue.batch(c.Clear(number), c.Fill(0, 0, 8, b"\1"))
        assert await read(client, queue, 0, 8) == b"\1" * 8


async def test_what_a_run_names_is_checked_in_its_place(cache):
    async with serving(cache) as server, server.client() as client:
        queue = await client.open()
        recording = Recording()
        y, x = recording.buffer(ONE, 8, memory="y"), recording.buffer(ONE, 8, memory="x")
        both = Operand(Range(y, 0, 8)), Operand(Range(x, 0, 8), Access.READ)
        recording.add(Launch(ONE, 3, "ppfi", (*both, 0.5, Var("n", 1, 2))))
        array = part_array(Plan(recording).parts[0])
        record(client, 1, array, bindings=((y, 0), (x, 1)))
        expected = []

        async def fails(text, *commands, bindings=(), values=(2,)):
            if commands:
                queue.batch(*commands)
            [number] = run(client, 1, queue, bindings=bindings, values=values)
            failed, _ = await client.next(m.Failed, where=lambda message: message.number == number)
            assert text in failed.message
            queue.batch(c.Clear(number))
            expected.append(number)

        await fails("there is none")
        queue.program(3, ADD, "add", "ppfi", writes=[0])
        await fails("no buffer 0")
        await fails("no buffer 1", c.Alloc(0, 8))
        await fails("does not fit", c.Alloc(1, 4))
        await fails("n=3", c.Free(1), c.Alloc(1, 8), values=[3])
        await fails("was given 0 values", values=[])
        await fails("n='2'", values=["2"])
        await fails("does not fit", bindings=[(y, 0, 1)])
        await fails("no buffer 9", bindings=[(x, 9, 0)])
        run(client, 1, queue, values=[2])
        assert struct.unpack("<2f", await read(client, queue, 0, 8)) == (0.5, 0.5)
        await fails("no buffer 0", c.Free(0))
        await fails("there is none", c.Alloc(0, 8), c.Drop(3))
        queue.program(3, NOTHING, "nothing", "")
        await fails("there is none")


@pytest.mark.parametrize(
    "send",
    [
        lambda client, queue: client.send(m.Forget(9)),
        lambda client, queue: run(client, 9, queue),
        lambda client, queue: record(client, 1, filling()),
        lambda client, queue: record(client, 2, filling(), queues=[(0,)]),
        lambda client, queue: record(client, 2, filling(), bindings=[(0, "a")]),
        lambda client, queue: client.send(m.Run(1, [[1, -1]], [], [], 0)),
        lambda client, queue: client.send(m.Run(1, [[1, 1]], [[0, 0]], [], 0)),
        lambda client, queue: client.send(m.Run(1, [[1, 77]], [], [], 0)),
    ],
)
async def test_breaking_the_rules_of_graphs_ends_the_session(cache, send):
    async with serving(cache) as server, server.client() as client:
        queue = await client.open()
        record(client, 1, filling())
        await queue.done()
        send(client, queue)
        assert (await client.wait_closed()).code == 1002


async def test_more_graphs_than_a_session_may_have_fail_when_they_run(cache):
    async with serving(cache, max_graphs=2) as server, server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(0, 8))
        for graph in (1, 2, 3):
            record(client, graph, filling(value=graph))
        [number] = run(client, 3, queue)
        failed, _ = await client.next(m.Failed)
        assert (failed.number, failed.code) == (number, "LimitExceeded")
        assert "2 graphs; drop some, or raise it with --max-graphs" in failed.message
        queue.batch(c.Clear(number))
        client.send(m.Forget(3))
        client.send(m.Forget(1))
        record(client, 4, filling(value=4))
        run(client, 4, queue)
        assert await read(client, queue, 0, 8) == b"\4" * 8


def passing(nbytes):
    """A graph that sends buffer 0 of one device to buffer 1 of another, in two pieces."""
    recording = Recording()
    x, y = recording.buffer(ONE, nbytes, memory="x"), recording.buffer(TWO, nbytes, memory="y")
    half = nbytes // 2
    recording.add(Transfer(Range(y, 0, half), Range(x, half, half)))
    recording.add(Fill(ONE, Range(x, half, half), b"\1"))
    recording.add(Transfer(Range(y, half, half), Range(x, half, half)))
    return part_array(Plan(recording).parts[0])


@pytest.mark.parametrize("nbytes", [16, 5 << 20])
async def test_many_runs_with_transfers_wait_for_each_other_where_there_are_too_many(cache, monkeypatch, nbytes):
    monkeypatch.setattr(graphs, "MAX_RUN_FLOWS", 3)
    async with serving(cache, devices=("cpu", "cpu")) as server, server.client() as client:
        one, two = await client.open(), await client.open("box/cpu/1", 2)
        for queue in (one, two):
            queue.batch(c.Alloc(0, nbytes))
        record(client, 1, passing(nbytes), queues=((0, 1), (1, 2)), bindings=((0, 0), (1, 0)))
        for turn in range(20):
            one.batch(c.Fill(0, nbytes // 2, nbytes // 2, bytes([turn])))
            run(client, 1, one, two)
        assert await read(client, two, 0, 8) == bytes([19]) * 8
        number = two.batch(c.Read(0, nbytes - 8, 8))
        _, data = await client.next(m.ReadData, where=lambda message: message.number == number)
        assert data == b"\1" * 8


@pytest.mark.parametrize("closed", [1, 2])
async def test_closing_a_queue_of_a_run_fails_the_other_end_and_nothing_hangs(cache, closed):
    nbytes = 9 << 20
    async with serving(cache, devices=("cpu", "cpu")) as server, server.client() as client:
        queues = {1: await client.open(), 2: await client.open("box/cpu/1", 2)}
        for queue in queues.values():
            queue.batch(c.Alloc(0, nbytes))
        record(client, 1, passing(nbytes), queues=((0, 1), (1, 2)), bindings=((0, 0), (1, 0)))
        left = queues[3 - closed]
        for _ in range(3):
            run(client, 1, *queues.values())
        client.send(m.Close(closed))
        await left.done()
        # A run that names a queue which is no more, as one may that was on its way.
        [number] = run(client, 1, left)
        if closed == 1:
            failed, _ = await client.next(m.Failed, where=lambda message: message.queue == 2)
            assert failed.code == "DeviceError"
            assert "closed" in failed.message
        await left.done()
        left.batch(c.Clear(number), c.Clear(failed.number if closed == 1 else 0), c.Fill(0, 0, 8, b"\5"))
        assert await read(client, left, 0, 8) == b"\5" * 8
