"""Finds the adapters that wgpu can drive and opens one of them; launches nothing.

`python -m wsgrad.devices.webgpu.adapters` prints them as one line of JSON: the server asks a process of its own, since
drivers start threads, hold files and may crash.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from wsgrad.errors import DeviceError, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Mapping

# One adapter shows up once for every interface of its driver: the first of these that has any is taken. OpenGL lacks
# too much, and the null backends of other implementations compute nothing and say nothing.
_BACKENDS: Final = ("Metal", "D3D12", "Vulkan")
# What changes programs or their timing; the others are about drawing.
_FEATURES: Final = re.compile(
    r"shader-(f16|i16|int64|f64|float32-atomic)|shader-int64-atomic.*|subgroup.*|timestamp-query"
)
SHOWN_LIMITS: Final = (
    "maxBufferSize",
    "maxStorageBufferBindingSize",
    "maxUniformBufferBindingSize",
    "maxStorageBuffersPerShaderStage",
    "maxUniformBuffersPerShaderStage",
    "maxComputeWorkgroupsPerDimension",
    "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupSizeX",
    "maxComputeWorkgroupSizeY",
    "maxComputeWorkgroupSizeZ",
    "maxComputeWorkgroupStorageSize",
)


def load_wgpu() -> Any:  # noqa: ANN401  # wgpu has no types
    """The library.

    Raises:
        DeviceError: it is not installed, or can't be loaded here.
    """
    try:
        import wgpu
        import wgpu.backends.wgpu_native
    except ImportError as error:
        raise DeviceError(f"webgpu needs the package wgpu ({error}): pip install 'wsgrad[webgpu]'") from error
    except (OSError, RuntimeError) as error:
        raise DeviceError(f"webgpu: the package wgpu can't be loaded here: {error}") from error
    return wgpu


def find_adapters() -> list[Any]:
    """The adapters that are offered, in the driver's order.

    Raises:
        DeviceError: there is none; says why and what to install.
    """
    wgpu = load_wgpu()
    found = list(wgpu.gpu.enumerate_adapters_sync())
    for backend in _BACKENDS:
        of_backend = [adapter for adapter in found if adapter.info["backend_type"] == backend]
        if of_backend:
            return of_backend
    others = ", ".join(f"{adapter.info['device']!r:.60} by {adapter.info['backend_type']}" for adapter in found)
    what = f"only {others}" if others else "no adapter"
    raise DeviceError(
        f"webgpu: {what} was found, but no driver for Vulkan; install the graphics card's, or for the processor Mesa's "
        "(on Debian and Ubuntu: apt install mesa-vulkan-drivers)"
    )


def limits_of(adapter: Any) -> dict[str, int]:  # noqa: ANN401
    """An adapter's or device's limits by the names of the WebGPU specification."""
    return {_camel(name): int(value) for name, value in adapter.limits.items()}


def describe(adapter: Any) -> dict[str, object]:  # noqa: ANN401
    """An adapter as clients are told of it."""
    info = adapter.info
    limits = limits_of(adapter)
    return {
        "kind": "webgpu",
        "dialects": ["wgsl"],
        "adapter": str(info["device"] or info["description"])[:200],
        "compiler": f"naga of wgpu {load_wgpu().__version__}",
        "arch": str(info["backend_type"]).lower(),
        "alignment": alignment_of(limits),
        "f16": "shader-f16" in adapter.features,
        "timestamps": "timestamp-query" in adapter.features,
        "native_graphs": True,
        "software": info["adapter_type"] == "CPU",
        "limits": {name: min(limits[name], (1 << 53) - 1) for name in SHOWN_LIMITS},
    }


def alignment_of(limits: Mapping[str, int]) -> int:
    """Where the start of a bound range may be."""
    return max(limits["minStorageBufferOffsetAlignment"], limits["minUniformBufferOffsetAlignment"], 16)


def open_device(adapter: Any) -> Any:  # noqa: ANN401
    """A device of its own, with all limits and every feature that matters to programs.

    Raises:
        DeviceLost: the driver refuses.
    """
    features = [name for name in sorted(adapter.features) if _FEATURES.fullmatch(name)]
    try:
        return adapter.request_device_sync(required_features=features)  # without limits: all that the adapter has
    except Exception as error:
        raise DeviceLost(f"the driver of {adapter.info['device']!r:.80} opens no device: {error}") from error


def _camel(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


def main() -> None:
    """Print `{"devices": […]}` or `{"error": text}`."""
    try:
        found: dict[str, object] = {"devices": [describe(adapter) for adapter in find_adapters()]}
    except DeviceError as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
