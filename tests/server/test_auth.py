"""Who gets in: Host, Origin and token on every route, before any upgrade, over a real port."""

import math
import time

import pytest
import trio
from edge_port import TOKENS, UPGRADE, WEBSOCKET, bearer, serving

from wsgrad.server import auth
from wsgrad.server.auth import Delays, network_of, own_names, plain_address

ROUTES = {
    "/status.json": (TOKENS.client, TOKENS.admin),
    "/v1/client": (TOKENS.client,),
    "/v1/node": (TOKENS.node,),
}
ALL_TOKENS = (TOKENS.client, TOKENS.node, TOKENS.admin)


def head(path):
    return WEBSOCKET if path.startswith("/v1/") else ()


def good(path):
    return 101 if path.startswith("/v1/") else 200


@pytest.mark.parametrize("path", ROUTES)
async def test_a_route_lets_in_its_own_tokens_and_no_other_role(path):
    async with serving() as edge:
        for token in ALL_TOKENS:
            answer = await edge.ask(path, bearer(token), *head(path))
            assert answer.status == (good(path) if token in ROUTES[path] else 403)


@pytest.mark.parametrize("path", ROUTES)
async def test_without_a_token_nobody_gets_in(path):
    async with serving() as edge:
        for headers in ((), ("Authorization: Basic Zm9vOmJhcg==",), (bearer(""),)):
            answer = await edge.ask(path, *headers, *head(path))
            assert answer.status == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert edge.hub.clients == edge.hub.nodes == []


@pytest.mark.parametrize("path", ROUTES)
async def test_a_wrong_token_is_refused(path):
    right = ROUTES[path][0]
    async with serving() as edge:
        for token in (right[:-1], right.swapcase(), "é"):
            assert (await edge.ask(path, bearer(token), *head(path))).status == 401
        assert edge.hub.clients == edge.hub.nodes == []
        assert edge.port.counters.wrong_tokens == 3


async def test_a_token_in_the_url_lets_nobody_in():
    async with serving() as edge:
        assert (await edge.ask(f"/status.json?token={TOKENS.client}")).status == 401


async def test_a_browser_gives_its_token_as_a_subprotocol_and_gets_only_the_protocol_back():
    async with serving() as edge:
        answer = await edge.ask(
            "/v1/client", *UPGRADE, f"Sec-WebSocket-Protocol: wsgrad.v1, wsgrad.token.{TOKENS.client}"
        )
        assert answer.status == 101
        assert answer.headers["sec-websocket-protocol"] == "wsgrad.v1"


async def test_a_client_that_does_not_offer_the_protocol_is_refused():
    async with serving() as edge:
        assert (await edge.ask("/v1/client", bearer(TOKENS.client), *UPGRADE)).status == 400
        offer = f"Sec-WebSocket-Protocol: chat, wsgrad.token.{TOKENS.client}"
        assert (await edge.ask("/v1/client", *UPGRADE, offer)).status == 401
        assert edge.hub.clients == []


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "host",
    [
        "rebound.example",
        "rebound.example:{port}",
        "127.0.0.1.rebound.example",
        "localhost.rebound.example",
        "user@localhost",
        "localhost:{port}:1",
        "localhost:x",
        "",
        "[::1",
    ],
)
async def test_a_name_that_is_not_ours_is_refused_so_rebinding_leads_nowhere(path, host):
    async with serving() as edge:
        answer = await edge.ask(path, bearer(ROUTES[path][0]), *head(path), host=host.format(port=edge.number))
        assert answer.status == 421
        assert edge.hub.clients == edge.hub.nodes == []


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST", "127.0.0.1", "[::1]:7000", "10.1.2.3:{port}"])
async def test_addresses_and_localhost_are_ours_with_any_port(host):
    async with serving() as edge:
        answer = await edge.ask("/status.json", bearer(TOKENS.client), host=host.format(port=edge.number))
        assert answer.status == 200


async def test_allowed_hosts_are_accepted_with_their_port_if_one_was_given():
    async with serving(allow_hosts=("box.example", "gate.example:443")) as edge:
        for host, status in {
            "box.example": 200,
            "Box.Example:1": 200,
            "gate.example:443": 200,
            "gate.example": 421,
            "gate.example:444": 421,
        }.items():
            assert (await edge.ask("/status.json", bearer(TOKENS.client), host=host)).status == status


async def test_the_health_check_needs_neither_name_nor_token():
    async with serving() as edge:
        answer = await edge.ask("/healthz", host="anything.example")
        assert (answer.status, answer.body) == (200, b'{\n "status": "ok"\n}\n')
        # A page from elsewhere may learn that it answers, no more: so it tells a wrong token from a server that is off.
        assert answer.headers["cross-origin-resource-policy"] == "cross-origin"
        assert (await edge.ask("/status.json")).headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("path", ["/healthz", *ROUTES])
@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost:{port}",
        "https://127.0.0.1:{port}",
        "http://127.0.0.1",
        "http://127.0.0.1:1",
        "http://127.0.0.1:{port}@evil.example",
        "http://127.0.0.1:{port}/path",
        "moz-extension://abc",
        "null, http://127.0.0.1:{port}",
        "",
    ],
)
async def test_pages_of_others_are_refused_even_with_the_token(path, origin):
    token = ROUTES.get(path, ALL_TOKENS)[0]
    async with serving() as edge:
        answer = await edge.ask(path, bearer(token), f"Origin: {origin.format(port=edge.number)}", *head(path))
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers
        assert edge.hub.clients == edge.hub.nodes == []


@pytest.mark.parametrize("path", ROUTES)
async def test_our_own_pages_and_allowed_origins_get_in(path):
    async with serving(allow_origins=("https://app.example",)) as edge:
        for origin in (f"http://127.0.0.1:{edge.number}", "https://app.example", "https://APP.example:443"):
            answer = await edge.ask(path, bearer(ROUTES[path][0]), f"Origin: {origin}", *head(path))
            assert answer.status == good(path)
        twice = [f"Origin: http://127.0.0.1:{edge.number}"] * 2
        assert (await edge.ask(path, bearer(ROUTES[path][0]), *twice, *head(path))).status == 403


@pytest.mark.parametrize("path", ROUTES)
async def test_a_page_opened_as_a_file_may_only_be_a_node(path):
    async with serving() as edge:
        answer = await edge.ask(path, bearer(ROUTES[path][0]), "Origin: null", *head(path))
        assert answer.status == (101 if path == "/v1/node" else 403)


async def test_forwarded_headers_of_a_stranger_mean_nothing():
    async with serving() as edge:
        forged = ("X-Forwarded-Host: localhost", "X-Forwarded-For: 10.0.0.1", "X-Forwarded-Proto: https")
        assert (await edge.ask("/status.json", bearer(TOKENS.client), *forged, host="evil.example")).status == 421
        origin = f"Origin: https://127.0.0.1:{edge.number}"
        assert (await edge.ask("/status.json", bearer(TOKENS.client), *forged, origin)).status == 403


async def test_a_trusted_proxy_tells_name_scheme_and_address():
    settings = {"trusted_proxies": ("127.0.0.0/8",), "allow_hosts": ("gpu.example",)}
    async with serving(**settings) as edge:
        forwarded = (
            "X-Forwarded-Host: gpu.example",
            "X-Forwarded-Proto: https",
            "X-Forwarded-For: 6.6.6.6, 203.0.113.9, 127.0.0.2",
        )
        own = "Origin: https://gpu.example"
        answer = await edge.ask("/v1/client", bearer(TOKENS.client), *forwarded, own, *WEBSOCKET)
        assert answer.status == 101
        await edge.hub.arrived.wait()
        assert edge.hub.clients == ["203.0.113.9"]
        plain = ("X-Forwarded-Host: gpu.example", "X-Forwarded-Proto: http")
        assert (await edge.ask("/v1/client", bearer(TOKENS.client), *plain, own, *WEBSOCKET)).status == 403


async def test_connections_through_a_proxy_are_limited_by_visitor():
    async with serving(trusted_proxies=("127.0.0.1/32",), max_connections_per_address=1) as edge:

        async def enter(address):
            stream = await edge.connect()
            lines = [
                "GET /v1/client HTTP/1.1",
                "Host: localhost",
                bearer(TOKENS.client),
                f"X-Forwarded-For: {address}",
                *WEBSOCKET,
            ]
            await stream.send_all(("\r\n".join(lines) + "\r\n\r\n").encode())
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += await stream.receive_some()
            assert answer.startswith(b"HTTP/1.1 101")
            return stream, answer.partition(b"\r\n\r\n")[2]

        async with (await enter("203.0.113.1"))[0], (await enter("203.0.113.2"))[0]:
            stream, rest = await enter("203.0.113.1")
            async with stream:
                while len(rest) < 4:
                    rest += await stream.receive_some()
            assert rest[0] == 0x88
            assert int.from_bytes(rest[2:4], "big") == 1008


async def test_wrong_tokens_take_longer_each_time_and_the_right_one_no_time_at_all():
    async with serving() as edge:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            assert (await edge.ask("/status.json", bearer("wrong"))).status == 401
            times.append(time.perf_counter() - start)
        assert times[0] >= 0.1
        assert times[1] >= 0.2
        assert times[2] >= 0.4
        async with trio.open_nursery() as nursery:
            nursery.start_soon(edge.ask, "/status.json", bearer("wrong"))
            start = time.perf_counter()
            assert (await edge.ask("/status.json", bearer(TOKENS.client))).status == 200
            assert time.perf_counter() - start < 0.4
            nursery.cancel_scope.cancel()


async def test_many_wrong_tokens_at_once_are_slowed_down_too_and_the_right_one_is_let_in(monkeypatch):
    monkeypatch.setattr(auth, "_FIRST_DELAY", 0.5)
    monkeypatch.setattr(auth, "_MAX_DELAY", 0.5)
    async with serving() as edge:
        times = []

        async def guess():
            start = time.perf_counter()
            assert (await edge.ask("/status.json", bearer("wrong"))).status == 401
            times.append(time.perf_counter() - start)

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(guess)
            while edge.port.counters.wrong_tokens < 40:  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert (await edge.ask("/status.json", bearer(TOKENS.client))).status == 200
        assert len(times) == 40
        assert min(times) >= 0.5


async def test_behind_a_proxy_an_address_with_too_many_wrong_tokens_is_told_nothing_of_another(monkeypatch):
    monkeypatch.setattr(auth, "_FIRST_DELAY", 60.0)
    monkeypatch.setattr(auth, "_MAX_DELAY", 60.0)
    async with serving(trusted_proxies=("127.0.0.1",), max_connections_per_address=3) as edge:

        async def ask(address, token):
            return (await edge.ask("/status.json", bearer(token), f"X-Forwarded-For: {address}")).status

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, "203.0.113.1", "wrong")
            while edge.port.counters.wrong_tokens < 3:  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert await ask("203.0.113.1", "wrong") == 429
            assert await ask("203.0.113.1", TOKENS.client) == 429
            assert await ask("203.0.113.2", TOKENS.client) == 200
            nursery.cancel_scope.cancel()


def test_delays_double_up_to_five_seconds_and_are_forgotten():
    delays = Delays()
    given = [delays.failed("203.0.113.1", 100.0) for _ in range(200)]
    assert given[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(given) == given[-1] == 5.0
    assert delays.failed("203.0.113.2", 100.0) == 0.1
    assert delays.failed("203.0.113.1", 701.0) == 0.1


def test_delays_hold_a_bounded_number_of_addresses_and_an_ipv6_network_counts_as_one():
    delays = Delays()
    for number in range(10_000):
        delays.failed(f"10.0.{number // 256}.{number % 256}", 0.0)
    assert len(delays._failures) == 4096
    assert delays.failed("2001:db8::1", 0.0) == 0.1
    assert delays.failed("2001:db8::2", 0.0) == 0.2
    assert math.isclose(delays.failed("2001:db8:0:1::1", 0.0), 0.1)


def test_addresses_are_compared_in_one_form():
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1%eth0") == "fe80::1"
    assert network_of("10.0.0.1") == "10.0.0.1"


def test_our_names_hold_localhost_and_the_name_we_listen_on():
    assert "localhost" in own_names("127.0.0.1")
    assert "gpu-box" in own_names("GPU-Box")
    assert "127.0.0.1" not in own_names("127.0.0.1")


def test_tokens_are_not_in_their_repr():
    assert repr(TOKENS) == "<Tokens>"
