"""Native words: read back after patching, they are the launches that were recorded."""

import random
import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_recording

from wsgrad.graph.items import INDEX, Copy, Device, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.native import PATCH, PatchKind, Run, native_words, value_words
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording

CPU = Device(0, 0)
FORMATS = {"p": "I", "i": "i", "I": "I", "q": "q", "Q": "Q", "f": "f", "d": "d"}


def patched(native, values):
    """The words of one replay, each patch applied as its description says."""
    words = bytearray(native.words)
    for word, kind, source, zero, scale, offset in PATCH.iter_unpack(native.patches):
        assert zero == 0
        value = scale * values[source] + offset
        whole = value % (1 << 64)
        match kind:
            case PatchKind.WORD:
                struct.pack_into("<I", words, 4 * word, whole & 0xFFFFFFFF)
            case PatchKind.DOUBLE:
                struct.pack_into("<Q", words, 4 * word, whole)
            case PatchKind.FLOAT32:
                struct.pack_into("<f", words, 4 * word, float(value))
            case PatchKind.FLOAT64:
                struct.pack_into("<d", words, 4 * word, float(value))
    return bytes(words)


def launches(words, signatures):
    """What the native loop reads: (program, grid, arguments) one after another."""
    at = 0
    while at < len(words):
        program, grid = struct.unpack_from("<II", words, at)
        form = "<" + "".join(FORMATS[letter] for letter in signatures[program] if letter != "x")
        yield program, grid, struct.unpack_from(form, words, at + 8)
        at += 8 + struct.calcsize(form)


def test_scalars_of_every_kind_and_variables_come_out_as_they_went_in():
    recording = Recording()
    x = recording.buffer(CPU, 64, memory="x")
    n, m = Var("n", 1, 1 << 40), Var("m", -5, 5)
    view, whole = Operand(Range(x, 8, 8)), Operand(Range(x, 0, 64))
    recording.add(Launch(CPU, 0, "piIqQfd", (view, -1, 1 << 31, -(1 << 40), 1 << 63, 0.5, -2.25)))
    recording.add(Launch(CPU, 1, "xpiqQfd", (INDEX, whole, m * 2, 5 - n, n * 3, m, n + 1), grid=(m + 6,)))
    recording.add(Launch(CPU, 0, "piIqQfd", (whole, 1, 2, 3, 4, 5, 6), grid=(7,)))
    [device] = Plan(recording).parts[0].devices
    native = native_words(device)
    assert device.slots == (Range(x, 8, 8), Range(x, 0, 64))
    assert [(run.first, run.end, len(run.steps)) for run in native.queue] == [(0, len(native.words) // 4, 3)]
    big = 1 << 39
    assert list(launches(patched(native, [-3, big]), device.programs)) == [
        (0, 0, (0, -1, 1 << 31, -(1 << 40), 1 << 63, 0.5, -2.25)),
        (1, 3, (1, -6, 5 - big, 3 * big, -3.0, float(big + 1))),
        (0, 7, (1, 1, 2, 3, 4, 5.0, 6.0)),
    ]


def test_runs_end_at_waits_signals_and_what_the_loop_can_not_run():
    recording = Recording()
    x = recording.buffer(CPU, 64, memory="x")
    y = recording.buffer(Device(0, 1), 64, memory="y")

    def launch(offset, **more):
        recording.add(Launch(CPU, 0, "p", (Operand(Range(x, offset, 8)),), **more))

    launch(0)
    launch(0)
    recording.add(Transfer(Range(y, 0, 8), Range(x, 0, 8)))
    launch(8)
    launch(0)
    launch(8)
    recording.add(Copy(CPU, Range(x, 8, 8), Range(x, 16, 8)))
    launch(8)
    launch(8, grid=(2, 2))
    plan = Plan(recording)
    [device] = [d for d in plan.parts[0].devices if d.index == 0]
    native = native_words(device)
    shape = [[s.number for s in entry.steps] if isinstance(entry, Run) else entry.number for entry in native.queue]
    assert shape == [[1, 2], [5], [6, 7], 8, [9], 10]
    assert [plan.schedule.step(n).waits != () for n in (1, 5, 6, 8, 9, 10)] == [False, False, True, False, False, False]
    ends = [(entry.first, entry.end) for entry in native.queue if isinstance(entry, Run)]
    assert ends == [(0, 6), (6, 9), (9, 15), (15, 18)]


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_step_of_the_compute_queue_is_there_once_and_in_order(seed):
    for part in Plan(random_recording(random.Random(seed))).parts.values():
        for device in part.devices:
            native = native_words(device)
            transfers = [step for lane in device.lanes[1:] for step in lane]
            steps = []
            for entry in native.queue:
                run = entry.steps if isinstance(entry, Run) else (entry,)
                assert all(not step.waits for step in run[1:])
                assert device.signalled.isdisjoint(step.number for step in run[:-1])
                assert not any(run[0].number < step.number < run[-1].number for step in transfers)
                if isinstance(entry, Run):
                    words = native.words[4 * entry.first : 4 * entry.end]
                    ops = [(step.op.program, 0, step.op.arguments) for step in run]
                    assert list(launches(words, device.programs)) == ops
                steps += run
            assert steps == list(device.lanes[0])


def test_a_float_too_large_for_its_kind_becomes_an_infinity():
    assert value_words(PatchKind.FLOAT32, -1e39) == (0xFF800000,)
    assert value_words(PatchKind.FLOAT32, 1e39) == (0x7F800000,)
