"""A link that lets no more bytes a second pass than a slow one would; it adds no delay and loses nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.link import PIECE_NBYTES, Link

if TYPE_CHECKING:
    import socket

_BURST_SECONDS = 0.01


class ShapedLink(Link):
    """A rate of its own for each direction.

    Attributes:
        passed: bytes that went to the server.
    """

    def __init__(self, url: str, *, bytes_per_second: float) -> None:
        super().__init__(url)
        self._rate = bytes_per_second
        self.passed = 0

    def carry(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        piece = memoryview(bytearray(PIECE_NBYTES))
        free_at = 0.0
        while nbytes := source.recv_into(piece):
            now = time.perf_counter()
            # Sleeping takes longer than asked for; what that cost is caught up on, as a link's buffer would.
            free_at = max(free_at, now - _BURST_SECONDS) + nbytes / self._rate
            if free_at > now:
                time.sleep(free_at - now)
            sink.sendall(piece[:nbytes])
            if to_server:
                self.passed += nbytes
