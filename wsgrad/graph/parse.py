"""Checks what a peer sent as its part of a graph; whether its buffers and programs exist is not known here.

It has the last word on everything that a runtime would otherwise have to fear: shapes, types, ranges, numbers that fit,
and an order that can't stall. The values of a replay are checked here as well.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from wsgrad.errors import LaunchError, ProtocolError
from wsgrad.graph.items import Range
from wsgrad.graph.part import (
    LANES,
    CopyOp,
    DevicePart,
    FillOp,
    LaunchOp,
    Linear,
    Part,
    PartStep,
    ReceiveOp,
    SendOp,
)
from wsgrad.graph.recording import INTEGERS, MAX_GRID, MAX_INTEGER, PATTERNS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeGuard

    from wsgrad.graph.part import Argument, Op, Size

MAX_ARGUMENTS: Final = 64
_U32: Final = (1 << 32) - 1
_U53: Final = (1 << 53) - 1
_LETTERS: Final = frozenset("piIqQfdx")


def parse_part(array: object) -> Part:
    """Check what a peer sent and return the part.

    Raises:
        ProtocolError: a wrong shape or type, a number out of its range, a wait on what can't have happened.
    """
    server, devices, buffers, variables = _array(array, 4, "a graph part")
    known, names = _buffers(buffers), _variables(variables)
    parsed = tuple(_device(row, known, names) for row in _list(devices, "a graph's devices"))
    part = Part(_integer(server, "a server"), parsed, known, tuple(names))
    _check_order(part)
    _check_transfers(part)
    return part


def device_arrays(array: list[object]) -> dict[int, list[object]]:
    """What each device of a checked part is told of it, for `parse_device_part`, by the device's index."""
    _, devices, buffers, variables = _array(array, 4, "a graph part")
    arrays: dict[int, list[object]] = {}
    for device in _list(devices, "a graph's devices"):
        index = _list(device, "a graph's device")[0]
        assert isinstance(index, int)
        mine = [row for row in _list(buffers, "a graph's buffers") if _list(row, "a graph's buffer")[1] == index]
        arrays[index] = [device, mine, variables]
    return arrays


def parse_device_part(array: object) -> tuple[DevicePart, dict[int, int], list[tuple[str, int, int]]]:
    """Check one device's part, as `device_arrays` made it.

    Returns:
        The part, the sizes of its buffers by their numbers in the graph, and the variables with their bounds.

    Raises:
        ProtocolError: as `parse_part`.
    """
    device, buffers, variables = _array(array, 3, "a device's part of a graph")
    known, names = _buffers(buffers), _variables(variables)
    part = _device(device, known, names)
    _check_device_order(part)
    return part, {number: nbytes for number, (_, nbytes) in known.items()}, names


def check_values(part: Part, values: Sequence[object]) -> tuple[int, ...]:
    """A replay's values of a part's variables, as they came from a peer.

    Raises:
        LaunchError: too few or too many, or one outside its range.
    """
    if len(values) != len(part.variables):
        raise LaunchError(f"a graph with {len(part.variables)} variables was given {len(values)} values")
    checked = []
    for (name, low, high), value in zip(part.variables, values, strict=True):
        if not _is_int(value) or not low <= value <= high:
            raise LaunchError(f"{name}={value!r:.100} is not an integer from {low} to {high}")
        checked.append(value)
    return tuple(checked)


def _check_order(part: Part) -> None:
    numbers = [step.number for device in part.devices for lane in device.lanes for step in lane]
    indices = [device.index for device in part.devices]
    if len(set(numbers)) < len(numbers) or len(set(indices)) < len(indices):
        raise ProtocolError("a graph has a step or a device twice")
    for device in part.devices:
        _check_device_order(device)


def _check_device_order(device: DevicePart) -> None:
    here = {step.number for lane in device.lanes for step in lane}
    for lane in device.lanes:
        if any(one.number >= other.number for one, other in itertools.pairwise(lane)):
            raise ProtocolError("the steps of a graph's queue are not in the order of their numbers")
        for step in lane:
            for wait in step.waits:
                if wait >= step.number or wait not in here:
                    raise ProtocolError(
                        f"step {step.number} of a graph waits for step {wait}, which is not before it there"
                    )


def _buffers(rows: object) -> dict[int, tuple[int, int]]:
    """(Device index, size) by number."""
    parsed = [_integers(row, 3, "a graph's buffer", limit=_U53) for row in _list(rows, "a graph's buffers")]
    return {number: (index, nbytes) for number, index, nbytes in parsed}


def _variables(rows: object) -> list[tuple[str, int, int]]:
    names: list[tuple[str, int, int]] = []
    for row in _list(rows, "a graph's variables"):
        name, low, high = _array(row, 3, "a graph's variable")
        if type(name) is not str or not (_is_int(low) and _is_int(high) and -MAX_INTEGER <= low <= high <= MAX_INTEGER):
            raise ProtocolError(f"a graph's variable {row!r} is no name with two integers in order")
        names.append((name, low, high))
    return names


def _check_transfers(part: Part) -> None:
    """Both halves of a transfer inside the server are there and fit."""
    halves = {
        step.number: (device, step.op)
        for device in part.devices
        for lane in device.lanes[1:]
        for step in lane
        if isinstance(step.op, SendOp | ReceiveOp)
    }
    for number, (device, op) in halves.items():
        if op.server != part.server:
            continue
        other, half = halves.get(number + (1 if isinstance(op, SendOp) else -1), (None, None))
        if half is None or other is None or type(half) is type(op) or other.index != op.device:
            raise ProtocolError(f"step {number} of a graph is half a transfer without its other half")
        if (half.server, half.device) != (part.server, device.index) or _nbytes(device, op) != _nbytes(other, half):
            raise ProtocolError(f"the halves of the transfer at step {number} of a graph do not fit")


def _nbytes(device: DevicePart, op: SendOp | ReceiveOp) -> int:
    return device.slots[op.source if isinstance(op, SendOp) else op.target].nbytes


def _device(row: object, buffers: dict[int, tuple[int, int]], variables: list[tuple[str, int, int]]) -> DevicePart:
    index_, programs_, slots_, lanes = _array(row, 4, "a graph's device")
    index = _integer(index_, "a device")
    programs: dict[int, str] = {}
    for pair in _list(programs_, "a graph's programs"):
        program, signature = _array(pair, 2, "a graph's program")
        if type(signature) is not str or not set(signature) <= _LETTERS or len(signature) > MAX_ARGUMENTS:
            raise ProtocolError(f"a graph's program has no signature but {signature!r}")
        programs[_integer(program, "a program")] = signature
    slots = []
    for numbers in _list(slots_, "a graph's slots"):
        buffer, offset, nbytes = _integers(numbers, 3, "a graph's slot", limit=_U53)
        if buffer not in buffers or buffers[buffer][0] != index or offset + nbytes > buffers[buffer][1]:
            raise ProtocolError(f"a graph's slot of bytes {offset} to {offset + nbytes} is not in buffer {buffer}")
        slots.append(Range(buffer, offset, nbytes))
    reader = _OpReader(programs, slots, variables)
    parsed = tuple(
        tuple(reader.step(step) for step in _list(lane, "a queue")) for lane in _array(lanes, LANES, "queues")
    )
    for at, lane in enumerate(parsed):
        if not all(_lane_of(step.op) == at for step in lane):
            raise ProtocolError("a step of a graph stands in a queue that does not run its kind")
    return DevicePart(index, programs, tuple(slots), parsed)


def _lane_of(op: Op) -> int:
    return 1 if isinstance(op, SendOp) else 2 if isinstance(op, ReceiveOp) else 0


class _OpReader:
    """Checks steps against what their device has."""

    def __init__(self, programs: dict[int, str], slots: list[Range], variables: list[tuple[str, int, int]]) -> None:
        self._programs = programs
        self._slots = slots
        self._variables = variables

    def step(self, row: object) -> PartStep:
        number, op, waits = _array(row, 3, "a step")
        awaited = tuple(_integer(wait, "a wait") for wait in _list(waits, "waits"))
        return PartStep(_integer(number, "a step"), self._op(op), awaited)

    def _op(self, row: object) -> Op:
        match row:
            case [0, program, grid, block, arguments] if type(program) is int and program in self._programs:
                sizes = None if grid is None else self._sizes(grid)
                dims = None if block is None else tuple(_integers(block, None, "a block"))
                return LaunchOp(program, sizes, dims, self._arguments(self._programs[program], arguments))
            case [1, int(target), int(source)]:
                if self._slot(target).nbytes != self._slot(source).nbytes:
                    raise ProtocolError("a copy in a graph between ranges of different sizes")
                return CopyOp(target, source)
            case [2, int(target), bytes(pattern)] if len(pattern) in PATTERNS:
                if self._slot(target).nbytes % len(pattern):
                    raise ProtocolError("a fill in a graph with a pattern that does not divide its range")
                return FillOp(target, pattern)
            case [3, int(source), server, device]:
                self._slot(source)
                return SendOp(source, _integer(server, "a server"), _integer(device, "a device"))
            case [4, int(target), server, device]:
                self._slot(target)
                return ReceiveOp(target, _integer(server, "a server"), _integer(device, "a device"))
        raise ProtocolError(f"a step of a graph does nothing known: {row!r:.200}")

    def _slot(self, value: object) -> Range:
        if not _is_int(value) or not 0 <= value < len(self._slots):
            raise ProtocolError(f"a step of a graph uses slot {value!r} of {len(self._slots)}")
        return self._slots[value]

    def _sizes(self, grid: object) -> tuple[Size, ...]:
        sizes = _list(grid, "a grid")
        if not 1 <= len(sizes) <= 3:
            raise ProtocolError(f"a grid of {len(sizes)} sizes in a graph")
        parsed: list[Size] = []
        for row in sizes:
            size = self._linear(row) if type(row) is list else _integer(row, "a grid's size")
            low, high = self._bounds(size)
            if not 1 <= low <= high <= MAX_GRID:
                raise ProtocolError(f"a grid of {low} to {high} in a graph")
            parsed.append(size)
        return tuple(parsed)

    def _linear(self, row: object) -> Linear:
        var, scale, offset = _array(row, 3, "a use of a variable")
        if not (_is_int(var) and 0 <= var < len(self._variables) and _is_wide(scale) and _is_wide(offset)):
            raise ProtocolError(f"a use of a graph's variable that can't be: {row!r:.200}")
        return Linear(var, scale, offset)

    def _bounds(self, size: Size) -> tuple[int, int]:
        if isinstance(size, int):
            return size, size
        _, low, high = self._variables[size.var]
        one, other = size.scale * low + size.offset, size.scale * high + size.offset
        return min(one, other), max(one, other)

    def _arguments(self, signature: str, row: object) -> tuple[Argument, ...]:
        letters = signature.replace("x", "")
        values = _array(row, len(letters), "a launch's arguments")
        return tuple(self._argument(letter, value) for letter, value in zip(letters, values, strict=True))

    def _argument(self, letter: str, value: object) -> Argument:
        if letter == "p":
            if _is_int(value):
                self._slot(value)
                return value
        elif type(value) is float and letter in "fd":
            return value
        elif _is_int(value) or type(value) is list:
            size = value if _is_int(value) else self._linear(value)
            least, most = INTEGERS.get(letter, (-MAX_INTEGER, MAX_INTEGER))
            low, high = self._bounds(size)
            if least <= low <= high <= most:
                return size
        raise ProtocolError(f"a launch in a graph has {value!r:.100} for an argument of kind {letter}")


def _is_int(value: object) -> TypeGuard[int]:
    return type(value) is int


def _is_wide(value: object) -> TypeGuard[int]:
    return _is_int(value) and -MAX_INTEGER <= value <= MAX_INTEGER


def _integer(value: object, what: str, *, limit: int = _U32) -> int:
    if not _is_int(value) or not 0 <= value <= limit:
        raise ProtocolError(f"{what} of a graph is {value!r:.100}, not a number from 0 to {limit}")
    return value


def _list(value: object, what: str) -> list[object]:
    if type(value) is not list:
        raise ProtocolError(f"{what} is {value!r:.100}, not an array")
    return value


def _array(value: object, length: int, what: str) -> list[object]:
    array = _list(value, what)
    if len(array) != length:
        raise ProtocolError(f"{what} has {len(array)} fields, not {length}")
    return array


def _integers(value: object, length: int | None, what: str, *, limit: int = _U53) -> list[int]:
    array = _list(value, what)
    if length is not None and len(array) != length:
        raise ProtocolError(f"{what} has {len(array)} fields, not {length}")
    return [_integer(item, what, limit=limit) for item in array]
