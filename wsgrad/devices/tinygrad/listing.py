"""Which devices a tinygrad runtime has, as a process of its own says; loads no driver."""

from __future__ import annotations

from typing import Final

from wsgrad.devices.listing import list_devices

PROBED: Final = ("CL", "CUDA")
"""What is looked for where nobody names a runtime: others may take a card from its driver, or belong to one system."""


def list_wrapped(name: str) -> list[dict[str, object]]:
    """The devices of a runtime as clients are told of them, in its order.

    Args:
        name: tinygrad's, such as `CL` or `AMD`.

    Raises:
        DeviceError: there is none, the package tinygrad or a driver is missing; says what to do.
    """
    return list_devices(f"tinygrad:{name}", "wsgrad.devices.tinygrad.library", name)
