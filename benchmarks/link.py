"""A TCP proxy in front of a server, for links worse than loopback; what it does to the bytes, a subclass says."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

PIECE_NBYTES = 1 << 16


class Link:
    """Passes connections on to a server until the end of its `with` block; threads of this process.

    Attributes:
        url: the server's address by way of this link.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}/#{parts.fragment}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up(self._listener, *self._sockets)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def carry(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        """Carry one direction of a connection until it ends; called in a thread of its own."""
        raise NotImplementedError

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
                self._start(partial(self._carry, source, sink, to_server=sink is server))

    def _carry(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            self.carry(source, sink, to_server=to_server)
        self.hang_up(source, sink)

    @staticmethod
    def hang_up(*sockets: socket.socket) -> None:
        """End connections for both of their sides; those that have ended stay as they are."""
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _start(self, function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function)
        self._threads.append(thread)
        thread.start()
