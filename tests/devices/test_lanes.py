"""Replays whose transfers go on while their launches run: in another thread of this process, and in real nodes."""

from __future__ import annotations

import pytest
from device_rigs import BesideRig
from test_replay import CPU, OTHER, failures, replay, send_graph, whole

from wsgrad.devices import replay as replays
from wsgrad.devices.ring import SLOT_BYTES
from wsgrad.graph.items import Launch, Range, Transfer
from wsgrad.graph.recording import Recording
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.tracing import RECORD, SpanKind

WHERE = "void entry(long *at, void *y) { *at = (long)y; }"
UNTIL = "void entry(int *x, long flag) { while (!*(volatile int *)flag) { } x[0] = 7; }"
SPIN = "void entry(int *x, long n) { for (volatile long i = 0; i < n; i++) { } x[0] = 7; }"
CLASH = "void entry(int *x, int *y) { }"
X, Y, Z = 1, 2, 3


@pytest.fixture(params=["beside", "process"])
def rig(request, toolbox):
    if request.param == "beside":
        rig = BesideRig(toolbox, request.getfixturevalue("loop"))
    else:
        rig = request.getfixturevalue("zygote").open_node(toolbox)
    yield rig
    rig.close()


def recorded(source, *, nbytes=4, argument=0, first="launch"):
    """A kernel on x, and what has nothing to do with it: z is sent, y is received."""
    recording = Recording()
    x, y = recording.buffer(CPU, 4, memory="x"), recording.buffer(CPU, 4, memory="y")
    z, other = recording.buffer(CPU, nbytes, memory="z"), recording.buffer(OTHER, nbytes, memory="other")
    arguments = (whole(x, 4), whole(x, 4)) if source is CLASH else (whole(x, 4), argument)
    launch = Launch(CPU, 1, "pp" if source is CLASH else "pq", arguments, alias=source is CLASH)
    if first == "launch":
        recording.add(launch)
    recording.add(Transfer(Range(other, 0, nbytes), Range(z, 0, nbytes)))
    if source is not CLASH:
        recording.add(Transfer(Range(y, 0, 4), Range(other, 0, 4)))
    if first != "launch":
        recording.add(launch)
    return recording, {x: X, y: Y, z: Z} if source is not CLASH else {x: X, z: Z}


def prepare(rig, source, *, nbytes=4, argument=None, first="launch"):
    """Buffers, program and graph 1; the kernel takes y's address where it gets no other argument."""
    rig.program(1, source, "pp" if source is CLASH else "pq", writes=[0, 1] if source is CLASH else [0], name="kernel")
    rig.program(2, WHERE, "pp", writes=[0])
    rig.run(c.Alloc(X, 4), c.Alloc(Y, 4), c.Alloc(Z, nbytes), c.Fill(Z, 0, nbytes, b"z"), c.Alloc(4, 8))
    rig.launches([2, 0, 4, Y])
    (where,) = rig.read_as("q", 4)
    recording, buffers = recorded(source, nbytes=nbytes, argument=where if argument is None else argument, first=first)
    send_graph(rig, 1, recording, buffers)


@pytest.mark.parametrize("first", ["launch", "transfers"])
def test_what_is_sent_and_received_goes_on_while_a_kernel_runs(rig, first):
    prepare(rig, UNTIL, first=first)
    number = replay(rig, 1, transfer=100)
    assert rig.receive_chunk() == (100, 0, b"zzzz")
    rig.send(m.Credit(rig.queue, 1))
    # What comes for later waits for the replay, whatever becomes of its transfers.
    read = rig.batch(c.Read(X, 0, 4))
    assert not any(isinstance(a, m.Ack | m.ReadData) and number <= a.number for a, _ in rig.received)
    if hasattr(rig, "ring"):
        assert rig.ring.progress() == (number, True)
        assert rig.ring.step() == (1 if first == "launch" else 3)
    rig.send_chunk(101, 0, b"\1\0\0\0")  # which ends the kernel
    message, bulk = rig.wait_for(m.ReadData)
    assert (message.number, bytes(bulk)) == (read, b"\7\0\0\0")
    assert rig.read(Y, 4) == b"\1\0\0\0"


def test_a_failure_elsewhere_is_told_only_when_the_kernel_is_over(rig):
    prepare(rig, SPIN, argument=50_000_000)
    number = replay(rig, 1, transfer=100)
    assert rig.receive_chunk()[0] == 100
    rig.send(m.Credit(rig.queue, 1))
    rig.send(m.Fail(rig.queue, number, "OutOfMemory", "the sender had no memory", {"cause": "sender"}))
    message = rig.wait_for(m.Failed)
    assert (message.number, message.code, message.details["cause"]) == (number, "OutOfMemory", "sender")
    rig.run(c.Clear(number))
    assert rig.read_as("i", X) == (7,)


def test_a_launch_that_fails_ends_the_send_beside_it(rig):
    nbytes = 6 * SLOT_BYTES
    prepare(rig, CLASH, nbytes=nbytes, first="transfers")
    number = replay(rig, 1, transfer=100)
    for at in range(4):
        assert rig.receive_chunk()[:2] == (100, at * SLOT_BYTES)
    [failed] = failures(rig.settle())
    assert (failed.number, failed.details["program"], failed.details["step"]) == (number, "kernel", 3)
    rig.send(m.Credit(rig.queue, 4))
    rig.run(c.Clear(number))
    assert rig.silent()
    assert rig.download(Z, 4) == b"zzzz"


def test_nothing_is_sent_behind_a_launch_that_failed(rig):
    rig.program(1, CLASH, "pp", writes=[0, 1], name="kernel")
    rig.run(c.Alloc(X, 4))
    recording = Recording()
    x, other = recording.buffer(CPU, 4, memory="x"), recording.buffer(OTHER, 4, memory="other")
    recording.add(Launch(CPU, 1, "pp", (whole(x, 4), whole(x, 4)), alias=True))
    recording.add(Transfer(Range(other, 0, 4), Range(x, 0, 4)))
    send_graph(rig, 1, recording, {x: X})
    for _ in range(3):  # in the other thread, then at once
        number = replay(rig, 1, transfer=100)
        [failed] = failures(rig.settle())
        assert failed.number == number
        rig.run(c.Clear(number))
        assert not any(isinstance(message, m.Slot | m.Chunk) for message, _ in rig.received)


def test_a_timeline_shows_copies_before_the_end_of_a_kernel_beside_them(rig):
    prepare(rig, UNTIL)
    rig.send(m.Profile(rig.queue, 9, True))
    number = replay(rig, 1, transfer=100)
    assert rig.receive_chunk()[0] == 100
    rig.send(m.Credit(rig.queue, 1))
    rig.send(m.Profile(rig.queue, 9, False))  # which has to wait until the kernel is over
    rig.send_chunk(101, 0, b"\1\0\0\0")
    rig.settle()
    while not any(isinstance(message, m.Spans) and message.last for message, _ in rig.received):
        rig.wait_for(m.Spans)
    found = [bulk for message, bulk in rig.received if isinstance(message, m.Spans)]
    spans = {}
    for bulk in found:
        for kind, _, _, _, graph, step, _, command, start, end, _ in RECORD.iter_unpack(bytes(bulk)):
            assert (graph, command) == (1, number)
            spans[SpanKind(kind)] = step, start, end
    step, _, end = spans[SpanKind.LAUNCH]
    assert step == 1
    for kind, position in ((SpanKind.DOWNLOAD, 2), (SpanKind.UPLOAD, 3)):
        assert spans[kind][0] == position
        assert spans[kind][1] < end  # the upload is what ends the kernel


def test_launches_that_were_brief_are_run_at_once(toolbox, loop, monkeypatch):
    rig = BesideRig(toolbox, loop)
    given = []
    give = rig.worker.give
    monkeypatch.setattr(rig.worker, "give", lambda work: (given.append(work), give(work)))
    prepare(rig, SPIN, argument=1)
    for brief, count in ((10**12, 1), (-1, 1), (10**12, 2), (10**12, 2)):
        monkeypatch.setattr(replays, "_BRIEF_NANOSECONDS", brief)
        replay(rig, 1, transfer=100)
        rig.send_chunk(101, 0, b"\1\0\0\0")
        assert rig.receive_chunk()[0] == 100
        rig.send(m.Credit(rig.queue, 1))
        assert not failures(rig.settle())
        assert len(given) == count
    rig.close()
