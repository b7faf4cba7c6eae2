"""What one server is told of a plan, as frozen values and as the plain arrays that travel; it plans and runs nothing.

Buffers, variables and steps go by their numbers in the graph, so a replay sends only new ids and values. Ranges that
steps use are listed once for each device, as *slots*. A wait is the number of the step that must be over. It is always
a step of the same device, because a step touches only its own device's buffers: what orders devices and servers among
each other are the transfers. Queues run their steps by ascending numbers and waits point backwards, so nothing stalls.
`parse.py` checks all that: a part comes from a peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

if TYPE_CHECKING:
    from wsgrad.graph.items import Range

LANES: Final = 3
"""Compute, send, receive: the queues of a device, in this order."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`scale * value + offset`, with the value of the variable in place `var` of `Part.variables`."""

    var: int
    scale: int
    offset: int


Size: TypeAlias = int | Linear
Argument: TypeAlias = int | float | Linear


@dataclass(frozen=True, slots=True)
class LaunchOp:
    """One launch; `arguments` are slots for buffers and values for scalars, with none for the index."""

    program: int
    grid: tuple[Size, ...] | None
    block: tuple[int, ...] | None
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One slot's bytes to another of the same size; overlap behaves as through a temporary."""

    target: int
    source: int


@dataclass(frozen=True, slots=True)
class FillOp:
    """A pattern repeated over a slot."""

    target: int
    pattern: bytes


@dataclass(frozen=True, slots=True)
class SendOp:
    """A slot's bytes to the receive with the next number, on device `device` of server `server`."""

    source: int
    server: int
    device: int


@dataclass(frozen=True, slots=True)
class ReceiveOp:
    """A slot's bytes from the send with the number before this one's, on device `device` of server `server`."""

    target: int
    server: int
    device: int


Op: TypeAlias = LaunchOp | CopyOp | FillOp | SendOp | ReceiveOp


@dataclass(frozen=True, slots=True)
class PartStep:
    """What a queue runs once the steps named by `waits`, on other queues of its device, are over."""

    number: int
    op: Op
    waits: tuple[int, ...]


@dataclass(frozen=True)
class DevicePart:
    """What one device does.

    Attributes:
        programs: the signatures of the programs launched, by the program's id on the device's queue.
        slots: the ranges used, of this device's buffers.
        lanes: the steps of the three queues. A runtime with one queue runs all of them by their numbers.
    """

    index: int
    programs: dict[int, str]
    slots: tuple[Range, ...]
    lanes: tuple[tuple[PartStep, ...], ...]

    @property
    def by_number(self) -> list[PartStep]:
        """All steps as one queue would run them."""
        return sorted((step for lane in self.lanes for step in lane), key=lambda step: step.number)

    @cached_property
    def signalled(self) -> frozenset[int]:
        """The steps that another queue of the device waits for."""
        return frozenset(wait for lane in self.lanes for step in lane for wait in step.waits)


@dataclass(frozen=True, slots=True)
class Part:
    """What one server does.

    Attributes:
        buffers: (device index, size in bytes) by number in the graph.
        variables: (name, low, high) in the order of a replay's values.
    """

    server: int
    devices: tuple[DevicePart, ...]
    buffers: dict[int, tuple[int, int]]
    variables: tuple[tuple[str, int, int], ...]


def part_array(part: Part) -> list[object]:
    """The part as what CBOR carries: lists, integers, floats, text, bytes and None."""
    return [
        part.server,
        [
            [
                device.index,
                [[program, signature] for program, signature in device.programs.items()],
                [[slot.buffer, slot.offset, slot.nbytes] for slot in device.slots],
                [[[step.number, _op_array(step.op), list(step.waits)] for step in lane] for lane in device.lanes],
            ]
            for device in part.devices
        ],
        [[number, index, nbytes] for number, (index, nbytes) in part.buffers.items()],
        [list(variable) for variable in part.variables],
    ]


def _op_array(op: Op) -> list[object]:
    match op:
        case LaunchOp():
            grid = None if op.grid is None else [_size_array(size) for size in op.grid]
            block = None if op.block is None else list(op.block)
            return [0, op.program, grid, block, [_size_array(argument) for argument in op.arguments]]
        case CopyOp():
            return [1, op.target, op.source]
        case FillOp():
            return [2, op.target, op.pattern]
        case SendOp():
            return [3, op.source, op.server, op.device]
        case ReceiveOp():
            return [4, op.target, op.server, op.device]
        case _:
            assert_never(op)


def _size_array(size: Argument) -> object:
    return [size.var, size.scale, size.offset] if isinstance(size, Linear) else size
