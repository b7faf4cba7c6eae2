"""How nodes that dialled in are shown and used: labels, pauses, caps and loads, as clients are told of them."""

import pytest
import trio
from heart import Queue, eventually, serving
from raw_node import raw_node

from wsgrad.transport import messages as m

TAB = {
    "kind": "browser",
    "label": "Anna's phone",
    "dialects": ["wgsl"],
    "memory": 1 << 30,
    "adapter": "a fine GPU",
    "limits": {"maxBindGroups": 4, "maxComputeWorkgroupSizeX": 256},
    "paused": False,
}


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=()) as server:
        yield server


async def told(client, condition):
    """The first list of devices that is so."""
    message, _ = await client.next(m.Devices, where=lambda message: condition(message.devices))
    return message.devices


async def opened(client, node, device, number=1):
    queue = client.queues[number] = Queue(client, number)
    client.send(m.Open(number, device, {}))
    attach, _ = await node.next(m.Attach)
    node.send(m.Result(attach.queue, 0, {}))
    await client.next(m.Result)
    return queue, attach


async def test_a_tab_s_device_has_its_adapter_and_limits(server):
    async with raw_node(server, devices=[TAB]):
        [device] = server.hub.devices
    assert device == TAB | {"id": "raw/browser/0", "node": "raw", "index": 0, "queues": 0, "sessions": 0}


@pytest.mark.parametrize(
    "limits",
    [{"a": -1}, {"a": 1.5}, {"a": True}, {"a": 1 << 60}, {"a" * 60: 1}, [1], {str(i): 1 for i in range(17)}],
    ids=str,
)
async def test_limits_that_can_t_be_are_left_out(server, limits):
    async with raw_node(server, devices=[TAB | {"limits": limits}]):
        [device] = server.hub.devices
    assert "limits" not in device


async def test_what_could_write_on_a_terminal_is_taken_out_of_a_device_s_words(server):
    odd = "a\x1b[2J\x00\u202eb\n c"
    async with raw_node(server, devices=[TAB | {"label": odd, "adapter": odd, "dialects": ["wgsl", odd]}]) as node:
        [device] = server.hub.devices
        assert (device["label"], device["adapter"]) == ("a [2J b c", "a [2J b c")
        assert device["dialects"] == ["wgsl", "a [2J b c"]
        [shown] = server.hub.status()["nodes"]
        assert (node.joined.name, shown["label"]) == ("raw", "a [2J b c")


async def test_a_label_of_nothing_to_be_seen_is_none(server):
    async with raw_node(server, devices=[TAB | {"label": "\u202e \x07"}]):
        [device] = server.hub.devices
    assert device["label"] == "raw/browser/0"


async def test_a_node_says_how_it_is_shown_and_every_client_hears_of_it(server):
    async with raw_node(server, devices=[TAB]) as node, server.client() as first, server.client() as second:
        node.send(m.Present("  Ben's\n phone ", True, 1 << 28))
        for client in (first, second):
            [device] = await told(client, lambda devices: devices[0]["paused"])
            assert (device["label"], device["memory"]) == ("Ben's phone", 1 << 28)
        node.send(m.Present("", False, 0))
        [device] = await told(first, lambda devices: not devices[0]["paused"])
        assert (device["label"], device["memory"]) == ("raw/browser/0", 1 << 30)


async def test_a_node_with_several_devices_gives_each_a_label_of_its_own(server):
    async with raw_node(server, devices=[TAB, TAB]) as node, server.client() as client:
        node.send(m.Present("Lab", False, 0))
        devices = await told(client, lambda devices: devices[0]["label"].startswith("Lab"))
        assert [device["label"] for device in devices] == ["Lab/browser/0", "Lab/browser/1"]


async def test_a_paused_device_takes_no_new_queues_and_takes_them_again_when_it_is_resumed(server):
    async with raw_node(server, devices=[TAB]) as node, server.client() as client:
        node.send(m.Present("x", True, 0))
        await told(client, lambda devices: devices[0]["paused"])
        client.send(m.Open(1, "raw/browser/0", {}))
        failed, _ = await client.next(m.Failed)
        assert failed.code == "DeviceError"
        assert "'raw/browser/0' is paused by its owner" in failed.message
        client.send(m.Close(1))
        node.send(m.Present("x", False, 0))
        await told(client, lambda devices: not devices[0]["paused"])
        await opened(client, node, "raw/browser/0", 2)


async def test_a_node_is_told_which_client_attaches(server):
    async with raw_node(server, devices=[TAB]) as node, server.client() as client:
        _, attach = await opened(client, node, "raw/browser/0")
        assert attach.options["client"] == "test"


async def test_loads_are_told_to_everybody(server):
    async with raw_node(server, devices=[TAB]) as node, server.client() as watcher:

        async def load(queues, sessions):
            await told(watcher, lambda devices: (devices[0]["queues"], devices[0]["sessions"]) == (queues, sessions))

        async with server.client() as client:
            await opened(client, node, "raw/browser/0", 1)
            await opened(client, node, "raw/browser/0", 2)
            await load(2, 1)
            client.send(m.Close(2))
            await load(1, 1)
            client.send(m.Bye())
        await load(0, 0)


async def test_a_node_that_changes_its_looks_all_the_time_floods_nobody(server):
    async with raw_node(server, devices=[TAB]) as node, server.client() as client:
        start = trio.current_time()
        for index in range(500):
            node.send(m.Present(f"name {index}", False, 0))
        await told(client, lambda devices: devices[0]["label"] == "name 499")
        seconds = trio.current_time() - start
        others = sum(isinstance(message, m.Devices) for message, _ in client._kept)
        assert others <= 4 * seconds + 2


async def test_a_label_that_makes_the_list_too_long_costs_its_node(server):
    words = dict.fromkeys(("adapter", "compiler", "arch", "cpu"), "w" * 200)
    many = [{"kind": "cpu", "dialects": ["c"], **words}] * 60
    async with raw_node(server, devices=many), raw_node(server, name="more", devices=[TAB] * 16) as node:
        node.send(m.Present("\N{GRINNING FACE}" * 80, False, 0))
        await eventually(lambda: node.closed is not None)
        assert node.closed.code == 1008
        await eventually(lambda: len(server.hub.devices) == 60)


@pytest.mark.parametrize("code", ["DeviceLost", "Timeout"])
async def test_a_node_says_that_an_idle_queue_s_device_is_lost(server, code):
    async with raw_node(server, devices=[TAB]) as node, server.client() as client:
        _, attach = await opened(client, node, "raw/browser/0")
        node.send(m.Failed(attach.queue, 0, code, "the browser took the device away", {}))
        failed, _ = await client.next(m.Failed)
        assert (failed.number, failed.code, failed.details["lost"]) == (1, code, True)
        assert "the browser took the device away" in failed.message
        await node.next(m.Close)
        assert node.closed is None


async def test_an_idle_queue_can_t_fail_otherwise(server):
    async with raw_node(server, devices=[TAB]) as node, server.client() as client:
        _, attach = await opened(client, node, "raw/browser/0")
        node.send(m.Failed(attach.queue, 0, "LaunchError", "x", {}))
        await eventually(lambda: node.closed is not None)
