"""One-time tickets by which another server may dial in for a session; they live in memory only and for a short time."""

from __future__ import annotations

import base64
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from wsgrad.server.routes import Route

TICKET_NBYTES: Final = 16
TICKET_SECONDS: Final = 30.0
_MAX_TICKETS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Entry:
    text: bytes
    route: Route
    until: float


class Tickets:
    """All tickets of one server."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def make(self, route: Route) -> bytes:
        """A ticket for one link."""
        self._expire()
        if len(self._entries) >= _MAX_TICKETS:
            del self._entries[0]
        ticket = secrets.token_bytes(TICKET_NBYTES)
        self._entries.append(_Entry(ticket_text(ticket).encode(), route, time.monotonic() + TICKET_SECONDS))
        return ticket

    def take(self, text: str) -> Route | None:
        """The link that a ticket is for; it is worth nothing afterwards. Takes as long for any wrong one."""
        self._expire()
        given = text.encode("utf-8", "surrogatepass")
        found = None
        for entry in self._entries:
            if secrets.compare_digest(entry.text, given):
                found = entry
        if found is None:
            return None
        self._entries.remove(found)
        return found.route

    def forget(self, route: Route) -> None:
        """The session behind it is over."""
        self._entries = [entry for entry in self._entries if entry.route is not route]

    def _expire(self) -> None:
        now = time.monotonic()
        self._entries = [entry for entry in self._entries if entry.until > now]


def ticket_text(ticket: bytes) -> str:
    """A ticket as it stands in an Authorization header."""
    return base64.urlsafe_b64encode(ticket).rstrip(b"=").decode()
