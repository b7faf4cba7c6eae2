"""Connects a blocking socket to a server: TCP, TLS, the opening handshake; what is said after it is not its affair."""

from __future__ import annotations

import socket
import ssl
import time
from typing import TYPE_CHECKING

from wsgrad.errors import ConnectionLost, Unauthorized
from wsgrad.transport.handshake_blocking import open_websocket
from wsgrad.transport.messages import SUBPROTOCOL
from wsgrad.transport.tls import check_fingerprint, client_ssl_context, why_no_tls

if TYPE_CHECKING:
    from wsgrad.transport.url import Endpoint


def dial(
    endpoint: Endpoint, *, route: str, token: str | None, cafile: str | None, timeout: float
) -> tuple[socket.socket, bytes]:
    """Open a WebSocket connection.

    Returns:
        The socket, non-blocking, and what was received behind the handshake.

    Raises:
        ConnectionRefusedError: nothing listens there.
        TimeoutError: it took longer than `timeout` seconds.
        Unauthorized: the server, or its certificate, refused.
        ConnectionLost: anything else.
    """
    deadline = time.monotonic() + timeout
    sock = connect_socket(endpoint, cafile=cafile, timeout=timeout)
    try:
        headers = [] if token is None else [("Authorization", f"Bearer {token}")]
        leftover = open_websocket(
            sock,
            host=endpoint.authority,
            path=endpoint.target(route),
            headers=headers,
            subprotocols=[SUBPROTOCOL],
            timeout=max(0.001, deadline - time.monotonic()),
        )
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, leftover


def connect_socket(endpoint: Endpoint, *, cafile: str | None, timeout: float) -> socket.socket:
    """Open a connection, encrypted and checked where the address asks for it; the socket keeps the timeout.

    Raises:
        ConnectionRefusedError: nothing listens there.
        TimeoutError: it took longer than `timeout` seconds.
        Unauthorized: the server's certificate is not the one to trust.
        ConnectionLost: anything else.
    """
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout)
    except ConnectionRefusedError:
        raise
    except TimeoutError as exc:
        raise TimeoutError(f"no connection to {endpoint.url} within {timeout:g} s") from exc
    except OSError as exc:
        raise ConnectionLost(f"no connection to {endpoint.url}: {exc}") from exc
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.tls:
            sock = _wrap(sock, endpoint, cafile)
    except BaseException:
        sock.close()
        raise
    return sock


def _wrap(sock: socket.socket, endpoint: Endpoint, cafile: str | None) -> socket.socket:
    context = client_ssl_context(fingerprint=endpoint.sha256, cafile=cafile)
    try:
        wrapped = context.wrap_socket(sock, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as exc:
        raise Unauthorized(
            f"the certificate of {endpoint.url} is not trusted: {exc.verify_message}; give its fingerprint "
            "(#sha256=…, as the server prints it) or cafile="
        ) from exc
    except TimeoutError as exc:
        raise TimeoutError(f"{endpoint.url} did not answer the TLS handshake") from exc
    except OSError as exc:
        raise ConnectionLost(f"no encrypted connection to {endpoint.url}: {why_no_tls(exc)}") from exc
    try:
        if endpoint.sha256 is not None:
            check_fingerprint(wrapped.getpeercert(binary_form=True), endpoint.sha256)
    except BaseException:
        wrapped.close()
        raise
    return wrapped
