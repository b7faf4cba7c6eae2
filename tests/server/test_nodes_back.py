"""Nodes whose connection breaks: who may go on where it was, what is sent again, and when it is over."""

import pytest
import trio
from heart import eventually, serving
from raw_node import RawNode

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection
from wsgrad.transport.trio_driver import TrioConnection

DEVICES = [{"kind": "cpu", "dialects": ["c"]}]


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=(), node_grace=20.0) as server:
        yield server


class Dialled:
    """A node's connections, one after the other."""

    def __init__(self, server, nursery):
        self.server = server
        self.nursery = nursery

    async def join(self, secret=None, received=None, stay=None):
        stream = await trio.open_tcp_stream("127.0.0.1", self.server.node_port)
        node = RawNode(TrioConnection.from_stream(stream, client=True, max_bulk=2 << 20))
        node.stream = stream
        await self.nursery.start(node.run)
        node.send(m.Join(1, "test", "raw", secret, DEVICES, received, stay))
        node.joined, _ = await node.next(m.Joined)
        return node

    async def back(self, before, received):
        return await self.join(before.joined.secret, received, before.joined.info["stay"])

    async def cut(self, node):
        """End its connection, and wait until the server has seen that."""
        node.stream.socket.shutdown(2)
        await eventually(lambda: self.server.hub.node("raw").connection is None)


@pytest.fixture
async def dialled(server, nursery):
    return Dialled(server, nursery)


async def opened(client, node):
    """A queue of the client on the node, which has its attach."""
    client.send(m.Open(1, "raw/cpu/0", {}))
    attach, _ = await node.next(m.Attach)
    return attach.queue


async def test_what_the_node_has_not_seen_is_sent_again_and_nothing_else(server, dialled):
    first = await dialled.join()
    async with server.client() as client:
        number = await opened(client, first)
        first.send(m.Result(number, 0, DEVICES[0]))
        await client.next(m.Result)
        await dialled.cut(first)
        client.send(m.Batch(1, 1, [c.command_array(c.Alloc(1, 4))]))
        second = await dialled.back(first, 1)
        assert second.joined.received == 1
        batch, _ = await second.next(m.Batch)
        assert (batch.queue, batch.first) == (number, 1)
        await dialled.cut(second)
        third = await dialled.back(first, 1)  # it was cut before the batch had come
        batch, _ = await third.next(m.Batch)
        assert batch.first == 1
        third.send(m.Ack(number, 1))
        assert (await client.next(m.Ack))[0].number == 1
        assert not [message for message, _ in third.received if isinstance(message, m.Attach)]
    assert server.hub.statistics.node_resumes == 2


async def test_the_newest_connection_of_a_joining_goes_on(server, dialled):
    first = await dialled.join()
    async with server.client() as client:
        number = await opened(client, first)
        second = await dialled.back(first, 1)
        await eventually(lambda: first.closed is not None)
        assert first.closed.code == 1008
        second.send(m.Result(number, 0, DEVICES[0]))
        await client.next(m.Result)


@pytest.mark.parametrize("claim", ["another joining", "messages that never were", "no secret"])
async def test_who_can_not_go_on_joins_anew(server, dialled, claim):
    first = await dialled.join()
    async with server.client() as client:
        await opened(client, first)
        await dialled.cut(first)
        stay = first.joined.info["stay"]
        match claim:
            case "another joining":
                again = await dialled.join(first.joined.secret, 1, stay + 1)
            case "messages that never were":
                again = await dialled.join(first.joined.secret, 2, stay)
            case _:
                again = await dialled.join(None, 1, stay)
        assert again.joined.received is None
        if claim == "no secret":
            assert again.joined.name == "raw-2"
        else:
            failed, _ = await client.next(m.Failed)
            assert (failed.code, failed.details["lost"]) == ("DeviceLost", True)


async def test_a_node_that_comes_back_to_say_good_bye_leaves_once(server, dialled):
    first = await dialled.join()
    await dialled.cut(first)
    stream = await trio.open_tcp_stream("127.0.0.1", server.node_port)
    core = Connection(client=True, bulk_kinds=m.BULK_KINDS)
    join = m.Join(1, "test", "raw", first.joined.secret, DEVICES, 0, first.joined.info["stay"])
    parts = [part for message in (join, m.Bye()) for part in core.encode(encode(m.message_array(message)))]
    async with stream:
        await stream.send_all(b"".join(parts))  # both are read before anybody else has a turn
        await eventually(lambda: server.hub.node("raw") is None)
    assert server.hub.statistics.node_resumes == 1
    await dialled.join()


async def test_an_older_joining_is_not_put_into_the_place_of_a_newer(server, dialled):
    first = await dialled.join()
    await dialled.cut(first)
    second = await dialled.join(first.joined.secret)
    async with server.client() as client:
        await opened(client, second)
        await dialled.cut(second)
        assert (await dialled.back(first, 1)).joined.received is None


async def test_a_node_that_says_good_bye_is_not_waited_for(server, dialled):
    node = await dialled.join()
    node.send(m.Bye())
    await eventually(lambda: not server.hub.devices)


async def test_a_node_that_stays_away_is_lost_with_the_reason(cache, nursery):
    async with serving(cache, devices=(), node_grace=0.1) as server, server.client() as client:
        dialled = Dialled(server, nursery)
        node = await dialled.join()
        await opened(client, node)
        node.stream.socket.shutdown(2)
        failed, _ = await client.next(m.Failed)
        assert failed.code == "DeviceLost"
        await eventually(lambda: not server.hub.devices)
        assert (await dialled.back(node, 1)).joined.received is None


async def test_a_node_that_claims_to_have_seen_too_much_is_left(server, dialled):
    node = await dialled.join()
    node.send(m.Seen(1))
    await eventually(lambda: node.closed is not None)
    assert node.closed.code == 1002
    await eventually(lambda: not server.hub.devices)
