"""The process of one session on one adapter: `python -m wsgrad.devices.webgpu.node CONTROL RING ADAPTER`.

It is started anew and not forked, because drivers have threads. The drivers bear only a part of the confinement that
programs in C are under, but no program in WGSL is machine code of a client's: what it may do is what the driver makes
of it. Before a driver is loaded the process gives up new privileges, everything that could be executed, and all files
but those that drivers read and their devices.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final, NoReturn

from wsgrad.devices import confine, elf
from wsgrad.devices.node import EXIT_FAILED, EXIT_LOST, Receiver, Sender, converse
from wsgrad.devices.ring import Ring
from wsgrad.devices.webgpu.adapters import find_adapters, load_wgpu, open_device
from wsgrad.devices.webgpu.runtime import WebGpuRuntime
from wsgrad.errors import DeviceError, WsgradError, error_code
from wsgrad.transport import messages as m

_LAUNCH_SECONDS: Final = 30.0


def main() -> NoReturn:
    """Be a node process until the server closes its end; the arguments are two descriptors and the adapter's place."""
    status = EXIT_FAILED
    try:
        _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
        status = 0
    finally:
        os._exit(status)  # a driver's threads may not let an orderly end come to its end


def _serve(sock: socket.socket, ring_fd: int, adapter: int) -> None:
    receiver, send = Receiver(sock), Sender(sock)
    first = receiver.receive()
    if first is None or not isinstance(first[0], m.Attach):
        return
    attach = first[0]
    ring = Ring.attach(ring_fd)
    os.close(ring_fd)
    try:
        runtime = _open(attach, ring, adapter, sock.fileno())
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


def _open(attach: m.Attach, ring: Ring, adapter: int, control: int) -> WebGpuRuntime:
    load_wgpu()  # Python's own files may be anywhere; drivers are where the system keeps them
    confine.confine_driver(keep=(control,))
    found = find_adapters()
    if adapter >= len(found):
        raise DeviceError(f"adapter {adapter} is gone: the driver names {len(found)} now")
    memory, seconds = attach.options.get("memory"), attach.options.get("launch_seconds")
    return WebGpuRuntime(
        open_device(found[adapter]),
        memory_bytes=memory if isinstance(memory, int) and memory > 0 else None,
        launch_seconds=float(seconds) if isinstance(seconds, int | float) else _LAUNCH_SECONDS,
        report=lambda number, step: ring.set_progress(number, True, step),
        lost=lambda: os._exit(EXIT_LOST),
    )


if __name__ == "__main__":
    main()
