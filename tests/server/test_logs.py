"""Logs: both formats, nothing forged by a peer's words, and no secret at any level of a real session."""

import base64
import json
import logging

import pytest
import trio
from server_process import running_server

from wsgrad.server import logs
from wsgrad.transport.cbor import encode
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.messages import Bye, Hello, Open, Welcome, message_array, parse_message
from wsgrad.transport.trio_driver import TrioConnection


def record(message, *arguments, exc_info=None, **extra):
    made = logging.LogRecord("wsgrad.server.session", logging.INFO, __file__, 1, message, arguments, exc_info)
    vars(made).update(extra)
    return made


def test_a_text_line_is_one_line_whatever_a_peer_sends():
    line = logs.TextFormatter().format(record("opened by %s", "a\nERROR b\x1b[2J\u202e", peer="127.0.0.1:5"))
    assert line.endswith("INFO    session: opened by a\\nERROR b\\x1b[2J\\u202e peer=127.0.0.1:5")
    assert line.isprintable()


def test_a_json_line_is_one_object_whatever_a_peer_sends():
    line = logs.JsonFormatter().format(record("opened by %s", 'a"\n\x1b', peer="127.0.0.1:5", nbytes=7))
    assert "\n" not in line
    value = json.loads(line)
    assert value.pop("time") > 0
    assert value == {
        "level": "info",
        "logger": "wsgrad.server.session",
        "message": 'opened by a"\n\x1b',
        "peer": "127.0.0.1:5",
        "nbytes": 7,
    }


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()], ids=["text", "json"])
def test_hidden_texts_are_blotted_out_of_messages_fields_and_tracebacks(formatter):
    formatter.secrets.append("tok-en_1")
    try:
        raise ValueError("bad tok-en_1")
    except ValueError as exc:
        made = record("got %s", "tok-en_1", exc_info=(type(exc), exc, exc.__traceback__), header="Bearer tok-en_1")
    line = formatter.format(made)
    assert "tok-en_1" not in line
    assert line.count("***") >= 3
    assert "ValueError" in line


async def talk(ready, *, token):
    """Open a session and a device, wait for its answer, say good-bye; the session's key."""
    keys = []

    def handle(received):
        message = parse_message(received.head)
        if isinstance(message, Welcome):
            keys.append(message.key)
            connection.send(encode(message_array(Open(1, message.info["devices"][0]["id"], {}))))
        else:
            connection.send(encode(message_array(Bye())))

    async with await trio.open_tcp_stream("127.0.0.1", ready["port"]) as stream:
        leftover = await open_websocket(
            stream,
            host=f"127.0.0.1:{ready['port']}",
            path="/v1/client",
            headers=[("Authorization", f"Bearer {token}")],
            subprotocols=["wsgrad.v1"],
        )
        connection = TrioConnection.from_stream(stream, client=True, max_bulk=1 << 20, leftover=leftover)
        connection.send(encode(message_array(Hello(1, "a test\nERROR forged", None, 0, {}))))
        with trio.fail_after(20):
            closed = await connection.run(handle)
    assert closed.code == 1000
    return keys[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_session_at_debug_is_told_of_and_no_secret_of_it(form, tmp_path):
    with running_server(tmp_path, "--log-level", "debug", "--log-format", form) as server:
        ready = server.ready
        key = trio.run(lambda: talk(ready, token=ready["token"]))
        with pytest.raises(Exception, match="401"):
            trio.run(lambda: talk(ready, token="wrong-token-0123456789"))
        server.stop()
        log = server.log()
    secrets = [ready["token"], ready["node_token"], ready["admin_token"], "wrong-token-0123456789"]
    secrets += [key.hex(), repr(key)[2:-1], base64.b64encode(key).decode().rstrip("="), str(list(key))[1:-1]]
    for secret in secrets:
        assert secret not in log
    assert "connected at /v1/client" in log
    assert "wrong token" in log
    assert "it sent 1 Hello, 1 Open, 1 Bye" in log
    lines = log.splitlines()
    assert len(lines) >= 5
    if form == "json":
        assert all({"time", "level", "logger", "message"} <= json.loads(line).keys() for line in lines)
    else:
        assert not [line for line in lines if line.startswith("ERROR")]
