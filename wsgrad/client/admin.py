"""Asks a server's administration over HTTP: its nodes, what to do with them, new tokens; shows nothing by itself."""

from __future__ import annotations

import http.client
import json
import os
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from wsgrad.client.target import wanted_url
from wsgrad.errors import ConnectionLost, DeviceError, Unauthorized
from wsgrad.transport.dial import connect_socket
from wsgrad.transport.url import InvalidUrl, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wsgrad.transport.url import Endpoint

_SECONDS: Final = 10.0
_MAX_NBYTES: Final = 16 << 20


def administration_of(url: str | None) -> Administration:
    """The server of an address, with the administrator's token behind it or in `WSGRAD_ADMIN_TOKEN`.

    Without an address `WSGRAD_URL` is used; the token there is a client's, so the variable's comes first then.

    Raises:
        InvalidUrl: it can't be read.
        Unauthorized: there is no token.
    """
    text = wanted_url(url)
    if text is None:
        raise InvalidUrl("no server is named: give its URL, or set WSGRAD_URL")
    endpoint = parse_endpoint(text)
    variable = os.environ.get("WSGRAD_ADMIN_TOKEN")
    token = (variable or endpoint.token) if url is None else (endpoint.token or variable)
    if not token:
        raise Unauthorized(
            "the administrator's token is needed: set WSGRAD_ADMIN_TOKEN, or write #token=… behind the address"
        )
    return Administration(endpoint, token)


class Administration:
    """A server, and the administrator's token for it; each question is a connection of its own."""

    def __init__(self, endpoint: Endpoint, token: str, *, cafile: str | None = None) -> None:
        self._endpoint = endpoint
        self._token = token
        self._cafile = cafile

    def nodes(self) -> list[dict[str, object]]:
        """The nodes that have dialled in."""
        nodes = self._ask("GET", "/status.json").get("nodes")
        return [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []

    def act(self, name: str, action: str, asked: Mapping[str, object] | None = None) -> dict[str, object]:
        """Rename, pause, resume, kick or revoke a node; what the server answers."""
        return self._ask("POST", f"/admin/nodes/{quote(name, safe='')}/{action}", asked)

    def rotate_tokens(self, *, admin: bool = False) -> dict[str, object]:
        """Let the server make new tokens for clients and nodes, with `admin` for its administrators too; all as now."""
        return self._ask("POST", "/admin/tokens/rotate", {"roles": ["client", "node", *(["admin"] if admin else [])]})

    def _ask(self, method: str, route: str, asked: Mapping[str, object] | None = None) -> dict[str, object]:
        """Ask once.

        Raises:
            Unauthorized: the token, or the certificate, is wrong.
            DeviceError: the server refuses for another reason, such as a node that is not there.
            ConnectionLost: no answer came.
        """
        endpoint = self._endpoint
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_SECONDS)
        connection.sock = connect_socket(endpoint, cafile=self._cafile, timeout=_SECONDS)
        try:
            body = None if method == "GET" else json.dumps(asked or {}).encode()
            headers = {"Host": endpoint.authority, "Authorization": f"Bearer {self._token}"}
            connection.request(method, endpoint.target(route), body, headers)
            response = connection.getresponse()
            data = response.read(_MAX_NBYTES)
        except http.client.HTTPException as exc:
            raise ConnectionLost(f"{endpoint.url} does not answer in HTTP: {type(exc).__name__}") from exc
        finally:
            connection.close()
        if response.status == 200:
            return _object(data, endpoint)
        words = data.decode("utf-8", "replace").strip()[:500]
        said = "".join(c if c.isprintable() else " " for c in words) or response.reason
        if response.status in (401, 403, 421):
            raise Unauthorized(f"{endpoint.url} refuses: {said}")
        raise DeviceError(f"{endpoint.url} answers with status {response.status}: {said}")


def _object(data: bytes, endpoint: Endpoint) -> dict[str, object]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ConnectionLost(f"{endpoint.url} did not answer in JSON") from exc
    if not isinstance(value, dict):
        raise ConnectionLost(f"{endpoint.url} did not answer with a JSON object")
    return value
