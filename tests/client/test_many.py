"""Several servers as one object: their devices in order, work across them, and what is left when one of them fails."""

import contextlib
import gc
import os
import random
import signal

import numpy as np
import pytest
import trio
from graph_servers import ADD, CRASH, SPIN, embedded, ints
from real_servers import running

import wsgrad
from benchmarks.faulty import FaultyLink
from wsgrad.transport.url import InvalidUrl

N = 700_000  # int32: 2.8 MB, three chunks


@pytest.fixture(scope="module")
def urls():
    """Three servers that may dial each other, and one that may dial nobody."""
    with (
        running("--device", "cpu*3", "--name", "first") as first,
        running("--device", "cpu*2", "--name", "second") as second,
        running("--device", "cpu*2", "--name", "third") as third,
        running("--device", "cpu*2", "--name", "alone", "--allow-peer", "elsewhere:1") as alone,
    ):
        yield first, second, third, alone


def address(url):
    return url.partition("#")[0].rstrip("/")


# -- opening


def test_devices_stand_in_the_order_of_the_list_with_its_counts(urls):
    with wsgrad.connect_all(f"{urls[1]}*1, {urls[0]}*2,{urls[2]}") as all_:
        ids = ["second/cpu/0", "first/cpu/0", "first/cpu/1", "third/cpu/0", "third/cpu/1"]
        assert [device.id for device in all_.devices] == ids
        assert len(all_.devices) == 5
        assert all_.devices[-1] is all_.devices["third/cpu/1"]
        assert all_.devices[1:3] == list(all_.servers[1].devices)
        assert all_.devices["cpu"].id == "second/cpu/0"
        assert [server.url for server in all_.servers] == [
            url.replace("/#", "#") for url in (urls[1], urls[0], urls[2])
        ]
        assert repr(all_) == "<Servers: 5 devices of 3 servers>"
        with pytest.raises(IndexError, match=address(urls[2])):
            all_.devices[5]
        with pytest.raises(wsgrad.DeviceError, match="there is no device 'gpu'"):
            all_.devices["gpu"]
    assert all_.closed
    assert repr(all_) == "<Servers: 5 devices of 3 servers, closed>"
    all_.close()


def test_a_name_that_two_servers_have_is_refused(urls):
    with (
        wsgrad.connect_all([urls[0], urls[0]]) as all_,
        pytest.raises(wsgrad.DeviceError, match="choose by index"),
    ):
        all_.devices["first/cpu/0"]


def test_the_list_may_stand_in_the_environment(urls, monkeypatch):
    monkeypatch.setenv("WSGRAD_URL", f"{urls[0]}*1,{urls[1]}*1")
    with wsgrad.connect_all() as all_:
        assert [device.id for device in all_.devices] == ["first/cpu/0", "second/cpu/0"]
    with pytest.raises(InvalidUrl, match="connect_all"):
        wsgrad.connect()


def test_without_a_list_it_is_a_server_of_our_own():
    with wsgrad.connect_all() as all_:
        x = all_.devices[0].array(ints(1, 2))
        np.testing.assert_array_equal(x.numpy(), ints(1, 2))


def test_one_that_cannot_be_opened_is_named_and_the_others_are_closed(urls, monkeypatch):
    opened = []
    connect = wsgrad.client.many.connect
    monkeypatch.setattr("wsgrad.client.many.connect", lambda *a, **k: opened.append(connect(*a, **k)) or opened[-1])
    with pytest.raises(wsgrad.ConnectionLost, match=r"ws://127\.0\.0\.1:9"):
        wsgrad.connect_all([urls[0], urls[1], "127.0.0.1:9"])
    with pytest.raises(wsgrad.Unauthorized, match=address(urls[1])):
        wsgrad.connect_all([urls[0], address(urls[1]) + "#token=wrong"])
    assert len(opened) == 3
    assert all(server.closed for server in opened)
    with pytest.raises(InvalidUrl, match="port"):
        wsgrad.connect_all([urls[0], "host:port"])
    assert len(opened) == 3  # the list was read before anything was opened


# -- working together


def ring(devices, rounds):
    programs = [device.program(ADD, "add", writes=[0]) for device in devices]
    ones = [device.array(ints(1)) for device in devices]
    places = [device.empty(1, np.int32) for device in devices]
    for _ in range(rounds):
        for index, device in enumerate(devices):
            programs[index](places[index], ones[index], 1, 1)
            after = (index + 1) % len(devices)
            devices[after].wait(device.signal())
            places[after].copy_from(places[index])
    return places[0]


def test_a_ring_of_three_servers_goes_round(urls):
    with wsgrad.connect_all([f"{url}*1" for url in urls[:3]]) as all_:
        rounds = 300
        last = ring(list(all_.devices), rounds)
        np.testing.assert_array_equal(last.numpy(timeout=60), ints(3 * rounds))
        assert all_.statistics["relayed"] == 0
        assert not all_.relay_reasons


def test_a_server_that_may_not_dial_sends_through_the_client_which_says_why(urls):
    with wsgrad.connect_all([f"{urls[3]}*1", f"{urls[0]}*1"]) as all_:
        alone, first = all_.devices
        data = np.arange(N, dtype=np.int32)
        x, y = alone.array(data), first.empty(N, np.int32)
        y.copy_from(x)
        np.testing.assert_array_equal(y.numpy(), data)
        assert all_.statistics["relayed"] == 1
        [(way, reason)] = all_.relay_reasons.items()
        assert way == (address(urls[3]), address(urls[0]))
        assert "--allow-peer" in reason


def test_a_server_that_dies_is_named_and_the_others_go_on(urls):
    with (
        embedded() as process,
        wsgrad.connect_all([urls[0], process.url, urls[1]]) as all_,
    ):
        mortal = process.url
        a, b, c = (server.devices[0] for server in all_.servers)
        x, y, z = a.array(ints(1, 2)), b.array(ints(0, 0)), c.array(ints(0, 0))
        y.copy_from(x)
        z.copy_from(y)
        np.testing.assert_array_equal(z.numpy(), ints(1, 2))
        spin = b.program(SPIN, "spin")
        spin(y, np.int64(1 << 60))
        z.copy_from(y)
        a.wait(b.signal())
        all_.flush()
        os.kill(process.pid, signal.SIGKILL)
        for device in (a, c):
            with pytest.raises(wsgrad.ConnectionLost, match=address(mortal)):
                device.synchronize(timeout=30)
        with pytest.raises(wsgrad.ConnectionLost, match=address(mortal)):
            b.synchronize(timeout=30)
        with pytest.raises(wsgrad.ConnectionLost, match=address(mortal)):
            y.copy_from(x)
        z.copy_from(x)
        np.testing.assert_array_equal(z.numpy(), ints(1, 2))
        assert f"lost: {address(mortal)}" in repr(all_)
        all_.servers[0].close()
        all_.servers[2].close()
        all_._end()


def test_an_error_that_no_call_has_met_is_raised_when_all_are_closed(urls):
    all_ = wsgrad.connect_all(urls[:2])
    first, second = all_.devices[0], all_.devices[3]
    x, y = first.array(ints(1)), second.array(ints(2))
    first.program(CRASH, "crash", name="bad")(x)
    y.copy_from(x)
    with pytest.raises(wsgrad.DeviceLost, match="bad"):
        all_.close()
    assert all_.closed


# -- graphs


def test_a_graph_over_two_servers_sends_between_them(urls):
    with wsgrad.connect_all([f"{urls[0]}*2", f"{urls[1]}*1"]) as all_:
        run_graphs(all_)
        assert all_.statistics["relayed"] == 0


def test_a_graph_over_two_servers_without_a_link_goes_through_the_client(urls):
    with wsgrad.connect_all([f"{urls[3]}*2", f"{urls[1]}*1"]) as all_:
        run_graphs(all_)
        assert all_.statistics["relayed"] == 4  # once a run: the other server may dial


def run_graphs(all_):
    devices = list(all_.devices)
    add = [device.program(ADD, "add", writes=[0]) for device in devices]
    data = [np.arange(N, dtype=np.int32) * (k + 1) for k in range(3)]
    buffers = [device.array(array) for device, array in zip(devices, data, strict=True)]
    inboxes = [device.empty(N, np.int32) for device in devices]
    with wsgrad.record(*devices) as graph:
        for at, inbox in enumerate(inboxes):
            inbox.copy_from(buffers[at - 1])
        for at, program in enumerate(add):
            program(buffers[at], inboxes[at], N, wsgrad.Var("k", 1, 9))
    for k in (1, 2, 3):
        graph.run(k=k)
        data = [array + k * data[at - 1] for at, array in enumerate(data)]
    graph.wait(timeout=60)
    for buffer, array in zip(buffers, data, strict=True):
        np.testing.assert_array_equal(buffer.numpy(), array)
    other = devices[2].array(np.full(N, 5, np.int32))
    graph.run({buffers[2]: other}, k=1, wait=True, timeout=60)
    np.testing.assert_array_equal(buffers[0].numpy(), data[0] + 5)
    np.testing.assert_array_equal(other.numpy(), 5 + data[1])


def test_random_graphs_over_three_servers_do_what_eager_work_and_numpy_do(urls):
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    with wsgrad.connect_all([f"{urls[0]}*2", f"{urls[1]}*1", f"{urls[3]}*1"]) as all_:
        devices = list(all_.devices)
        size = 3000
        add = [device.program(ADD, "add", writes=[0]) for device in devices]
        for _ in range(6):
            worlds = [[[device.empty(size, np.int32) for _ in range(2)] for device in devices] for _ in range(2)]
            model = [[np.zeros(size, np.int32) for _ in range(2)] for _ in devices]
            for at in range(len(devices)):
                model[at][1][:] = rng.randrange(100)
                for world in worlds:
                    world[at][1].copy_from(model[at][1])
            steps = []
            for _ in range(40):
                at, to = rng.sample(range(len(devices)), 2)
                start = rng.randrange(size)
                cut = slice(start, rng.randrange(start, size + 1))
                steps.append((rng.randrange(4), at, to, rng.randrange(2), rng.randrange(2), cut, rng.randrange(9)))

            def work(buffers, steps=steps):
                for what, at, to, i, j, cut, k in steps:
                    if what == 0:
                        add[at](buffers[at][0], buffers[at][1], size, k)
                    elif what == 1:
                        buffers[at][i][cut].fill(k)
                    else:
                        buffers[to][j][cut].copy_from(buffers[at][i][cut])

            with wsgrad.record(*devices) as graph:
                work(worlds[1])
            for _ in range(3):
                work(worlds[0])
                graph.run()
                for what, at, to, i, j, cut, k in steps:
                    if what == 0:
                        model[at][0] += k * model[at][1]
                    elif what == 1:
                        model[at][i][cut] = k
                    else:
                        model[to][j][cut] = model[at][i][cut]
            for world in worlds:
                for mine, theirs in zip(world, model, strict=True):
                    for buffer, array in zip(mine, theirs, strict=True):
                        np.testing.assert_array_equal(buffer.numpy(timeout=60), array, err_msg=str(seed))


def test_what_fails_in_a_graph_on_one_server_fails_on_the_other_and_names_the_item(urls):
    with wsgrad.connect_all([f"{urls[0]}*1", f"{urls[1]}*1"]) as all_:
        a, b = all_.devices
        x, y = a.array(ints(1)), b.array(ints(2))
        crash = a.program(CRASH, "crash", name="bad")
        with wsgrad.record(a, b) as graph:
            x.fill(3)
            crash(x)
            y.copy_from(x)
        graph.run()
        for device in (b, a):
            with pytest.raises(wsgrad.DeviceLost, match=r"bad.*item 1 of its graph") as raised:
                device.synchronize(timeout=30)
            assert raised.value.details["item"] == 1
        y.fill(4)
        np.testing.assert_array_equal(y.numpy(), ints(4))


@pytest.fixture
def proxy(urls):
    with FaultyLink(urls[1]) as link:
        yield link


def crossing(a, b):
    """A graph that goes from one server to the other and back, and its first and last buffer."""
    size = 2 << 20
    x, y, z = a.zeros(size, np.int32), b.zeros(size, np.int32), a.zeros(size, np.int32)
    add = b.program(ADD, "add", writes=[0])
    with wsgrad.record(a, b) as graph:
        w = b.empty(size, np.int32)
        y.copy_from(x)
        add(w, y, size, wsgrad.Var("k", 1, 100))
        z.copy_from(w)
    return graph, x, z


def test_a_link_that_is_cut_fails_the_run_by_name_and_the_next_has_another(urls, proxy):
    with wsgrad.connect_all([f"{urls[0]}*1", f"{proxy.url}*1"]) as all_:
        graph, x, z = crossing(*all_.devices)
        graph.run(k=1, wait=True)
        assert proxy.connections == 2  # this client, and the link
        proxy.sparing = 1
        ends = " and ".join(server._address for server in all_.servers)
        for k in range(2, 6):
            x.fill(k)
            proxy.cut_after = k << 20
            with pytest.raises(wsgrad.ConnectionLost, match=f"the link between .* broke: .*{ends}"):
                graph.run(k=k, wait=True, timeout=30)
            graph.run(k=k, wait=True, timeout=30)
            assert proxy.connections == k + 1
            np.testing.assert_array_equal(z.numpy(), k * k)
        assert all_.statistics["relayed"] == 0
        graph.free()
        del graph
        gc.collect()
        all_.synchronize()


def test_a_link_that_is_cut_between_runs_costs_one_run_at_most(urls, proxy):
    with wsgrad.connect_all([f"{urls[0]}*1", f"{proxy.url}*1"]) as all_:
        graph, x, z = crossing(*all_.devices)
        graph.run(k=1, wait=True)
        proxy.sparing = 1
        for k in range(2, 5):
            proxy.cut()
            x.fill(k)
            with contextlib.suppress(wsgrad.ConnectionLost):  # it may be issued before the cut is heard of
                graph.run(k=k, wait=True, timeout=30)
            graph.run(k=k, wait=True, timeout=30)
            np.testing.assert_array_equal(z.numpy(), k * k)


async def test_a_cut_link_fails_the_run_of_the_trio_face_once(urls, proxy):
    async with wsgrad.open_all([f"{urls[0]}*1", f"{proxy.url}*1"]) as all_:
        a, b = all_.devices
        size = 2 << 20
        x, y, z = a.zeros(size, np.int32), b.zeros(size, np.int32), a.zeros(size, np.int32)
        with wsgrad.record(a, b) as graph:
            await y.copy_from(x)
            await z.copy_from(y)
        graph.run()
        await graph.wait()
        proxy.sparing = 1
        x.fill(3)
        proxy.cut_after = 3 << 20
        graph.run()
        with trio.fail_after(30), pytest.raises(wsgrad.ConnectionLost, match="the link between"):
            await graph.wait()
        graph.run()
        await graph.wait()
        np.testing.assert_array_equal(await z.numpy(), 3)


# -- trio


async def test_the_trio_face_does_the_same(urls):
    async with wsgrad.open_all([f"{urls[0]}*1", f"{urls[3]}*1"]) as all_:
        a, b = all_.devices
        data = np.arange(N, dtype=np.int32)
        x, y = await a.array(data), b.empty(N, np.int32)
        await y.copy_from(x)
        a.wait(b.signal())
        with wsgrad.record(a, b) as graph:
            await x[:3].copy_from(y[3:6])
        graph.run()
        await graph.wait()
        np.testing.assert_array_equal(await x[:3].numpy(), ints(3, 4, 5))
        await all_.synchronize()
        assert all_.statistics["relayed"] == 1
        last = all_
    assert last.closed
    with pytest.raises(wsgrad.ConnectionLost, match=r"ws://127\.0\.0\.1:9"):
        async with wsgrad.open_all([urls[0], "127.0.0.1:9"]):
            pass


async def test_the_end_of_the_trio_face_raises_what_no_call_has_met(urls):
    with pytest.raises(wsgrad.DeviceLost, match="bad"):  # noqa: PT012
        async with wsgrad.open_all(urls[:2]) as all_:
            x = await all_.devices[0].array(ints(1))
            all_.devices[0].program(CRASH, "crash", name="bad")(x)
