"""Requests and answers of the HTTP that shares the port, by h11: heads in, bytes out; no decisions, no I/O in here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_HEAD = 16 * 1024
MAX_BODY = 4 * 1024


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; the connection ends after it.

    Attributes:
        policy: the Content-Security-Policy; what is no page may load nothing.
        shared: whether a page from elsewhere may learn that there was an answer; none can read it.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    policy: str = "default-src 'none'; frame-ancestors 'none'"
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. `repr` leaves the headers out: they hold tokens.

    Attributes:
        path: the target without its query, not decoded: no route needs it.
        headers: names in lower case, in order.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)

    def values(self, name: str) -> list[str]:
        """All values of a header, as they came."""
        return [value for key, value in self.headers if key == name]

    def items(self, name: str) -> list[str]:
        """The comma-separated items of all headers of a name."""
        return [item.strip() for value in self.values(name) for item in value.split(",") if item.strip()]

    @property
    def upgrade(self) -> bool:
        """Whether it asks for a WebSocket."""
        return "websocket" in map(str.lower, self.items("upgrade")) and "upgrade" in map(
            str.lower, self.items("connection")
        )

    @property
    def has_body(self) -> bool:
        """Whether a body follows the head."""
        return bool(self.values("transfer-encoding")) or any(value != "0" for value in self.values("content-length"))

    @property
    def body_nbytes(self) -> int | None:
        """How many bytes of body follow the head; None where that is not said, or not as it should be."""
        if self.values("transfer-encoding"):
            return None
        lengths = self.values("content-length") or ["0"]
        return int(lengths[0]) if len(lengths) == 1 and lengths[0].isascii() and lengths[0].isdigit() else None


class BadRequest(Exception):
    """The head is no HTTP/1.1 request."""


def parse_head(head: bytes) -> Request:
    """Read the head of a request, up to and with its empty line.

    Raises:
        BadRequest: with a text for the peer.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError as exc:
        raise BadRequest(f"not an HTTP/1.1 request: {exc}") from exc
    if not isinstance(event, h11.Request) or event.http_version not in (b"1.1", b"1.0"):
        raise BadRequest("not an HTTP/1.1 request")
    target = event.target.decode("ascii", "replace")
    if not target.startswith("/"):
        raise BadRequest("the target of a request must be a path")
    headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers)
    return Request(event.method.decode("ascii"), target.partition("?")[0], headers)


def text(status: int, message: str, *headers: tuple[str, str]) -> Response:
    """A short answer in words."""
    return Response(status, message.encode() + b"\n", headers=headers)


def document(status: int, value: Mapping[str, object], *, shared: bool = False) -> Response:
    """An answer in JSON."""
    body = json.dumps(value, indent=1, default=str).encode() + b"\n"
    return Response(status, body, "application/json", shared=shared)


def encode(response: Response, *, head_only: bool = False) -> bytes:
    """The bytes of an answer; `head_only` for requests with HEAD.

    No header lets another origin read it, browsers must not guess its type, and nobody keeps a copy.
    """
    headers = [
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        ("Connection", "close"),
        ("Date", formatdate(usegmt=True)),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Resource-Policy", "cross-origin" if response.shared else "same-origin"),
        ("Content-Security-Policy", response.policy),
        *response.headers,
    ]
    reason = HTTPStatus(response.status).phrase.encode()
    head = h11.Connection(h11.SERVER).send(h11.Response(status_code=response.status, headers=headers, reason=reason))
    assert head is not None
    return head if head_only else head + response.body
