"""Who may ask for what: Host, Origin and token of a request against its route, before any upgrade; it sends nothing.

Hosts are checked so that a name which an attacker controls can't be rebound to this machine, Origins so that a foreign
page can't use a visitor's browser, tokens so that nobody else comes in.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsgrad.server import http
from wsgrad.server.options import address_of, normal_origin, own_origin, split_host
from wsgrad.server.tokens import VARIABLES, Role
from wsgrad.transport.messages import SUBPROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.config import Config
    from wsgrad.server.http import Request, Response
    from wsgrad.server.tokens import Tokens

TOKEN_SUBPROTOCOL = "wsgrad.token."
"""What a browser, which can't set Authorization, puts before the token in its offer of subprotocols."""

_FIRST_DELAY = 0.1
_MAX_DELAY = 5.0
_FORGET_SECONDS = 600.0
_MAX_ADDRESSES = 4096


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route asks for."""

    websocket: bool = False
    check_host: bool = True
    null_origin: bool = False
    roles: frozenset[Role] = frozenset()
    ticket: bool = False
    own_origin: bool = False
    post: bool = False


ROUTES = {
    "/healthz": Rule(check_host=False),
    "/status.json": Rule(roles=frozenset({Role.CLIENT, Role.ADMIN})),
    "/metrics": Rule(roles=frozenset({Role.CLIENT, Role.ADMIN})),
    "/v1/client": Rule(websocket=True, roles=frozenset({Role.CLIENT})),
    "/v1/peer": Rule(websocket=True, ticket=True),
    "/v1/node": Rule(websocket=True, null_origin=True, roles=frozenset({Role.NODE})),
}

ADMIN = Rule(roles=frozenset({Role.ADMIN}), own_origin=True, post=True)
PAGE = Rule()
"""A page file: no token, since no secret is in it."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Where a request comes from, as far as it can be believed."""

    address: str
    scheme: str
    host: str | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request gets no further. `guessed`: a token was tried, so the answer should take its time."""

    response: Response
    why: str
    guessed: bool = False


def own_names(host: str) -> frozenset[str]:
    """The names by which this machine may be called: localhost, its host name, and the name it listens on."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    names = {"localhost", name, short, f"{short}.local"}
    if address_of(host) is None:
        names.add(host.lower())
    return frozenset(names - {"", ".local"})


class Gate:
    """The rules of one server."""

    def __init__(
        self,
        config: Config,
        tokens: Tokens,
        *,
        names: frozenset[str] | None = None,
        knows_node: Callable[[str], bool] = lambda secret: False,
    ) -> None:
        self._tokens = tokens
        self._knows_node = knows_node
        self._tls = config.tls
        self._names = own_names(config.host) if names is None else names
        self._allow_hosts = frozenset(config.allow_hosts)
        self._allow_origins = frozenset(config.allow_origins)
        self._proxies = [ipaddress.ip_network(text) for text in config.trusted_proxies]

    def trusts(self, address: str) -> bool:
        """Whether the address is a reverse proxy's."""
        parsed = address_of(address)
        return parsed is not None and any(parsed in network for network in self._proxies)

    def visitor(self, request: Request, address: str) -> Visitor:
        """Who asks: the peer, or whoever a trusted proxy names. Others' `X-Forwarded-…` headers mean nothing."""
        hosts = request.values("host")
        host = hosts[0] if len(hosts) == 1 else None
        scheme = "https" if self._tls else "http"
        if not self.trusts(address):
            return Visitor(address, scheme, host)
        for item in reversed(request.items("x-forwarded-for")):
            if address_of(item) is None:
                break
            address = plain_address(item)
            if not self.trusts(address):
                break
        if protocols := request.items("x-forwarded-proto"):
            scheme = "https" if protocols[-1].lower() in ("https", "wss") else "http"
        if hosts := request.items("x-forwarded-host"):
            host = hosts[-1]
        return Visitor(address, scheme, host)

    def check(self, request: Request, rule: Rule, visitor: Visitor) -> Refusal | None:
        """Whether the request may go on. None: yes."""
        if rule.check_host and not self._host_is_ours(visitor.host):
            return _refuse(
                421, f"this server does not answer to the name {_shown(visitor.host)}; --allow-host adds one"
            )
        if (why := self._foreign_origin(request, rule, visitor)) is not None:
            return _refuse(403, why)
        if rule.websocket and not request.upgrade:
            return _refuse(426, "this route speaks WebSocket only", ("Upgrade", "websocket"))
        if rule.ticket:
            return self._check_ticket(request)
        if not rule.roles:
            return None
        return self._check_token(request, rule)

    def role_of(self, request: Request) -> Role | None:
        """Whose token a request brings."""
        token = token_of(request)
        return None if token is None else self._tokens.role_of(token)

    def _check_ticket(self, request: Request) -> Refusal | None:
        """A ticket is only looked at here; whoever lets the request in takes it."""
        if token_of(request) is None:
            return _refuse(401, "a ticket is needed", ("WWW-Authenticate", "Bearer"), why="no ticket")
        return None

    def _host_is_ours(self, host_header: str | None) -> bool:
        split = split_host(host_header) if host_header is not None else None
        if split is None:
            return False
        host, port = split
        shown = f"[{host}]" if ":" in host else host
        return (
            address_of(host) is not None
            or host in self._names
            or shown in self._allow_hosts
            or f"{shown}:{port}" in self._allow_hosts
        )

    def _foreign_origin(self, request: Request, rule: Rule, visitor: Visitor) -> str | None:
        origins = request.values("origin")
        if not origins:
            return None
        if len(origins) > 1:
            return "more than one Origin was sent"
        [origin] = origins
        if origin == "null":
            return None if rule.null_origin else "a page without an origin may not use this route"
        normal = normal_origin(origin)
        # Same scheme, name and port as the request itself: a page on another port of this machine is a stranger.
        if normal is not None and (
            (normal in self._allow_origins and not rule.own_origin)
            or (visitor.host is not None and normal == own_origin(visitor.scheme, visitor.host))
        ):
            return None
        if rule.own_origin:
            return f"pages of {_shown(origin)} may not use this route: only the server's own may"
        return f"pages of {_shown(origin)} may not use this server; --allow-origin adds an origin"

    def _check_token(self, request: Request, rule: Rule) -> Refusal | None:
        token = token_of(request)
        wanted = " or ".join(sorted(role.value for role in rule.roles))
        if token is None:
            variables = " or ".join(sorted(VARIABLES[role] for role in rule.roles))
            text = f"the {wanted} token is needed: write #token=… behind the address, or set {variables}"
            return _refuse(401, text, ("WWW-Authenticate", "Bearer"), why="no token")
        role = self._tokens.role_of(token)
        if role is None and Role.NODE in rule.roles and self._knows_node(token):
            return None  # a node that joined before: what it got then stays good when the node token changes
        if role is None:
            refusal = _refuse(401, "the token is wrong", ("WWW-Authenticate", 'Bearer error="invalid_token"'))
            return Refusal(refusal.response, "wrong token", guessed=True)
        if role not in rule.roles:
            return _refuse(403, f"this is the {role.value} token; this route needs the {wanted} token")
        return None


class Delays:
    """How long each address's next wrong token takes to be answered. Right ones are never asked to wait."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, address: str, now: float) -> float:
        """Note a wrong token; the seconds to wait before answering it, twice as long each time up to 5."""
        key = network_of(address)
        count, last = self._failures.pop(key, (0, now))
        count = 1 if now - last > _FORGET_SECONDS else count + 1
        self._failures[key] = count, now
        if len(self._failures) > _MAX_ADDRESSES:
            self._failures.popitem(last=False)
        return float(min(_FIRST_DELAY * 2.0 ** min(count - 1, 32), _MAX_DELAY))


def plain_address(address: str) -> str:
    """An address without zone, and as IPv4 where it is IPv4 in IPv6's clothes."""
    parsed = address_of(address.partition("%")[0])
    if parsed is None:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)


def network_of(address: str) -> str:
    """What counts as one address: an IPv6 host has a whole /64 to itself."""
    parsed = address_of(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


def token_of(request: Request) -> str | None:
    """The token or ticket that a request brings."""
    for value in request.values("authorization"):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            return token.strip()
    if SUBPROTOCOL in (offered := request.items("sec-websocket-protocol")):
        for item in offered:
            if item.startswith(TOKEN_SUBPROTOCOL):
                return item.removeprefix(TOKEN_SUBPROTOCOL)
    return None


def wrong_ticket() -> Refusal:
    """The answer to a ticket that is unknown, used, or too old."""
    refusal = _refuse(401, "the ticket is wrong, used or too old", ("WWW-Authenticate", 'Bearer error="invalid_token"'))
    return Refusal(refusal.response, "wrong ticket", guessed=True)


def _refuse(status: int, message: str, *headers: tuple[str, str], why: str | None = None) -> Refusal:
    return Refusal(http.text(status, message, *headers), message if why is None else why)


def _shown(value: str | None) -> str:
    """A stranger's header as it may stand in an answer or a log."""
    return "(none)" if value is None else ascii(value[:100])
