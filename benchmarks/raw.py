"""A bare TCP peer in a process of its own: the reference that wsgrad's figures are held against.

Blocking sockets, reused buffers, no framing, no copies but the kernel's. Nothing of wsgrad is used here.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

_REQUEST = struct.Struct("<cQ")
_ECHO, _SINK, _SOURCE = b"e", b"s", b"d"
_BUFFER_BYTES = 8 << 20


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]


def _serve(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    request = memoryview(bytearray(_REQUEST.size))
    while True:
        try:
            _receive(connection, request)
        except EOFError:
            return
        operation, nbytes = _REQUEST.unpack(request)
        if operation == _ECHO:
            connection.sendall(buffer[:nbytes])
            continue
        while nbytes:
            piece = buffer[: min(nbytes, _BUFFER_BYTES)]
            if operation == _SINK:
                _receive(connection, piece)
            else:
                connection.sendall(piece)
            nbytes -= len(piece)
        if operation == _SINK:
            connection.sendall(b"done")


class RawPeer:
    """The client's end: seconds of a round trip, an upload, a download."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reply = memoryview(bytearray(64))

    def round_trip(self, nbytes: int = 4) -> float:
        """Seconds until `nbytes` (at most 64) asked for are here."""
        start = time.perf_counter()
        self._connection.sendall(_REQUEST.pack(_ECHO, nbytes))
        _receive(self._connection, self._reply[:nbytes])
        return time.perf_counter() - start

    def upload(self, array: np.ndarray) -> float:
        """Seconds until the peer has received all bytes of a contiguous array and said so."""
        start = time.perf_counter()
        self._connection.sendall(_REQUEST.pack(_SINK, array.nbytes))
        self._connection.sendall(array.data.cast("B"))
        _receive(self._connection, self._reply[:4])
        return time.perf_counter() - start

    def download(self, array: np.ndarray) -> float:
        """Seconds until a contiguous array is filled."""
        start = time.perf_counter()
        self._connection.sendall(_REQUEST.pack(_SOURCE, array.nbytes))
        _receive(self._connection, array.data.cast("B"))
        return time.perf_counter() - start


@contextmanager
def raw_peer() -> Iterator[RawPeer]:
    """A peer process and a connection to it; both end with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener,), daemon=True)
        process.start()
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield RawPeer(connection)
        finally:
            connection.close()
            process.join(5)
            process.kill()
            process.join()
