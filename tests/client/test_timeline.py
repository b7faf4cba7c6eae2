"""Timelines as users make them: what is in the file, on one clock, whatever happens inside; and what costs most."""

import json
import os
import signal
import threading
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import trio
from graph_servers import ADD, CRASH, SPIN, embedded, ints

import wsgrad
from wsgrad import cli
from wsgrad.client.trace_summary import summarize

LOOPS = 1 << 23


@pytest.fixture(scope="module")
def farm():
    with embedded(device="cpu*2", launch_seconds=5) as server:
        yield server.url


@pytest.fixture
def server(farm):
    with wsgrad.connect(farm) as server:
        yield server


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


class Timeline:
    """A file, as a viewer would read it."""

    def __init__(self, path):
        self.file = json.loads(path.read_text())
        self.events = self.file["traceEvents"]
        self.processes = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}
        self.threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events if e["name"] == "thread_name"}

    def of(self, category, name=None):
        """Events with a duration, by their beginning."""
        found = [e for e in self.events if e["ph"] == "X" and e["cat"] == category and name in (None, e["name"])]
        return sorted(found, key=lambda e: e["ts"])

    def check(self):
        """What every file must be."""
        assert self.file["displayTimeUnit"] == "ms"
        assert {e["ph"] for e in self.events} <= {"X", "M", "b", "e"}
        for e in self.events:
            assert isinstance(e["name"], str)
            assert e["pid"] in self.processes
            if e["ph"] != "M":
                assert (e["pid"], e["tid"]) in self.threads
                assert e["ts"] >= 0
        assert all(e["dur"] >= 0 for e in self.events if e["ph"] == "X")
        begun, ended = ({(e["cat"], e["id"]): e for e in self.events if e["ph"] == phase} for phase in "be")
        assert begun.keys() == ended.keys()
        assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)
        # A viewer nests what is on one thread: each event lies in the one before it, or behind it.
        for thread in self.threads:
            stack = []
            mine = [e for e in self.events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread]
            for e in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
                while stack and stack[-1] <= e["ts"] + 0.0015:  # the file holds nanoseconds, as decimals
                    stack.pop()
                end = e["ts"] + e["dur"]
                assert not stack or end <= stack[-1] + 0.0015, (self.threads[thread], e)
                stack.append(end)
        assert self.file["metadata"]["servers"][0]["dropped"] == 0


def within(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_a_timeline_shows_calls_frames_waits_kernels_and_copies_on_one_clock(server, path):
    device = server.devices[0]
    y, x = device.zeros(4, np.int32), device.array(ints(1, 2, 3, 4))
    add = device.program(ADD, "add", writes=[0], name="plus")
    spin = device.program(SPIN, "spin")
    add(y, x, 4, 1)
    seconds = spin.timed(y, np.int64(LOOPS))
    with server.trace(path):
        for _ in range(5):
            add(y, x, 4, 1)
        spin(y, np.int64(LOOPS))
        y.numpy()
        device.array(np.zeros(3 << 20, np.uint8)).numpy()
    assert server._session.trace is None
    found = Timeline(path)
    found.check()
    assert [e["name"] for e in found.of("kernel")] == ["plus"] * 5 + ["spin"]
    [waited, _] = found.of("call", "Buffer.numpy")
    [kernel] = found.of("kernel", "spin")
    assert within(kernel, waited)
    assert seconds / 3 < kernel["dur"] / 1e6 < waited["dur"] / 1e6
    launches = found.of("call", "launch plus")
    assert len(launches) == 5
    assert launches[0]["ts"] < found.of("kernel", "plus")[0]["ts"]
    assert found.threads[launches[0]["pid"], launches[0]["tid"]] == "MainThread"
    assert found.processes[launches[0]["pid"]] == "client"
    assert found.processes[kernel["pid"]] == f"device {device.id} (queue 0)"
    copies = Counter(e["name"] for e in found.of("copy"))
    assert copies == {"read": 1, "upload": 3, "download": 3}
    assert sum(e["args"]["bytes"] for e in found.of("copy", "upload")) == 3 << 20
    parties = {found.processes[e["pid"]].split()[0] for e in found.of("frame")}
    assert parties == {"client", "server"}
    waits = [e for e in found.events if e["ph"] == "b" and e["cat"] == "wait"]
    assert "wait: Launches" in {e["name"] for e in waits}
    assert found.file["metadata"]["servers"][0]["clock_offset_ns"] == 0


def test_a_replay_holds_its_items_by_name_also_of_a_graph_that_is_gone(server, path):
    device = server.devices[0]
    y, x = device.zeros(4, np.int32), device.array(ints(1, 2, 3, 4))
    add = device.program(ADD, "add", writes=[0])
    device.synchronize()
    with server.trace(path):
        with wsgrad.record(device) as graph:
            add(y, x, 4, 1)
            y.fill(3)
            add(y, x, 2, 5)
        graph.run()
        graph.run(wait=True)
        graph.free()
    found = Timeline(path)
    found.check()
    first, second = found.of("replay")
    kernels = found.of("kernel")
    number = kernels[0]["args"]["graph"]
    assert first["name"] == second["name"] == f"graph {number}"
    assert [e["name"] for e in kernels] == ["add #0", "add #2"] * 2
    assert [(e["args"]["graph"], e["args"]["item"], e["args"]["of"]) for e in kernels[:2]] == [
        (number, 0, "add"),
        (number, 2, "add"),
    ]
    assert [e["name"] for e in found.of("copy")] == ["fill #1"] * 2
    assert within(kernels[0], first)
    assert within(kernels[1], first)
    assert within(kernels[3], second)
    assert found.file["metadata"]["servers"][0]["graphs"][str(number)][1][0] == 1


def test_two_devices_are_seen_to_work_at_once(server, path):
    spins = []
    for device in server.devices:
        y, spin = device.zeros(1, np.int32), device.program(SPIN, "spin")
        spin(y, np.int64(1))
        spins.append((device, y, spin))
        device.synchronize()
    with server.trace(path):
        for _, y, spin in spins:
            spin(y, np.int64(4 * LOOPS))
    found = Timeline(path)
    found.check()
    one, two = found.of("kernel", "spin")
    assert one["pid"] != two["pid"]
    assert two["ts"] < one["ts"] + one["dur"]


async def test_the_trio_face_shows_each_task_on_its_own_thread(farm, path):
    async with wsgrad.open_server(farm) as server:
        device = server.devices[0]
        y, spin = device.zeros(1, np.int32), device.program(SPIN, "spin")

        async def work():
            spin(y, np.int64(1000))
            await y.numpy()

        async with server.trace(path), trio.open_nursery() as nursery:
            nursery.start_soon(work, name="first")
            nursery.start_soon(work, name="second")
    found = Timeline(path)
    found.check()
    calls = found.of("call", "AsyncBuffer.numpy")
    assert {found.threads[e["pid"], e["tid"]] for e in calls} == {"first", "second"}
    assert len(found.of("kernel", "spin")) == 2


async def test_a_cancelled_timeline_is_written_all_the_same(farm, path):
    async with wsgrad.open_server(farm) as server:
        device = server.devices[0]
        y, spin = device.zeros(1, np.int32), device.program(SPIN, "spin")
        spin(y, np.int64(1))
        await device.synchronize()
        with trio.CancelScope() as scope:
            async with server.trace(path):
                spin(y, np.int64(10))
                await y.numpy()
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert len(Timeline(path).of("kernel", "spin")) == 1
        assert (await y.numpy() == 2).all()


def test_what_is_raised_inside_passes_and_the_file_is_whole(server, path):
    device = server.devices[0]

    def fail():
        device.zeros(3).numpy()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), server.trace(path):
        fail()
    found = Timeline(path)
    found.check()
    assert found.of("copy", "read")
    assert server._session.trace is None
    assert (device.zeros(3).numpy() == 0).all()


def test_the_end_of_a_timeline_keeps_errors_for_those_who_ask(server, path):
    device = server.devices[1]
    crash, y = device.program(CRASH, "crash"), device.zeros(1, np.int32)
    with server.trace(path):
        crash(y)
    with pytest.raises(wsgrad.DeviceLost, match="crash"):
        device.synchronize()
    device.reopen()
    Timeline(path).check()
    with server.trace(path):
        assert (device.zeros(1).numpy() == 0).all()
    found = Timeline(path)
    found.check()
    assert found.of("copy", "read")


def test_the_end_waits_no_longer_than_it_may(server, path):
    device = server.devices[0]
    y, spin = device.zeros(1, np.int32), device.program(SPIN, "spin")
    spin(y, np.int64(1))
    device.synchronize()
    with pytest.raises(TimeoutError), server.trace(path, timeout=0.01):
        spin(y, np.int64(8 * LOOPS))
    Timeline(path).check()
    assert (y.numpy() == 2).all()


def test_timelines_follow_one_another_but_do_not_overlap(server, path, tmp_path):
    device = server.devices[0]
    for _ in range(2):
        with server.trace(path):
            with pytest.raises(wsgrad.WsgradError, match="in a timeline already"), server.trace(tmp_path / "other"):
                pytest.fail("unreachable")
            device.zeros(2).numpy()
        found = Timeline(path)
        found.check()
        assert len(found.of("copy", "read")) == 1


def test_a_file_that_can_not_be_written_is_told_at_once(server, tmp_path):
    with pytest.raises(FileNotFoundError), server.trace(tmp_path / "missing" / "run.json"):
        pytest.fail("unreachable")
    assert server._session.trace is None


def test_threads_have_their_own_lanes_and_no_call_is_lost(server, path):
    import threading

    device = server.devices[0]
    y = device.zeros(1, np.int32)
    add = device.program(ADD, "add", writes=[0])
    add(y, y[:0], 0, 0)
    device.synchronize()

    def work():
        for _ in range(700):
            add(y, y[:0], 0, 0)

    with server.trace(path):
        threads = [threading.Thread(target=work, name=f"worker {index}") for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = Timeline(path)
    found.check()
    calls = Counter(found.threads[e["pid"], e["tid"]] for e in found.of("call", "launch add"))
    assert calls == {f"worker {index}": 700 for index in range(3)}
    assert len(found.of("kernel", "add")) == 2100


@pytest.fixture(scope="module")
def pair(farm):
    with embedded() as other:
        yield [farm, other.url]


def test_several_servers_share_one_timeline(pair, path):
    with wsgrad.connect_all(pair) as all_:
        a, b = all_.devices[0], all_.devices[-1]
        x, y = a.array(ints(1, 2, 3)), b.zeros(3, np.int32)
        spin = b.program(SPIN, "spin")

        over = threading.Event()

        def use(device):
            device.zeros(1).numpy()
            over.wait(30)

        with all_.trace(path):
            # Each session meets its callers in another order.
            threads = [threading.Thread(target=use, args=(device,), name=f"user of {device.id}") for device in (a, b)]
            for thread in threads:
                thread.start()
            with wsgrad.record(a, b) as graph:
                y.copy_from(x)
                spin(y, LOOPS)
                x.copy_from(y)
            graph.run(wait=True)
            over.set()
            for thread in threads:
                thread.join()
        found = Timeline(path)
        found.check()
        assert sorted(name.split()[0] for name in found.processes.values()) == [
            "client", "device", "device", "server", "server",
        ]  # fmt: skip
        assert len(found.of("copy", "read")) == 2
        assert len(found.file["metadata"]["servers"]) == 2
        # One clock: what goes from one server to the other and back happens in that order, inside of the wait for it.
        [kernel] = [e for e in found.of("kernel") if e["name"].startswith("spin")]
        [waited] = [e for e in found.of("call", "Graph.run") if within(kernel, e)]
        first, second = ([found.of("copy", f"{way} #{n}")[0] for way in ("download", "upload")] for n in (0, 2))
        moved = [*first, kernel, *second]
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(moved)), moved
        assert all(within(event, waited) for event in moved)
        callers = [found.threads[e["pid"], e["tid"]] for e in found.of("call", "Buffer.numpy")]
        assert sorted(callers) == sorted(f"user of {device.id}" for device in (a, b))
        assert len({e["tid"] for e in found.of("call", "Buffer.numpy")}) == 2
        assert found.threads[waited["pid"], waited["tid"]] == "MainThread"


async def test_several_servers_share_one_timeline_in_the_trio_face(pair, path):
    async with wsgrad.open_all(pair) as all_:
        async with all_.trace(path):
            for device in (all_.devices[0], all_.devices[-1]):
                await device.zeros(1).numpy()
        found = Timeline(path)
        found.check()
        assert len(found.of("copy", "read")) == len(found.of("call", "AsyncBuffer.numpy")) == 2


def test_a_server_that_dies_leaves_what_was_measured(path):
    with embedded() as started, wsgrad.connect(started.url) as server:
        device = server.devices[0]

        def work():
            device.zeros(1).numpy()
            os.kill(started.pid, signal.SIGKILL)
            for _ in range(100):
                device.zeros(1).numpy()

        with pytest.raises(wsgrad.ConnectionLost), server.trace(path):
            work()
        assert Timeline(path).of("call", "Buffer.numpy")


def test_the_most_expensive_rows_come_first(server, path, capsys):
    device = server.devices[0]
    y, x = device.zeros(4, np.int32), device.array(ints(1, 2, 3, 4))
    add, spin = device.program(ADD, "add", writes=[0]), device.program(SPIN, "spin")
    with server.trace(path):
        with wsgrad.record(device) as graph:
            spin(y, 4 * LOOPS)
            add(y, x, 4, 1)
            add(y, x, 4, 1)
        graph.run(wait=True)
    rows = summarize(path)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    kernels = {row.name: row for row in rows if row.what == "kernel"}
    assert set(kernels) == {"spin", "add"}
    assert kernels["add"].count == 2
    assert kernels["add"].longest_seconds <= kernels["add"].seconds == 2 * kernels["add"].mean_seconds
    assert {row.name for row in summarize(path, items=True) if row.what == "kernel"} == {"spin #0", "add #1", "add #2"}
    assert cli.main(["trace", str(path), "--top", "3", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown] == [row.name for row in rows[:3]]
    assert shown[0]["where"] == rows[0].where
    assert cli.main(["trace", str(path)]) == 0
    assert "spin" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": 1}', '{"traceEvents": [{"ph": "X"}]}', "{}", "\0"])
def test_a_file_that_is_no_timeline_is_named(path, capsys, text):
    path.write_text(text)
    assert cli.main(["trace", str(path)]) == 1
    assert "is no timeline of wsgrad" in capsys.readouterr().err
    assert cli.main(["trace", str(path) + "missing"]) == 1
    assert "can't be read" in capsys.readouterr().err
