"""Puts into words what ended a node or a launch, as the client is told; decides nothing and sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wsgrad.errors import CompileError, DeviceLost, Timeout, WsgradError
from wsgrad.server.graphs import ReplaySent
from wsgrad.server.port import Loss

if TYPE_CHECKING:
    from wsgrad.server.outstanding import Outstanding
    from wsgrad.server.tables import ProgramEntry, Tables
    from wsgrad.transport.messages import Failed


def what_ran(out: Outstanding, tables: Tables, number: int | None, step: int) -> tuple[str | None, dict[str, object]]:
    """The program that a command ran, if any, and what to tell the client of it; `step` is how far a replay came."""
    if number is None:
        return None, {}
    sent = out.message_of(number)
    if isinstance(sent, ReplaySent) and sent.graph is not None:
        return sent.graph.details(step, tables)
    program = out.program_of(number, tables)
    entry = None if program is None else tables.program(program)
    return (None, {}) if entry is None else (entry.name, {"operation": "launch", "program": entry.name})


def program_of(out: Outstanding, tables: Tables, failed: Failed) -> ProgramEntry | None:
    """The program whose launch failed."""
    sent, step = out.message_of(failed.number), failed.details.get("step")
    if isinstance(sent, ReplaySent) and sent.graph is not None:
        program = sent.graph.program_at(step) if isinstance(step, int) else None
    else:
        program = out.program_of(failed.number, tables)
    return None if program is None else tables.program(program)


def loss_error(loss: Loss, device: str, program: str | None, details: dict[str, object]) -> WsgradError:
    """The error for a device that is lost, while this program was running as far as is known."""
    if loss.timed_out:
        who = "a command" if program is None else f"program {program!r}"
        return Timeout(f"{who} {loss.cause}; device.reopen() starts the device anew", details=details)
    what = f"device {device!r} is lost" if program is None else f"program {program!r} ended the device"
    return DeviceLost(f"{what}: {loss.cause}; device.reopen() starts it anew", details=details)


def reported_loss(message: Failed) -> Loss | None:
    """What a node that dialled in says of the end of a queue's device, where it leaves the words to the server.

    Its `ended` is the cause alone. Command 0 stands for none: nothing was under way.
    """
    cause, step = message.details.get("ended"), message.details.get("step")
    if message.code not in (DeviceLost.__name__, Timeout.__name__) or (message.number and type(cause) is not str):
        return None
    text = cause if isinstance(cause, str) else message.message
    return Loss(text, message.number, step if type(step) is int else 0, timed_out=message.code == Timeout.__name__)


def with_compiler_words(error: WsgradError, entry: ProgramEntry | None) -> WsgradError:
    """The error of a launch, with what the compiler said: a node that was given machine code does not know that."""
    if isinstance(error, CompileError) and entry is not None and entry.error is not None:
        text = f"program {entry.name!r} failed to compile\n{entry.error}"
        return CompileError(text, details=error.details | {"program": entry.name})
    return error
