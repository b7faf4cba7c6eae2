"""Opening handshakes: HTTP heads in pieces, requests against their rules, answers of strangers, and addresses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wsgrad.errors import ConnectionLost, InvalidUrl, LimitExceeded, WsgradError
from wsgrad.server import http
from wsgrad.transport import handshake, url

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 320
_LIMIT = 512


def seeds() -> Iterator[bytes]:
    """What browsers, curl and our client send, what servers answer, and addresses that users write."""
    yield (
        b"\0\5GET /v1/client HTTP/1.1\r\nHost: box:7667\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"Sec-WebSocket-Protocol: wsgrad.v1, wsgrad.token.abc\r\n\r\n\x82\x85rest"
    )
    yield b"\0\1POST /v1/admin HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
    yield b"\0\2GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"
    yield b"\1\3HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n"
    yield b"\1\7HTTP/1.1 401 Unauthorized\r\nContent-Length: 12\r\n\r\nwrong token\n"
    yield b"\1\1HTTP/1.1 404\r\n\r\n"
    for text in (
        "ws://gpu-box:7667#token=abc&sha256=" + "a1" * 32, "wss://[::1]:80/path/#sha256=" + "A1:" * 31 + "A1",
        "box", "box:1*2,ws://other#token=x*3", "http://x", "[fe80::1]:99999", "WSS://Box/%20a*0",
    ):  # fmt: skip
        yield b"\2\0" + text.encode()


def check(data: bytes) -> None:
    """Only the named errors, whatever comes."""
    if len(data) < 2:
        return
    kind, step, rest = data[0] % 3, data[1] % 60 + 1, data[2:]
    if kind == 2:
        _address(rest.decode("utf-8", "surrogateescape" if data[1] & 1 else "replace"))
        return
    head = _head(rest, step)
    assert head == _head(rest, len(rest) + 1), (rest, step)
    if kind:
        _answer(rest if head is None else head[0], b"" if head is None else head[1])
    else:
        _request(rest if head is None else head[0])


def _head(data: bytes, step: int) -> tuple[bytes, bytes] | None:
    """The head and all that follows it, however it is cut; None where it is too long or not whole."""
    buffer = handshake.HeadBuffer(limit=_LIMIT)
    for start in range(0, len(data), step):
        try:
            found = buffer.feed(data[start : start + step])
        except LimitExceeded:
            return None
        if found is not None:
            head, rest = found
            assert head.endswith(b"\r\n\r\n")
            assert head.count(b"\r\n\r\n") == 1
            return head, rest + data[start + step :]
    try:
        buffer.feed(b"")
    except ConnectionLost:
        return None
    raise AssertionError("the end of a peer's bytes was no end")


def _request(head: bytes) -> None:
    try:
        request = http.parse_head(head)
    except http.BadRequest as exc:
        http.encode(http.text(400, str(exc)))
        return
    assert request.path.startswith("/")
    assert "?" not in request.path
    assert request.body_nbytes is None or request.body_nbytes >= 0
    if request.body_nbytes:
        assert request.has_body
    assert isinstance(request.upgrade, bool)
    for name in ("host", "origin", "authorization", "sec-websocket-protocol", "x-forwarded-for"):
        request.items(name)
    assert "authorization" not in repr(request)


def _answer(head: bytes, rest: bytes) -> None:
    try:
        answer = handshake.parse_answer(head)
    except ConnectionLost as exc:
        assert str(exc).isprintable()
        return
    assert 0 <= handshake.missing_body(answer, rest) <= handshake.MAX_REFUSAL_NBYTES
    error = handshake.refusal(answer, rest)
    assert isinstance(error, WsgradError)
    assert str(error).isprintable(), error


def _address(text: str) -> None:
    try:
        endpoints = url.parse_endpoints(text)
    except InvalidUrl as exc:
        found = re.search(r"[#?].*?token=(.*)", text, re.DOTALL)
        secret = found[1] if found else ""
        assert len(secret) < 12 or text.count(secret) > 1 or secret not in str(exc), (text, exc)
        return
    for endpoint in endpoints:
        assert 0 < endpoint.port < 65536
        assert (
            endpoint.token is None
            or endpoint.token not in repr(endpoint)
            or len(endpoint.token) < 9
            or text.count(endpoint.token) > 1
        )
        assert "#" not in endpoint.url
        again = url.parse_endpoint(endpoint.url)
        assert (again.host, again.port, again.tls, again.path) == (
            endpoint.host, endpoint.port, endpoint.tls, endpoint.path,
        )  # fmt: skip
        assert endpoint.target("/v1/client").endswith("/v1/client")
        assert (endpoint.authority + endpoint.path).isascii()
        assert (endpoint.authority + endpoint.path).isprintable()
