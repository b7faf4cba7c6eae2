"""Drives `browser/gpu.js` in a tab or its worker from Python, with arrays for bytes."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from typing import Any

import numpy as np

SCRIPTS = (
    "cbor",
    "soon",
    "wgsl",
    "gpu-queue",
    "gpu-copy",
    "gpu-memory",
    "gpu-program",
    "gpu-launch",
    "gpu-graph",
    "gpu",
)
RIG = "./gpu_rig.js"


class GpuRefused(Exception):
    """A `GpuError` of the runtime."""

    def __init__(self, code: str, message: str, details: dict[str, Any]) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.details = details


def b64(data: Any) -> str:
    return json.dumps(base64.b64encode(np.ascontiguousarray(data).tobytes()).decode())


class GpuRig:
    """One runtime in a tab.

    Args:
        worker: whether it lives in the tab's worker.
    """

    def __init__(self, browser: Any, page_files: Any, *, worker: bool, file: bool = False) -> None:
        self.tab = browser.open(page_files.scripts(*SCRIPTS, RIG, file=file))
        self.tab.evaluate("ready")
        self._worker = worker
        self._ids = itertools.count(1)

    def js(self, expression: str, timeout: float = 60) -> Any:
        """The value of an expression; raises `GpuRefused`."""
        code = f"rig.attempt(async () => {expression})"
        got = self.tab.evaluate(f"inWorker({json.dumps(code)})" if self._worker else code, timeout)
        if "code" in got:
            raise GpuRefused(got["code"], got["message"], got["details"])
        return got["value"]

    def open(self, **options: object) -> dict[str, Any]:
        return self.js(f"rig.open({json.dumps(options)})")

    def array(self, data: Any) -> int:
        number = next(self._ids)
        self.js(f"rig.array({number}, {b64(data)})")
        return number

    def empty(self, nbytes: int) -> int:
        number = next(self._ids)
        self.js(f"rig.empty({number}, {nbytes})")
        return number

    def view(self, of: int, offset: int, nbytes: int) -> int:
        number = next(self._ids)
        self.js(f"rig.view({number}, {of}, {offset}, {nbytes})")
        return number

    def read(self, number: int, dtype: Any = np.uint8) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.js(f"rig.read({number})")), dtype)

    def tiled(self, block: np.ndarray, nbytes: int) -> int:
        """A large array: `np.resize(block, nbytes)`."""
        number = next(self._ids)
        self.js(f"rig.tiled({number}, {b64(block)}, {nbytes})")
        return number

    def same(self, number: int, data: np.ndarray) -> bool:
        """Whether a large array's bytes, downloaded in pieces, are these: compared by their digests."""
        digest = base64.b64decode(self.js(f"rig.digest({number})"))
        return digest == hashlib.sha256(np.ascontiguousarray(data).tobytes()).digest()

    def load(self, source: str, signature: str, **options: object) -> int:
        number = next(self._ids)
        self.js(f"rig.load({number}, {json.dumps(source)}, {json.dumps(signature)}, {json.dumps(options)})")
        return number

    def launch(self, program: int, *values: object, grid: object = None, number: int = 1) -> None:
        self.js(f"rig.runtime.launch({program}, {json.dumps(grid)}, null, {json.dumps(values)}, {number}, false)")

    def close(self) -> None:
        self.tab.close()
