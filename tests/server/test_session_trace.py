"""A session's timeline as the server makes it: real nodes, bounded memory, and nothing believed of a node that lies."""

import itertools
import struct
import time
from contextlib import asynccontextmanager

import pytest
import trio
from heart import ADD, NOTHING, SPIN, Queue, as_word, eventually, serving
from raw_node import raw_node

from wsgrad.server.trace import SessionTrace
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.tracing import MAX_SPANS_NBYTES, RECORD, SpanKind

KINDS = ("kind", "zero", "name", "queue", "graph", "step", "unused", "number", "start", "end", "nbytes")


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=("cpu", "cpu"), launch_seconds=3.0) as server:
        yield server


class Span:
    def __init__(self, values, names):
        vars(self).update(zip(KINDS, values, strict=True))
        self.kind = SpanKind(self.kind)
        self.name = names.get(self.name)


async def ended(client, trace=1):
    """End a timeline; all its spans and the last message."""
    client.send(m.Trace(trace, False))
    return await gathered(client, trace)


async def gathered(client, trace=1):
    found, names = [], {}
    while True:
        message, bulk = await client.next(m.Traced, where=lambda message: message.trace == trace)
        assert len(bulk) <= MAX_SPANS_NBYTES
        names.update(dict(message.names))
        found += RECORD.iter_unpack(bulk)
        if message.last:
            return [Span(values, names) for values in found], message


def of(spans, *kinds):
    return [span for span in spans if span.kind in kinds]


async def test_launches_waits_and_frames_have_names_and_lie_within_each_other(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(3, ADD, "add", "ppfi", writes=[0], name="plus")
        queue.batch(c.Alloc(1, 400), c.Alloc(2, 400))
        await queue.done()
        start = time.monotonic_ns()
        client.send(m.Trace(1, True))
        last = queue.launches([3, 0, 2, 1, as_word(1.0), 100] * 10, 10)
        await queue.done()
        spans, message = await ended(client)
        assert message.dropped == 0
        kernels = of(spans, SpanKind.LAUNCH)
        assert [(span.name, span.queue, span.number) for span in kernels] == [
            ("plus", 1, number) for number in range(last - 9, last + 1)
        ]
        [queued], [running] = of(spans, SpanKind.QUEUED), of(spans, SpanKind.RUNNING)
        assert (queued.name, queued.step, queued.number, queued.queue) == ("Launches", 10, last, 1)
        assert start <= queued.start <= queued.end <= running.start
        assert queued.end <= kernels[0].start
        assert all(before.end <= after.start for before, after in itertools.pairwise(kernels))
        assert kernels[-1].end <= running.end <= time.monotonic_ns()
        [received] = [span for span in of(spans, SpanKind.RECEIVED) if span.name == "Launches"]
        assert received.start <= queued.start <= received.end
        assert received.nbytes > 240
        assert "Ack" in {span.name for span in of(spans, SpanKind.SENT)}
        assert "Traced" not in {span.name for span in spans}


async def test_a_queue_opened_inside_is_measured_from_its_first_command(server):
    async with server.client() as client:
        client.send(m.Trace(1, True))
        queue = await client.open("box/cpu/1", 9)
        number = queue.program(1, NOTHING, "nothing", "")
        queue.launches([1, 0], 1)
        await queue.done()
        spans, _ = await ended(client)
        [compiled] = of(spans, SpanKind.COMPILING)
        assert (compiled.name, compiled.queue, compiled.number) == ("nothing", 9, number)
        [kernel] = of(spans, SpanKind.LAUNCH)
        assert (kernel.name, kernel.queue) == ("nothing", 9)
        assert compiled.end <= kernel.start


async def test_a_compile_that_began_before_is_shown_from_the_beginning_of_the_timeline(server):
    async with server.client() as client:
        queue = await client.open()
        start = time.monotonic_ns()
        queue.program(1, f"void entry(void) {{}} // {time.time_ns()}", "entry", "")
        client.send(m.Trace(1, True))
        await client.next(m.Compiled)
        spans, _ = await ended(client)
        [compiled] = of(spans, SpanKind.COMPILING)
        assert start < compiled.start <= min(span.start for span in spans)
        assert compiled.start < compiled.end


async def test_an_id_that_another_program_has_now_is_called_by_the_name_it_had(server):
    async with server.client() as client:
        queue = await client.open()
        client.send(m.Trace(1, True))
        for name in ("first", "second"):
            queue.program(1, NOTHING, "nothing", "", name=name)
            queue.launches([1, 0], 1)
            queue.batch(c.Drop(1))
        await queue.done()
        spans, _ = await ended(client)
        assert [span.name for span in of(spans, SpanKind.LAUNCH)] == ["first", "second"]


async def test_two_devices_are_seen_to_run_at_once(server):
    source = "void wait(int *p) { for (volatile int i = 0; i < 60000000; i++) ; }"
    async with server.client() as client:
        queues = [await client.open(f"box/cpu/{index}", index + 1) for index in range(2)]
        for queue in queues:
            queue.program(1, source, "wait", "p")
            queue.batch(c.Alloc(1, 4))
            await queue.done()
        client.send(m.Trace(1, True))
        for queue in queues:
            queue.launches([1, 0, 1], 1)
        for queue in queues:
            await queue.done()
        one, two = sorted(of((await ended(client))[0], SpanKind.LAUNCH), key=lambda span: span.start)
        assert {one.queue, two.queue} == {1, 2}
        assert two.start < one.end


async def test_without_a_timeline_no_message_is_about_one(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, NOTHING, "nothing", "")
        client.send(m.Trace(1, True))
        await ended(client)
        queue.launches([1, 0] * 1000, 1000)
        await queue.done()
        client.send(m.Clock(4))
        answer, _ = await client.next(m.Time)
        assert answer.token == 4
        assert not any(isinstance(message, m.Traced) for message, _ in client._kept)
        session = server.session(client)
        assert session.trace is None
        assert session._link.observer is None
        assert all(queue.trace is None and not queue._port.traces for queue in session._queues.values())


async def test_a_timeline_ends_although_a_program_runs(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, SPIN, "spin", "p")
        queue.batch(c.Alloc(1, 4))
        await client.next(m.Compiled)
        client.send(m.Trace(1, True))
        queue.launches([1, 0, 1], 1)
        spans, message = await ended(client)
        assert message.last
        assert of(spans, SpanKind.QUEUED)
        failed = await queue.failure()
        assert failed.code == "Timeout"


async def test_a_timeline_goes_on_over_a_new_connection_and_a_new_process(server):
    async with server.client() as client:
        queue = await client.open()
        client.send(m.Trace(1, True))
        queue.program(1, NOTHING, "nothing", "")
        await queue.done()
        key, link = client.welcome.key, client.link
    async with server.client(key=key, link=link, queues=(queue,)) as again:
        queue.reopen()
        queue.program(2, NOTHING, "nothing", "", name="anew")
        queue.launches([2, 0], 1)
        await queue.done()
        spans, _ = await ended(again)
        assert "anew" in {span.name for span in of(spans, SpanKind.LAUNCH)}


async def test_a_second_timeline_takes_the_place_of_the_first(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, NOTHING, "nothing", "")
        client.send(m.Trace(1, True))
        client.send(m.Trace(2, True))
        queue.launches([1, 0], 1)
        await queue.done()
        spans, _ = await ended(client, 2)
        assert [span.name for span in of(spans, SpanKind.LAUNCH)] == ["nothing"]
        await client.next(m.Traced, where=lambda message: message.trace == 1 and message.last)


async def test_a_client_that_does_not_look_costs_bounded_memory_and_learns_what_it_missed(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, NOTHING, "nothing", "")
        await queue.done()
        client.sees = False
        client.send(m.Trace(1, True))
        count, rounds = 4000, 80
        for _ in range(rounds):
            queue.launches([1, 0] * count, count)
            await queue.done()
        session = server.session(client)
        assert session.trace._ring_nbytes <= 4 << 20
        assert session._link.unseen_bytes < 3 << 20
        client.sees = True
        client.connection.send(encode(m.message_array(m.Seen(client.link.received))))
        spans, message = await ended(client)
        kernels = len(of(spans, SpanKind.LAUNCH))
        assert message.dropped > 0
        assert kernels < count * rounds <= kernels + message.dropped


# -- nodes that can't be believed


@asynccontextmanager
async def asked(server):
    """A node that dialled in, with a queue whose timeline it was asked for, and five commands that were sent."""
    async with raw_node(server) as node, server.client() as client:
        queue = client.queues[1] = Queue(client, 1)
        client.send(m.Open(1, "raw/cpu/0", {}))
        attach, _ = await node.next(m.Attach)
        node.send(m.Result(attach.queue, 0, {}))
        await client.next(m.Result)
        queue.program(4, "source", "entry", "", name="mine")
        queue.launches([4, 0] * 4, 4)
        client.send(m.Trace(1, True))
        profile, _ = await node.next(m.Profile)
        assert (profile.queue, profile.trace, profile.on) == (attach.queue, 1, True)
        yield node, client, attach.queue


def record(kind=1, zero=0, name=4, queue=0, graph=0, step=0, unused=0, number=3, start=0, end=0, nbytes=0):
    return RECORD.pack(kind, zero, name, queue, graph, step, unused, number, start, end, nbytes)


@pytest.mark.parametrize(
    "bulk",
    [
        record()[:-1],
        record() * 2000,
        record(kind=0),
        record(kind=SpanKind.QUEUED),
        record(kind=SpanKind.CALL),
        record(zero=1),
        record(unused=1),
        record(queue=1),
        record(number=6),
        record(number=2**64 - 1),
        record(start=2, end=1),
        record(start=-(2**63), end=2**63 - 1),
        record(nbytes=2**53),
    ],
    ids=[
        "no records",
        "too many",
        "no kind",
        "server's kind",
        "client's kind",
        "zero",
        "unused",
        "queue",
        "not sent",
        "number too large",
        "ends before",
        "too long ago",
        "too many bytes",
    ],
)
async def test_spans_that_no_honest_node_sends_cost_the_node_its_connection(server, bulk):
    async with asked(server) as (node, client, queue):
        node.send(m.Spans(queue, 1, False), bulk)
        failed, _ = await client.next(m.Failed)
        assert failed.code == "DeviceLost"
        await eventually(lambda: node.closed is not None)
        spans, _ = await ended(client)
        assert not of(spans, SpanKind.LAUNCH)


async def test_spans_that_nobody_asked_for_are_refused(server):
    async with asked(server) as (node, client, queue):
        node.send(m.Spans(queue, 1, True), b"")
        node.send(m.Spans(queue, 1, False), record())
        await client.next(m.Failed)
        await eventually(lambda: node.closed is not None)


async def test_times_that_can_not_be_are_left_out_and_names_are_the_servers(server):
    hour = 3_600_000_000_000
    async with asked(server) as (node, client, queue):
        # Its clock is an hour ahead.
        while not isinstance(clock := (await node.next(m.Clock))[0], m.Clock) or clock.token < 5:
            node.send(m.Time(clock.token, time.monotonic_ns() + hour))
        node.send(m.Time(clock.token, time.monotonic_ns() + hour))
        await trio.testing.wait_all_tasks_blocked(0.01)
        now = time.monotonic_ns()
        good = record(start=now + hour, end=now + hour + 1000)
        unknown = record(name=77, start=now + hour, end=now + hour)
        early = record(start=now, end=now)
        late = record(start=now + 2 * hour, end=now + 2 * hour)
        node.send(m.Spans(queue, 1, False), good + unknown + early + late)
        client.send(m.Trace(1, False))
        profile, _ = await node.next(m.Profile)
        assert not profile.on
        node.send(m.Spans(queue, 1, True), b"")
        spans, message = await gathered(client)
        assert [span.name for span in of(spans, SpanKind.LAUNCH)] == ["mine", None]
        assert message.dropped == 2
        [first, _] = of(spans, SpanKind.LAUNCH)
        assert abs(first.start - now) < 50_000_000
        assert first.end - first.start == 1000


async def test_a_node_whose_clock_is_unknown_adds_nothing(server):
    async with asked(server) as (node, client, queue):
        now = time.monotonic_ns()
        node.send(m.Spans(queue, 1, False), record(start=now, end=now) * 3)
        client.send(m.Trace(1, False))
        node.send(m.Spans(queue, 1, True), b"")
        spans, message = await gathered(client)
        assert not of(spans, SpanKind.LAUNCH)
        assert message.dropped == 3


def test_the_ring_drops_the_oldest_and_counts():
    sent = []
    trace = SessionTrace(1, lambda head, bulk, seen: sent.append((head, bytes(bulk), seen)))
    for number in range(300_000):
        trace.add(SpanKind.COPY, "copy", 0, time.monotonic_ns(), number=number)
    assert trace._ring_nbytes <= 4 << 20
    trace._pump()
    assert sum(len(bulk) for _, bulk, _ in sent) <= (1 << 20) + MAX_SPANS_NBYTES
    first = struct.unpack_from("<Q", sent[0][1], 24)[0]
    assert first == trace._dropped > 0
