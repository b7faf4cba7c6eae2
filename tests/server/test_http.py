"""The HTTP on the server's port: its routes, its refusals and its headers, and heads that are no heads."""

import json

import pytest
from edge_port import TOKENS, WEBSOCKET, bearer, read_answer, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.server import http

ALWAYS = {
    "connection": "close",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}


async def test_the_status_document_is_json_with_devices_and_counters():
    async with serving(name="box") as edge:
        answer = await edge.ask("/status.json?pretty=1", bearer(TOKENS.admin))
        assert answer.headers["content-type"] == "application/json"
        document = json.loads(answer.body)
        assert document["name"] == "box"
        assert document["devices"] == []
        assert document["port"]["connections"] == 1


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/peer", "GET", 426),
        ("/admin/rotate", "GET", 404),
        ("/healthz/", "GET", 404),
        ("/%68ealthz", "GET", 404),
        ("/../healthz", "GET", 404),
        ("/healthz", "POST", 405),
        ("/healthz", "OPTIONS", 405),
        ("/v1/client", "DELETE", 405),
        ("/v1/client", "GET", 426),
    ],
)
async def test_what_a_route_does_not_answer_is_refused_with_its_status(path, method, status):
    async with serving() as edge:
        answer = await edge.ask(path, bearer(TOKENS.client), method=method)
        assert answer.status == status
        assert answer.body.endswith(b"\n")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert ALWAYS.items() <= answer.headers.items()
        if status == 405:
            assert answer.headers["allow"] == "GET, HEAD"
        if status == 426:
            assert answer.headers["upgrade"] == "websocket"


async def test_head_gets_the_headers_of_get_and_no_body():
    async with serving() as edge:
        get = await edge.ask("/healthz")
        head = await edge.ask("/healthz", method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.body))
        assert ALWAYS.items() <= head.headers.items()


@pytest.mark.parametrize("header", ["Content-Length: 5", "Transfer-Encoding: chunked"])
async def test_a_body_is_refused_but_its_sender_still_reads_why(header):
    async with serving() as edge:
        stream = await edge.connect()
        async with stream:
            await stream.send_all(f"GET /healthz HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode() + b"0" * 300_000)
            assert (await read_answer(stream)).status == 413


@pytest.mark.parametrize(
    "head",
    [
        b"hello\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX y: z\r\n\r\n",
        b"GET http://a/healthz HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET /healthz HTTP/2.0\r\nHost: a\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_answered_with_400(head):
    async with serving() as edge:
        stream = await edge.connect()
        async with stream:
            await stream.send_all(head)
            assert (await read_answer(stream)).status == 400
        assert (await edge.ask("/healthz")).status == 200


async def test_an_oversize_head_is_answered_with_431_and_the_limit():
    async with serving() as edge:
        stream = await edge.connect()
        async with stream:
            await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000)
            answer = await read_answer(stream)
        assert answer.status == 431
        assert b"16384" in answer.body


async def test_http_1_0_without_a_host_gets_the_health_check_only():
    async with serving() as edge:
        for path, status in (("/healthz", 200), ("/status.json", 421)):
            stream = await edge.connect()
            async with stream:
                await stream.send_all(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                assert (await read_answer(stream)).status == status


async def test_a_stopping_server_opens_no_sessions_and_says_so():
    async with serving() as edge:
        edge.port.drain()
        assert (await edge.ask("/v1/client", bearer(TOKENS.client), *WEBSOCKET)).status == 503
        answer = await edge.ask("/healthz")
        assert answer.status == 503
        assert json.loads(answer.body) == {"status": "stopping"}


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_head_is_a_request_or_named_bad(head):
    try:
        request = http.parse_head(head + b"\r\n\r\n")
    except http.BadRequest:
        return
    assert request.path.startswith("/")


def test_a_request_does_not_show_its_headers():
    request = http.parse_head(f"GET /a?token=x HTTP/1.1\r\nHost: x\r\n{bearer(TOKENS.client)}\r\n\r\n".encode())
    assert repr(request) == "Request(method='GET', path='/a')"


async def test_a_caller_that_does_not_read_its_answer_is_dropped():
    async with serving() as edge:
        stream = await edge.connect()
        await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        await edge.until_connections(0)  # after a second
        await stream.aclose()
