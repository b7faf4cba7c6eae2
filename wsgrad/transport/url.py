"""Reads the addresses a user writes, `ws://host:port#token=…` and lists of them; it opens nothing and looks nothing up.

A token stands in the fragment, which no server or proxy ever sees, and never in an error's text or in a `repr`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from wsgrad.errors import InvalidUrl as InvalidUrl

DEFAULT_PORT = 7667

_SCHEMES = {"ws": False, "wss": True}
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
# What may stand in an Authorization header and in a WebSocket subprotocol without any quoting.
_TOKEN = re.compile(r"[A-Za-z0-9._~+-]+")
_PATH = re.compile(r"[A-Za-z0-9._~/%+-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server as a user named it.

    Attributes:
        host: a name or an IP address, without brackets.
        port: its TCP port.
        tls: whether the connection is encrypted (`wss`).
        token: the client token, or None if the address holds none; left out of the `repr`.
        sha256: the fingerprint its certificate must have, 64 lower-case hex digits, or None.
        count: how many of its devices are meant, or None for all.
        path: what a reverse proxy puts before the routes, without a slash at the end; mostly empty.
    """

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False
    token: str | None = field(default=None, repr=False)
    sha256: str | None = None
    count: int | None = None
    path: str = ""

    @property
    def authority(self) -> str:
        """`host:port`, as the Host header wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address without its fragment, fit for messages and logs."""
        return f"{'wss' if self.tls else 'ws'}://{self.authority}{self.path}"

    def target(self, route: str) -> str:
        """Returns what to ask the server for, given a route such as `/v1/client`."""
        return self.path + route

    def __str__(self) -> str:
        return self.url


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Reads `item,item`: each item an address, then perhaps `*N` for its first N devices.

    Raises:
        InvalidUrl: one of them cannot be read.
    """
    return tuple(parse_endpoint(item) for item in text.split(","))


def parse_endpoint(text: str) -> Endpoint:
    """Reads one address: `host`, `host:port`, or a `ws://` or `wss://` URL; then perhaps `#token=…&sha256=…` and `*N`.

    Raises:
        InvalidUrl: it cannot be read.
    """
    text = text.strip()
    if not text:
        raise InvalidUrl("an address is empty; write host, host:port or ws://host:port#token=…")
    rest, star, count_text = text.rpartition("*")
    address, _, fragment = (rest if star else text).partition("#")
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "ws", address
    if "@" in rest.partition("/")[0]:
        raise InvalidUrl("a user name or password in an address is not supported; write #token=… behind it")
    shown, query, _ = address.partition("?")  # what messages may show
    # Of a wrong number only one that stands alone is shown: else a token may be in it, or cut by the '*'.
    count = _count(count_text, shown, show=not set("#?@") & set(text)) if star else None
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        raise InvalidUrl(f"{shown!r}: the scheme {scheme!r} is not supported; write ws:// or wss://")
    tls = _SCHEMES[scheme]
    if query:
        raise InvalidUrl(f"{shown!r}: a query is not supported; a token belongs behind '#', where no proxy sees it")
    authority, slash, path = rest.partition("/")
    path = (slash + path).rstrip("/")
    if not _PATH.fullmatch(path):
        raise InvalidUrl(f"{shown!r}: the path {path!r} holds characters that must be percent-encoded")
    host, port = _host_and_port(authority, shown)
    token, sha256 = _fragment(fragment, shown)
    if sha256 is not None and not tls:
        raise InvalidUrl(f"{shown!r}: a certificate's fingerprint needs an encrypted connection; write wss://")
    return Endpoint(host, port, tls, token, sha256, count, path)


def _count(text: str, shown: str, *, show: bool) -> int:
    if not text.isascii() or not text.isdigit() or int(text[:9]) == 0 or len(text) > 9:
        found = f"not {text[:20]!r}" if show else "and nothing behind it"
        raise InvalidUrl(f"{shown!r}: behind '*' stands a number of devices, at least 1, {found}")
    return int(text)


def _host_and_port(authority: str, shown: str) -> tuple[str, int]:
    if authority.startswith("["):
        host, bracket, port_text = authority[1:].partition("]")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise InvalidUrl(f"{shown!r}: {host!r} in brackets is not an IPv6 address") from None
        if not bracket or (port_text and not port_text.startswith(":")):
            raise InvalidUrl(f"{shown!r}: an IPv6 address is written [address]:port")
    else:
        if authority.count(":") > 1:
            raise InvalidUrl(f"{shown!r}: an IPv6 address is written in brackets, [address]:port")
        host, colon, port_text = authority.partition(":")
        port_text = colon + port_text
        if not host:
            raise InvalidUrl(f"{shown!r}: the host is missing")
        if not _HOST.fullmatch(host):
            raise InvalidUrl(f"{shown!r}: {host!r} is not a host name or an IP address")
    if not port_text:
        return host, DEFAULT_PORT
    digits = port_text[1:]
    if not digits.isascii() or not digits.isdigit() or len(digits) > 5 or not 0 < int(digits) < 65536:
        raise InvalidUrl(f"{shown!r}: the port must be a number from 1 to 65535, not {digits!r}")
    return host, int(digits)


def _fragment(fragment: str, shown: str) -> tuple[str | None, str | None]:
    values: dict[str, str] = {}
    for part in fragment.split("&") if fragment else ():
        key, equals, value = part.partition("=")
        if key not in ("token", "sha256") or not equals:
            # The part itself is not shown: it may be a token whose key was forgotten.
            raise InvalidUrl(f"{shown!r}: behind '#' only token=… and sha256=… may stand, joined by '&'")
        if key in values:
            raise InvalidUrl(f"{shown!r}: {key} stands twice behind '#'")
        values[key] = unquote(value)
    token = values.get("token")
    if token is not None and not _TOKEN.fullmatch(token):
        raise InvalidUrl(f"{shown!r}: the token behind '#' is empty or holds characters that no token has")
    sha256 = values.get("sha256")
    if sha256 is not None:
        try:
            sha256 = normal_fingerprint(sha256)
        except InvalidUrl:
            # It is not shown: a token may stand in it, behind something else than '&'.
            raise InvalidUrl(f"{shown!r}: behind sha256= stand 64 hex digits, and '&' before token=") from None
    return token, sha256


def normal_fingerprint(text: str) -> str:
    """Returns a SHA-256 fingerprint as 64 lower-case hex digits; colons and capitals are accepted.

    Raises:
        InvalidUrl: it is none.
    """
    digits = text.replace(":", "").lower()
    if not _SHA256.fullmatch(digits):
        raise InvalidUrl(f"a certificate's SHA-256 fingerprint has 64 hex digits, not {text[:80]!r}")
    return digits
