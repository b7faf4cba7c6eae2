"""A TCP proxy in front of a server, for links worse than loopback; what it does to the bytes, a subclass says."""

from __future__ import annotations

import contextlib
import socket
import threading
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
        connections: how many there were.
        accepting: whether what connects is passed on; else it is closed at once.
        sparing: so many connections, the first ones, are not ended by `cut`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.connections = 0
        self.accepting = True
        self.sparing = 0
        self._address = self._listener.getsockname()
        self.url = f"{parts.scheme}://127.0.0.1:{self._address[1]}/#{parts.fragment}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.accepting = False
        self.sparing = 0
        self.refuse()
        for thread in list(self._threads):
            thread.join()
        self.cut()
        for thread in list(self._threads):
            thread.join()

    def carry(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        """Carry one direction of a connection until it ends; called in a thread of its own."""
        raise NotImplementedError

    def cut(self) -> None:
        """End the connections that there are now, but for those that are spared."""
        with self._lock:
            for number, sockets in self._sockets.items():
                if number > self.sparing:
                    self.hang_up(*sockets)

    def refuse(self) -> None:
        """Let nothing listen here any more, and end what is connected."""
        self.hang_up(self._listener)
        self._listener.close()
        self.cut()

    def listen(self) -> None:
        """Let the same address accept connections again after `refuse`."""
        self._listener = socket.create_server(self._address)
        self._start(self._accept)

    def connected(self, number: int, client: socket.socket, server: socket.socket) -> None:
        """Begin to carry connection `number`, counted from 1: a thread each way, and `over` when both have ended."""
        left = [2]

        def carry(source: socket.socket, sink: socket.socket) -> None:
            try:
                with contextlib.suppress(OSError):
                    self.carry(source, sink, to_server=sink is server)
                self.hang_up(source, sink)
            finally:
                with self._lock:
                    left[0] -= 1
                    last = not left[0]
                if last:
                    self.over(number)

        self._start(lambda: carry(client, server))
        self._start(lambda: carry(server, client))

    def over(self, number: int) -> None:
        """Nothing is carried on connection `number` any more."""
        with self._lock:
            for sock in self._sockets.pop(number):
                sock.close()

    @staticmethod
    def hang_up(*sockets: socket.socket) -> None:
        """End connections for both of their sides; those that have ended stay as they are."""
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self.accepting:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            with self._lock:
                self._sockets[self.connections] = client, server
            self.connected(self.connections, client, server)

    def _start(self, function: Callable[[], object]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive() or not thread.ident]
        thread = threading.Thread(target=function)
        self._threads.append(thread)
        thread.start()
