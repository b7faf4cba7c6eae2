"""Dropped connections: the session goes on over a new one, and every command still runs exactly once."""

import random
import socket
import threading
import time

import numpy as np
import pytest
import trio
from kernels import COUNT

import wsgrad
from benchmarks.faulty import FaultyLink
from wsgrad.client import async_driver
from wsgrad.transport import blocking_daemon
from wsgrad.transport.connection import Connection
from wsgrad.transport.messages import BULK_KINDS
from wsgrad.transport.trio_driver import TrioConnection


@pytest.fixture
def proxy(url):
    with FaultyLink(url) as link:
        yield link


def test_a_session_goes_on_after_a_cut(proxy):
    with wsgrad.connect(proxy.url) as server:
        device = server.devices["cpu"]
        x = device.array(np.arange(10))
        assert x.numpy().sum() == 45
        proxy.cut()
        assert x.numpy().sum() == 45
        assert proxy.connections == 2


def work(rng, device, model):
    """One random step on the device and on its model in NumPy; returns a check."""
    buffer, array, count, counter = model["buffer"], model["array"], model["count"], model["counter"]
    match rng.choice(["upload", "download", "launch", "small", "fill"]):
        case "upload":
            array[:] = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, len(array), np.uint8)
            return buffer.copy_from(array)
        case "download":
            return buffer.copy_to(model["target"])
        case "launch":
            for _ in range(rng.randrange(2000)):
                count(counter)
                model["launched"] += 1
        case "small":
            start = rng.randrange(len(array) - 10)
            values = np.arange(10, dtype=np.uint8)
            array[start : start + 10] = values
            return buffer[start : start + 10].copy_from(values)
        case "fill":
            start = rng.randrange(len(array) - 1000)
            array[start : start + 1000] = 7
            buffer[start : start + 1000].fill(7)


def make_model(device):
    return {
        "buffer": device.empty(3 << 20, np.uint8),
        "array": np.zeros(3 << 20, np.uint8),
        "target": np.zeros(3 << 20, np.uint8),
        "count": device.program(COUNT, "count"),
        "counter": device.zeros(1, np.int32),
        "launched": 0,
    }


@pytest.mark.parametrize("seed", range(12))
def test_each_command_runs_once_whatever_byte_the_cut_falls_on(proxy, seed):
    rng = random.Random(seed)
    with wsgrad.connect(proxy.url) as server:
        device = server.devices["cpu"]
        model = make_model(device)
        proxy.cut_after = rng.randrange(12 << 20)
        for _ in range(12):
            work(rng, device, model)
        proxy.cut_after = None
        assert np.array_equal(model["buffer"].numpy(), model["array"])
        assert model["counter"].numpy()[0] == model["launched"]


@pytest.mark.parametrize("seed", range(6))
async def test_the_trio_face_resumes_too(proxy, seed):
    rng = random.Random(100 + seed)
    async with wsgrad.open_server(proxy.url) as server:
        device = server.devices["cpu"]
        model = make_model(device)
        proxy.cut_after = rng.randrange(12 << 20)
        for _ in range(12):
            waiting = work(rng, device, model)
            if waiting is not None:
                await waiting
        proxy.cut_after = None
        assert np.array_equal(await model["buffer"].numpy(), model["array"])
        assert (await model["counter"].numpy())[0] == model["launched"]


def test_nothing_is_raised_while_the_connection_is_down_for_a_moment(proxy):
    with wsgrad.connect(proxy.url) as server:
        device = server.devices["cpu"]
        x = device.array(np.arange(10))
        x.numpy()
        proxy.accepting = False
        proxy.cut()
        x.fill(3)
        with pytest.raises(TimeoutError):
            x.numpy(timeout=0.1)
        assert "reconnecting" in repr(server)
        proxy.accepting = True
        assert x.numpy().tolist() == [3] * 10
        assert "open" in repr(server)


def test_every_pending_call_raises_within_a_second_when_the_server_is_gone(proxy):
    server = wsgrad.connect(proxy.url)
    device = server.devices["cpu"]
    spin = device.program("void spin(long n) { for (volatile long i = 0; i < n; i++); }", "spin")
    x = device.array(np.arange(10))
    spin.ready()
    spin(np.int64(3 << 30))
    errors = []

    def wait(call):
        with pytest.raises(wsgrad.ConnectionLost) as caught:
            call()
        errors.append((time.monotonic(), caught.value))

    calls = [x.numpy, device.synchronize, lambda: x.copy_to(np.empty(10, np.int64)), lambda: spin.timed(np.int64(1))]
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    while len(device._queue.pending._acks) + len(device._queue.pending._reads) < 3:
        time.sleep(0.001)
    start = time.monotonic()
    proxy.refuse()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert all(when - start < 1 for when, _ in errors)
    assert all("lost" in str(error) for _, error in errors)
    for call in (x.numpy, lambda: device.empty(3), lambda: spin(np.int64(1)), lambda: x[0]):
        with pytest.raises(wsgrad.ConnectionLost):
            call()
    assert server.closed
    server.close()


async def test_waiting_tasks_get_connection_lost_too(proxy):
    async with wsgrad.open_server(proxy.url) as server:
        device = server.devices["cpu"]
        x = await device.array(np.arange(10))
        spin = device.program("void spin(long n) { for (volatile long i = 0; i < n; i++); }", "spin")
        await spin.ready()
        spin(np.int64(3 << 30))
        lost = []

        async def wait():
            with pytest.raises(wsgrad.ConnectionLost):
                await x.numpy()
            lost.append(trio.current_time())

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                start = trio.current_time()
                proxy.refuse()
        assert all(when - start < 1 for when in lost)
        assert server.closed


def test_the_newest_connection_of_a_session_wins(url):
    first = wsgrad.connect(url)
    x = first.devices["cpu"].array(np.arange(3))
    second = wsgrad.client.core.Session(agent="thief")
    second.key, second.link = first._session.key, first._session.link
    driver = wsgrad.transport.blocking_driver.BlockingDriver(second, first._driver.dial, peer="test")
    driver.open(5)
    with pytest.raises(wsgrad.ConnectionLost, match="another connection"):
        x.numpy()
    driver.close()
    first.close()


def test_a_loss_that_no_call_met_is_raised_by_closing(proxy):
    server = wsgrad.connect(proxy.url)
    server.devices["cpu"].array(np.arange(10)).numpy()
    proxy.refuse()
    deadline = time.monotonic() + 5
    while not server.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(wsgrad.ConnectionLost, match="nothing listens there"):
        server.close()
    server.close()


async def test_a_loss_that_no_task_met_is_raised_at_the_end(proxy):
    async def lose():
        async with wsgrad.open_server(proxy.url) as server:
            await (await server.devices["cpu"].array(np.arange(10))).numpy()
            proxy.refuse()
            with trio.fail_after(5):
                while not server.closed:  # noqa: ASYNC110
                    await trio.sleep(0.01)

    with pytest.raises(wsgrad.ConnectionLost, match="nothing listens there"):
        await lose()


def dead_sockets(dials):
    """A way to connect whose every connection is over before the server has welcomed anybody."""

    def dial(timeout):
        dials.append(timeout)
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.setblocking(False)
        return ours, b""

    return dial


def test_connections_that_end_before_the_welcome_are_tried_with_pauses_within_the_grace_time(proxy):
    server = wsgrad.connect(proxy.url)
    x = server.devices["cpu"].array(np.arange(10))
    x.numpy()
    dials = []
    server._driver.dial = dead_sockets(dials)
    server._session.info["limits"]["resume_grace"] = 2.0
    proxy.cut()
    with pytest.raises(wsgrad.ConnectionLost, match="no new one within 2 s"):
        x.numpy(timeout=60)
    assert 2 <= len(dials) < 30
    server.close()


async def test_the_trio_face_pauses_and_gives_up_there_too(proxy, monkeypatch):
    async with wsgrad.open_server(proxy.url) as server:
        x = await server.devices["cpu"].array(np.arange(10))
        await x.numpy()
        dials = []

        async def opened():
            dials.append(1)
            ours, theirs = trio.testing.memory_stream_pair()
            await theirs.aclose()
            connection = Connection(client=True, bulk_kinds=BULK_KINDS)
            return TrioConnection(ours, connection, peer="test"), server._session.hello()

        monkeypatch.setattr(server._driver, "_open", opened)
        server._session.info["limits"]["resume_grace"] = 2.0
        proxy.cut()
        with trio.fail_after(60), pytest.raises(wsgrad.ConnectionLost, match="no new one within 2 s"):
            await x.numpy()
        assert 2 <= len(dials) < 30


def test_a_proxy_that_restarts_costs_a_pause(proxy, monkeypatch):
    monkeypatch.setattr(blocking_daemon, "REFUSED_SECONDS", 60.0)
    with wsgrad.connect(proxy.url) as server:
        x = server.devices["cpu"].array(np.arange(10))
        x.numpy()
        refused = threading.Event()
        dial = server._driver.dial

        def dialled(timeout):
            try:
                return dial(timeout)
            except ConnectionRefusedError:
                refused.set()
                raise

        server._driver.dial = dialled
        proxy.refuse()
        assert refused.wait(60)
        proxy.listen()
        assert x.numpy(timeout=60).tolist() == list(range(10))


async def test_a_proxy_that_restarts_costs_the_trio_face_a_pause(proxy, monkeypatch):
    monkeypatch.setattr(async_driver, "REFUSED_SECONDS", 60.0)
    async with wsgrad.open_server(proxy.url) as server:
        x = await server.devices["cpu"].array(np.arange(10))
        await x.numpy()
        refused = trio.Event()
        dial = server._driver._dial

        async def dialled():
            try:
                return await dial()
            except ConnectionRefusedError:
                refused.set()
                raise

        monkeypatch.setattr(server._driver, "_dial", dialled)
        proxy.refuse()
        with trio.fail_after(60):
            await refused.wait()
            proxy.listen()
            assert (await x.numpy()).tolist() == list(range(10))
