"""Clients that work in a session and end it, each in its own way; what that leaves in the server is others' to look at.

A way that kills its client forks one from this process, which must have one thread then: all others are closed first.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

import wsgrad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.processes import ServerProcess

PROGRAM: Final = "void add(int *x, int n) { for (int i = 0; i < n; i++) x[i] += 1; }"
_CRASH: Final = "void crash(int *x) { *(volatile int *)8 = 1; }"
_SPIN: Final = "void spin(int *x) { for (volatile int i = 0;; i++) ; }"
_PATIENCE: Final = 60.0
_NBYTES: Final = 4 << 20


def work(server: wsgrad.Server, *, rounds: int = 1) -> None:
    """Launches and reads whose results are checked."""
    start = np.arange(64, dtype=np.int32)
    array = server.devices[0].array(start)
    add = server.devices[0].program(PROGRAM, "add")
    for done in range(rounds):
        add(array, np.int32(64))
        if not np.array_equal(array.numpy(timeout=_PATIENCE), start + done + 1):
            raise AssertionError("a device computed something else")


@contextlib.contextmanager
def forked(client: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """Run a client in a process of its own; it ends with the block at the latest.

    Args:
        client: called there with a descriptor, on which it may write that it is ready.

    Yields:
        Its process id, and what to read its word from.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.close(reading)
            client(writing)
            os._exit(0)
        os._exit(1)
    os.close(writing)
    try:
        yield pid, reading
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


def heard(reading: int) -> bytes:
    """What a forked client says next; nothing where it ended without a word."""
    if not select.select((reading,), (), (), _PATIENCE)[0]:
        raise TimeoutError(f"a client said nothing for {_PATIENCE:g} s")
    return os.read(reading, 100)


def bye(server: ServerProcess) -> None:
    """Works, and says good-bye."""
    with wsgrad.connect(server.url) as connected:
        work(connected)


def wrong(server: ServerProcess) -> None:
    """Its program does not compile: a named error, and the session works on."""
    with wsgrad.connect(server.url) as connected:
        with _raises(wsgrad.CompileError):
            connected.devices[0].program("this is not C", "f").ready(timeout=_PATIENCE)
        work(connected)


def greedy(server: ServerProcess) -> None:
    """It wants more memory than a session may have: a named error, and the session works on."""
    with wsgrad.connect(server.url) as connected:
        device = connected.devices[0]
        with _raises(wsgrad.OutOfMemory):
            device.empty((1 << 40,), np.uint8)
            device.synchronize(timeout=_PATIENCE)
        work(connected)


def crash(server: ServerProcess) -> None:
    """A kernel ends its process; the device opens again."""
    with wsgrad.connect(server.url) as connected:
        device = connected.devices[0]
        with _raises(wsgrad.DeviceLost):
            device.program(_CRASH, "crash")(device.array(np.zeros(4, np.int32)))
            device.synchronize(timeout=_PATIENCE)
        device.reopen(timeout=_PATIENCE)
        work(connected)


def spin(server: ServerProcess) -> None:
    """A kernel runs over its limit, and its client leaves."""
    with wsgrad.connect(server.url) as connected:
        device = connected.devices[0]
        with _raises(wsgrad.Timeout):
            device.program(_SPIN, "spin")(device.array(np.zeros(4, np.int32)))
            device.synchronize(timeout=_PATIENCE)


def node_killed(server: ServerProcess) -> None:
    """Something outside ends the node's process."""
    with wsgrad.connect(server.url) as connected:
        device = connected.devices[0]
        array = device.array(np.zeros(4, np.int32))
        device.synchronize(timeout=_PATIENCE)
        for pid in nodes_of(server):
            os.kill(pid, signal.SIGKILL)
        with _raises(wsgrad.DeviceLost):
            array.numpy(timeout=_PATIENCE)


def client_killed(server: ServerProcess) -> None:
    """The client is killed while its session idles."""

    def client(ready: int) -> None:
        with wsgrad.connect(server.url) as connected:
            work(connected)
            os.write(ready, b"r")
            signal.pause()

    with forked(client) as (_, reading):
        if not heard(reading):
            raise AssertionError("a client ended before it was killed")


def upload_cut(server: ServerProcess) -> None:
    """The client is killed somewhere in an upload, in the middle of a frame as a rule."""

    def client(ready: int) -> None:
        with wsgrad.connect(server.url) as connected:
            data = np.ones(_NBYTES, np.uint8)
            array = connected.devices[0].array(data)
            os.write(ready, b"r")
            while True:
                array.copy_from(data, timeout=_PATIENCE)

    with forked(client) as (_, reading):
        if not heard(reading):
            raise AssertionError("a client ended before it was killed")
        time.sleep(random.uniform(0, 0.01))


def reset(server: ServerProcess) -> None:
    """A stranger resets the connection in its handshake, or sends what is no message after it."""
    host, _, rest = server.url.partition("://")[2].partition(":")
    port, _, token = rest.partition("/#token=")
    with socket.create_connection((host, int(port)), _PATIENCE) as sock:
        head = (
            f"GET /v1/client HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "Sec-WebSocket-Protocol: wsgrad.v1\r\n\r\n"
        ).encode()
        if random.random() < 0.5:
            sock.sendall(head[: random.randrange(1, len(head))])
        else:
            sock.sendall(head)
            sock.recv(4096)
            sock.sendall(random.randbytes(random.randrange(1, 200)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


WAYS: Final[dict[str, tuple[Callable[[ServerProcess], None], int]]] = {
    "bye": (bye, 30),
    "over its memory": (greedy, 13),
    "no program": (wrong, 3),
    "crash": (crash, 12),
    "over its time": (spin, 1),
    "node killed": (node_killed, 8),
    "client killed": (client_killed, 12),
    "upload cut": (upload_cut, 12),
    "reset": (reset, 9),
}
"""By name: the way, and how many of a hundred sessions end so."""


def nodes_of(server: ServerProcess) -> list[int]:
    """The node processes of a server: what its zygote has forked."""
    return [pid for child in children(server.pid) for pid in children(child)]


def children(pid: int) -> list[int]:
    """The children of a process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def _raises(kind: type[wsgrad.WsgradError]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")
