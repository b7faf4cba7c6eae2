"""What clients are told about this machine's cpu devices; opens none."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from wsgrad.devices.program_cache import processor

if TYPE_CHECKING:
    from wsgrad.devices.toolchain import Compiler


def cpu_info(compiler: Compiler, *, threads: int, memory: int, confined: bool) -> dict[str, object]:
    """The properties of a cpu device, as in a device map without its id."""
    model, features = _processor()
    return {
        "kind": "cpu",
        "dialects": ["c"],
        "compiler": compiler.version,
        "arch": platform.machine(),
        "cpu": model,
        "threads": threads,
        "memory": memory,
        "alignment": 64,
        # Without these instructions a conversion is a call into the compiler's runtime library, which is not linked.
        "f16": bool(features & {"f16c", "avx512_fp16", "fphp"}),
        "bf16": bool(features & {"avx512_bf16", "bf16"}),
        "f64": True,
        "timestamps": False,
        "native_graphs": True,
        "software": False,
        "confined": confined,
    }


def _processor() -> tuple[str, set[str]]:
    model = platform.machine()
    features: set[str] = set()
    for line in processor().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() in ("flags", "Features"):
            features = set(value.split())
    return model, features
