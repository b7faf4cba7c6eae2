"""Devices that come and go: waiting for one, choosing the least loaded, in both faces and of many servers."""

import secrets
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import trio
from real_servers import running
from small_node import SmallNode

import wsgrad

TOKEN = secrets.token_urlsafe()


@pytest.fixture(scope="module")
def hub():
    with running("--device", "none", WSGRAD_NODE_TOKEN=TOKEN) as url:
        yield url


@pytest.fixture(scope="module")
def other():
    with running("--device", "none", WSGRAD_NODE_TOKEN=TOKEN) as url:
        yield url


@pytest.fixture
def join():
    """Nodes that leave at the end of the test; `later=True` for one that comes a moment after."""
    nodes, threads = ExitStack(), []

    def start(url, name, *, later=False, **how):
        if later:
            threads.append(threading.Timer(0.2, start, (url, name), how))
            threads[-1].start()
            return None
        return nodes.enter_context(SmallNode(url, TOKEN, name, **how))

    yield start
    for thread in threads:
        thread.join()
    nodes.close()


def until(devices, condition):
    """Let the server speak until it is so."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        devices._look()


@pytest.mark.parametrize(("node", "name"), [("a", "browser"), ("b", "b/browser/0"), ("c", "My phone")])
def test_a_device_that_comes_later_is_waited_for_by_kind_id_or_label(hub, join, node, name):
    with wsgrad.connect(hub) as server:
        until(server.devices, lambda: not server.devices)
        join(hub, node, later=True, label="My phone")
        device = server.wait_for_device(name, timeout=20)
        assert device is server.devices[name]
        assert (device.kind, device.label) == ("browser", "My phone")
        assert server.wait_for_device(device.id, timeout=0) is device


def test_a_wait_that_takes_too_long_says_what_there_is(hub):
    offer = r"no device 'fridge' .* within 0\.01 s; ws://.* offers"
    with wsgrad.connect(hub) as server, pytest.raises(TimeoutError, match=offer):
        server.wait_for_device("fridge", timeout=0.01)
    with pytest.raises(wsgrad.ConnectionLost):
        server.wait_for_device("fridge", timeout=5)


def test_a_paused_device_is_waited_for_until_it_is_resumed(hub, join):
    with wsgrad.connect(hub) as server:
        node = join(hub, "sleepy")
        device = server.wait_for_device("sleepy", timeout=20)
        node.present("sleepy", paused=True)
        until(server.devices, lambda: device.properties.get("paused"))
        with pytest.raises(TimeoutError):
            server.wait_for_device("sleepy", timeout=0.01)
        with pytest.raises(wsgrad.DeviceError, match=rf"no device takes work now: {device.id} paused or lost"):
            server.devices.least_loaded("sleepy")
        timer = threading.Timer(0.2, node.present, ("sleepy",))
        timer.start()
        assert server.wait_for_device("sleepy", timeout=20) is device
        timer.join()


async def test_the_trio_face_waits_as_a_coroutine(hub, join):
    async with wsgrad.open_server(hub) as server:
        with trio.move_on_after(0.05) as scope:
            await server.wait_for_device("nobody")
        assert scope.cancelled_caught
        join(hub, "async", later=True)
        with trio.fail_after(20):
            device = await server.wait_for_device("async")
        assert device.kind == "browser"


def test_many_servers_are_waited_for_together(hub, other, join):
    with wsgrad.connect_all([hub, other]) as servers:
        with pytest.raises(TimeoutError, match="no device 'none' "):
            servers.wait_for_device("none", timeout=0.01)
        join(other, "second", later=True)
        device = servers.wait_for_device("second", timeout=20)
        assert device.server is servers.servers[1]
        assert servers.devices[np.int64(len(servers.devices) - 1)] is device


async def test_many_servers_are_waited_for_together_in_the_trio_face(hub, other, join):
    async with wsgrad.open_all([hub, other]) as servers:
        join(other, "third", later=True)
        with trio.fail_after(20):
            device = await servers.wait_for_device("third")
        assert device.server is servers.servers[1]


def test_the_least_loaded_device_is_chosen_by_everybody_s_queues(hub, join):
    for number in range(3):
        join(hub, f"many{number}", label="many")
    with wsgrad.connect(hub) as server, wsgrad.connect(hub) as stranger:
        until(server.devices, lambda: sum(device.label == "many" for device in server.devices) == 3)
        first, second, third = [device for device in server.devices if device.label == "many"]
        assert server.devices.least_loaded("many") is first
        first.empty(4)  # what we use ourselves counts at once
        assert server.devices.least_loaded("many") is second
        until(stranger.devices, lambda: second.id in [device.id for device in stranger.devices])
        stranger.devices[second.id].empty(4)
        stranger.flush()
        until(server.devices, lambda: second.properties["queues"] == 1)
        assert server.devices.least_loaded("many") is third
        third.empty(4)
        third.empty(4)
        for device in (first, third):
            device.flush()
            until(server.devices, lambda device=device: device.properties["queues"] == 1)
        assert server.devices.least_loaded("many") is second  # as many queues everywhere, but none of our work there
        stranger.devices[second.id].close()
        server._end()
        stranger._end()


def test_without_any_device_there_is_no_least_loaded_one(hub, other):
    offers = r"no device 'toaster'; .* offers .*; .* offers"
    with wsgrad.connect_all([hub, other]) as servers, pytest.raises(wsgrad.DeviceError, match=offers):
        servers.devices.least_loaded("toaster")


@pytest.mark.parametrize("index", [np.int64(0), np.uint8(0), np.intp(-1)])
def test_numpy_s_integers_are_indices(server, index):
    assert server.devices[index] is server.devices[int(index)]


@pytest.mark.parametrize("index", [1.0, None, np.float32(0)])
def test_other_things_are_no_indices(server, index):
    with pytest.raises(TypeError):
        server.devices[index]
