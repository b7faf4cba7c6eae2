"""What `/status.json` shows, and to whom: the server, its devices, and what others count; it counts nothing itself."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from wsgrad.server.addresses import is_loopback
from wsgrad.server.config import version
from wsgrad.server.invitation import join_url, svg_code
from wsgrad.server.limits import all_limits
from wsgrad.server.options import split_host
from wsgrad.server.tokens import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wsgrad.server.config import Config


@dataclass(slots=True)
class PortCounters:
    """Counted by the listener since the start; `connections` are those there are now."""

    connections: int = 0
    accepted: int = 0
    refused: int = 0
    wrong_tokens: int = 0
    http_requests: int = 0
    started: float = field(default_factory=time.monotonic)


def document(config: Config, counters: PortCounters, hub: Mapping[str, object]) -> dict[str, object]:
    """The document as a JSON-able dict; the hub's keys stand beside the server's own."""
    return {
        "server": f"wsgrad {version()}",
        "name": config.name,
        "time": round(time.time(), 3),
        "pid": os.getpid(),
        "uptime_seconds": round(time.monotonic() - counters.started, 3),
        "port": {
            "connections": counters.connections,
            "accepted": counters.accepted,
            "refused": counters.refused,
            "wrong_tokens": counters.wrong_tokens,
            "http_requests": counters.http_requests,
        },
        "limits": all_limits(config),
        **hub,
    }


def shown_to(role: Role | None, document: dict[str, object], *, page: str, node_token: str) -> dict[str, object]:
    """The document for whoever asks.

    Administrators get the URL that lets a device in, and what errors say. Clients get neither: an error's words may
    hold lines of another session's source.

    Args:
        role: whose token it was asked with.
        document: all there is.
        page: the page's URL without a token.
        node_token: what makes it one that joins by itself.
    """
    split = split_host(urlsplit(page).netloc)
    own = split is None or is_loopback(split[0])  # a page that only this machine can open
    shown = {**document, "role": None if role is None else role.value, "page_url": None if own else page}
    if role is Role.ADMIN:
        shown["join_url"] = url = join_url(page, node_token)
        code = None if own else _code(url)
        return shown if code is None else {**shown, "qr": code}
    errors = document.get("errors", [])
    assert isinstance(errors, list)
    hidden = [{key: value for key, value in error.items() if key != "message"} for error in errors]
    return {**shown, "errors": hidden}


@lru_cache(maxsize=4)
def _code(url: str) -> str | None:
    # A status page asks every second, and drawing takes milliseconds.
    return svg_code(url)
