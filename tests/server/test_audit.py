"""The audit log: who came in, as what, until when, who was refused; and no secret in anything that is said."""

import base64
import errno
import json
import logging
import os
import stat
from contextlib import asynccontextmanager

import pytest
import trio
from edge_port import UPGRADE, WEBSOCKET, bearer, read_answer
from heart import Client
from raw_node import RawNode
from server_process import running_server

from wsgrad.server import audit, logs
from wsgrad.server.tickets import ticket_text
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.trio_driver import TrioConnection

MISTYPED = "wrong-token-0123456789"
TAB = {"kind": "browser", "dialects": ["wgsl"], "label": "Anna's phone"}


async def ask(ready, path, *headers, method="GET", body=b""):
    async with await trio.open_tcp_stream("127.0.0.1", ready["port"]) as stream:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{ready['port']}", *headers]
        lines.append(f"Content-Length: {len(body)}" if method == "POST" else "Accept: */*")
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
        return await read_answer(stream)


@asynccontextmanager
async def opened(ready, path, token, kind, *headers):
    """A connection that was let in, with whatever of the tests' peers is to speak on it."""
    stream = await trio.open_tcp_stream("127.0.0.1", ready["port"])
    leftover = await open_websocket(
        stream,
        host=f"127.0.0.1:{ready['port']}",
        path=path,
        headers=[("Authorization", f"Bearer {token}"), *headers],
        subprotocols=[m.SUBPROTOCOL],
    )
    connection = TrioConnection.from_stream(stream, client=True, max_bulk=2 << 20, leftover=leftover)
    peer = kind(connection)
    async with trio.open_nursery() as nursery:
        await nursery.start(peer.run)
        yield peer
        nursery.cancel_scope.cancel()


async def hello(client, agent, key=None):
    client.connection.send(encode(m.message_array(m.Hello(1, agent, key, client.link.received, {}))))
    answer, _ = await client.next(m.Welcome, m.Refused)
    if isinstance(answer, m.Welcome):
        client.link.resume(answer.received)
        client.connection.link = client.link
        client.connection.wake()
    return answer


async def client_flows(ready, said, secrets):
    """A session that is resumed, has a failing program and a link of another server, and is refused what it is not."""
    token = ready["token"]
    async with opened(ready, "/v1/client", token, Client, ("X-Forwarded-For", "203.0.113.9")) as client:
        welcome = await hello(client, "a client\nforged")
        secrets.add(welcome.key)
        link, queue = client.link, await client.open(welcome.info["devices"][0]["id"])
    async with opened(ready, "/v1/client", token, Client) as client:
        client.link, client.queues, queue.client = link, {1: queue}, client
        assert (await hello(client, "a client again", welcome.key)).key == welcome.key
        queue.program(0, f"#error {token}", "f", "")
        queue.batch(c.Alloc(1, 64), c.Read(1, 60, 8))
        said.append(str(await queue.failure()))
        client.send(m.Peer(5))
        ticket, _ = await client.next(m.Ticket)
        secrets.add(ticket.ticket)
        text = ticket_text(ticket.ticket)
        async with opened(ready, "/v1/peer", text, RawNode):
            # One that was used once is worth nothing.
            answer = await ask(ready, "/v1/peer", bearer(text), *WEBSOCKET)
            assert answer.status == 401
            said.append(answer.body.decode())
        client.send(m.Bye())
        await client.wait_closed()
    async with opened(ready, "/v1/client", token, Client) as client:
        refused = await hello(client, "too late", welcome.key)
        said.append(str(refused))
        assert refused.code == "ConnectionLost"


async def node_and_admin_flows(ready, said, secrets):
    """A node that joins, is renamed, kicked and revoked, and new tokens; what is said to an admin may hold tokens."""
    admin = bearer(ready["admin_token"])
    async with opened(ready, "/v1/node", ready["node_token"], RawNode) as node:
        node.send(m.Join(1, "a tab", "tab", None, [TAB]))
        joined, _ = await node.next(m.Joined)
        secrets.add(joined.secret)
        label = json.dumps({"label": "Lab"}).encode()
        assert (await ask(ready, "/admin/nodes/tab/rename", admin, method="POST", body=label)).status == 200
        assert (await ask(ready, "/admin/nodes/tab/kick", admin, method="POST")).status == 200
        said.append(str(await node.next(m.Refused)))
    async with opened(ready, "/v1/node", joined.secret, RawNode) as node:
        node.send(m.Join(1, "a tab", "tab", joined.secret, [TAB]))
        await node.next(m.Joined)
        assert (await ask(ready, "/admin/nodes/tab/revoke", admin, method="POST")).status == 200
    for path in ("/status.json", "/metrics"):
        said.append((await ask(ready, path, bearer(ready["token"]))).body.decode())
    answer = await ask(ready, "/admin/tokens/rotate", admin, method="POST")
    secrets.update(json.loads(answer.body).values())
    answer = await ask(ready, "/status.json", bearer(ready["token"]))
    assert answer.status == 401
    said.append(answer.body.decode())


def spellings(secret):
    """How a secret may be written."""
    if isinstance(secret, str):
        return {secret}
    return {secret.hex(), repr(secret)[2:-1], ticket_text(secret), base64.b64encode(secret).decode(), str(list(secret))}


def test_all_is_told_of_once_and_no_secret_anywhere(tmp_path):
    path = tmp_path / "audit.jsonl"
    secrets, said = {MISTYPED}, []
    arguments = ["--log-level", "debug", "--audit-log", str(path), "--trusted-proxy", "127.0.0.0/8"]
    with running_server(tmp_path, *arguments) as server:
        ready = server.ready
        secrets |= {ready["token"], ready["node_token"], ready["admin_token"]}

        async def flows():
            with trio.fail_after(60):
                answer = await ask(ready, "/v1/client", bearer(MISTYPED), *WEBSOCKET)
                said.append(answer.body.decode())
                offer = f"Sec-WebSocket-Protocol: chat, wsgrad.token.{MISTYPED}"
                answer = await ask(ready, "/v1/client", bearer(ready["token"]), offer, *UPGRADE)
                assert answer.status == 400
                said.append(answer.body.decode())
                await client_flows(ready, said, secrets)
                path.rename(tmp_path / "old.jsonl")  # as what rotates logs does
                await node_and_admin_flows(ready, said, secrets)

        trio.run(flows)
        server.stop()
        texts = [*said, server.log(), path.read_text(), (tmp_path / "old.jsonl").read_text()]
    for secret in secrets:
        for spelling in spellings(secret):
            assert [text for text in texts if spelling in text] == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for text in texts[:-3:-1] for line in text.splitlines()]
    told = [{key: value for key, value in line.items() if key not in ("time", "seconds")} for line in lines]
    first = next(line for line in told if line["event"] == "connected")
    assert (first["peer"], first["route"]) == ("203.0.113.9", "/v1/client")
    assert first["proxy"].startswith("127.0.0.1:")
    assert {"event": "session opened", "session": 1, "peer": "203.0.113.9", "agent": "a client forged"} in told
    assert [line["agent"] for line in told if line["event"] == "session resumed"] == ["a client again"]
    assert {"event": "session ended", "session": 1, "why": "the client said good-bye"} in told
    refused = [(line.get("route"), line["why"]) for line in told if line["event"] == "refused"]
    assert refused[0] == ("/v1/client", "wrong token")
    assert "does not offer" in refused[1][1]
    assert refused[2] == ("/v1/peer", "wrong ticket")
    assert "no such session" in refused[3][1]
    assert refused[4] == ("/status.json", "wrong token")
    done = [(line["action"], line.get("node") or line["roles"]) for line in told if line["event"] == "admin"]
    assert done == [("rename", "tab"), ("kick", "tab"), ("revoke", "tab"), ("rotate", ["client", "node"])]
    assert [line["node"] for line in told if line["event"] == "node left"] == ["tab", "tab"]
    came = [line["route"] for line in told if line["event"] == "connected"]
    assert sorted(came) == sorted(line["route"] for line in told if line["event"] == "disconnected")
    assert all(line["time"].endswith("Z") for line in lines)


@pytest.fixture
def written(tmp_path):
    """The path of an audit log that is written in this process; all is as it was afterwards."""
    logger = logging.getLogger("wsgrad.audit")
    before = logger.handlers[:], logger.level, logger.propagate
    path = tmp_path / "audit"
    audit.set_up(str(path))
    yield path
    for handler in logger.handlers:
        if handler not in before[0]:
            handler.close()
    logger.handlers[:], logger.level, logger.propagate = before
    logging.Logger.manager._clear_cache()


def test_a_flood_of_refusals_does_not_fill_the_disk(written, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(logging.time, "time", lambda: clock[0])
    for _ in range(500):
        audit.note("refused", peer="203.0.113.1", why="wrong token")
    audit.note("connected", peer="203.0.113.2")
    clock[0] += 1
    audit.note("refused", peer="203.0.113.1", why="wrong token")
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["refused"] * 50 + ["connected", "refused"]
    assert lines[-1]["left_out_before"] == 450


def test_what_is_hidden_in_logs_is_hidden_here_and_a_peer_forges_no_line(written):
    logs.hide("tok-en_2")
    audit.note("refused", why='x tok-en_2\n{"event": "forged"}')
    [line] = written.read_text().splitlines()
    assert "tok-en_2" not in line
    assert json.loads(line)["why"].startswith("x ***")


def test_a_disk_that_is_full_ends_nothing_and_is_said_once(written, monkeypatch, caplog):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    [handler] = [one for one in logging.getLogger("wsgrad.audit").handlers if isinstance(one, audit.AuditFile)]
    monkeypatch.setattr(handler, "flush", full)
    for _ in range(3):
        audit.note("connected", peer="203.0.113.1")
    monkeypatch.undo()
    [said] = [record.message for record in caplog.records if "--audit-log" in record.message]
    assert str(written) in said


def test_a_directory_that_has_gone_ends_nothing(written, caplog):
    written.unlink()
    written.parent.rename(written.parent.with_name("moved away"))
    audit.note("connected", peer="203.0.113.1")
    written.parent.with_name("moved away").rename(written.parent)
    assert [record.levelname for record in caplog.records if "--audit-log" in record.message] == ["ERROR"]


def test_a_file_that_can_not_be_opened_ends_the_start(tmp_path):
    with (
        pytest.raises(RuntimeError, match="ended with 2"),
        running_server(tmp_path, "--audit-log", str(tmp_path / "missing" / "audit")),
    ):
        pass
    assert "--audit-log" in (tmp_path / "server.log").read_text()
