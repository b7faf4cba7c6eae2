"""A node that lies or floods costs itself: the server, its other nodes and their sessions go on meanwhile."""

import pytest
import trio
import trio.lowlevel
from heart import eventually, serving
from raw_node import raw_node
from test_nodes_present import opened

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.trio_driver import TrioConnection


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


async def still_works(queue):
    queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"fine"))
    assert await queue.read(1, 0, 4) == b"fine"
    queue.batch(c.Free(1))


@pytest.mark.parametrize(
    "forged",
    [
        m.Attach(1, 1, 0, {}),
        m.Result(2, 0, {}),
        m.Failed(7, 0, "DeviceLost", "x", {}),
        m.Spans(1, 1, False),
        m.Devices([]),
        m.Welcome(1, b"k" * 16, 0, {}),
        m.Join(1, "again", "raw", None, []),
        m.Hello(1, "x", None, 0, {}),
        m.Record(1, [], [], []),
        m.Open(1, "box/cpu/0", {}),
        m.Seen(5),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_messages_that_no_node_sends_cost_the_node_only(server, forged):
    async with raw_node(server) as node, server.client() as client:
        local = await client.open("box/cpu/0", 9)
        _, attach = await opened(client, node, "raw/cpu/0")
        assert attach.queue == 1
        node.send(forged, b"" if isinstance(forged, m.Spans | m.Record) else None)
        await eventually(lambda: node.closed is not None)
        failed, _ = await client.next(m.Failed)
        assert (failed.queue, failed.code) == (1, "DeviceLost")
        await still_works(local)


FLOODS = {
    "acknowledgements of nothing new": lambda queue: m.Ack(queue, 0),
    "times that nobody asked for": lambda queue: m.Time(1, 1),
    "looks": lambda queue: m.Present("x" * 60, False, 0),
    "answers for a queue that is closed": lambda queue: m.Ack(queue, 3),
    "pings": lambda queue: m.Ping(1),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_stops_nobody_else(server, kind):
    async with raw_node(server) as node, server.client() as client, trio.open_nursery() as nursery:
        local = await client.open("box/cpu/0", 9)
        _, attach = await opened(client, node, "raw/cpu/0")
        if "closed" in kind:
            client.send(m.Close(1))
            await node.next(m.Close)

        async def flood():
            while node.closed is None:
                for _ in range(200):
                    node.send(FLOODS[kind](attach.queue))
                await trio.lowlevel.checkpoint()

        nursery.start_soon(flood)
        with trio.fail_after(20):
            for _ in range(20):
                await still_works(local)
        nursery.cancel_scope.cancel()
    async with server.client() as late:
        await still_works(await late.open("box/cpu/0"))
        listed = [message for message, _ in client._kept if isinstance(message, m.Devices)]
        assert len(listed) < 100


async def test_a_node_that_never_joins_is_told_why_it_is_turned_away(cache, notes):
    async with serving(cache, handshake_seconds=0.3) as server, raw_node(server) as node, server.client() as client:
        stream = await trio.open_tcp_stream("127.0.0.1", server.node_port)
        silent = TrioConnection.from_stream(stream, client=True, max_bulk=1)
        with trio.fail_after(30):
            closed = await silent.run(lambda received: None)
        assert (closed.code, closed.reason) == (1008, "no Join came within 0.3 s (--handshake-seconds)")
        (refused,) = notes("refused")
        assert (refused["route"], refused["why"]) == ("/v1/node", closed.reason)
        await opened(client, node, "raw/cpu/0")
        assert node.closed is None
