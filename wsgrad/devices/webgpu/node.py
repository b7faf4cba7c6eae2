"""The process of one session on one adapter: confines itself, then opens the adapter; the rest is `driver.py`'s.

The drivers bear only a part of the confinement that programs in C are under, but no program in WGSL is machine code of
a client's: what it may do is what the driver makes of it. Before a driver is loaded the process gives up new
privileges, everything that could be executed, all files but those that drivers read and their devices, and the system
calls that no driver needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wsgrad.devices import confine
from wsgrad.devices.driver import be_node
from wsgrad.devices.webgpu.adapters import find_adapters, load_wgpu, open_device
from wsgrad.devices.webgpu.runtime import WebGpuRuntime
from wsgrad.errors import DeviceError

if TYPE_CHECKING:
    from wsgrad.devices.driver import Opening


def _open(opening: Opening) -> WebGpuRuntime:
    load_wgpu()  # Python's own files may be anywhere; drivers are where the system keeps them
    confine.confine_driver(keep=(opening.keep,))
    found = find_adapters()
    adapter = int(opening.place)
    if adapter >= len(found):
        raise DeviceError(f"adapter {adapter} is gone: the driver names {len(found)} now")
    return WebGpuRuntime(
        open_device(found[adapter]),
        memory_bytes=opening.memory_bytes,
        launch_seconds=opening.launch_seconds,
        report=opening.report,
        lost=opening.lost,
    )


if __name__ == "__main__":
    be_node(_open)
