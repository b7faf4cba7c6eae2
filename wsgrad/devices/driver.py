"""The process of one session on one device with a driver: `python -m RUNTIME'S.node CONTROL RING PLACE`; knows none.

It is started anew and not forked, because drivers have threads. What the runtime's own module does is to confine the
process as far as its drivers bear it, and to open the device.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from wsgrad.devices import elf
from wsgrad.devices.node import EXIT_FAILED, EXIT_LOST, Receiver, Sender, converse
from wsgrad.devices.ring import Ring
from wsgrad.errors import WsgradError, error_code
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wsgrad.devices.base import DriverRuntime

_LAUNCH_SECONDS: Final = 30.0


class Opening:
    """What a runtime is told when it is to open its device.

    Attributes:
        place: which of the driver's devices.
        keep: the descriptor that has to stay open.
        memory_bytes: what buffers may take together; None for no limit.
        launch_seconds: how long one launch may run.
    """

    def __init__(self, place: str, keep: int, options: Mapping[str, object], ring: Ring) -> None:
        memory, seconds = options.get("memory"), options.get("launch_seconds")
        self.place = place
        self.keep = keep
        self.memory_bytes = memory if isinstance(memory, int) and memory > 0 else None
        self.launch_seconds = float(seconds) if isinstance(seconds, int | float) else _LAUNCH_SECONDS
        self._ring = ring

    def report(self, number: int, step: int) -> None:
        """Tell the server that this command, and this step of a graph, is believed to run."""
        self._ring.set_progress(number, True, step)

    @staticmethod
    def lost() -> None:
        """End the process: the driver has lost the device."""
        os._exit(EXIT_LOST)


def be_node(open_runtime: Callable[[Opening], DriverRuntime]) -> NoReturn:
    """Be a node process until the server closes its end."""
    status = EXIT_FAILED
    try:
        _serve(open_runtime, socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
        status = 0
    finally:
        os._exit(status)  # a driver's threads may not let an orderly end come to its end


def _serve(open_runtime: Callable[[Opening], DriverRuntime], sock: socket.socket, ring_fd: int, place: str) -> None:
    receiver, send = Receiver(sock), Sender(sock)
    first = receiver.receive()
    if first is None or not isinstance(first[0], m.Attach):
        return
    attach = first[0]
    ring = Ring.attach(ring_fd)
    os.close(ring_fd)
    try:
        runtime = open_runtime(Opening(place, sock.fileno(), attach.options, ring))
    except WsgradError as error:
        send(m.Failed(attach.queue, 0, error_code(error), str(error), error.details), None)
        send.flush()
        receiver.receive()  # the server has something to say to that, and closes
        return

    def progress(number: int, step: int) -> None:
        send.flush()
        runtime.progress(number, step)

    def build(message: m.Program, source: str) -> tuple[int, int]:
        text = source.encode()
        return elf.memfd(text), len(text)

    converse(sock, receiver, send, ring, attach.queue, runtime, progress=progress, build=build)
    runtime.close()
