"""What `/status.json` shows: the server, its devices, and the counters of hub and port; it counts nothing itself."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wsgrad.server.config import version

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
        "pid": os.getpid(),
        "uptime_seconds": round(time.monotonic() - counters.started, 3),
        "port": {
            "connections": counters.connections,
            "accepted": counters.accepted,
            "refused": counters.refused,
            "wrong_tokens": counters.wrong_tokens,
            "http_requests": counters.http_requests,
        },
        **hub,
    }
