"""Dials another server: for a session, where this server's owner allows that address, or to lend it this machine."""

from __future__ import annotations

import ipaddress
import ssl
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.errors import ConnectionLost, Unauthorized, WsgradError
from wsgrad.server.options import address_of, split_host
from wsgrad.server.tickets import ticket_text
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.messages import CHUNK_BYTES, SUBPROTOCOL
from wsgrad.transport.timing import DIAL_SECONDS
from wsgrad.transport.tls import check_fingerprint, client_ssl_context
from wsgrad.transport.trio_driver import TrioConnection
from wsgrad.transport.url import parse_endpoint

if TYPE_CHECKING:
    from wsgrad.server.config import Config
    from wsgrad.transport.url import Endpoint

PEER_SECONDS: Final = 5.0
ROUTE: Final = "/v1/peer"


class PeerRules:
    """Which servers may be dialled: those of `--allow-peer`, else loopback where this one listens there itself."""

    def __init__(self, config: Config) -> None:
        self._allowed = [split for text in config.allow_peers if (split := split_host(text)) is not None]
        own = address_of(config.host)
        self._loopback = not config.allow_peers and (
            own.is_loopback if own is not None else config.host.lower() == "localhost"
        )

    def allows(self, host: str, address: str, port: int) -> bool:
        """Whether a host, with the address that its name stands for now, may be dialled at that port."""
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if self._loopback and parsed.is_loopback:
            return True
        for name, only in self._allowed:
            if (name == host.lower() or address_of(name) == parsed) and only in (None, port):
                return True
        return False


async def dial(rules: PeerRules, url: str, ticket: bytes, sha256: str | None) -> TrioConnection:
    """Open a link to another server.

    Raises:
        Unauthorized: this server does not allow it, or that one refused the ticket or showed another certificate.
        ConnectionLost: it can't be reached within 5 s.
        InvalidUrl: the address can't be read.
    """
    endpoint = parse_endpoint(url + (f"#sha256={sha256}" if sha256 else ""))
    try:
        with trio.fail_after(PEER_SECONDS):
            address = await _address(rules, endpoint)
            return await _open(endpoint, address, ROUTE, ticket_text(ticket), CHUNK_BYTES)
    except trio.TooSlowError:
        raise ConnectionLost(f"no link to {endpoint.url} within {PEER_SECONDS:g} s") from None
    except TimeoutError as exc:
        raise ConnectionLost(f"no link to {endpoint.url}: {exc}") from exc
    except OSError as exc:
        if isinstance(exc, WsgradError):
            raise
        raise ConnectionLost(f"no link to {endpoint.url}: {exc.strerror or exc}") from exc


async def open_to(endpoint: Endpoint, route: str, *, bearer: str, max_bulk: int) -> TrioConnection:
    """Open a connection to a server that the owner of this machine has named.

    Raises:
        Unauthorized: it refuses the token, or showed another certificate.
        ConnectionLost: it can't be reached within 10 s, or refuses otherwise.
    """
    try:
        with trio.fail_after(DIAL_SECONDS):
            return await _open(endpoint, endpoint.host, route, bearer, max_bulk)
    except trio.TooSlowError:
        raise ConnectionLost(f"no connection to {endpoint.url} within {DIAL_SECONDS:g} s") from None
    except OSError as exc:
        if isinstance(exc, WsgradError):
            raise
        raise ConnectionLost(f"no connection to {endpoint.url}: {exc.strerror or exc}") from exc


async def _address(rules: PeerRules, endpoint: Endpoint) -> str:
    """An allowed address of a host; it is dialled itself, so that the name can't come to mean another."""
    found = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, type=trio.socket.SOCK_STREAM)
    for _, _, _, _, where in found:
        address = str(where[0])
        if rules.allows(endpoint.host, address, endpoint.port):
            return address
    raise Unauthorized(f"this server may not dial {endpoint.authority}; --allow-peer adds it")


async def _open(endpoint: Endpoint, address: str, route: str, bearer: str, max_bulk: int) -> TrioConnection:
    tcp = await trio.open_tcp_stream(address, endpoint.port)
    stream: trio.abc.Stream = tcp
    try:
        tcp.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        if endpoint.tls:
            stream = await _encrypt(tcp, endpoint)
        leftover = await open_websocket(
            stream,
            host=endpoint.authority,
            path=endpoint.target(route),
            headers=[("Authorization", f"Bearer {bearer}")],
            subprotocols=[SUBPROTOCOL],
        )
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return TrioConnection.from_stream(stream, client=True, max_bulk=max_bulk, leftover=leftover, peer=endpoint.url)


async def _encrypt(tcp: trio.SocketStream, endpoint: Endpoint) -> trio.SSLStream[trio.SocketStream]:
    context = client_ssl_context(fingerprint=endpoint.sha256, cafile=None)
    stream = trio.SSLStream(tcp, context, server_hostname=endpoint.host, https_compatible=True)
    try:
        await stream.do_handshake()
    except trio.BrokenResourceError as exc:
        cause = exc.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise Unauthorized(f"the certificate of {endpoint.url} is not trusted: {cause.verify_message}") from exc
        raise ConnectionLost(f"no encrypted link to {endpoint.url}: {cause or exc}") from exc
    if endpoint.sha256 is not None:
        check_fingerprint(stream.getpeercert(binary_form=True), endpoint.sha256)
    return stream
