"""Which server a caller means: an address, `WSGRAD_URL`, or one of our own; it connects to none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import quote

import wsgrad
from wsgrad.transport.url import Endpoint, InvalidUrl, parse_endpoints

AGENT = f"wsgrad-python/{wsgrad.__version__}"
ROUTE = "/v1/client"


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to be let in."""

    endpoint: Endpoint
    token: str | None
    cafile: str | None

    @property
    def url(self) -> str:
        """The address with token and fingerprint, for connecting once more; not for logs."""
        parts = [
            f"{key}={quote(value)}" for key, value in (("token", self.token), ("sha256", self.endpoint.sha256)) if value
        ]
        return self.endpoint.url + ("#" + "&".join(parts) if parts else "")


def wanted_url(url: str | None) -> str | None:
    """The address to use; None means a server of our own."""
    return url if url is not None else os.environ.get("WSGRAD_URL") or None


def target_of(url: str, *, token: str | None, cafile: str | None) -> Target:
    """Read an address; a token beside it comes before the one in it, and that before `WSGRAD_TOKEN`.

    Raises:
        InvalidUrl: it can't be read, or names several servers.
    """
    endpoints = parse_endpoints(url)
    if len(endpoints) != 1:
        raise InvalidUrl(
            f"connect() and open_server() take one server, {len(endpoints)} were given; "
            "wsgrad.connect_all() and wsgrad.open_all() take several"
        )
    endpoint = endpoints[0]
    return Target(endpoint, token or endpoint.token or os.environ.get("WSGRAD_TOKEN") or None, cafile)


def debugging() -> bool:
    """Whether `WSGRAD_DEBUG` asks for the line of the user's program in every error."""
    return os.environ.get("WSGRAD_DEBUG", "") not in ("", "0")
