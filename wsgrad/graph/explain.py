"""Puts a plan into words: a table for people, in which every recorded item and every wait with its reason is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from wsgrad.graph.items import Access, Affine, Copy, Fill, Launch, Operand, Var
from wsgrad.graph.schedule import Receive, Send

if TYPE_CHECKING:
    from wsgrad.graph.items import Argument, Device, Range
    from wsgrad.graph.recording import Recording
    from wsgrad.graph.schedule import Schedule, Step, Wait

_HEAD = ("queue", "step", "items", "what", "waits", "why")


def explained(recording: Recording, planned: Schedule) -> str:
    """The table, queue by queue; a step with several waits takes a line for each."""
    rows = []
    for at, queue in enumerate(planned.queues):
        for step in planned.steps:
            if step.queue != at:
                continue
            items = " ".join(f"#{item}" for item in step.items)
            first, *more = step.waits or (None,)
            rows.append((queue.label, str(step.number), items, what(recording, step), *_reason(recording, step, first)))
            rows += [(queue.label, "", "", "", *_reason(recording, step, wait)) for wait in more]
    widths = [max(len(row[column]) for row in [_HEAD, *rows]) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [_HEAD, *rows]
    ]
    devices = {queue.device for queue in planned.queues}
    counts = (
        _count(len(recording.items), "item"),
        _count(len(planned.steps), "step"),
        f"{_count(len(planned.queues), 'queue')} of {_count(len(devices), 'device')} on "
        f"{_count(len({device.server for device in devices}), 'server')}",
        _count(len(planned.signals), "signal"),
    )
    return "\n".join([", ".join(counts), *lines]) + "\n"


def what(recording: Recording, step: Step) -> str:
    """What a step does, with names."""
    action = step.action
    match action:
        case Launch():
            arguments = ", ".join(_argument(recording, argument) for argument in action.arguments)
            grid = "" if action.grid is None else f" grid {'×'.join(str(_size(size)) for size in action.grid)}"
            return f"{action.name or f'program {action.program}'}({arguments}){grid}"
        case Copy():
            return f"copy {_range(recording, action.source)} to {_range(recording, action.target)}"
        case Fill():
            return f"fill {_range(recording, action.target)} with {action.pattern.hex()}"
        case Send():
            return f"send {_range(recording, action.source)} to {_place(action.to)}"
        case Receive():
            return f"receive {_range(recording, action.target)} from {_place(action.sender)}"
        case _:
            assert_never(action)


def _place(device: Device) -> str:
    return f"{device.label} (server {device.server})"


def _reason(recording: Recording, step: Step, wait: Wait | None) -> tuple[str, str]:
    if wait is None:
        return "", ""
    item = f"#{wait.item} " if len(step.items) > 1 else ""
    hazard = wait.hazard
    return str(wait.step), f"{item}{hazard.kind.value} #{hazard.before} on {_range(recording, hazard.range)}"


def _range(recording: Recording, range_: Range) -> str:
    buffer = recording.buffers[range_.buffer]
    return buffer.label if range_.nbytes == buffer.nbytes else f"{buffer.label}[{range_.offset}:{range_.end}]"


def _argument(recording: Recording, argument: Argument) -> str:
    if isinstance(argument, Operand):
        letters = {Access.READ: "r", Access.WRITE: "w", Access.BOTH: "rw"}
        return f"{letters[argument.access]} {_range(recording, argument.range)}"
    if isinstance(argument, int | float | Var | Affine):
        return str(_size(argument))
    return "INDEX"


def _size(size: float | Var | Affine) -> object:
    return size.name if isinstance(size, Var) else size


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
