"""The opening of one connection: reads its head, checks it, answers over HTTP or upgrades; sessions come after it.

Whatever a stranger sends here costs only its own connection, and little longer than the handshake's time limit.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from wsgrad.errors import ConnectionLost, LimitExceeded, ProtocolError
from wsgrad.server import audit, http, metrics
from wsgrad.server.admin import is_admin_path
from wsgrad.server.auth import ADMIN, PAGE, ROUTES, Delays, network_of, token_of, wrong_ticket
from wsgrad.server.http import MAX_HEAD, BadRequest
from wsgrad.transport.handshake_trio import accept_websocket, read_http_head
from wsgrad.transport.messages import SUBPROTOCOL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from wsgrad.server.admin import Admin
    from wsgrad.server.auth import Gate, Rule, Visitor
    from wsgrad.server.http import Request, Response
    from wsgrad.server.pages import Pages
    from wsgrad.server.routes import Route
    from wsgrad.server.status import PortCounters
    from wsgrad.server.tickets import Tickets
    from wsgrad.server.tokens import Role

_LINGER_SECONDS = 1.0

_log = logging.getLogger("wsgrad.server.door")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A connection whose WebSocket is open.

    Attributes:
        leftover: what the peer sent right behind its head.
        claim: what another server's ticket is for.
        address: the peer's, or the one a trusted proxy names; `peer` is the same for logs, with the port if known.
        proxy: the trusted proxy through which it came, or nothing.
    """

    stream: trio.abc.Stream
    leftover: bytes
    route: str
    address: str
    peer: str
    claim: Route | None = None
    proxy: str = ""


class Door:
    """Lets connections of one server in, or tells them why not."""

    def __init__(
        self,
        gate: Gate,
        counters: PortCounters,
        status: Callable[[Role | None, Visitor], Mapping[str, object]],
        tickets: Tickets,
        pages: Pages,
        admin: Admin,
        *,
        max_delayed: int,
    ) -> None:
        """Make one.

        Args:
            max_delayed: wrong tokens of one address whose answers wait at the same time. While there are so many, no
                other token of that address is looked at: whoever guesses could else do so as fast as it connects.
        """
        self._max_delayed = max_delayed
        self._gate = gate
        self._counters = counters
        self._status = status
        self._tickets = tickets
        self._pages = pages
        self._admin = admin
        self._delays = Delays()
        self._delayed: Counter[str] = Counter()
        self.draining = False

    async def admit(
        self, stream: trio.abc.Stream, address: str, peer: str, *, due: float, late: str
    ) -> Admitted | None:
        """Read the head and see it through; None where the connection was answered and is over.

        Args:
            stream: where it comes from.
            address: whose it is.
            peer: the same for logs.
            due: when the head must be whole, by trio's clock.
            late: what to say where it is not.

        Raises:
            ConnectionLost: the peer left.
        """
        try:
            head, rest = await read_http_head(stream, limit=MAX_HEAD, timeout=max(0.0, due - trio.current_time()))
            request = http.parse_head(head)
        except TimeoutError:
            await self._turn_away(stream, peer, "-", http.text(408, late))
            return None
        except LimitExceeded:
            await self._turn_away(stream, peer, "-", http.text(431, f"a request's head may have {MAX_HEAD} bytes"))
            return None
        except BadRequest as exc:
            await self._turn_away(stream, peer, "-", http.text(400, str(exc)))
            return None
        visitor = self._gate.visitor(request, address)
        proxy = ""
        if visitor.address != address:
            peer, proxy = visitor.address, peer
        answer = await self._answer(request, visitor, peer, partial(_read_body, stream, rest))
        if answer is not None:
            await send(stream, answer, head_only=request.method == "HEAD")
            return None
        claim = None
        if ROUTES[request.path].ticket:
            claim = self._tickets.take(token_of(request) or "")
            if claim is None:
                refusal = wrong_ticket()
                self._note(peer, request.path, refusal.why)
                await self._delay(visitor.address)
                await send(stream, refusal.response)
                return None
        try:
            await accept_websocket(stream, head, subprotocol=SUBPROTOCOL)
        except ProtocolError as exc:
            self._note(peer, request.path, str(exc))
            await linger(stream)
            return None
        return Admitted(stream, rest, request.path, visitor.address, peer, claim, proxy)

    async def _answer(
        self, request: Request, visitor: Visitor, peer: str, body: Callable[[int], Awaitable[bytes]]
    ) -> Response | None:
        """What to say over HTTP. None: the request may become a WebSocket."""
        rule = self._rule(request.path)
        if rule is None:
            return http.text(404, "there is nothing here")
        if (wrong := _wrong_method(request, rule)) is not None:
            return wrong
        if self._delayed[network_of(visitor.address)] >= self._max_delayed:
            self._note(peer, request.path, "too many wrong tokens")
            return http.text(429, "too many wrong tokens came from this address", ("Retry-After", "5"))
        if (refusal := self._gate.check(request, rule, visitor)) is not None:
            self._note(peer, request.path, refusal.why)
            if refusal.guessed:
                await self._delay(visitor.address)
            return refusal.response
        if rule.websocket:
            return http.text(503, "the server is stopping", ("Retry-After", "5")) if self.draining else None
        self._counters.http_requests += 1
        _log.debug("%s asked for %s", peer, request.path)
        if request.path == "/healthz":
            # Shared: a tab's page from a file tells a refused token from a server that is off by whether this answers.
            status = "stopping" if self.draining else "ok"
            return http.document(503 if self.draining else 200, {"status": status}, shared=True)
        if rule is ADMIN:
            return await self._admin.answer(request.path, await body(request.body_nbytes or 0), peer)
        if rule is PAGE:
            return self._pages.answer(request.path)
        document = self._status(self._gate.role_of(request), visitor)
        return metrics.answer(document) if request.path == "/metrics" else http.document(200, document)

    def _rule(self, path: str) -> Rule | None:
        if path in self._pages:
            return PAGE
        return ADMIN if is_admin_path(path) else ROUTES.get(path)

    async def _delay(self, address: str) -> None:
        self._counters.wrong_tokens += 1
        key = network_of(address)
        seconds = self._delays.failed(address, trio.current_time())
        self._delayed[key] += 1
        try:
            await trio.sleep(seconds)
        finally:
            self._delayed[key] -= 1
            if not self._delayed[key]:
                del self._delayed[key]

    async def _turn_away(self, stream: trio.abc.Stream, peer: str, route: str, response: Response) -> None:
        self._note(peer, route, response.body.decode().strip())
        await send(stream, response)

    def _note(self, peer: str, route: str, why: str) -> None:
        self._counters.refused += 1
        _log.info("refused %s at %s: %s", peer, route, why)
        audit.note("refused", peer=peer, route=route, why=why)


def _wrong_method(request: Request, rule: Rule) -> Response | None:
    if rule.post:
        if request.method != "POST":
            return http.text(405, "this route answers POST only", ("Allow", "POST"))
        if request.body_nbytes is None:
            return http.text(411, "a body needs its Content-Length")
        if request.body_nbytes > http.MAX_BODY:
            return http.text(413, f"a body may have {http.MAX_BODY} bytes")
        return None
    if request.method not in ("GET", "HEAD"):
        return http.text(405, "this route answers GET and HEAD only", ("Allow", "GET, HEAD"))
    return http.text(413, "this route takes no body") if request.has_body else None


async def _read_body(stream: trio.abc.Stream, begun: bytes, nbytes: int) -> bytes:
    """The body of a request, of which some may have come with its head.

    Raises:
        ConnectionLost: the peer left before its end.
    """
    body = bytearray(begun)
    while len(body) < nbytes:
        part = await stream.receive_some(nbytes - len(body))
        if not part:
            raise ConnectionLost(f"the peer left after {len(body)} of {nbytes} bytes of a body")
        body += part
    return bytes(body[:nbytes])


async def send(stream: trio.abc.Stream, response: Response, *, head_only: bool = False) -> None:
    """Answer over HTTP; nothing may be sent on the stream after it."""
    await stream.send_all(http.encode(response, head_only=head_only))
    await linger(stream)


async def linger(stream: trio.abc.Stream) -> None:
    """Let the peer read what was sent: a close while its bytes lie unread would reset the connection and the answer."""
    while isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    with (
        trio.move_on_after(_LINGER_SECONDS),
        contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError),
    ):
        if isinstance(stream, trio.SocketStream):
            await stream.send_eof()
        while await stream.receive_some(MAX_HEAD):
            pass
