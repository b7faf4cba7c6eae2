"""A link on which everything arrives later, as from a far-away server; it slows nothing down, loses nothing."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from benchmarks.link import PIECE_NBYTES, Link

if TYPE_CHECKING:
    import socket

_EARLY_SECONDS = 0.0005
"""Sleeping takes longer than asked for; the rest is waited for awake."""


class DelayedLink(Link):
    """A delay in each direction."""

    def __init__(self, url: str, *, seconds: float) -> None:
        super().__init__(url)
        self._seconds = seconds

    def carry(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        reader = threading.Thread(target=self._read, args=(source, pieces))
        reader.start()
        try:
            while True:
                due, piece = pieces.get()
                left = due - time.perf_counter() - _EARLY_SECONDS
                if left > 0:
                    time.sleep(left)
                while time.perf_counter() < due:
                    pass
                if not piece:
                    return
                sink.sendall(piece)
        finally:
            self.hang_up(source, sink)
            reader.join()

    def _read(self, source: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        try:
            while piece := source.recv(PIECE_NBYTES):
                pieces.put((time.perf_counter() + self._seconds, piece))
        except OSError:
            pass
        finally:
            pieces.put((time.perf_counter() + self._seconds, b""))
