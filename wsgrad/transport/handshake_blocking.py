"""The client's WebSocket opening handshake on a blocking socket; it neither connects nor does TLS or frames.

The blocking face also works inside somebody's trio program, where no second trio can run, so this uses wsproto's
sans-IO core, the one that trio-websocket is built on.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from wsproto import WSConnection
from wsproto.connection import ConnectionType
from wsproto.events import AcceptConnection, Request
from wsproto.utilities import RemoteProtocolError

from wsgrad.errors import ConnectionLost, WsgradError
from wsgrad.transport.handshake import (
    HANDSHAKE_SECONDS,
    MAX_HEAD_NBYTES,
    HeadBuffer,
    bad_answer,
    missing_body,
    parse_answer,
    refusal,
    wrong_subprotocol,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Sequence

_BODY_SECONDS = 2


def open_websocket(
    sock: socket.socket,
    *,
    host: str,
    path: str,
    headers: Iterable[tuple[str, str]] = (),
    subprotocols: Sequence[str],
    timeout: float = HANDSHAKE_SECONDS,
) -> bytes:
    """Does a client's handshake.

    Args:
        sock: connected, and wrapped by TLS where it should be; its own time-out is left as it was.
        host: for the Host header, with the port.
        path: what to ask for, such as `/v1/client`.
        headers: more headers, such as Authorization.
        subprotocols: what to offer; the server must choose the first.
        timeout: seconds for the whole of it.

    Returns:
        The bytes received behind the server's answer.

    Raises:
        Unauthorized: the server refused us with 401, 403 or 421.
        ConnectionLost: it refused with another status, or left.
        ProtocolError: its answer breaks the rules, or chooses another subprotocol.
        TimeoutError: no answer came.
    """
    deadline = time.monotonic() + timeout
    before = sock.gettimeout()
    try:
        return _open(sock, host, path, headers, subprotocols, deadline)
    except WsgradError:
        raise
    except TimeoutError as exc:
        raise TimeoutError(f"{host} did not answer the WebSocket handshake within {timeout:g} s") from exc
    except OSError as exc:
        raise ConnectionLost(f"the connection to {host} broke during the handshake: {exc}") from exc
    finally:
        sock.settimeout(before)


def _open(
    sock: socket.socket,
    host: str,
    path: str,
    headers: Iterable[tuple[str, str]],
    subprotocols: Sequence[str],
    deadline: float,
) -> bytes:
    core = WSConnection(ConnectionType.CLIENT)
    extra_headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers]
    request = Request(host=host, target=path, subprotocols=list(subprotocols), extra_headers=extra_headers)
    _limit(sock, deadline)
    sock.sendall(core.send(request))
    buffer = HeadBuffer()
    while (found := buffer.feed(_receive(sock, deadline))) is None:
        pass
    head, leftover = found
    answer = parse_answer(head)
    if answer.status != 101:
        body = bytearray(leftover)
        # The status alone is answer enough if the body does not come.
        deadline = min(deadline, time.monotonic() + _BODY_SECONDS)
        with contextlib.suppress(OSError):
            while missing_body(answer, body) and (data := _receive(sock, deadline)):
                body += data
        raise refusal(answer, body)
    try:
        core.receive_data(head)
        event = next(iter(core.events()), None)
    except RemoteProtocolError as exc:
        raise bad_answer(exc) from exc
    if not isinstance(event, AcceptConnection):
        raise bad_answer("it does not upgrade the connection")
    if event.subprotocol != subprotocols[0]:
        raise wrong_subprotocol(event.subprotocol)
    return leftover


def _receive(sock: socket.socket, deadline: float) -> bytes:
    _limit(sock, deadline)
    return sock.recv(MAX_HEAD_NBYTES)


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)
