"""Bare TCP through relays, each in a process of its own: the reference for bytes that pass several processes.

Blocking sockets, one reused buffer in each process, no framing, no copies but the kernel's. Nothing of wsgrad is used.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NBYTES = struct.Struct("<Q")
_PIECE_BYTES = 1 << 20
_DONE = b"done"


def _accept(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _dial(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]


def _relay(listener: socket.socket, port: int) -> None:
    """Pass on what comes, at once, and the last process's answer back."""
    source, sink = _accept(listener), _dial(port)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    while True:
        try:
            _receive(source, buffer[: _NBYTES.size])
        except EOFError:
            return
        sink.sendall(buffer[: _NBYTES.size])
        (nbytes,) = _NBYTES.unpack_from(buffer)
        while nbytes:
            received = source.recv_into(buffer[: min(nbytes, _PIECE_BYTES)])
            if not received:
                return
            sink.sendall(buffer[:received])
            nbytes -= received
        _receive(sink, buffer[: len(_DONE)])
        source.sendall(buffer[: len(_DONE)])


def _sink(listener: socket.socket, size: int) -> None:
    """Receive into the same memory each time, and say so."""
    source = _accept(listener)
    memory = memoryview(bytearray(size))
    head = memoryview(bytearray(_NBYTES.size))
    while True:
        try:
            _receive(source, head)
        except EOFError:
            return
        _receive(source, memory[: _NBYTES.unpack(head)[0]])
        source.sendall(_DONE)


class Chain:
    """The first of the processes, which is this one."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(size))
        self._answer = memoryview(bytearray(len(_DONE)))

    def send(self) -> float:
        """Seconds until the last process has received all of this one's memory and said so."""
        start = time.perf_counter()
        self._connection.sendall(_NBYTES.pack(len(self._memory)))
        self._connection.sendall(self._memory)
        _receive(self._connection, self._answer)
        return time.perf_counter() - start


@contextmanager
def chain(*, processes: int, nbytes: int) -> Iterator[Chain]:
    """So many processes in a row, this one first, all joined by TCP; the others end with the block."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        started = []
        port = 0
        for place in range(processes - 1):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            work = _sink if not place else _relay
            process = context.Process(target=work, args=(listener, port if place else nbytes), daemon=True)
            port = listener.getsockname()[1]
            process.start()
            started.append(process)
        connection = stack.enter_context(_dial(port))
        try:
            yield Chain(connection, nbytes)
        finally:
            connection.close()
            for process in reversed(started):
                process.join(5)
                process.kill()
                process.join()
