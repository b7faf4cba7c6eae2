"""Asks a process of its own which devices a driver has: a driver that is loaded once stays, and may crash or hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Final

from wsgrad.errors import DeviceError

_SECONDS: Final = 60.0


def list_devices(kind: str, module: str, *arguments: str) -> list[dict[str, object]]:
    """What `python -m module arguments` prints as `{"devices": […]}`, or `{"error": text}`.

    Args:
        kind: what errors call the devices.

    Raises:
        DeviceError: there is none, the library is missing, or a driver failed; says what to do.
    """
    command = [sys.executable, "-m", module, *arguments]
    null = subprocess.DEVNULL  # the loaders' complaints about what is not there say nothing
    try:
        result = subprocess.run(command, stdin=null, stdout=subprocess.PIPE, stderr=null, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{kind}: the drivers did not name their devices within {_SECONDS:g} s") from None
    except OSError as error:
        raise DeviceError(f"{kind}: the process that asks for devices can't be started: {error}") from error
    try:
        # A driver may have written lines of its own before.
        answer = json.loads(result.stdout.decode(errors="replace").strip().rpartition("\n")[2])
        devices, reason = answer.get("devices"), answer.get("error")
    except (ValueError, AttributeError):
        raise DeviceError(f"{kind}: asking for devices ended with {_status(result.returncode)}") from None
    if devices:
        return list(devices)
    raise DeviceError(str(reason or f"{kind}: there is no device"))


def _status(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    try:
        return f"{signal.Signals(-code).name}: a driver crashed"
    except ValueError:
        return f"signal {-code}"
