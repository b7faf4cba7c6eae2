"""Opening handshakes over real loopback sockets: the hand-over loses nothing, and each refusal is a named error."""

import contextlib
import socket
import ssl
import threading
from functools import partial

import pytest
import trio
import trustme
import websockets.sync.client
import websockets.sync.server

from wsgrad.errors import ConnectionLost, LimitExceeded, ProtocolError, Unauthorized
from wsgrad.transport import cbor, handshake_blocking
from wsgrad.transport.connection import Connection
from wsgrad.transport.handshake_trio import accept_websocket, open_websocket, read_http_head
from wsgrad.transport.tls import certificate_fingerprint, check_fingerprint, client_ssl_context

V1 = "wsgrad.v1"
UPGRADE = (
    b"GET /v1/client HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: other, wsgrad.v1\r\n\r\n"
)


def end(*, client: bool) -> Connection:
    return Connection(client=client, bulk_kinds=frozenset({9}))


@contextlib.asynccontextmanager
async def listening(handler):
    """A loopback server whose handler gets each stream, and whose errors are the test's."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, handler, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def connected(port: int) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port)


async def echo(stream: trio.abc.Stream) -> None:
    """Accepts, then sends every message back until the client closes."""
    async with stream:
        head, rest = await read_http_head(stream)
        await accept_websocket(stream, head, subprotocol=V1)
        connection = end(client=False)
        events = connection.feed(rest)
        while True:
            for event in events:
                if hasattr(event, "code"):
                    await stream.send_all(connection.take_control())
                    return
                for part in connection.encode(event.raw, event.bulk):
                    await stream.send_all(part)
            data = await stream.receive_some()
            if not data:
                return
            events = connection.feed(data)


async def test_client_and_server_shake_hands_and_exchange_messages():
    async with listening(echo) as port, await connected(port) as stream:
        leftover = await open_websocket(
            stream,
            host=f"127.0.0.1:{port}",
            path="/v1/client",
            headers=[("Authorization", "Bearer T")],
            subprotocols=[V1],
        )
        assert leftover == b""
        connection = end(client=True)
        bulk = bytes(range(256)) * 4096
        for part in connection.encode(cbor.encode([9, "x"]), bulk):
            await stream.send_all(part)
        events = []
        while not events:
            events = connection.feed(await stream.receive_some())
        assert events[0].head == [9, "x"]
        assert events[0].bulk == bulk


@pytest.mark.parametrize("count", [1, 300])
async def test_no_frame_is_lost_that_a_client_pipelines_behind_its_handshake(count):
    """The frames travel in the same packets as the head, and more follow before the server's answer is there."""
    async with listening(echo) as port, await connected(port) as stream:
        connection = end(client=True)
        frames = [b"".join(connection.encode(cbor.encode([2, i]))) for i in range(count)]
        await stream.send_all(UPGRADE[:20])
        await stream.send_all(UPGRADE[20:] + b"".join(frames[: count // 2]))
        await stream.send_all(b"".join(frames[count // 2 :]))
        head, rest = await read_http_head(stream)
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"wsgrad.v1" in head
        events = connection.feed(rest)
        while len(events) < count:
            events += connection.feed(await stream.receive_some())
        assert [e.head for e in events] == [[2, i] for i in range(count)]


async def test_no_frame_is_lost_that_a_server_pipelines_behind_its_answer():
    async def server(stream):
        async with stream:
            head, _ = await read_http_head(stream)
            collected = _Collecting(stream)
            await accept_websocket(collected, head, subprotocol=V1)
            await stream.send_all(collected.data + b"".join(end(client=False).encode(cbor.encode([2, "first"]))))
            await stream.receive_some()

    async with listening(server) as port, await connected(port) as stream:
        leftover = await open_websocket(stream, host="a", path="/", subprotocols=[V1])
        [event] = end(client=True).feed(leftover)
        assert event.head == [2, "first"]


class _Collecting(trio.abc.Stream):
    """A stream whose output is held back, so that the test sends it together with more."""

    def __init__(self, inner):
        self.inner, self.data = inner, b""

    async def send_all(self, data):
        self.data += data

    async def wait_send_all_might_not_block(self):
        pass

    async def receive_some(self, max_bytes=None):
        return await self.inner.receive_some(max_bytes)

    async def aclose(self):
        pass


def refusing(answer: bytes, *, close: bool = True):
    async def server(stream):
        async with stream:
            await read_http_head(stream)
            await stream.send_all(answer)
            if not close:
                await stream.receive_some()

    return server


async def opened_by_trio(port):
    async with await connected(port) as stream:
        await open_websocket(stream, host="a", path="/v1/client", subprotocols=[V1])


async def opened_by_socket(port):
    def in_thread():
        with socket.create_connection(("127.0.0.1", port)) as sock:
            handshake_blocking.open_websocket(sock, host="a", path="/v1/client", subprotocols=[V1], timeout=5)

    await trio.to_thread.run_sync(in_thread)


both_faces = pytest.mark.parametrize("opened", [opened_by_trio, opened_by_socket])

UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"


@both_faces
@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 12\r\n\r\nwrong token\n", Unauthorized, "401: wrong token"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\nOrigin not allowed\nmore", Unauthorized, "403: Origin not allowed"),
        (b"HTTP/1.1 421 Misdirected Request\r\nContent-Length: 0\r\n\r\n", Unauthorized, "421: Misdirected Request"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", ConnectionLost, "404: Not Found"),
        (b"HTTP/1.1 503 \r\nContent-Length: 999999\r\n\r\nfull", ConnectionLost, "503: full"),
        (b"HTTP/1.1 200 OK\r\n\r\n\x1b[31mhello", ConnectionLost, "200: \ufffd"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", ConnectionLost, "does not speak HTTP"),
        (b"HTTP/1.1 1", ConnectionLost, "left after 10 bytes"),
        (b"", ConnectionLost, "left after 0 bytes"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", LimitExceeded, "16384"),
        (UPGRADED + b"Sec-WebSocket-Accept: wrong\r\n\r\n", ProtocolError, "invalid"),
        (UPGRADED + b"\r\n", ProtocolError, "invalid"),
    ],
)
async def test_refusal_is_a_named_error_with_status_and_reason(opened, answer, error, words):
    async with listening(refusing(answer)) as port:
        with pytest.raises(error, match=words):
            await opened(port)


@both_faces
async def test_refusal_with_an_announced_body_that_never_comes_is_still_told(opened, monkeypatch):
    monkeypatch.setattr("wsgrad.transport.handshake_trio._BODY_SECONDS", 0.05)
    monkeypatch.setattr("wsgrad.transport.handshake_blocking._BODY_SECONDS", 0.05)
    answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 50\r\n\r\n"
    async with listening(refusing(answer, close=False)) as port:
        with pytest.raises(Unauthorized, match="401: Unauthorized"):
            await opened(port)


@both_faces
async def test_server_that_speaks_another_protocol_is_refused(opened):
    async def server(stream):
        async with stream:
            head, _ = await read_http_head(stream)
            await accept_websocket(stream, head.replace(b"wsgrad.v1", b"other"), subprotocol="other")
            await stream.receive_some()

    async with listening(server) as port:
        with pytest.raises(ProtocolError):
            await opened(port)


async def test_silent_server_is_a_timeout_and_leaves_the_sockets_own_timeout():
    async def server(stream):
        await stream.receive_some()
        await trio.sleep_forever()

    async with listening(server) as port:

        def in_thread():
            with socket.create_connection(("127.0.0.1", port), timeout=33) as sock:
                with pytest.raises(TimeoutError, match=r"0\.05 s"):
                    handshake_blocking.open_websocket(sock, host="a", path="/", subprotocols=[V1], timeout=0.05)
                assert sock.gettimeout() == 33

        await trio.to_thread.run_sync(in_thread)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        UPGRADE.replace(b"Version: 13", b"Version: 8"),
        UPGRADE.replace(b"wsgrad.v1", b"wsgrad.v9"),
    ],
)
async def test_bad_upgrade_request_is_answered_with_an_error_status_and_named(head):
    raised = []

    async def server(stream):
        async with stream:
            got, _ = await read_http_head(stream)
            with pytest.raises(ProtocolError) as caught:
                await accept_websocket(stream, got, subprotocol=V1)
            raised.append(caught.value)

    with trio.fail_after(5):
        async with listening(server) as port, await connected(port) as stream:
            await stream.send_all(head)
            answer = b""
            while data := await stream.receive_some():
                answer += data
    assert answer.startswith(b"HTTP/1.1 4")
    assert len(raised) == 1


@pytest.mark.parametrize("sent", [b"", b"GET / HT", UPGRADE[:-1]])
async def test_client_that_leaves_in_the_middle_of_its_head_ends_only_its_connection(sent):
    outcomes = []

    async def server(stream):
        try:
            await echo(stream)
        except ConnectionLost as exc:
            outcomes.append(str(exc))

    with trio.fail_after(5):
        async with listening(server) as port:
            async with await connected(port) as leaver:
                await leaver.send_all(sent)
            await opened_by_trio(port)
            while not outcomes:
                await trio.lowlevel.checkpoint()
    assert outcomes == [f"the peer left after {len(sent)} bytes of its HTTP head"]


async def test_slow_head_times_out_and_a_long_one_is_refused():
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_all(b"GET / HTTP/1.1\r\n")
    with pytest.raises(TimeoutError, match="HTTP head"):
        await read_http_head(ours, timeout=0.01)
    await theirs.send_all(b"X: " + b"y" * 200)
    with pytest.raises(LimitExceeded, match="100 bytes"):
        await read_http_head(ours, limit=100)


async def test_what_follows_the_head_is_returned_whole():
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_all(UPGRADE + b"\x82\x00rest\r\n\r\n")
    assert await read_http_head(ours) == (UPGRADE, b"\x82\x00rest\r\n\r\n")


async def test_stock_client_of_websockets_is_accepted():
    def in_thread(port):
        with websockets.sync.client.connect(f"ws://127.0.0.1:{port}/v1/client", subprotocols=[V1], proxy=None) as stock:
            assert stock.subprotocol == V1
            stock.send(cbor.encode([2, "hello"]))
            return cbor.decode(stock.recv())

    async with listening(echo) as port:
        assert await trio.to_thread.run_sync(in_thread, port) == [2, "hello"]


@both_faces
async def test_stock_server_of_websockets_is_opened(opened):
    with websockets.sync.server.serve(lambda ws: ws.recv(), "127.0.0.1", 0, subprotocols=[V1]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            await opened(server.socket.getsockname()[1])
        finally:
            server.shutdown()
            await trio.to_thread.run_sync(thread.join)


async def test_pinned_certificate_over_tls_on_both_faces():
    certificate = trustme.CA().issue_cert("gpu-box")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    der = ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())
    pin = certificate_fingerprint(der)

    async def server(stream):
        with contextlib.suppress(ConnectionLost):
            await echo(trio.SSLStream(stream, context, server_side=True, https_compatible=True))

    def in_thread(port):
        plain = socket.create_connection(("127.0.0.1", port))
        with client_ssl_context(fingerprint=pin).wrap_socket(plain) as sock:
            check_fingerprint(sock.getpeercert(binary_form=True), pin)
            assert handshake_blocking.open_websocket(sock, host="gpu-box", path="/", subprotocols=[V1]) == b""

    async with listening(server) as port:
        await trio.to_thread.run_sync(in_thread, port)
        stream = trio.SSLStream(await connected(port), client_ssl_context(fingerprint=pin), https_compatible=True)
        async with stream:
            await stream.do_handshake()
            check_fingerprint(stream.getpeercert(binary_form=True), pin)
            assert await open_websocket(stream, host="gpu-box", path="/", subprotocols=[V1]) == b""
        # Without the pin, nobody vouches for it.
        stream = trio.SSLStream(await connected(port), client_ssl_context(), server_hostname="gpu-box")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)
