"""Measures the way to a device: round trip, bulk speed, launches, opening; it prints nothing and judges nothing.

Every figure is a median over several rounds after a warm-up, with memory that is used again on both sides.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from wsgrad.client.blocking import connect
from wsgrad.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.client.blocking import Device

_EMPTY_KERNELS = {
    "c": "void empty(void *buffer) {}",
    "wgsl": "@group(0) @binding(0) var<storage> buffer: array<f32>; @compute @workgroup_size(1) fn empty() {}",
}
# Long enough to be measured, short enough that small sizes don't take minutes.
_ROUND_SECONDS = 0.1
_MAX_ROUNDS = 200


def measure_round_trip(device: Device, *, n: int = 500) -> float:
    """Seconds from asking for 4 bytes of a buffer to having them."""
    target = np.empty(1, np.float32)
    with device.zeros(1, np.float32) as buffer:
        for _ in range(max(1, n // 10)):
            buffer.copy_to(target)
        return statistics.median(_seconds(lambda: buffer.copy_to(target)) for _ in range(n))


def measure_upload(device: Device, nbytes: int) -> float:
    """Bytes per second from a NumPy array to a buffer, both used before."""
    source = np.ones(nbytes, np.uint8)
    with device.empty(nbytes, np.uint8) as buffer:

        def upload() -> None:
            buffer.copy_from(source)
            # What is small is copied and travels later; it has arrived when the queue is done.
            device.synchronize()

        return nbytes / _median_seconds(upload)


def measure_download(device: Device, nbytes: int) -> float:
    """Bytes per second from a buffer to a NumPy array, both used before."""
    target = np.ones(nbytes, np.uint8)
    with device.zeros(nbytes, np.uint8) as buffer:
        return nbytes / _median_seconds(lambda: buffer.copy_to(target))


def measure_launches(device: Device, *, n: int = 50_000) -> float:
    """Launches per second of an empty kernel, issued one after the other and waited for at the end.

    Raises:
        DeviceError: no kernel is at hand in any of the device's dialects.
    """
    dialect = next((dialect for dialect in device.dialects if dialect in _EMPTY_KERNELS), None)
    if dialect is None:
        raise DeviceError(
            f"{device.id!r} speaks none of {', '.join(_EMPTY_KERNELS)}, in which there is an empty kernel"
        )
    program = device.program(_EMPTY_KERNELS[dialect], "empty", dialect=dialect, writes=())
    with device.zeros(1, np.float32) as buffer:

        def launch() -> None:
            for _ in range(n):
                program(buffer)
            device.synchronize()

        program(buffer)
        device.synchronize()
        return n / statistics.median(_seconds(launch) for _ in range(3))


def measure_open(url: str) -> float:
    """Seconds to open a session and its first device, ready to run."""
    start = time.perf_counter()
    with connect(url) as server:
        server.devices[0].synchronize()
        return time.perf_counter() - start


def _median_seconds(function: Callable[[], None]) -> float:
    function()
    times = [_seconds(function)]
    while sum(times) < _ROUND_SECONDS or len(times) < 3:
        times.append(_seconds(function))
        if len(times) == _MAX_ROUNDS:
            break
    return statistics.median(times)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
