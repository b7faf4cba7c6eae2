"""Asks a process of its own which adapters there are: a driver that is loaded once stays, and may crash or hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Final

from wsgrad.errors import DeviceError

_SECONDS: Final = 60.0


def list_adapters() -> list[dict[str, object]]:
    """The adapters as clients are told of them, in the driver's order.

    Raises:
        DeviceError: there is none, the package wgpu is missing, or a driver failed; says what to do.
    """
    command = [sys.executable, "-m", "wsgrad.devices.webgpu.adapters"]
    null = subprocess.DEVNULL  # the loaders' complaints about what is not there say nothing
    try:
        result = subprocess.run(command, stdin=null, stdout=subprocess.PIPE, stderr=null, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"webgpu: the graphics drivers did not name their adapters within {_SECONDS:g} s") from None
    except OSError as error:
        raise DeviceError(f"webgpu: the process that asks for adapters can't be started: {error}") from error
    try:
        answer = json.loads(result.stdout)
        adapters, reason = answer.get("adapters"), answer.get("error")
    except (ValueError, AttributeError):
        raise DeviceError(f"webgpu: asking for adapters ended with {_status(result.returncode)}") from None
    if adapters:
        return list(adapters)
    raise DeviceError(str(reason or "webgpu: there is no adapter"))


def _status(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    try:
        return f"{signal.Signals(-code).name}: a graphics driver crashed"
    except ValueError:
        return f"signal {-code}"
