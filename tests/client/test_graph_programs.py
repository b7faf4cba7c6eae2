"""Random programs over several devices: run eagerly and as graphs, with substitutes, they do what NumPy does."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from graph_servers import SET, embedded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wsgrad

MIX = "void mix(int *y, const int *x, int n, int k) { for (int i = 0; i < n; i++) y[i] = 3 * y[i] + k * x[i] + 1; }"
DEVICES = 3
LEAST = 4


@dataclass
class Programs:
    mix: list
    stamp: list


@pytest.fixture(scope="module")
def farm():
    with embedded(device=f"cpu*{DEVICES}") as server, wsgrad.connect(server.url) as connected:
        devices = list(connected.devices)
        mix = [device.program(MIX, "mix", writes=[0]) for device in devices]
        yield devices, Programs(mix, [device.program(SET, "set") for device in devices])


def random_operations(rng, sizes):
    """Operations on buffers that are told apart by device and place; -1 is one allocated on the way."""

    def piece(device, count=None):
        number = rng.choice([number for number, (home, _) in enumerate(sizes) if home == device])
        size = sizes[number][1]
        wanted = rng.randint(LEAST, size) if count is None else min(count, size)
        return number, rng.randint(0, size - wanted), wanted

    operations = []
    for _ in range(rng.randint(1, 14)):
        device = rng.randrange(DEVICES)
        target = piece(device)
        match rng.choice(["mix", "mix", "mix", "stamp", "copy", "fill", "move", "move", "through"]):
            case "mix":
                operations.append(("mix", device, target, piece(device), rng.randint(-3, 3), rng.random() < 0.5))
            case "stamp":
                operations.append(("stamp", device, target, rng.randint(-9, 9)))
            case "fill":
                operations.append(("fill", device, target, rng.choice([0, 7, -(2**31), 0x01010101])))
            case "through":
                operations.append(("through", device, target, piece(device)))
            case kind:
                other = device if kind == "copy" else rng.choice([d for d in range(DEVICES) if d != device])
                source = piece(other, target[2])
                operations.append((kind, device, (*target[:2], source[2]), source))
    return operations


def cut(buffers, piece):
    number, at, count = piece
    return buffers[number][at : at + count]


def issue(operations, devices, programs, buffers, n, k, *, eager):
    for operation in operations:
        match operation:
            case ("mix", device, target, source, scale, whole):
                count = min(target[2], source[2]) if whole else n
                programs.mix[device](cut(buffers, target), cut(buffers, source), count, k * scale + 1)
            case ("stamp", device, target, value):
                programs.stamp[device](wsgrad.INDEX, cut(buffers, target), k + value, grid=n)
            case ("fill", _, target, value):
                cut(buffers, target).fill(value)
            case ("through", device, target, source):
                # Memory of its own, of which only a part is written.
                middle = devices[device].empty(target[2] + source[2], np.int32)
                middle[: source[2]].copy_from(cut(buffers, source))
                programs.mix[device](cut(buffers, target), middle[source[2] :], target[2], 5)
                programs.mix[device](cut(buffers, target), middle[: source[2]], LEAST, 5)
            case (kind, _, target, source):
                source = cut(buffers, source)
                cut(buffers, target).copy_from(source.numpy() if eager and kind == "move" else source)


def in_numpy(operations, arrays, n, k):
    def mix(y, x, count, k):
        y[:count] = 3 * y[:count] + np.int32(k) * x[:count].copy() + np.int32(1)

    for operation in operations:
        match operation:
            case ("mix", _, target, source, scale, whole):
                count = min(target[2], source[2]) if whole else n
                mix(cut(arrays, target), cut(arrays, source), count, k * scale + 1)
            case ("stamp", _, target, value):
                cut(arrays, target)[:n] = 10 * np.arange(n) + k + value
            case ("fill", _, target, value):
                cut(arrays, target)[:] = value
            case ("through", _, target, source):
                x = cut(arrays, source).copy()
                mix(cut(arrays, target), np.zeros(target[2], np.int32), target[2], 5)
                mix(cut(arrays, target), x, LEAST, 5)
            case (_, _, target, source):
                cut(arrays, target)[:] = cut(arrays, source).copy()


class World:
    """The same buffers twice on the devices, for eager runs and for graphs, and in NumPy."""

    def __init__(self, rng, devices, sizes):
        numbers = np.random.default_rng(rng.randrange(1 << 30))
        self.arrays = [numbers.integers(-(2**31), 2**31, count, dtype=np.int32) for _, count in sizes]
        homes = [devices[device] for device, _ in sizes]
        self.eager = [home.array(array) for home, array in zip(homes, self.arrays, strict=True)]
        self.graph = [home.array(array) for home, array in zip(homes, self.arrays, strict=True)]

    def check(self):
        for number, array in enumerate(self.arrays):
            assert self.eager[number].numpy().tobytes() == array.tobytes(), number
            assert self.graph[number].numpy().tobytes() == array.tobytes(), number


def substituted(rng, world, spare, sizes):
    """Which recorded buffers others stand for, in all three: {number: (number of the other, where it begins there)}."""
    chosen = {}
    taken = set()
    for number, (device, count) in enumerate(sizes):
        others = [at for at, (home, size) in enumerate(spare.sizes) if home == device and size >= count]
        others = [at for at in others if at not in taken or rng.random() < 0.1]
        if others and rng.random() < 0.5:
            other = rng.choice(others)
            taken.add(other)
            chosen[number] = other, rng.randint(0, spare.sizes[other][1] - count)
    return chosen


def put(chosen, sizes, buffers, others):
    return [
        others[chosen[number][0]][chosen[number][1] : chosen[number][1] + count]
        if number in chosen
        else buffers[number]
        for number, (_, count) in enumerate(sizes)
    ]


@given(st.integers(0, 2**40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_eager_runs_and_replays_do_what_numpy_does(farm, seed):
    devices, programs = farm
    rng = random.Random(seed)
    sizes = [(device, rng.randint(LEAST, 20)) for device in range(DEVICES) for _ in range(rng.randint(1, 3))]
    operations = random_operations(rng, sizes)
    world = World(rng, devices, sizes)
    spare_sizes = [(device, rng.randint(10, 24)) for device in range(DEVICES) for _ in range(3)]
    spare = World(rng, devices, spare_sizes)
    spare.sizes = spare_sizes
    with wsgrad.record(*devices) as graph:
        n, k = wsgrad.Var("n", 1, LEAST), wsgrad.Var("k", -5, 5)
        issue(operations, devices, programs, world.graph, n, k, eager=False)
    names = graph._plan.recording.variables
    with np.errstate(over="ignore"):
        for _ in range(rng.randint(1, 4)):
            n, k = rng.randint(1, LEAST), rng.randint(-5, 5)
            chosen = substituted(rng, world, spare, sizes) if rng.random() < 0.7 else {}
            stand_ins = put(chosen, sizes, world.graph, spare.graph)
            used = {buffer.memory[1] for buffer in graph._plan.recording.buffers}
            new = {world.graph[at]: stand_ins[at] for at in chosen if id(world.graph[at]._base) in used}
            values = {name: {"n": n, "k": k}[name] for name in names}
            try:
                graph.run(new, **values)
            except wsgrad.LaunchError:
                # Two buffers in the same memory, in a way that the plan does not order.
                shared = len({other for other, _ in chosen.values()}) < len(chosen)
                if not shared:
                    raise
                continue
            issue(operations, devices, programs, put(chosen, sizes, world.eager, spare.eager), n, k, eager=True)
            in_numpy(operations, put(chosen, sizes, world.arrays, spare.arrays), n, k)
    graph.wait()
    world.check()
    spare.check()


def test_a_ring_of_devices_passes_on_what_it_has_a_thousand_times(farm):
    devices, programs = farm
    count = 3000
    xs = [device.array(np.full(count, number, np.int32)) for number, device in enumerate(devices)]
    inboxes = [device.zeros(count, np.int32) for device in devices]
    with wsgrad.record(*devices) as graph:
        for number in range(DEVICES):
            inboxes[(number + 1) % DEVICES].copy_from(xs[number])
        for number in range(DEVICES):
            programs.mix[number](xs[number], inboxes[number], count, wsgrad.Var("k", -3, 3))
    arrays = [np.full(count, number, np.int32) for number in range(DEVICES)]
    with np.errstate(over="ignore"):
        for turn in range(1000):
            graph.run(k=turn % 7 - 3)
            before = [array.copy() for array in arrays]
            for number in range(DEVICES):
                arrays[number] = 3 * arrays[number] + np.int32(turn % 7 - 3) * before[number - 1] + np.int32(1)
    for x, array in zip(xs, arrays, strict=True):
        assert (x.numpy() == array).all()


def test_a_failing_device_fails_those_that_would_have_received_from_it(farm):
    devices, programs = farm
    source, target, third = devices
    x, y, z = (device.array(np.arange(8, dtype=np.int32)) for device in devices)
    bad = source.program("void bad(int *y) { this is no C }", "bad")
    with wsgrad.record(*devices) as graph:
        y[:4].fill(1)
        bad(x)
        y.copy_from(x)
        z.copy_from(y)
    graph.run()
    for device in devices:
        with pytest.raises(wsgrad.CompileError, match="failed to compile"):
            device.synchronize()
    graph.run({x: source.zeros(8, np.int32)})
    with pytest.raises(wsgrad.CompileError):
        graph.wait()
    third.synchronize()
    target.synchronize()
    programs.mix[0](x, x[:], 8, 0)
    assert (x.numpy() == 3 * np.arange(8) + 1).all()


def test_a_crash_in_a_graph_does_not_hang_its_other_devices(farm):
    devices, _ = farm
    source, target, third = devices
    count = 3 << 18
    x, y, z = (device.zeros(count, np.int32) for device in devices)
    crash = source.program("void crash(int *y) { *(volatile int *)0 = y[0]; }", "crash")
    with wsgrad.record(*devices) as graph:
        z.copy_from(x)
        crash(x)
        y.copy_from(x)
        z.copy_from(y)
    graph.run()
    for device in (target, third):
        with pytest.raises(wsgrad.DeviceLost, match="program 'crash' ended the device"):
            device.synchronize()
        device.synchronize()
    with pytest.raises(wsgrad.DeviceLost, match=r"item 1 of its graph: crash"):
        source.synchronize()
    with pytest.raises(wsgrad.DeviceLost):
        graph.run()
    source.reopen()
