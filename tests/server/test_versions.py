"""Peers of other versions: refused by name, with both versions and what to do; nobody else notices."""

import pytest
import trio
from edge_port import bearer
from edge_port import serving as edge_serving
from heart import Client, serving
from raw_node import RawNode
from test_nodes_admin import TEXT, edge

import wsgrad
from wsgrad.client import core
from wsgrad.server import joining
from wsgrad.server.config import version
from wsgrad.server.joining import Machine
from wsgrad.server.limits import Limits
from wsgrad.server.tickets import ticket_text
from wsgrad.server.tokens import Tokens
from wsgrad.server.versions import OtherVersion
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.trio_driver import TrioConnection
from wsgrad.transport.url import parse_endpoint


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=()) as server:
        yield server


@pytest.fixture
async def gate(server):
    async with edge(server, Tokens(*TEXT)) as gate:
        yield gate


async def said_to(port, kind, *first):
    """What the server answers to a first message, and how it closes."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    peer = kind(TrioConnection.from_stream(stream, client=True, max_bulk=1 << 20))
    async with trio.open_nursery() as nursery:
        await nursery.start(peer.run)
        peer.connection.send(encode(list(first)))
        refused, _ = await peer.next(m.Refused)
        with trio.fail_after(20):
            while peer.closed is None:  # noqa: ASYNC110
                await trio.sleep(0.01)
    return refused, peer.closed


OURS = f"this server (wsgrad {version()}) speaks version {m.VERSION} of the protocol"


@pytest.mark.parametrize(
    ("spoken", "agent", "rest", "remedy"),
    [
        (m.VERSION + 1, "wsgrad-python/9", [None, 0, {}], "update the server, or use a release of its version"),
        (m.VERSION + 1, "wsgrad-python/9", ["what", "no", "message", "of", "ours", "has"], "update the server"),
        (0, "wsgrad-python/0.0", [None, 0, {}], "update it: pip install --upgrade wsgrad"),
    ],
)
async def test_a_client_of_another_version_is_told_both_and_what_to_do(server, spoken, agent, rest, remedy):
    refused, closed = await said_to(server.port, Client, m.Hello.KIND, spoken, agent, *rest)
    assert refused.code == "ProtocolError"
    assert refused.message.startswith(f"{OURS}, {agent} speaks version {spoken}: {remedy}")
    assert closed.code == 1008
    assert not server.hub.status()["sessions"]
    async with server.client() as client:
        assert isinstance(client.welcome, m.Welcome)


@pytest.mark.parametrize(
    ("spoken", "agent", "remedy"),
    [
        (0, "Firefox on Linux", "reload its page, or update it"),
        (0, "wsgrad-serve 0.0", "update it: pip install --upgrade wsgrad"),
        (m.VERSION + 1, "Firefox on Linux", "update the server"),
    ],
)
async def test_a_node_of_another_version_is_told_both_and_what_to_do(server, spoken, agent, remedy):
    refused, closed = await said_to(server.node_port, RawNode, m.Join.KIND, spoken, agent, "far", None, [])
    assert refused.code == "ProtocolError"
    assert refused.message.startswith(f"{OURS}, {agent} speaks version {spoken}: {remedy}")
    assert closed.code == 1008
    assert not server.hub._registry._names


async def test_a_python_client_raises_it_at_once(gate, monkeypatch):
    monkeypatch.setattr(core, "VERSION", m.VERSION + 1)
    url = f"ws://127.0.0.1:{gate.number}#token={TEXT[0]}"
    with pytest.raises(wsgrad.ProtocolError, match=r"wsgrad-python/\S+ speaks version 2: update the server"):
        async with wsgrad.open_server(url):
            pass

    def connect():
        with wsgrad.connect(url):
            pass

    with pytest.raises(wsgrad.ProtocolError, match=f"wsgrad-python/{wsgrad.__version__} speaks version 2"):
        await trio.to_thread.run_sync(connect)


class Membership:
    """What a machine remembers of a hub, in memory."""

    label, paused, secret, path = "", False, None, None

    def keep(self):
        pass

    forget = keep


async def test_a_machine_that_joins_for_the_first_time_ends_with_it(gate, monkeypatch):
    monkeypatch.setattr(joining, "VERSION", m.VERSION + 1)
    hub = parse_endpoint(f"ws://127.0.0.1:{gate.number}")
    devices = [{"kind": "cpu", "dialects": ["c"]}]
    machine = Machine(
        hub, TEXT[1], "far", Membership(), devices=devices, open_device=None, limits=Limits(), programs=None
    )
    with (
        trio.fail_after(30),
        pytest.raises(OtherVersion, match=r"wsgrad-serve \S+ speaks version 2: update the server"),
    ):
        await machine.run(lambda: None)


async def test_another_server_of_another_version_is_told_which_is_spoken():
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    key, offer = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol: wsgrad.v2"
    async with edge_serving() as edge:
        ticket = edge.hub.tickets.make(object())
        answer = await edge.ask("/v1/peer", bearer(ticket_text(ticket)), *upgrade, key, offer)
    assert answer.status == 400
    assert "speaks the WebSocket subprotocol wsgrad.v1, which was not offered" in answer.body.decode()
