"""Nodes that dial in: a real one in a process of its own serves several sessions; one that lies is sent away."""

import os
import signal
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from edge_port import TOKENS
from heart import ADD, as_word, eventually, serving
from joined_machine import joined
from raw_node import RawNode, raw_node

from wsgrad.graph.items import Device, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.server.config import Config
from wsgrad.server.listener import Port, open_listeners
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.trio_driver import TrioConnection


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=(), launch_seconds=5.0, node_grace=0.5) as server:
        yield server


@pytest.fixture
async def gate(server):
    """The port number of the whole edge in front of the hub: handshake, token and all."""
    listeners = await open_listeners("127.0.0.1", 0)
    port = Port(Config(), TOKENS, server.hub)
    await server.nursery.start(port.serve, listeners, server.nursery)
    return listeners[0].socket.getsockname()[1]


@pytest.fixture
def dialled_in(gate, tmp_path):
    """A machine that joins from a process of its own; gives the name that it got and the process."""

    @asynccontextmanager
    async def join(gate, name):
        async with joined(gate, name, token=TOKENS.node, state=tmp_path) as (ready, process):
            yield ready["name"], process

    return join


async def test_a_node_serves_two_sessions_and_keeps_them_apart(server, gate, dialled_in):
    async with dialled_in(gate, "The Box!") as (name, _):
        assert name == "the-box"
        async with server.client() as first, server.client() as second:
            queues = [await client.open("the-box/cpu/0", 7) for client in (first, second)]
            for index, queue in enumerate(queues):
                queue.batch(c.Alloc(1, 4000), c.Fill(1, 0, 4000, bytes([index + 1])))
            for index, queue in enumerate(queues):
                assert await queue.read(1, 0, 40) == bytes([index + 1]) * 40
            first.send(m.Bye())
            await first.wait_closed()
            assert await queues[1].read(1, 0, 40) == bytes([2]) * 40


async def test_transfers_programs_and_errors_are_like_a_local_nodes(server, gate, dialled_in):
    x = np.random.default_rng(3).random(1_000_000, np.float32)
    async with dialled_in(gate, "far") as (name, _), server.client() as client:
        queue = await client.open(f"{name}/cpu/0", 3)
        queue.batch(c.Alloc(1, x.nbytes), c.Alloc(2, x.nbytes))
        await queue.upload(1, x.tobytes())
        queue.program(0, ADD, "add", "ppfi", writes=[0])
        compiled, _ = await client.next(m.Compiled)
        assert (compiled.queue, compiled.ok) == (3, True)
        queue.launches([0, 0, 2, 1, as_word(2.0), x.size], 1)
        y = np.frombuffer(await queue.download(2, 0, x.nbytes), np.float32)
        np.testing.assert_array_equal(y, x + np.float32(2))
        await client.until(lambda: queue.credit == m.SLOTS)
        queue.program(1, "void bad(int *p) { *p = undeclared; }", "bad", "p")
        compiled, _ = await client.next(m.Compiled)
        assert not compiled.ok
        assert "undeclared" in compiled.message
        number = queue.launches([1, 0, 1], 1)
        failed = await queue.failure()
        assert (failed.number, failed.code) == (number, "CompileError")
        assert "undeclared" in failed.message
        number = queue.batch(c.Clear(number), c.Write(1, x.nbytes, b"x"))
        failed = await queue.failure()
        assert (failed.number, failed.code) == (number, "DeviceError")
        queue.batch(c.Clear(number))
        assert await queue.read(1, 0, 4) == x[:1].tobytes()


async def test_a_queue_that_is_closed_leaves_no_memory_in_its_node(server, gate, dialled_in):
    async with dialled_in(gate, "far") as (name, process), server.client() as client:

        async def open_and_close(number):
            await client.open(f"{name}/cpu/0", number)
            client.send(m.Close(number))

        async def mapped():
            await (await client.open(f"{name}/cpu/0", 100)).done()  # the node has seen the closing before it
            client.send(m.Close(100))
            return (await trio.Path(f"/proc/{process.pid}/maps").read_text()).count("\n")

        await open_and_close(1)
        before = await mapped()
        for number in range(2, 12):
            await open_and_close(number)
        assert await mapped() < before + 10


async def test_when_a_node_leaves_its_devices_are_lost_and_the_list_tells(server, gate, dialled_in):
    async with server.client() as client:
        async with dialled_in(gate, "far") as (name, process):
            devices, _ = await client.next(m.Devices)
            assert [device["id"] for device in devices.devices] == ["far/cpu/0"]
            assert devices.devices[0]["confined"] is True
            queue = await client.open(f"{name}/cpu/0", 2)
            queue.batch(c.Alloc(1, 4))
            await queue.done()
            os.kill(process.pid, signal.SIGKILL)
            failed = await queue.failure()
            assert failed.code == "DeviceLost"
            assert failed.details["lost"] is True
            assert "far" in failed.message
        devices, _ = await client.next(m.Devices, where=lambda message: not message.devices)
        number = queue.reopen()
        failed = await queue.failure()
        assert (failed.number, failed.code) == (number, "DeviceLost")


async def test_a_lost_device_reopens_on_the_node_that_came_back_under_its_name(server):
    async with server.client() as client:
        async with raw_node(server) as node:
            queue = await client_queue(client, node)
        assert (await queue.failure()).code == "DeviceLost"
        async with raw_node(server, secret=node.joined.secret) as back:
            number = queue.reopen()
            attach, _ = await back.next(m.Attach)
            back.send(m.Result(attach.queue, 0, {}))
            result, _ = await client.next(m.Result)
            assert result.number == number


async def test_names_are_unique_and_come_back_with_their_secret(server):
    async with raw_node(server, name="Mi Pad") as first, raw_node(server, name="mi-pad") as second:
        assert (first.joined.name, second.joined.name) == ("mi-pad", "mi-pad-2")
        assert [device["id"] for device in server.hub.devices] == ["mi-pad/cpu/0", "mi-pad-2/cpu/0"]
        # Who comes again while the old connection still stands takes its place.
        async with raw_node(server, name="other", secret=first.joined.secret) as again:
            assert again.joined.name == "mi-pad"
            await eventually(lambda: first.closed is not None)
            assert sorted(device["id"] for device in server.hub.devices) == ["mi-pad-2/cpu/0", "mi-pad/cpu/0"]
    async with raw_node(server, secret=second.joined.secret) as back:
        assert back.joined.name == "mi-pad-2"
    async with raw_node(server, name="mi-pad", secret="made up") as stranger:
        assert stranger.joined.name == "mi-pad-3"


@pytest.mark.parametrize(
    "device",
    [{}, {"kind": "CPU ../", "dialects": []}, {"kind": "cpu", "dialects": "c"}, {"kind": "cpu", "dialects": [1]}],
)
async def test_a_node_with_malformed_devices_is_refused(server, device):
    stream = await trio.open_tcp_stream("127.0.0.1", server.node_port)
    async with trio.open_nursery() as nursery:
        node = RawNode(TrioConnection.from_stream(stream, client=True, max_bulk=1))
        await nursery.start(node.run)
        node.send(m.Join(1, "test", "x", None, [device]))
        await eventually(lambda: node.closed is not None)
        assert node.closed.code == 1002
    assert server.hub.devices == []
    async with raw_node(server, name="x") as other:
        assert other.joined.name == "x"  # the name that it wanted is free


async def test_a_node_whose_devices_no_client_could_be_told_of_is_refused(server):
    words = dict.fromkeys(("label", "compiler", "arch", "cpu"), "w" * 200)
    devices = [{"kind": "cpu", "dialects": ["c"], **words}] * 60
    async with server.client() as client, raw_node(server, devices=devices):
        stream = await trio.open_tcp_stream("127.0.0.1", server.node_port)
        async with trio.open_nursery() as nursery:
            node = RawNode(TrioConnection.from_stream(stream, client=True, max_bulk=1))
            await nursery.start(node.run)
            node.send(m.Join(1, "test", "x", None, devices))
            await eventually(lambda: node.closed is not None)
            assert (node.closed.code, "bytes" in node.closed.reason) == (1008, True)
        assert len(server.hub.devices) == 60
        await client.next(m.Devices)
        async with server.client() as late:
            assert len(late.welcome.info["devices"]) == 60


async def test_a_node_is_asked_once_to_stop_a_download_however_often_the_client_says_so(server):
    async with raw_node(server) as node, server.client() as client:
        queue = await client_queue(client, node)
        queue.batch(c.Alloc(1, 1 << 20), c.Download(1, 1, 0, 1 << 20))
        await node.next(m.Batch)
        for _ in range(10):
            client.send(m.Abort(1, 1))
        queue.batch(c.Write(1, 0, b"x"))
        await node.next(m.Batch)
        assert sum(isinstance(message, m.Abort) for message, _ in node.received) == 1


@pytest.mark.parametrize(
    ("forged", "bulk"),
    [
        (m.Ack(1, 50), None),
        (m.Ack(99, 1), None),
        (m.Result(1, 1, 2.0), None),
        (m.ReadData(1, 1, 0), b"data"),
        (m.Chunk(1, 4, 0), bytes(100)),
        (m.Slot(1, 4, 0, 4, 100), None),
        (m.Credit(1, 4), None),
        (m.Compiled(1, 5, True, ""), None),
        (m.Failed(1, 50, "DeviceError", "x", {}), None),
        (m.Bye(), None),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_node_that_lies_is_sent_away_and_its_device_is_lost(server, forged, bulk):
    async with raw_node(server) as node, server.client() as client:
        client.queues[5] = None
        client.send(m.Open(5, "raw/cpu/0", {}))
        attach, _ = await node.next(m.Attach)
        node.send(m.Result(attach.queue, 0, {}))
        opened, _ = await client.next(m.Result)
        assert (opened.queue, opened.number) == (5, 0)
        node.send(forged, bulk)
        failed, _ = await client.next(m.Failed)
        assert (failed.queue, failed.code) == (5, "DeviceLost")
        await eventually(lambda: node.closed is not None)
        assert server.hub.devices == []


async def test_a_download_keeps_at_most_its_credit_of_chunks_for_a_client_that_does_not_look(server):
    size = 10 << 20
    async with raw_node(server) as node:
        async with server.client() as client:
            queue = await client_queue(client, node)
            queue.batch(c.Alloc(1, size), c.Download(1, 1, 0, size))
            await node.next(m.Batch)
            stop = trio.Event()
            stop.set()
        for index in range(m.SLOTS):
            node.send(m.Chunk(1, 1, index << 20), bytes(1 << 20))
        await eventually(lambda: server.hub.statistics.downloaded == m.SLOTS << 20)
        node.send(m.Chunk(1, 1, m.SLOTS << 20), bytes(1 << 20))
        await eventually(lambda: node.closed is not None)


async def client_queue(client, node):
    from heart import Queue

    queue = client.queues[1] = Queue(client, 1)
    client.send(m.Open(1, "raw/cpu/0", {}))
    attach, _ = await node.next(m.Attach)
    node.send(m.Result(attach.queue, 0, {}))
    await client.next(m.Result)
    return queue


async def test_graphs_run_and_transfer_between_nodes_that_dialled_in(server, gate, dialled_in):
    nbytes = 5 << 19
    x = np.random.default_rng(4).random(nbytes // 4, np.float32)
    one, two = Device(0, 0), Device(0, 1)
    recording = Recording()
    source, target = recording.buffer(one, nbytes, memory="x"), recording.buffer(two, nbytes, memory="y")
    halves = [Operand(Range(target, at, nbytes // 2)) for at in (0, nbytes // 2)]
    recording.add(Transfer(Range(target, 0, nbytes), Range(source, 0, nbytes)))
    recording.add(Launch(two, 0, "ppfi", (*halves, 1.5, Var("n", 1, nbytes // 8))))
    recording.add(Transfer(Range(source, 0, nbytes), Range(target, 0, nbytes)))
    part = encode(part_array(Plan(recording).parts[0]))
    async with dialled_in(gate, "near") as (near, _), dialled_in(gate, "far") as (far, _), server.client() as client:
        queues = [await client.open(f"{near}/cpu/0", 3), await client.open(f"{far}/cpu/0", 8)]
        for queue in queues:
            queue.batch(c.Alloc(1, nbytes))
        await queues[0].upload(1, x.tobytes())
        queues[1].program(0, ADD, "add", "ppfi", writes=[0])
        client.send(m.Record(1, [[0, 3], [1, 8]], [[source, 1], [target, 1]], []), part)
        for n in (nbytes // 8, 1000, 7):
            client.send(m.Run(1, [[queue.number, queue.next] for queue in queues], [], [n], 0))
            for queue in queues:
                queue.next += 1
            half = len(x) // 2
            x[:n] = x[half : half + n] + np.float32(1.5)
        for queue in queues:
            await queue.done()
            assert await queue.download(1, 0, nbytes) == x.tobytes()
