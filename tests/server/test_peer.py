"""Transfers between servers: by a link with a one-time ticket, else through the client; an end whatever breaks."""

import os
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
from heart import CRASH, eventually, serving

from wsgrad.errors import ProtocolError, Unauthorized
from wsgrad.server.config import Config, parse
from wsgrad.server.dialing import PeerRules, dial
from wsgrad.server.listener import Port, open_listeners
from wsgrad.server.routes import RELAYED, Inlet, Route
from wsgrad.server.tickets import Tickets, ticket_text
from wsgrad.server.tokens import Tokens
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode

MIB = 1 << 20


@asynccontextmanager
async def edged(cache, **settings):
    """A server of the heart's tests with a real port, where others can dial in."""
    async with serving(cache, **settings) as server:
        config = Config(port=0)
        listeners = await open_listeners(config.host, 0)
        port = Port(config, Tokens("a" * 32, "b" * 32, "c" * 32), server.hub)
        await server.nursery.start(lambda task_status: port.serve(listeners, server.nursery, task_status=task_status))
        server.url = f"ws://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        yield server


@asynccontextmanager
async def pair(cache, **settings):
    """Two servers, a client of each, and a queue on each."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(edged(cache, name="first", **settings))
        second = await stack.enter_async_context(edged(cache, name="second"))
        one = await stack.enter_async_context(first.client())
        two = await stack.enter_async_context(second.client())
        one.server, two.server = first, second
        one.queue, two.queue = await one.open("first/cpu/0"), await two.open("second/cpu/0")
        yield one, two


async def link(source, target, route=1, *, url=None, sha256=None, wait=True):
    target.send(m.Peer(route))
    ticket, _ = await target.next(m.Ticket)
    source.send(m.Dial(route, url or target.server.url, ticket.ticket, sha256))
    return (await source.next(m.Dialled))[0] if wait else None


def transfer(source, target, number, nbytes, *, route=1, sizes=None):
    sent, wanted = sizes or (nbytes, nbytes)
    return (
        source.queue.batch(c.Send(number, 1, 0, sent, route)),
        target.queue.batch(c.Receive(number, 1, 0, wanted, route)),
    )


async def relay(source, target):
    """What a client does: it carries everything with a transfer's id from each server to the other."""

    async def carry(here, there):
        while True:
            message, bulk = await here.next(
                m.Chunk, m.Credit, m.Ack, m.Failed, m.Abort, where=lambda message: message.queue >= RELAYED
            )
            there.link.push(encode(m.message_array(message)), bulk)
            there.connection.wake()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carry, source, target)
        nursery.start_soon(carry, target, source)


async def test_a_transfer_over_a_link_is_whole_and_the_client_sees_none_of_it(cache):
    nbytes = 9 * MIB + 5
    data = os.urandom(nbytes)
    async with pair(cache) as (one, two):
        dialled = await link(one, two)
        assert dialled.code is None
        for client in (one, two):
            client.queue.batch(c.Alloc(1, nbytes))
        await one.queue.upload(1, data)
        for number, size in enumerate([0, 1, MIB, nbytes], 1):
            transfer(one, two, number, size)
        one.queue.batch(c.Fill(1, 0, nbytes, b"\xff"))
        assert await two.queue.download(1, 0, nbytes) == data
        await one.queue.done()
        await two.queue.done()
        for client in (one, two):
            session = client.server.session(client)
            await eventually(lambda session=session: not len(session.transfers))
            assert not session.routes._outlets
            assert not session.routes._inlets
        assert two.server.hub.statistics.relayed == 0


async def test_commands_may_come_before_the_link_is_open(cache):
    async with pair(cache) as (one, two):
        for client in (one, two):
            client.queue.batch(c.Alloc(1, 6 * MIB))
        one.queue.batch(c.Fill(1, 0, 6 * MIB, b"\7"))
        transfer(one, two, 1, 6 * MIB)
        await one.queue.done(2)
        assert (await link(one, two)).code is None
        assert await two.queue.read(1, 6 * MIB - 1, 1) == b"\7"


async def test_both_directions_at_once(cache):
    async with pair(cache) as (one, two):
        for client, value in ((one, b"\1"), (two, b"\2")):
            client.queue.batch(c.Alloc(1, 8 * MIB), c.Alloc(2, 8 * MIB), c.Fill(1, 0, 8 * MIB, value))
        await link(one, two, 1)
        await link(two, one, 2)
        for number in range(1, 9, 2):
            one.queue.batch(c.Send(number, 1, 0, 8 * MIB, 1))
            two.queue.batch(c.Receive(number, 2, 0, 8 * MIB, 1))
            two.queue.batch(c.Send(number + 1, 1, 0, 8 * MIB, 2))
            one.queue.batch(c.Receive(number + 1, 2, 0, 8 * MIB, 2))
        assert await one.queue.read(2, 8 * MIB - 1, 1) == b"\2"
        assert await two.queue.read(2, 8 * MIB - 1, 1) == b"\1"


@pytest.mark.parametrize("why", ["not allowed", "nobody there", "wrong ticket"])
async def test_without_a_link_transfers_go_through_the_client(cache, why):
    nbytes = 7 * MIB + 1
    data = os.urandom(nbytes)
    settings = {"allow_peers": ("elsewhere:7667",)} if why == "not allowed" else {}
    async with pair(cache, **settings) as (one, two), trio.open_nursery() as nursery:
        for client in (one, two):
            client.queue.batch(c.Alloc(1, nbytes))
        await one.queue.upload(1, data)
        transfer(one, two, 1, nbytes)  # issued while nobody knows yet
        if why == "wrong ticket":
            two.send(m.Peer(1))
            await two.next(m.Ticket)
            one.send(m.Dial(1, two.server.url, bytes(16), None))
            dialled, _ = await one.next(m.Dialled)
        else:
            dialled = await link(one, two, url="ws://127.0.0.1:9" if why == "nobody there" else None)
        assert dialled.code == ("ConnectionLost" if why == "nobody there" else "Unauthorized")
        if why == "not allowed":
            assert "--allow-peer" in dialled.message
        nursery.start_soon(relay, one, two)
        assert await two.queue.download(1, 0, nbytes) == data
        transfer(one, two, 2, nbytes)
        await two.queue.done()
        await one.queue.done()
        assert two.server.hub.statistics.relayed == 2 * nbytes
        nursery.cancel_scope.cancel()


async def test_a_slow_client_bounds_what_is_under_way(cache):
    async with pair(cache, allow_peers=("elsewhere",)) as (one, two):
        for client in (one, two):
            client.queue.batch(c.Alloc(1, 32 * MIB))
        await link(one, two)
        transfer(one, two, 1, 32 * MIB)
        for _ in range(m.SLOTS):
            await one.next(m.Chunk)
        one.queue.batch(c.Read(1, 0, 1))
        with trio.move_on_after(0.2):
            await one.next(m.Chunk)
            pytest.fail("a fifth chunk came without credit")


@pytest.mark.parametrize("relayed", [False, True])
async def test_failures_reach_the_other_server_with_their_cause(cache, relayed):
    settings = {"allow_peers": ("elsewhere",)} if relayed else {}
    async with pair(cache, **settings) as (one, two), trio.open_nursery() as nursery:
        if relayed:
            nursery.start_soon(relay, one, two)
        for client in (one, two):
            client.queue.batch(c.Alloc(1, 16 * MIB))
        await link(one, two)
        # At the source, before the send.
        one.queue.batch(c.Read(9, 0, 1))
        transfer(one, two, 1, 16 * MIB)
        first, second = await one.queue.failure(), await two.queue.failure()
        assert (first.code, first.message) == (second.code, second.message)
        assert second.details["cause"] == "first/cpu/0"
        one.queue.batch(c.Clear(first.number))
        two.queue.batch(c.Clear(second.number))
        # At the target: the source goes on.
        _, received = transfer(one, two, 2, 16 * MIB, sizes=(16 * MIB, 17 * MIB))
        failed = await two.queue.failure()
        assert failed.number == received
        await one.queue.done()
        two.queue.batch(c.Clear(failed.number))
        # The sizes differ, either way.
        for number, sizes in ((3, (3 * MIB, 2 * MIB)), (4, (2 * MIB, 3 * MIB)), (5, (0, 4)), (6, (4, 0))):
            transfer(one, two, number, 0, sizes=sizes)
            await one.queue.done()
            failed = await two.queue.failure()
            assert f"a transfer of {sizes[0]} bytes to a place of {sizes[1]} bytes" in failed.message
            two.queue.batch(c.Clear(failed.number))
        # A device that is lost in the middle.
        one.queue.program(0, CRASH, "crash", "p", name="bad")
        one.queue.launches([0, 0, 1], 1)
        transfer(one, two, 7, 16 * MIB)
        failed = await two.queue.failure()
        assert failed.code == "DeviceLost"
        assert "bad" in failed.message
        assert "lost" not in failed.details
        two.queue.batch(c.Clear(failed.number), c.Write(1, 0, b"on"))
        assert await two.queue.read(1, 0, 2) == b"on"
        for client in (one, two):
            session = client.server.session(client)
            await eventually(lambda session=session: not session.routes._outlets and not session.routes._inlets)
        nursery.cancel_scope.cancel()


async def test_a_link_that_breaks_fails_its_transfers_and_names_both_servers(cache):
    async with pair(cache) as (one, two):
        for client in (one, two):
            client.queue.batch(c.Alloc(1, 1 << 28))
        await link(one, two)
        transfer(one, two, 1, 1 << 28)
        await eventually(lambda: one.server.hub.statistics.transferred > 8 * MIB)
        session = one.server.session(one)
        session.routes._routes[1].connection.close(1011, "pulled by the test")
        failed = await two.queue.failure()
        assert failed.code == "ConnectionLost"
        assert "'second'" in failed.message
        assert "pulled by the test" in failed.message
        await one.queue.done()
        dialled, _ = await one.next(m.Dialled)
        assert dialled.code == "ConnectionLost"
        assert "'first'" in dialled.message
        assert two.server.url in dialled.message
        two.queue.batch(c.Clear(failed.number))
        # The way stays closed, a new one may be opened.
        transfer(one, two, 2, MIB)
        failed = await two.queue.failure()
        two.queue.batch(c.Clear(failed.number))
        assert (await link(one, two, 2)).code is None
        transfer(one, two, 3, MIB, route=2)
        await two.queue.done()


@pytest.mark.parametrize("who", ["source", "target"])
async def test_a_session_that_ends_takes_its_links_with_it(cache, who):
    async with pair(cache) as (one, two):
        for client in (one, two):
            client.queue.batch(c.Alloc(1, 1 << 28))
        await link(one, two)
        transfer(one, two, 1, 1 << 28)
        await eventually(lambda: one.server.hub.statistics.transferred > 8 * MIB)
        (one if who == "source" else two).send(m.Bye())
        if who == "source":
            failed = await two.queue.failure()
            assert failed.code == "ConnectionLost"
        else:
            await one.queue.done()
            one.queue.batch(c.Write(1, 0, b"on"))
            assert await one.queue.read(1, 0, 2) == b"on"


async def test_a_ticket_is_good_once_and_only_for_a_while(cache, monkeypatch):
    rules = PeerRules(Config())
    async with edged(cache, name="first") as server, server.client() as client:
        client.send(m.Peer(1))
        ticket, _ = await client.next(m.Ticket)
        connection = await dial(rules, server.url, ticket.ticket, None)
        server.nursery.start_soon(connection.run, lambda received: None)
        with pytest.raises(Unauthorized):
            await dial(rules, server.url, ticket.ticket, None)
        client.send(m.Peer(2))
        ticket, _ = await client.next(m.Ticket)
        monkeypatch.setattr("wsgrad.server.tickets.time", SimpleNamespace(monotonic=lambda: 1e12))
        with pytest.raises(Unauthorized, match="too old"):
            await dial(rules, server.url, ticket.ticket, None)
        connection.close(1000, "")


async def test_what_no_server_says_ends_the_link_only(cache):
    rules = PeerRules(Config())
    async with edged(cache, name="first") as server, server.client() as client:
        queue = await client.open("first/cpu/0")
        queue.batch(c.Alloc(1, 4))
        for number, (message, bulk) in enumerate(
            [
                (m.Batch(1, 1, [[1, 1, 1]]), None),
                (m.Chunk(5, 0, 4096), b"x"),
                (m.Chunk(5, 0, 0), b""),
                (m.Bye(), None),
            ],
            1,
        ):
            client.send(m.Peer(number))
            ticket, _ = await client.next(m.Ticket)
            connection = await dial(rules, server.url, ticket.ticket, None)
            connection.send(encode(m.message_array(message)), bulk)
            with trio.fail_after(10):
                closed = await connection.run(lambda received: None)
            assert closed.code == 1002
            dialled, _ = await client.next(m.Dialled)
            assert dialled.route == number
        assert await queue.read(1, 0, 4) == bytes(4)


def test_a_chunk_without_credit_is_refused():
    class Flow:
        number = 1
        offered = 0

        def offer(self, bulk, taken, *, owned):
            self.offered += 1

    inlet = Inlet(Route(None, 1), Flow())
    for index in range(m.SLOTS):
        inlet.chunk(index, memoryview(b"x"), client=False)
    with pytest.raises(ProtocolError):
        inlet.chunk(m.SLOTS, memoryview(b"x"), client=False)
    assert inlet.flow.offered == m.SLOTS


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        ({}, ["127.0.0.1", "::1"], ["10.0.0.1"]),
        ({"host": "0.0.0.0"}, [], ["127.0.0.1", "10.0.0.1"]),
        ({"allow_peers": ("10.0.0.1",)}, ["10.0.0.1"], ["127.0.0.1", "10.0.0.2"]),
        ({"allow_peers": ("10.0.0.1:1",)}, [], ["10.0.0.1"]),
        ({"allow_peers": ("name:7667",)}, ["name=10.0.0.9"], ["other=10.0.0.9"]),
    ],
)
def test_which_servers_may_be_dialled(settings, allowed, refused):
    rules = PeerRules(Config(**settings))
    for wanted, texts in ((True, allowed), (False, refused)):
        for text in texts:
            name, _, address = text.partition("=")
            assert rules.allows(name, address or name, 7667) is wanted, text


def test_allowed_peers_are_read_from_the_command_line():
    assert parse(["--allow-peer", "Box:7667", "--allow-peer", "10.0.0.1"], {}).allow_peers == ("box:7667", "10.0.0.1")


def test_tickets_of_a_session_that_is_over_are_worth_nothing():
    tickets = Tickets()
    route = Route(None, 1)
    ticket = tickets.make(route)
    tickets.forget(route)
    assert tickets.take(ticket_text(ticket)) is None
