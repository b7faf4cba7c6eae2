"""What a device measures while a timeline is made, in each way to reach one, and that it is silent otherwise."""

import itertools
import time

import pytest
from device_rigs import ExecutorRig

from wsgrad.devices.ring import SLOT_BYTES
from wsgrad.devices.trace import DeviceTrace
from wsgrad.graph.items import Access, Copy, Device, Fill, Launch, Operand, Range
from wsgrad.graph.parse import device_arrays
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.transport import cbor
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.tracing import MAX_SPANS_NBYTES, RECORD, SpanKind

CPU = Device(0, 0)
NOTHING = "void entry(void) {}"
SPIN = "void entry(long n) { for (volatile long i = 0; i < n; i++); }"
SET = "void entry(int *y, int k) { y[0] = k; }"
TWO = "void entry(int *y, const int *x) { y[0] = x[0] + 1; }"
KINDS = ("kind", "zero", "program", "queue", "graph", "step", "unused", "number", "start", "end", "nbytes")


class Span:
    def __init__(self, values):
        vars(self).update(zip(KINDS, values, strict=True))
        self.kind = SpanKind(self.kind)


def begin(rig, trace=1):
    rig.send(m.Profile(rig.queue, trace, True))


def end(rig, trace=1):
    """All spans of a timeline; checks their messages."""
    rig.send(m.Profile(rig.queue, trace, False))
    rig.wait_for(m.Spans, lambda message: message.last)
    found = [(message, bulk) for message, bulk in rig.received if isinstance(message, m.Spans)]
    rig.received.clear()
    assert all((message.queue, message.trace) == (rig.queue, trace) for message, _ in found)
    assert all(len(bulk) <= MAX_SPANS_NBYTES for _, bulk in found)
    spans = [Span(values) for _, bulk in found for values in RECORD.iter_unpack(bytes(bulk))]
    assert all(span.zero == span.unused == span.queue == 0 for span in spans)
    assert all(span.start <= span.end for span in spans)
    return spans


def in_a_row(spans):
    return all(before.end <= after.start for before, after in itertools.pairwise(spans))


def kernels(spans):
    return [span for span in spans if span.kind is SpanKind.LAUNCH]


def test_each_launch_has_a_span_in_order_with_its_number_and_program(rig):
    rig.program(4, NOTHING, "")
    rig.program(7, SET, "pi", writes=[0])
    rig.run(c.Alloc(1, 64))
    start = time.monotonic_ns()
    begin(rig)
    first = rig.number + 1
    rig.launches([4, 0], [7, 0, 1, 5], [4, 3])
    rig.batch(c.Launch(7, None, None, [1, 9], True))
    rig.settle()
    spans = end(rig)
    assert [(span.number, span.program, span.graph, span.step) for span in kernels(spans)] == [
        (first, 4, 0, 0),
        (first + 1, 7, 0, 0),
        (first + 2, 4, 0, 0),
        (first + 3, 7, 0, 0),
    ]
    assert in_a_row(kernels(spans))
    assert start <= spans[0].start
    assert spans[-1].end <= time.monotonic_ns()


def test_a_span_lasts_as_long_as_its_kernel(rig):
    rig.program(1, SPIN, "q")
    rig.settle()
    begin(rig)
    seconds = []
    for n in (1 << 16, 1 << 24):
        rig.batch(c.Launch(1, None, None, [n], True))
        seconds.append(rig.wait_for(m.Result).value)
    rig.settle()
    short, long = kernels(end(rig))
    for span, measured in ((short, seconds[0]), (long, seconds[1])):
        assert (span.end - span.start) / 1e9 <= measured
    assert (long.end - long.start) / 1e9 >= seconds[1] / 2
    assert long.end - long.start > 5 * (short.end - short.start)


def test_copies_fills_and_small_reads_and_writes_say_how_many_bytes(rig):
    rig.run(c.Alloc(1, 4096), c.Alloc(2, 4096))
    begin(rig)
    first = rig.batch(c.Write(1, 0, b"x" * 100), c.Copy(2, 0, 1, 0, 50), c.Fill(1, 0, 4096, b"\1"), c.Free(2)) - 3
    rig.read(1, 30)
    spans = end(rig)
    assert [(span.kind.name, span.number, span.nbytes) for span in spans] == [
        ("WRITE", first, 100),
        ("COPY", first + 1, 50),
        ("FILL", first + 2, 4096),
        ("READ", first + 4, 30),
    ]
    assert in_a_row(spans)


def test_each_chunk_of_a_transfer_is_a_span(rig):
    nbytes = 2 * SLOT_BYTES + 17
    rig.run(c.Alloc(1, nbytes))
    begin(rig)
    up = rig.upload(1, bytes(nbytes))
    rig.settle()
    rig.download(1, nbytes)
    rig.settle()
    spans = end(rig)
    pieces = [SLOT_BYTES, SLOT_BYTES, 17]
    assert [span.nbytes for span in spans if span.kind is SpanKind.UPLOAD] == pieces
    assert [span.nbytes for span in spans if span.kind is SpanKind.DOWNLOAD] == pieces
    assert [span.number for span in spans] == [up] * 3 + [up + 1] * 3


def test_more_launches_than_fit_one_message_leave_none_out(rig):
    rig.program(1, NOTHING, "")
    rig.settle()
    begin(rig)
    first = rig.number + 1
    for _ in range(3):
        rig.launches(*[[1, 0]] * 1500)
    rig.settle()
    spans = kernels(end(rig))
    assert [span.number for span in spans] == list(range(first, first + 4500))
    assert in_a_row(spans)


def test_a_launch_that_needs_a_temporary_copy_is_one_span(rig):
    rig.program(1, TWO, "pp", writes=[0])
    rig.run(c.Alloc(1, 4))
    begin(rig)
    rig.launches([1, 0, 1, 1], [1, 0, 1, 1])
    rig.settle()
    assert [span.number for span in kernels(end(rig))] == [rig.number - 1, rig.number]
    assert rig.read_as("i", 1) == (2,)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_replay_holds_its_steps_by_their_place(toolbox, loop, prepared):
    rig = ExecutorRig(toolbox, loop)
    if not prepared:
        rig.runtime.prepare = lambda part: None
    rig.program(1, SET, "pi", writes=[0])
    rig.run(c.Alloc(1, 64))
    recording = Recording()
    y = recording.buffer(CPU, 64, memory="y")
    one, other = Range(y, 0, 4), Range(y, 4, 4)
    recording.add(Launch(CPU, 1, "pi", (Operand(one, Access.WRITE), 5)))
    recording.add(Copy(CPU, other, one))
    recording.add(Fill(CPU, one, b"\1\2\3\4"))
    recording.add(Launch(CPU, 1, "pi", (Operand(other, Access.WRITE), 6)))
    array = part_array(Plan(recording).parts[0])
    blob = cbor.encode([device_arrays(array)[0], [[y, 1]]])
    rig.send(m.Graph(rig.queue, 3, 0, len(blob)), blob)
    begin(rig)
    rig.number += 1
    rig.send(m.Replay(rig.queue, rig.number, 3, 0, [], []))
    rig.settle()
    rig.launches([1, 0, 1, 1])
    rig.settle()
    spans = end(rig)
    *steps, whole, after = spans
    assert [(span.kind.name, span.step) for span in steps] == [("LAUNCH", 1), ("COPY", 2), ("FILL", 3), ("LAUNCH", 4)]
    assert all((span.graph, span.number) == (3, rig.number - 1) for span in [*steps, whole])
    assert [span.nbytes for span in steps] == [0, 4, 4, 0]
    assert whole.kind is SpanKind.REPLAY
    assert whole.start <= steps[0].start
    assert steps[-1].end <= whole.end
    assert in_a_row([*steps, after])
    assert (after.graph, after.step, after.number) == (0, 0, rig.number)
    rig.close()


def test_nothing_is_said_before_and_after_a_timeline(rig):
    rig.program(1, NOTHING, "")
    rig.launches(*[[1, 0]] * 600)
    rig.settle()
    begin(rig, 5)
    assert [span.kind for span in end(rig, 5)] == []
    rig.launches(*[[1, 0]] * 600)
    rig.settle()
    assert not any(isinstance(message, m.Spans) for message, _ in rig.received)


def test_a_second_timeline_ends_the_first(rig):
    rig.run(c.Alloc(1, 64))
    begin(rig, 1)
    rig.run(c.Fill(1, 0, 64, b"\1"))
    begin(rig, 2)
    rig.wait_for(m.Spans, lambda message: message.last)
    spans = [(message.trace, len(bulk)) for message, bulk in rig.received if isinstance(message, m.Spans)]
    assert {trace for trace, _ in spans} == {1}
    assert sum(nbytes for _, nbytes in spans) == RECORD.size
    rig.received.clear()
    rig.run(c.Fill(1, 0, 64, b"\2"))
    assert [span.kind for span in end(rig, 2)] == [SpanKind.FILL]


def test_a_node_that_dialled_in_tells_its_clock(dialled_in):
    before = time.monotonic_ns()
    dialled_in.send(m.Clock(77))
    while not isinstance((message := dialled_in.next()[0]), m.Time):
        pass
    assert message.token == 77
    assert before <= message.nanoseconds <= time.monotonic_ns()


def test_what_is_measured_takes_no_more_memory_than_one_message():
    sent = []
    trace = DeviceTrace(1, 1, lambda message, bulk: sent.append(len(bulk)))
    for number in range(3000):
        trace.add(SpanKind.COPY, time.monotonic_ns(), number=number, nbytes=1)
    assert len(sent) == 2
    assert max(sent) <= MAX_SPANS_NBYTES
    trace.flush(last=True)
    assert sum(sent) == 3000 * RECORD.size
