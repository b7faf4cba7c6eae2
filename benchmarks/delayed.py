"""A TCP proxy that lets everything arrive later, as a far-away server's would; it slows nothing down, loses nothing."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 16
_EARLY_SECONDS = 0.0005
"""Sleeping takes longer than asked for; the rest is waited for awake."""


class DelayedLink:
    """Passes connections on to a server with a delay in each direction; threads of this process.

    Attributes:
        url: the server's address by way of this link.
    """

    def __init__(self, url: str, *, seconds: float) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._seconds = seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}/#{parts.fragment}"
        self._threads[0].start()

    def close(self) -> None:
        """End all connections and wait for the threads."""
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                for thread in (
                    threading.Thread(target=self._read, args=(source, pieces)),
                    threading.Thread(target=self._write, args=(sink, pieces)),
                ):
                    self._threads.append(thread)
                    thread.start()

    def _read(self, source: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                pieces.put((time.perf_counter() + self._seconds, piece))
        pieces.put((time.perf_counter() + self._seconds, b""))

    def _write(self, sink: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, piece = pieces.get()
                left = due - time.perf_counter() - _EARLY_SECONDS
                if left > 0:
                    time.sleep(left)
                while time.perf_counter() < due:
                    pass
                if not piece:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(piece)


@contextlib.contextmanager
def delayed_link(url: str, *, seconds: float) -> Iterator[DelayedLink]:
    """A link to a server that ends with the block."""
    link = DelayedLink(url, seconds=seconds)
    try:
        yield link
    finally:
        link.close()
