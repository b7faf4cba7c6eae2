"""Puts into words what ended a node or a launch, as the client is told; decides nothing and sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wsgrad.errors import CompileError, DeviceLost, Timeout, WsgradError

if TYPE_CHECKING:
    from wsgrad.server.port import Loss
    from wsgrad.server.tables import ProgramEntry


def loss_error(loss: Loss, device: str, program: str | None, details: dict[str, object]) -> WsgradError:
    """The error for a device that is lost, while this program was running as far as is known."""
    if loss.timed_out:
        who = "a command" if program is None else f"program {program!r}"
        return Timeout(f"{who} {loss.cause}; device.reopen() starts the device anew", details=details)
    what = f"device {device!r} is lost" if program is None else f"program {program!r} ended the device"
    return DeviceLost(f"{what}: {loss.cause}; device.reopen() starts it anew", details=details)


def with_compiler_words(error: WsgradError, entry: ProgramEntry | None) -> WsgradError:
    """The error of a launch, with what the compiler said: a node that was given machine code does not know that."""
    if isinstance(error, CompileError) and entry is not None and entry.error is not None:
        text = f"program {entry.name!r} failed to compile\n{entry.error}"
        return CompileError(text, details=error.details | {"program": entry.name})
    return error
