"""Graphs as users hold them: recorded once, run often, with other buffers and values; what can't be recorded raises."""

import gc
import threading

import numpy as np
import pytest
import trio
from graph_servers import ADD, CRASH, SET, SPIN, TWICE, embedded, ints

import wsgrad

VAR = wsgrad.Var("n", 1, 4)


@pytest.fixture(scope="module")
def farm():
    with embedded(device="cpu*2", launch_seconds=1, max_session_memory=32 << 20) as server:
        yield server.url


@pytest.fixture
def server(farm):
    with wsgrad.connect(farm) as server:
        yield server


@pytest.fixture
def device(server):
    return server.devices[0]


@pytest.fixture
def add(device):
    return device.program(ADD, "add", writes=[0])


def test_a_graph_runs_as_often_as_wanted_with_values_and_buffers_of_its_own(device, add):
    y, x = device.array(ints(0, 0, 0, 0)), device.array(ints(1, 2, 3, 4))
    with wsgrad.record(device) as graph:
        add(y, x, VAR, 2 * wsgrad.Var("k", 0, 9) - 1)
        add(y[2:], y[:2], 2, 1)
    assert (y.numpy() == 0).all()
    graph.run(n=3, k=1)
    graph.run(n=4, k=0, wait=True)
    expected = ints(1, 2, 4, 2) - ints(1, 2, 3, 4)
    expected[2:] += expected[:2]
    assert (y.numpy() == expected).all()
    other = device.zeros(4, np.int32)
    graph.run({y: other}, n=4, k=1, wait=True)
    assert (other.numpy() == ints(1, 2, 4, 6)).all()
    larger = device.zeros(10, np.int32)
    graph.run({y: larger[3:7]}, n=1, k=1)
    assert (larger.numpy() == ints(0, 0, 0, 1, 0, 1, 0, 0, 0, 0)).all()


def test_a_variable_may_be_a_grid(device):
    y = device.zeros(4, np.int32)
    fill = device.program(SET, "set")
    with wsgrad.record(device) as graph:
        fill(wsgrad.INDEX, y, wsgrad.Var("k", -5, 5), grid=VAR)
        fill(wsgrad.INDEX, y[1:], 7, grid=1)
    graph.run(n=3, k=-5, wait=True)
    assert (y.numpy() == ints(-5, 7, 15, 0)).all()
    with pytest.raises(wsgrad.LaunchError, match="n=5 is not an integer from 1 to 4"):
        graph.run(n=5, k=0)
    with pytest.raises(wsgrad.LaunchError, match="needs a value for k"):
        graph.run(n=1)
    with pytest.raises(wsgrad.LaunchError, match="no variable 'm'"):
        graph.run(n=1, k=1, m=1)


def test_a_graph_runs_after_what_was_issued_before_and_before_what_comes_after(device, add):
    y, x = device.zeros(4, np.int32), device.array(ints(1, 1, 1, 1))
    with wsgrad.record(device) as graph:
        y.copy_from(x)
        add(y, x, 4, 2)
    for _ in range(50):
        y.fill(7)
        graph.run()
        add(y, x, 4, 10)
        add(y, x, 2, 1)
    assert (y.numpy() == ints(14, 14, 13, 13)).all()


def test_explain_and_svg_show_the_plan(device, add):
    y, x = device.zeros(4, np.int32), device.zeros(4, np.int32)
    with wsgrad.record(device) as graph:
        add(y, x, VAR, 1)
        x.fill(1)
    assert "add(rw int32[4] #0, r int32[4] #1, n, 1)" in graph.explain()
    assert "2 items, 2 steps" in graph.explain()
    assert graph.svg().startswith("<svg")
    assert "2 items, ready" in repr(graph)


REFUSED = {
    "numpy": lambda device, add, y, x: y.numpy(),
    "copy_to": lambda device, add, y, x: y.copy_to(np.zeros(4, np.int32)),
    "copy_from an array": lambda device, add, y, x: y.copy_from(np.zeros(4, np.int32)),
    "array": lambda device, add, y, x: device.array(np.zeros(4)),
    "synchronize": lambda device, add, y, x: device.synchronize(),
    "ready": lambda device, add, y, x: add.ready(),
    "flush": lambda device, add, y, x: device.server.flush(),
    "timed": lambda device, add, y, x: add.timed(y, x, 4, 1),
    "free": lambda device, add, y, x: y.free(),
    "reopen": lambda device, add, y, x: device.reopen(),
    "close": lambda device, add, y, x: device.close(),
    "another recording": lambda device, add, y, x: wsgrad.record(device).__enter__(),
    "a fill with elements of 12 bytes": lambda device, add, y, x: device.empty(4, "S12").fill(b"abc"),
    "a name that run has": lambda device, add, y, x: add(y, x, wsgrad.Var("timeout", 1, 4), 1),
    "two variables of a name": lambda device, add, y, x: (add(y, x, VAR, 1), add(y, x, wsgrad.Var("n", 1, 5), 1)),
    "a value outside its type": lambda device, add, y, x: add(y, x, 1 << 40, 1),
    "a grid that may be 0": lambda device, add, y, x: add(y, x, 1, 1, grid=VAR - 1),
    "another device": lambda device, add, y, x: device.server.devices[1].zeros(4),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_recorded_raises_where_it_is_written(device, add, what):
    y, x = device.zeros(4, np.int32), device.zeros(4, np.int32)
    with wsgrad.record(device) as whole:
        add(y, x, 4, 1)
    recording = wsgrad.record(device)
    graph = recording.__enter__()
    with pytest.raises(wsgrad.LaunchError) as raised:
        REFUSED[what](device, add, y, x)
    recording.__exit__(raised.type, raised.value, None)
    with pytest.raises(wsgrad.LaunchError, match="not recorded to its end"):
        graph.run()
    whole.run(wait=True)


def test_variables_mean_nothing_outside_a_recording(device, add):
    y = device.zeros(4, np.int32)
    with pytest.raises(wsgrad.LaunchError, match="argument 2 is a Var"):
        add(y, y, VAR, 1)


def test_memory_allocated_inside_belongs_to_the_graph_and_is_zero_in_each_run(device, add):
    y, x = device.zeros(4, np.int32), device.array(ints(1, 2, 3, 4))
    with wsgrad.record(device) as graph:
        sums, copy = device.empty(4, np.int32), device.empty(4, np.int32)
        tail = sums[2:]
        add(sums, x, 4, 1)
        add(tail, x, 2, 1)
        copy.copy_from(sums)
        add(y, copy, 4, 1)
        copy.free()
    assert graph.explain().count("fill") == 1
    graph.run()
    graph.run(wait=True)
    assert (y.numpy() == 2 * ints(1, 2, 4, 6)).all()
    for use in (
        sums.numpy,
        lambda: add(y, tail, 2, 1),
        lambda: sums[1:],
        lambda: sums.fill(1),
        lambda: graph.run({sums: y}),
    ):
        with pytest.raises(wsgrad.LaunchError, match="belongs to"):
            use()
    assert not sums.freed


def test_a_graph_frees_what_it_owns_and_keeps_what_it_uses(device, add):
    y = device.zeros(1 << 20, np.int32)
    for _ in range(10):
        # 4 MiB outside, 4 MiB used, 16 MiB owned, of 32 MiB in all.
        x = device.zeros(1 << 20, np.int32)
        x.fill(3)
        with wsgrad.record(device) as graph:
            big = device.empty(1 << 22, np.int32)
            big[: 1 << 20].copy_from(x)
            add(y, big, 1 << 20, 1)
        del x, big
        gc.collect()
        graph.run()
        device.synchronize()
        graph.run()
        del graph
        gc.collect()
        device.synchronize()
    assert (y.numpy() == 10 * 2 * 3).all()


def test_a_freed_graph_and_one_with_a_freed_buffer_do_not_run(device, add):
    y, x = device.zeros(4, np.int32), device.array(ints(1, 2, 3, 4))
    with wsgrad.record(device) as graph:
        add(y, x, 4, 1)
    x.free()
    with pytest.raises(wsgrad.DeviceError, match=r"its buffer int32\[4\] #1 was freed"):
        graph.run()
    graph.run({x: device.array(ints(1, 1, 1, 1))}, wait=True)
    assert (y.numpy() == 1).all()
    with graph:
        graph.run({x: y[:]})
    with pytest.raises(wsgrad.DeviceError, match="freed"):
        graph.run({x: y})


def test_a_substitute_that_does_not_fit_is_refused_by_name(server, device, add):
    y, x = device.zeros(4, np.int32), device.array(ints(1, 2, 3, 4))
    pair = device.zeros(8, np.int32)
    with wsgrad.record(device) as graph:
        add(y, x, 4, 1)
        add(pair[4:], x, 4, 1)
    elsewhere = server.devices[1].zeros(4, np.int32)
    for substitutions, text in (
        ({y: device.zeros(5, np.int32)}, "20 bytes can't stand for"),
        ({y: elsewhere}, "which the graph does not use"),
        ({pair[4:]: x}, "a view of a part"),
        ({device.zeros(4, np.int32): x}, "does not use"),
    ):
        with pytest.raises(wsgrad.LaunchError, match=text):
            graph.run(substitutions)
    with pytest.raises(TypeError):
        graph.run({y: np.zeros(4, np.int32)})
    device.synchronize()


def test_an_item_that_fails_is_named_with_its_line_and_the_rest_goes_on_after(device, add, monkeypatch, farm):
    twice = device.program(TWICE, "twice")
    y, x = device.zeros(1, np.int32), device.zeros(1, np.int32)
    with wsgrad.record(device) as graph:
        add(y, x, 1, 1)
        twice(y, x)
        add(y, x, 1, 1)
    with pytest.raises(wsgrad.LaunchError, match="would write overlapping"):
        graph.run({y: x})
    bad = device.program("void bad(int *y) { no C at all }", "bad")
    with wsgrad.record(device) as graph:
        add(y, x, 1, 1)
        bad(y)
    graph.run()
    with pytest.raises(
        wsgrad.CompileError, match=r"(?s)failed to compile.*\(item 1 of its graph: bad\(rw int32\[1\] #0\)\)"
    ) as info:
        graph.wait()
    assert (info.value.details["item"], info.value.details["program"]) == (1, "bad")
    assert (y.numpy() == 0).all()
    monkeypatch.setenv("WSGRAD_DEBUG", "1")
    with wsgrad.connect(farm) as debugged:
        device = debugged.devices[0]
        bad, y = device.program("void bad(int *y) { no C at all }", "bad"), device.zeros(1, np.int32)
        with wsgrad.record(device) as graph:
            bad(y)
        with pytest.raises(wsgrad.CompileError, match=r"issued at .*test_graphs.py:\d+"):
            graph.run(wait=True)


def test_a_crash_names_the_item_and_loses_the_graph_for_ever(device, add):
    crash = device.program(CRASH, "crash")
    y, x = device.zeros(1, np.int32), device.zeros(1, np.int32)
    with wsgrad.record(device) as graph:
        for _ in range(30):
            add(y, x, 1, 1)
        crash(y)
        add(y, x, 1, 1)
    with pytest.raises(wsgrad.DeviceLost, match=r"program 'crash' ended.*SIGSEGV.*item 30 of its graph") as info:
        graph.run(wait=True)
    assert info.value.details["item"] == 30
    device.reopen()
    y, x = device.zeros(1, np.int32), device.array(ints(2))
    with pytest.raises(wsgrad.DeviceLost):
        graph.run()
    with wsgrad.record(device) as again:
        add(y, x, 1, 1)
    again.run(wait=True)
    assert y.numpy()[0] == 2


def test_the_time_limit_is_per_item_and_the_one_that_ran_too_long_is_named(device):
    spin = device.program(SPIN, "spin")
    y = device.zeros(1, np.int32)
    spin.ready()
    seconds = min(spin.timed(y, np.int64(20_000_000)) for _ in range(3))
    count = np.int64(20_000_000 * 0.25 / seconds)
    with wsgrad.record(device) as graph:
        for _ in range(6):
            spin(y, count)
    graph.run(wait=True)
    with wsgrad.record(device) as graph:
        spin(y, count)
        spin(y, count * 100)
        spin(y, count)
    with pytest.raises(wsgrad.Timeout, match=r"'spin' ran longer than the limit of 1 s.*item 1 of its graph"):
        graph.run(wait=True)
    device.reopen()


def test_waiting_for_a_graph_may_time_out_and_the_session_lives(device):
    spin = device.program(SPIN, "spin")
    y = device.zeros(1, np.int32)
    with wsgrad.record(device) as graph:
        for _ in range(10):
            spin(y, np.int64(10_000_000))
    with pytest.raises(TimeoutError) as info:
        graph.run(wait=True, timeout=0.01)
    assert not isinstance(info.value, wsgrad.WsgradError)
    graph.run()
    graph.wait()
    assert y.numpy()[0] == 20


def test_only_the_thread_that_records_is_recorded(device, add):
    y, x, other = device.zeros(4, np.int32), device.array(ints(1, 1, 1, 1)), device.zeros(4, np.int32)
    add(other, x, 4, 0)
    with wsgrad.record(device) as graph:
        add(y, x, 4, 1)
        thread = threading.Thread(target=lambda: [add(other, x, 4, 1) for _ in range(10)])
        thread.start()
        thread.join()
        add(y, x, 4, 1)
    assert (other.numpy() == 10).all()
    assert (y.numpy() == 0).all()
    graph.run(wait=True)
    assert (y.numpy() == 2).all()


async def test_the_trio_face_records_its_task_and_waits_as_a_coroutine(farm):
    async with wsgrad.open_server(farm) as server, trio.open_nursery() as nursery:
        device = server.devices[0]
        add = device.program(ADD, "add", writes=[0])
        y, x = await device.array(ints(0, 0)), await device.array(ints(1, 2))
        other = await device.array(ints(0, 0))

        async def beside():
            for _ in range(5):
                add(other, x, 2, 1)
                await trio.lowlevel.checkpoint()

        with wsgrad.record(device) as graph:
            add(y, x, wsgrad.Var("n", 1, 2), 1)
            nursery.start_soon(beside)
            temporary = device.empty(2, np.int32)
            await temporary.copy_from(y)
            for _ in range(10):
                await trio.lowlevel.checkpoint()
            add(y, temporary, 2, 1)
        assert isinstance(graph, wsgrad.AsyncGraph)
        graph.run(n=1)
        graph.run({y: other}, n=2)
        await graph.wait()
        assert (await y.numpy() == ints(2, 0)).all()
        assert (await other.numpy() == 2 * (5 * ints(1, 2) + ints(1, 2))).all()
        with pytest.raises(wsgrad.LaunchError, match="can't be recorded"), wsgrad.record(device):
            await y.numpy()


def test_a_graph_over_two_devices_keeps_the_order_of_both_behind_uploads_under_way(server):
    one, two = server.devices
    adds = [device.program(ADD, "add", writes=[0]) for device in (one, two)]
    count = 1 << 20
    ys = [device.zeros(count, np.int32) for device in (one, two)]
    xs = [device.zeros(count, np.int32) for device in (one, two)]
    with wsgrad.record(one, two) as graph:
        for add, y, x in zip(adds, ys, xs, strict=True):
            add(y, x, count, 1)
    for turn in range(4):
        # Its chunks wait for credit while the graph is issued, on one device and not on the other.
        xs[turn % 2].copy_from(np.full(count, turn + 1, np.int32))
        graph.run()
        adds[0](ys[0], xs[0], 1, 100)
    graph.wait()
    assert (ys[0].numpy()[:2] == ints(1 + 1 + 3 + 3 + 800, 8)).all()
    assert (ys[1].numpy()[:2] == ints(2 + 2 + 4, 8)).all()


def test_closing_one_device_of_a_graph_holds_nobody_else(server):
    one, two = server.devices
    ys = [device.array(ints(1)) for device in (one, two)]
    with wsgrad.record(one, two) as graph:
        for y in ys:
            y.fill(5)
    graph.run()
    two.close()
    assert ys[0].numpy()[0] == 5
    with pytest.raises(wsgrad.DeviceError, match="closed"):
        graph.run()
    del graph
    gc.collect()
    one.synchronize()
    assert ys[0].numpy()[0] == 5


def test_a_graph_over_two_servers_runs_its_part_on_each():
    with embedded() as first, embedded() as second, wsgrad.connect(first.url) as a, wsgrad.connect(second.url) as b:
        one, two = a.devices[0], b.devices[0]
        adds = [device.program(ADD, "add", writes=[0]) for device in (one, two)]
        ys, xs = ([device.array(ints(value)) for device in (one, two)] for value in (0, 3))
        with wsgrad.record(one, two) as graph:
            for add, y, x in zip(adds, ys, xs, strict=True):
                add(y, x, 1, wsgrad.Var("k", 1, 5))
        graph.run(k=2)
        graph.run(k=5, wait=True)
        assert [y.numpy()[0] for y in ys] == [21, 21]
        assert "2 servers" in graph.explain()
