"""A TCP proxy that lets no more bytes a second pass than a slow link would; it adds no delay and loses nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 16
_BURST_SECONDS = 0.01


class ShapedLink:
    """Passes connections on to a server at a rate of its own for each direction; threads of this process.

    Attributes:
        url: the server's address by way of this link.
        passed: bytes that went to the server.
    """

    def __init__(self, url: str, *, bytes_per_second: float) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._rate = bytes_per_second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}/#{parts.fragment}"
        self.passed = 0
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
                for sock in (source, sink):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(target=self._forward, args=(source, sink, sink is server))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        piece = memoryview(bytearray(_PIECE))
        free_at = 0.0
        with contextlib.suppress(OSError):
            while nbytes := source.recv_into(piece):
                now = time.perf_counter()
                # Sleeping takes longer than asked for; what that cost is caught up on, as a link's buffer would.
                free_at = max(free_at, now - _BURST_SECONDS) + nbytes / self._rate
                if free_at > now:
                    time.sleep(free_at - now)
                sink.sendall(piece[:nbytes])
                if to_server:
                    self.passed += nbytes
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def shaped_link(url: str, *, bytes_per_second: float) -> Iterator[ShapedLink]:
    """A link to a server that ends with the block."""
    link = ShapedLink(url, bytes_per_second=bytes_per_second)
    try:
        yield link
    finally:
        link.close()
