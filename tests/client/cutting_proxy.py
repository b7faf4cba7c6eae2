"""A TCP proxy between client and server that counts bytes and cuts connections where a test wants it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """Forwards to a server. Threads of its own; everything ends with `close`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}#{parts.fragment}"
        self.connections = 0
        self.cut_after: int | None = None
        """Cut the connection once so many more bytes have passed, both directions together."""
        self.sparing = 0
        """So many connections, the first ones, are neither counted nor cut by that."""
        self.accepting = True
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Cut what is connected now, but for the connections that are spared."""
        with self._lock:
            for sock in self._open[2 * self.sparing :]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Nothing listens any more."""
        self._listener.close()
        self.cut()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.sparing = 0
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                if not select.select([self._listener], [], [], 0.05)[0]:
                    continue
                client, _ = self._listener.accept()
            except (OSError, ValueError):
                return
            if not self.accepting:
                client.close()
                continue
            self.connections += 1
            server = socket.create_connection(self._target)
            thread = threading.Thread(target=self._forward, args=(client, server, self.connections))
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket, server: socket.socket, number: int) -> None:
        with self._lock:
            self._open += [client, server]
        with client, server, contextlib.suppress(OSError):
            while True:
                readable, _, _ = select.select([client, server], [], [])
                for sock in readable:
                    data = sock.recv(1 << 14)
                    if self.cut_after is not None and number > self.sparing:
                        self.cut_after -= len(data)
                        if self.cut_after <= 0:
                            data = data[: len(data) + self.cut_after]
                            (server if sock is client else client).sendall(data)
                            self.cut_after = None
                            return
                    if not data:
                        return
                    (server if sock is client else client).sendall(data)
        with self._lock:
            self._open.remove(client)
            self._open.remove(server)
