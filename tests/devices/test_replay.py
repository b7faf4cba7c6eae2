"""Replays of graphs on a queue: its executor called directly, with and without prepared launches, and in real nodes."""

from __future__ import annotations

import os
import signal
import struct

import numpy as np
import pytest
from device_rigs import BesideRig, ExecutorRig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsgrad.devices.ring import SLOT_BYTES
from wsgrad.graph.items import INDEX, Access, Copy, Device, Fill, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.parse import device_arrays
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.transport import cbor
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

CPU, OTHER = Device(0, 0), Device(0, 1)
ADD = "void entry(int *y, const int *x, int n, int k) { for (int i = 0; i < n; i++) y[i] = y[i] * 3 + x[i] + k; }"
INDEXED = "void entry(long i, int *y, double d, long q, float f) { y[i] += (int)d + (int)q + (int)f; }"
CRASH = "void entry(int *y) { *(volatile int *)0 = y[0]; }"
PIECE = 1000


@pytest.fixture(params=["prepared", "beside", "one by one", "process", "dialled in"])
def rig(request, toolbox):
    if request.param == "beside":
        rig = BesideRig(toolbox, request.getfixturevalue("loop"))
    elif request.param in ("prepared", "one by one"):
        rig = ExecutorRig(toolbox, request.getfixturevalue("loop"))
        if request.param == "one by one":
            rig.runtime.prepare = lambda part: None
    elif request.param == "process":
        rig = request.getfixturevalue("zygote").open_node(toolbox)
    else:
        rig = request.getfixturevalue("dialled_in").open_queue()
    yield rig
    rig.close()


def send_graph(rig, graph, recording, bindings, *, index=0, piece=PIECE):
    """Give a node its part of a recording, in small pieces."""
    array = part_array(Plan(recording).parts[0])
    blob = cbor.encode([device_arrays(array)[index], [list(pair) for pair in bindings.items()]])
    for at in range(0, len(blob), piece):
        rig.send(m.Graph(rig.queue, graph, at, len(blob)), blob[at : at + piece])


def replay(rig, graph, bindings=(), values=(), transfer=0):
    rig.number += 1
    rig.send(m.Replay(rig.queue, rig.number, graph, transfer, [list(row) for row in bindings], list(values)))
    return rig.number


def failures(messages):
    return [message for message in messages if isinstance(message, m.Failed)]


def whole(buffer, nbytes, access=Access.BOTH):
    return Operand(Range(buffer, 0, nbytes), access)


def test_a_replay_launches_copies_and_fills_with_its_own_values_and_buffers(rig):
    rig.program(1, ADD, "ppii", writes=[0])
    rig.program(2, INDEXED, "xpdqf")
    rig.run(c.Alloc(1, 16), c.Alloc(2, 16), c.Alloc(3, 64), c.Write(2, 0, struct.pack("<4i", 1, 2, 3, 4)))
    recording = Recording()
    y, x = recording.buffer(CPU, 16, memory="y"), recording.buffer(CPU, 16, memory="x")
    n, k = Var("n", 1, 4), Var("k", -100, 100)
    recording.add(Fill(CPU, Range(y, 0, 8), struct.pack("<i", 5)))
    recording.add(Launch(CPU, 1, "ppii", (whole(y, 16), whole(x, 16, Access.READ), n, k * 2)))
    recording.add(Copy(CPU, Range(y, 8, 8), Range(y, 0, 8)))
    recording.add(Launch(CPU, 2, "xpdqf", (INDEX, whole(y, 16), k, 1 << 33, 2.5), grid=(n,)))
    send_graph(rig, 9, recording, {y: 1, x: 2})
    replay(rig, 9, values=[4, 10])
    first = 5 * 3 + 1 + 20
    assert not failures(rig.settle())
    assert rig.read_as("4i", 1) == (first + 12, first + 1 + 12, first + 12, first + 1 + 12)
    # Others in place of y: the middle of a larger buffer, at an offset.
    replay(rig, 9, bindings=[(y, 3, 16)], values=[1, -1])
    replay(rig, 9, bindings=[(y, 3, 16)], values=[2, -1])
    assert not failures(rig.settle())
    once = 5 * 3 + 1 - 2
    assert rig.read_as("16i", 3)[4:8] == (once - 1 + 2, 5 * 3 + 2 - 2 + 2 - 1, once, 5 * 3 + 2 - 2)
    assert rig.read_as("16i", 3)[:4] == rig.read_as("16i", 3)[8:12] == (0, 0, 0, 0)


def test_a_replay_with_values_or_buffers_that_do_not_fit_fails_without_running(rig):
    rig.run(c.Alloc(1, 16), c.Alloc(2, 8))
    recording = Recording()
    y = recording.buffer(CPU, 16, memory="y")
    recording.add(Fill(CPU, Range(y, 0, 16), b"\x01"))
    send_graph(rig, 3, recording, {y: 1})
    for bindings, values, text in (
        ([(y, 2, 0)], [], "outside buffer 2"),
        ([(y, 1, 4)], [], "outside buffer 1"),
        ([(y, 7, 0)], [], "no buffer 7"),
        ([], [1], "0 variables was given 1"),
    ):
        number = replay(rig, 3, bindings, values)
        [failed] = failures(rig.settle())
        assert failed.number == number
        assert text in failed.message
        assert failed.details["graph"] == 3
        rig.run(c.Clear(number))
    assert rig.read(1, 16) == bytes(16)
    replay(rig, 3)
    assert rig.read(1, 16) == b"\x01" * 16


def test_a_freed_buffer_is_missed_by_the_next_replay_even_if_its_memory_is_there_again(rig):
    rig.run(c.Alloc(1, 16))
    recording = Recording()
    y = recording.buffer(CPU, 16, memory="y")
    recording.add(Fill(CPU, Range(y, 0, 16), b"\x01"))
    send_graph(rig, 3, recording, {y: 1})
    replay(rig, 3)
    rig.run(c.Free(1))
    number = replay(rig, 3)
    [failed] = failures(rig.settle())
    assert "no buffer 1" in failed.message
    rig.run(c.Clear(number), c.Alloc(5, 16), c.Alloc(1, 16))
    replay(rig, 3)
    assert rig.read(1, 16) == b"\x01" * 16
    assert rig.read(5, 16) == bytes(16)


def test_a_step_that_fails_is_named_and_what_follows_is_dropped(rig):
    rig.program(1, ADD, "ppii", writes=[0, 1], name="clash")
    rig.program(2, ADD, "ppii", writes=[0], name="fine")
    rig.run(c.Alloc(1, 16), c.Alloc(2, 16))
    recording = Recording()
    y, x = recording.buffer(CPU, 16, memory="y"), recording.buffer(CPU, 16, memory="x")
    for program in (2, 2, 1, 2):
        recording.add(Launch(CPU, program, "ppii", (whole(y, 16), whole(x, 16), 4, 1)))
    send_graph(rig, 4, recording, {y: 1, x: 2})
    number = replay(rig, 4, bindings=[(x, 1, 0)])
    messages = rig.settle()
    [failed] = failures(messages)
    assert (failed.number, failed.code) == (number, "LaunchError")
    assert failed.details | {"operation": "launch", "program": "clash", "graph": 4, "step": 3} == failed.details
    # Two launches of which one only reads: through temporaries, as always.
    assert rig.number == number
    rig.run(c.Clear(number))
    y = 0
    for _ in range(2):
        y = y * 3 + y + 1
    assert rig.read_as("4i", 1) == (y,) * 4
    rig.send(m.Unrecord(rig.queue, 4))
    assert not failures(rig.run(c.Fill(1, 0, 16, b"\0")))


def chain(kinds):
    """What a device sends and receives between launches, with 2.5 chunks each."""
    nbytes = SLOT_BYTES * 2 + SLOT_BYTES // 2
    recording = Recording()
    x, y = recording.buffer(CPU, nbytes, memory="x"), recording.buffer(OTHER, nbytes, memory="y")
    count = nbytes // 4
    for kind in kinds:
        if kind == "launch":
            recording.add(Launch(CPU, 1, "ppii", (whole(x, nbytes), whole(x, nbytes), count, 1), alias=True))
        elif kind == "send":
            recording.add(Transfer(Range(y, 0, nbytes), Range(x, 0, nbytes)))
        else:
            recording.add(Transfer(Range(x, 0, nbytes), Range(y, 0, nbytes)))
    return recording, x, nbytes


def chunks_of(data):
    return [(at, data[at : at + SLOT_BYTES]) for at in range(0, len(data), SLOT_BYTES)]


def test_transfers_stop_a_replay_for_credit_and_for_bytes_and_chunks_may_come_early(rig):
    rig.program(1, ADD, "ppii", writes=[0, 1], alias=True)
    recording, x, nbytes = chain(["receive", "launch", "send", "receive", "launch", "send"])
    rig.run(c.Alloc(1, nbytes))
    send_graph(rig, 2, recording, {x: 1})
    number = replay(rig, 2, transfer=100)
    second = replay(rig, 2, transfer=200)
    rng = np.random.default_rng(0)
    for first, done in ((100, number - 1), (200, number)):
        for place in (0, 2):
            data = rng.integers(-1000, 1000, nbytes // 4, dtype=np.int32)
            for at, piece in chunks_of(data.tobytes()):
                while not rig.upload_credit:
                    rig.wait_for(m.Credit)
                rig.send_chunk(first + place, at, piece)
            received = b""
            while len(received) < nbytes:
                transfer, at, piece = rig.receive_chunk()
                assert (transfer, at) == (first + place + 1, len(received))
                received += piece
                if len(received) < nbytes:
                    assert all(not isinstance(a, m.Ack) or a.number <= done for a, _ in rig.received)
                rig.send(m.Credit(rig.queue, 1))
            assert (np.frombuffer(received, np.int32) == data * 4 + 1).all()
    rig.wait_for(m.Ack, lambda message: message.number >= second)
    while rig.upload_credit < m.SLOTS:
        rig.wait_for(m.Credit)
    assert rig.silent()


def test_chunks_of_a_replay_that_fails_or_is_dropped_give_their_credit_back(rig):
    rig.program(1, ADD, "ppii", writes=[0, 1], name="clash")
    recording, x, nbytes = chain(["launch", "receive"])
    rig.run(c.Alloc(1, nbytes))
    send_graph(rig, 2, recording, {x: 1})
    # The replays wait behind a download that has no credit left, so their chunks come before them.
    rig.run(c.Alloc(2, 5 * SLOT_BYTES))
    rig.batch(c.Download(7, 2, 0, 5 * SLOT_BYTES))
    first = replay(rig, 2, transfer=10)
    replay(rig, 2, transfer=11)
    rig.send_chunk(10, 0, bytes(SLOT_BYTES))
    rig.send_chunk(11, 0, bytes(SLOT_BYTES))
    for _ in range(5):
        rig.receive_chunk()
        rig.send(m.Credit(rig.queue, 1))
    [failed] = failures(rig.settle())
    assert (failed.number, failed.details["program"], failed.details["step"]) == (first, "clash", 1)
    while rig.upload_credit < m.SLOTS:
        rig.wait_for(m.Credit)
    rig.run(c.Clear(first))
    # What comes late is thrown away too.
    rig.send_chunk(11, SLOT_BYTES, bytes(SLOT_BYTES))
    while rig.upload_credit < m.SLOTS:
        rig.wait_for(m.Credit)


def test_a_replay_whose_sender_failed_fails_with_the_cause(rig):
    rig.program(1, ADD, "ppii", writes=[0, 1], alias=True)
    recording, x, nbytes = chain(["launch", "receive", "launch"])
    rig.run(c.Alloc(1, nbytes))
    send_graph(rig, 2, recording, {x: 1})
    number = replay(rig, 2, transfer=10)
    rig.send_chunk(10, 0, struct.pack("<i", 50) * (SLOT_BYTES // 4))
    rig.send(m.Fail(rig.queue, number, "OutOfMemory", "the sender had no memory", {"cause": "sender"}))
    [failed] = failures(rig.settle())
    assert (failed.number, failed.code, failed.message) == (number, "OutOfMemory", "the sender had no memory")
    assert failed.details["cause"] == "sender"
    while rig.upload_credit < m.SLOTS:
        rig.wait_for(m.Credit)
    rig.run(c.Clear(number))
    assert rig.read_as("i", 1) in ((1,), (50,))


def test_a_crash_leaves_the_step_that_ran_where_the_server_sees_it(zygote, toolbox):
    with_crash = zygote.open_node(toolbox)
    try:
        with_crash.program(1, ADD, "ppii", writes=[0])
        with_crash.program(2, CRASH, "p")
        with_crash.run(c.Alloc(1, 16), c.Alloc(2, 16))
        recording = Recording()
        y, x = recording.buffer(CPU, 16, memory="y"), recording.buffer(CPU, 16, memory="x")
        recording.add(Fill(CPU, Range(y, 0, 16), b"\0"))
        for _ in range(20):
            recording.add(Launch(CPU, 1, "ppii", (whole(y, 16), whole(x, 16, Access.READ), 4, 1)))
        recording.add(Launch(CPU, 2, "p", (whole(y, 16),)))
        send_graph(with_crash, 1, recording, {y: 1, x: 2})
        number = replay(with_crash, 1)
        assert os.WTERMSIG(with_crash.ended()) == signal.SIGSEGV
        assert with_crash.ring.progress() == (number, True)
        assert with_crash.ring.step() == 22
    finally:
        with_crash.close()


@st.composite
def graphs(draw):
    """Items on three small buffers with two variables, as (recording, what NumPy does)."""
    recording = Recording()
    buffers = [recording.buffer(CPU, 4 * count, memory=count, name=str(count)) for count in (6, 8, 10)]
    counts = (6, 8, 10)
    n, k = Var("n", 1, 3), Var("k", -5, 5)
    steps = []

    def piece(most=6):
        buffer = draw(st.integers(0, 2))
        count = draw(st.integers(3, min(most, counts[buffer])))
        return buffer, draw(st.integers(0, counts[buffer] - count)), count

    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["add", "add", "grid", "copy", "fill"]))
        buffer, at, count = piece()
        target = Range(buffers[buffer], 4 * at, 4 * count)
        if kind == "add":
            other, start, size = piece()
            if other == buffer and not (start + size <= at or at + count <= start):
                continue
            source = Operand(Range(buffers[other], 4 * start, 4 * size), Access.READ)
            scale = draw(st.integers(-3, 3))
            recording.add(Launch(CPU, 1, "ppii", (Operand(target), source, n, k * scale + 1)))
            steps.append(("add", buffer, at, other, start, scale))
        elif kind == "grid":
            recording.add(Launch(CPU, 2, "xpdqf", (INDEX, Operand(target), k * 2, 3 - k, 0.75), grid=(n,)))
            steps.append(("grid", buffer, at))
        elif kind == "copy":
            other, start, size = piece(count)
            recording.add(
                Copy(CPU, Range(target.buffer, target.offset, 4 * size), Range(buffers[other], 4 * start, 4 * size))
            )
            steps.append(("copy", buffer, at, other, start, size))
        else:
            value = draw(st.integers(-(2**31), 2**31 - 1))
            recording.add(Fill(CPU, target, struct.pack("<i", value)))
            steps.append(("fill", buffer, at, count, value))
    return recording, steps


def in_numpy(steps, arrays, n, k):
    for step in steps:
        match step:
            case ("add", buffer, at, other, start, scale):
                y, x = arrays[buffer][at : at + n], arrays[other][start : start + n]
                y[:] = y * 3 + x + np.int32(k * scale + 1)
            case ("grid", buffer, at):
                arrays[buffer][at : at + n] += k * 2 + 3 - k + 0
            case ("copy", buffer, at, other, start, size):
                arrays[buffer][at : at + size] = arrays[other][start : start + size].copy()
            case ("fill", buffer, at, count, value):
                arrays[buffer][at : at + count] = value


@pytest.mark.parametrize("prepared", [True, False])
@given(
    graphs(),
    st.lists(st.tuples(st.integers(1, 3), st.integers(-5, 5), st.permutations(range(3)), st.booleans()), max_size=4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_replays_do_what_numpy_does_with_any_values_and_substitutes(loop, toolbox, prepared, graph, replays, seed):
    recording, steps = graph
    if not recording.items:
        return
    rig = ExecutorRig(toolbox, loop)
    if not prepared:
        rig.runtime.prepare = lambda part: None
    rig.program(1, ADD, "ppii", writes=[0])
    rig.program(2, INDEXED, "xpdqf")
    counts = (6, 8, 10)
    rng = np.random.default_rng(seed)
    # Buffers 0 to 2 are the recorded ones, 3 to 5 theirs to stand for them, in the middle of something larger.
    arrays = [rng.integers(-(2**31), 2**31, count, dtype=np.int32) for count in (*counts, *(c + 4 for c in counts))]
    for number, array in enumerate(arrays):
        rig.run(c.Alloc(number, array.nbytes), c.Write(number, 0, array.tobytes()))
    send_graph(rig, 1, recording, {number: number for number in sorted(recording.touched)})
    values = {"n": (1, 3), "k": (-5, 5)}
    with np.errstate(over="ignore"):
        for n, k, _, substituted in [(2, 3, None, False), *replays]:
            chosen = sorted(recording.touched)[:: 2 if n == 2 else 1] if substituted else []
            given = [{"n": n, "k": k}[name] for name in recording.variables]
            assert all(values[name] for name in recording.variables)
            replay(rig, 1, [(number, number + 3, 8) for number in chosen], given)
            seen = [arrays[number + 3][2:-2] if number in chosen else arrays[number] for number in range(3)]
            in_numpy(steps, seen, n, k)
    assert not failures(rig.settle())
    for number, array in enumerate(arrays):
        assert rig.read(number, array.nbytes) == array.tobytes()
    rig.close()
