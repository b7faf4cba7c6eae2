"""Which adapters there are, as a process of its own says; loads no driver."""

from __future__ import annotations

from wsgrad.devices.listing import list_devices


def list_adapters() -> list[dict[str, object]]:
    """The adapters as clients are told of them, in the driver's order.

    Raises:
        DeviceError: there is none, the package wgpu is missing, or a driver failed; says what to do.
    """
    return list_devices("webgpu", "wsgrad.devices.webgpu.adapters")
