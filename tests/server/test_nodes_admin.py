"""What administrators do over HTTP: rename, pause, resume, kick and revoke nodes, and give out new tokens."""

import json
import logging
import os
import stat
from contextlib import asynccontextmanager

import pytest
import trio
from edge_port import WEBSOCKET, bearer, read_answer
from heart import eventually, serving
from raw_node import RawNode

from wsgrad.server.config import Config
from wsgrad.server.listener import Port, open_listeners
from wsgrad.server.rotation import rewritten
from wsgrad.server.tokens import Role, Tokens, load_tokens
from wsgrad.transport import messages as m
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.trio_driver import TrioConnection

TAB = {"kind": "browser", "dialects": ["wgsl"], "label": "Anna's phone", "memory": 1 << 30}
TEXT = "a" * 40, "b" * 40, "c" * 40


class Gate:
    """The whole edge in front of a hub."""

    def __init__(self, server, number, tokens):
        self.server = server
        self.number = number
        self.tokens = tokens

    async def post(self, path, body=b"", *headers, token=None, method="POST", length=None):
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.number}", *headers]
        lines.append(f"Content-Length: {len(body) if length is None else length}")
        lines.append(bearer(self.tokens.admin if token is None else token))
        stream = await trio.open_tcp_stream("127.0.0.1", self.number)
        async with stream:
            await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
            return await read_answer(stream)

    async def status(self, path, token):
        """The status of a request for a WebSocket or a document."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.number)
        async with stream:
            upgrade = WEBSOCKET if path.startswith("/v1") else ()
            lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{self.number}", *upgrade, bearer(token), "", ""]
            await stream.send_all("\r\n".join(lines).encode())
            return (await read_answer(stream)).status

    @asynccontextmanager
    async def node(self, *, name="tab", secret=None, token=None, devices=(TAB,)):
        stream = await trio.open_tcp_stream("127.0.0.1", self.number)
        headers = [("Authorization", f"Bearer {token or self.tokens.node}")]
        leftover = await open_websocket(
            stream, host="127.0.0.1", path="/v1/node", headers=headers, subprotocols=[m.SUBPROTOCOL]
        )
        async with trio.open_nursery() as nursery:
            node = RawNode(TrioConnection.from_stream(stream, client=True, max_bulk=2 << 20, leftover=leftover))
            await nursery.start(node.run)
            node.send(m.Join(1, "test agent", name, secret, list(devices)))
            node.joined, _ = await node.next(m.Joined)
            yield node
            node.send(m.Bye())
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def edge(server, tokens, *, tls=None, **settings):
    listeners = await open_listeners("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(Port(Config(**settings), tokens, server.hub, tls=tls).serve, listeners, nursery)
        yield Gate(server, listeners[0].socket.getsockname()[1], tokens)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=()) as server:
        yield server


@pytest.fixture
async def gate(server):
    async with edge(server, Tokens(*TEXT)) as gate:
        yield gate


async def test_a_node_is_renamed_and_clients_and_the_node_hear_of_it(server, gate):
    async with gate.node() as node, server.client() as client:
        answer = await gate.post("/admin/nodes/tab/rename", {"label": " The  big one\n"})
        assert (answer.status, json.loads(answer.body)["label"]) == (200, "The big one")
        shown, _ = await node.next(m.Present)
        assert shown == m.Present("The big one", False, 0)
        devices, _ = await client.next(m.Devices)
        assert [device["label"] for device in devices.devices] == ["The big one"]
        await gate.post("/admin/nodes/tab/rename", {"label": ""})
        devices, _ = await client.next(m.Devices)
        assert [device["label"] for device in devices.devices] == ["tab/browser/0"]


async def test_a_node_is_paused_and_resumed_and_keeps_its_label_and_cap(server, gate):
    async with gate.node() as node, server.client() as client:
        node.send(m.Present("Anna's phone", False, 1 << 20))
        await client.next(m.Devices)
        answer = await gate.post("/admin/nodes/tab/pause")
        assert json.loads(answer.body) | {"peer": ""} == {
            "name": "tab",
            "label": "Anna's phone",
            "paused": True,
            "memory": 1 << 20,
            "agent": "test agent",
            "peer": "",
            "away": False,
            "devices": ["tab/browser/0"],
            "queues": 0,
        }
        assert (await node.next(m.Present))[0] == m.Present("Anna's phone", True, 1 << 20)
        client.send(m.Open(1, "tab/browser/0", {}))
        failed, _ = await client.next(m.Failed)
        assert "is paused by its owner" in failed.message
        assert (await gate.post("/admin/nodes/tab/resume")).status == 200
        client.send(m.Open(2, "tab/browser/0", {}))
        await node.next(m.Attach)


async def test_a_kicked_node_is_told_so_and_may_come_again(gate):
    async with gate.node() as node:
        assert (await gate.post("/admin/nodes/tab/kick")).status == 200
        refused, _ = await node.next(m.Refused)
        assert refused.code == "Kicked"
        await eventually(lambda: node.closed is not None)
        assert node.closed.code == 1008
    async with gate.node(secret=node.joined.secret) as again:
        assert again.joined.name == "tab"


async def test_a_revoked_node_can_t_come_back_and_others_can(gate):
    async with gate.node() as node, gate.node(name="other") as other:
        old = gate.tokens.node
        answer = await gate.post("/admin/nodes/tab/revoke")
        assert json.loads(answer.body) == {"name": "tab", "node": gate.tokens.node}
        assert gate.tokens.node != old
        assert (await node.next(m.Refused))[0].code == "Unauthorized"
        await eventually(lambda: node.closed is not None)
        assert other.closed is None
    for token in (old, node.joined.secret):
        assert await gate.status("/v1/node", token) == 401
    async with gate.node(token=other.joined.secret, secret=other.joined.secret) as again:
        assert again.joined.name == "other"
    async with gate.node() as new:  # with the new token, under the name that is free again
        assert new.joined.name == "tab"


async def test_a_node_that_has_left_can_still_be_revoked(gate):
    async with gate.node() as node:
        pass
    await eventually(lambda: not gate.server.hub.devices)
    assert await gate.status("/v1/node", node.joined.secret) == 101
    assert (await gate.post("/admin/nodes/tab/kick")).status == 404
    assert (await gate.post("/admin/nodes/tab/revoke")).status == 200
    assert await gate.status("/v1/node", node.joined.secret) == 401
    assert (await gate.post("/admin/nodes/tab/revoke")).status == 404


async def test_the_server_s_own_devices_are_no_node(cache):
    async with serving(cache) as server, edge(server, Tokens(*TEXT)) as gate:
        for action in ("rename", "pause", "kick", "revoke"):
            assert (await gate.post(f"/admin/nodes/box/{action}", {"label": "x"})).status == 404


@pytest.mark.parametrize("action", ["nodes/tab/kick", "nodes/tab/revoke", "tokens/rotate"])
async def test_only_the_administrator_may(gate, action):
    async with gate.node() as node:
        for token, status in ((TEXT[0], 403), (TEXT[1], 403), ("wrong", 401), (node.joined.secret, 401)):
            assert (await gate.post(f"/admin/{action}", token=token)).status == status
        assert node.closed is None
    assert (gate.tokens.client, gate.tokens.node, gate.tokens.admin) == TEXT


async def test_only_the_server_s_own_pages_may(server):
    async with edge(server, Tokens(*TEXT), allow_origins=("https://elsewhere.example",)) as gate:
        for origin in ("https://elsewhere.example", "null", "http://127.0.0.1:1"):
            assert (await gate.post("/admin/nodes/tab/kick", b"", f"Origin: {origin}")).status == 403
        assert (await gate.post("/admin/nodes/tab/kick", b"", f"Origin: http://127.0.0.1:{gate.number}")).status == 404


@pytest.mark.parametrize(
    ("path", "body", "how", "status"),
    [
        ("/admin/nodes/tab/rename", b"", {}, 400),
        ("/admin/nodes/tab/rename", b"{", {}, 400),
        ("/admin/nodes/tab/rename", b"[]", {}, 400),
        ("/admin/nodes/tab/rename", b"[" * 4000, {}, 400),
        ("/admin/nodes/tab/rename", {"label": 5}, {}, 400),
        ("/admin/nodes/tab/rename", {"label": "\n\t"}, {}, 400),
        ("/admin/nodes/tab/rename", b" " * 4097, {}, 413),
        ("/admin/nodes/tab/rename", {"label": "x"}, {"method": "GET"}, 405),
        ("/admin/nodes/tab/rename", {"label": "x"}, {"length": "1, 2"}, 400),
        ("/admin/nodes/tab/paint", b"", {}, 404),
        ("/admin/nodes/../rename", b"", {}, 404),
        ("/admin/nodes/nobody/rename", {"label": "x"}, {}, 404),
        ("/admin/tokens/rotate", {"roles": []}, {}, 400),
        ("/admin/tokens/rotate", {"roles": ["king"]}, {}, 400),
        ("/admin/tokens/rotate", {"roles": "client"}, {}, 400),
        ("/status.json", b"x", {"method": "GET"}, 413),
        ("/status.json", b"", {}, 405),
    ],
    ids=str,
)
async def test_what_is_asked_wrongly_changes_nothing(gate, path, body, how, status):
    async with gate.node() as node:
        assert (await gate.post(path, body, **how)).status == status
        assert not any(isinstance(message, m.Present) for message, _ in node.received)
    assert (gate.tokens.client, gate.tokens.node, gate.tokens.admin) == TEXT


async def test_a_body_that_comes_in_pieces_is_put_together(gate):
    async with gate.node() as node:
        body = b'{"label": "in pieces"}'
        head = f"POST /admin/nodes/tab/rename HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", gate.number) as stream:
            await stream.send_all(f"{head}{bearer(gate.tokens.admin)}\r\n\r\n".encode() + body[:5])
            await stream.send_all(body[5:])
            assert (await read_answer(stream)).status == 200
        assert (await node.next(m.Present))[0].label == "in pieces"


async def test_new_tokens_let_in_at_once_and_old_ones_no_more(gate, caplog):
    caplog.set_level(logging.DEBUG)
    async with gate.node() as node, gate.server.client() as client:
        answer = await gate.post("/admin/tokens/rotate")
        new = json.loads(answer.body)
        assert new == {role.value: gate.tokens.of(role) for role in Role}
        assert new["admin"] == TEXT[2]
        for path, old, token in (("/v1/client", TEXT[0], "client"), ("/v1/node", TEXT[1], "node")):
            assert await gate.status(path, old) == 401
            assert await gate.status(path, new[token]) == 101
        assert node.closed is None  # who is in stays in
        assert client.closed is None
        assert (await gate.post("/admin/tokens/rotate", {"roles": ["admin"]})).status == 200
        assert (await gate.post("/admin/tokens/rotate")).status == 200
        assert await gate.status("/status.json", TEXT[2]) == 401
    assert not [secret for secret in (*TEXT, *new.values(), node.joined.secret) if secret in caplog.text]


@pytest.mark.parametrize("form", ["json", "lines"])
async def test_a_token_file_gets_the_new_tokens_and_keeps_the_rest(server, tmp_path, form):
    path = tmp_path / "tokens"
    if form == "json":
        path.write_text(json.dumps({"client": TEXT[0], "node": TEXT[1], "note": "mine"}))
    else:
        path.write_text(f"# ours\nclient = {TEXT[0]}\nWSGRAD_NODE_TOKEN={TEXT[1]}\n")
    path.chmod(0o644)
    tokens, _ = load_tokens(str(path), {})
    async with edge(server, tokens, token_file=str(path)) as gate:
        assert (await gate.post("/admin/tokens/rotate")).status == 200
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again, _ = load_tokens(str(path), {})
    assert (again.client, again.node) == (tokens.client, tokens.node)
    assert (again.client, again.node) != TEXT[:2]
    assert ('"note": "mine"' if form == "json" else "# ours\n") in path.read_text()
    assert tokens.admin not in path.read_text()  # it never stood there


async def test_a_token_file_that_can_t_be_written_leaves_all_as_it_was(server, tmp_path):
    path = tmp_path / "gone" / "tokens"
    async with edge(server, Tokens(*TEXT), token_file=str(path)) as gate:
        answer = await gate.post("/admin/tokens/rotate")
        assert answer.status == 500
        assert b"tokens" in answer.body
        assert (gate.tokens.client, gate.tokens.node, gate.tokens.admin) == TEXT


def test_a_link_to_a_token_file_stays_one(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text(f"client={TEXT[0]}\n")
    os.symlink(real, link)

    async def main():
        from wsgrad.server.rotation import Rotation

        await Rotation(Tokens(*TEXT), str(link)).rotate([Role.CLIENT])

    trio.run(main)
    assert link.is_symlink()
    assert TEXT[0] not in real.read_text()


def test_lines_without_tokens_are_kept_as_they_are():
    assert rewritten("# a=b\n\nadmin=x\nclient='y'\n", {Role.CLIENT: "new"}) == "# a=b\n\nadmin=x\nclient=new\n"
