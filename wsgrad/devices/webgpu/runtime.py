"""Runs one session's memory and programs on one wgpu device; opens no adapter and knows no process.

Launches are gathered and run when somebody waits: for bytes, for a time, or for their acknowledgement (`settle`).
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, Any, Final

from wsgrad.devices.base import DriverRuntime, LaunchFailure, Prepared
from wsgrad.devices.pace import Pace
from wsgrad.devices.webgpu.adapters import alignment_of, limits_of
from wsgrad.devices.webgpu.binding import Binder, Memory
from wsgrad.devices.webgpu.graph import WebGpuGraph
from wsgrad.devices.webgpu.moves import Moves
from wsgrad.devices.webgpu.programs import Pipeline
from wsgrad.devices.webgpu.uniforms import Uniforms
from wsgrad.devices.webgpu.work import Work
from wsgrad.errors import CompileError, DeviceError, LaunchError, LimitExceeded, OutOfMemory, WsgradError
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wsgrad.devices.base import ProgramSpec
    from wsgrad.devices.webgpu.binding import Bound, Value
    from wsgrad.graph.part import DevicePart

_INTEGERS: Final = {"i": (-(1 << 31), 1 << 31), "I": (0, 1 << 32)}


class Program:
    """A program, or the error that each launch of it raises."""

    def __init__(self, spec: ProgramSpec, pipeline: Pipeline | None, failure: WsgradError) -> None:
        self.spec = spec
        self.pipeline = pipeline
        self.pace = Pace()
        self._failure = failure

    def ready(self) -> Pipeline:
        """Its pipeline; raises why there is none."""
        if self.pipeline is None:
            raise type(self._failure)(str(self._failure))
        return self.pipeline


class WebGpuRuntime(DriverRuntime):
    """Launches through wgpu.

    `memory` is a number that is never used again.

    Attributes:
        generation: changes whenever a program comes or goes.
    """

    def __init__(
        self,
        device: Any,  # noqa: ANN401  # wgpu has no types
        *,
        memory_bytes: int | None,
        launch_seconds: float,
        report: Callable[[int, int], None] = lambda number, step: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Make one.

        Args:
            device: wgpu's, the runtime's own from now on.
            memory_bytes: what buffers may take together.
            launch_seconds: how long one launch may run; only for deciding what is submitted together.
            report: told the number of the command, and the step of a graph, that the device is believed to run.
            lost: called when the driver has lost the device; nothing works any more then.
        """
        self.limits = limits_of(device)
        self.alignment = alignment_of(self.limits)
        self.work = Work(device, launch_seconds=launch_seconds, report=report, lost=lost)
        self.uniforms = Uniforms(self.work, self.alignment)
        self.moves = Moves(self.work, self.uniforms, self.limits, self.alignment)
        self.binder = Binder(self.work, self.uniforms, self.moves, self.limits, self.alignment)
        self._report = report
        self._memory_bytes = memory_bytes
        self._used_bytes = 0
        self._memories: dict[int, Memory] = {}
        self._last_memory = 0
        self._bound: dict[int, tuple[Memory, int, int]] = {}
        self._programs: dict[int, Program] = {}
        self._packed: dict[bytes, tuple[Program, Bound]] = {}
        self.generation = 0

    def describe(self) -> dict[str, object]:
        return {"memory": self._memory_bytes, "alignment": self.alignment}

    def progress(self, number: int, step: int) -> None:
        """The executor works on this command, and this step of a graph."""
        self.work.now = number, step
        self._report(number, step)

    # -- memory

    def allocate(self, nbytes: int) -> int:
        if self._memory_bytes is not None and self._used_bytes + nbytes > self._memory_bytes:
            raise OutOfMemory(
                f"{nbytes} bytes don't fit: {self._used_bytes} of the device's {self._memory_bytes} bytes are in use",
                details={"nbytes": nbytes, "used": self._used_bytes, "limit": self._memory_bytes},
            )
        if nbytes > self.limits["maxBufferSize"] - 16:
            limit = self.limits["maxBufferSize"]
            raise OutOfMemory(
                f"a buffer of {nbytes} bytes is larger than the device's maxBufferSize of {limit}",
                details={"nbytes": nbytes, "limit": limit},
            )
        memory = self.new_memory(nbytes)
        self._memories[memory.number] = memory
        self._used_bytes += nbytes
        return memory.number

    def new_memory(self, nbytes: int) -> Memory:
        """Memory that no client has an id for."""
        self._last_memory += 1
        return Memory(self._last_memory, self.moves.new(nbytes), nbytes)

    def release(self, memory: int) -> None:
        held = self._memories.pop(memory)
        self._used_bytes -= held.nbytes
        self.binder.forget(held)
        self.work.doom(held.buffer)

    def bind(self, buffer: int, memory: int, offset: int, nbytes: int) -> None:
        if buffer in self._bound:
            self._packed.clear()
        self._bound[buffer] = self._memories[memory], offset, nbytes

    def unbind(self, buffer: int) -> None:
        if self._bound.pop(buffer, None) is not None:
            self._packed.clear()

    def place(self, memory: int, offset: int, nbytes: int) -> tuple[Memory, int, int]:
        """A range as launches take it."""
        return self._memories[memory], offset, nbytes

    def write(self, memory: int, offset: int, data: bytes | memoryview) -> None:
        self.moves.write(self._memories[memory].buffer, offset, memoryview(data))

    def read(self, memory: int, offset: int, nbytes: int) -> bytes:
        found = bytearray(nbytes)
        self.read_into(memory, offset, memoryview(found))
        return bytes(found)

    def read_into(self, memory: int, offset: int, target: memoryview) -> None:
        def take(at: int, piece: memoryview) -> None:
            target[at : at + len(piece)] = piece

        self.moves.read(self._memories[memory].buffer, offset, target.nbytes, take)

    def copy(self, target: int, target_offset: int, source: int, source_offset: int, nbytes: int) -> None:
        to, start = self._memories[target].buffer, self._memories[source].buffer
        self.moves.copy(to, target_offset, start, source_offset, nbytes)

    def fill(self, memory: int, offset: int, nbytes: int, pattern: bytes) -> None:
        self.moves.fill(self._memories[memory].buffer, offset, nbytes, pattern)

    # -- programs

    def load(self, program: int, spec: ProgramSpec, code: tuple[int, int] | None) -> None:
        self.drop(program)
        pipeline: Pipeline | None = None
        failure: WsgradError = CompileError(f"program {spec.name!r} did not compile")
        if code is not None:
            try:
                pipeline = Pipeline(self.work.device, self.limits, spec, _text(*code))
            except WsgradError as error:
                failure = error
        self._programs[program] = Program(spec, pipeline, failure)
        self.generation += 1
        if code is not None and pipeline is None:
            raise failure

    def drop(self, program: int) -> None:
        if self._programs.pop(program, None) is not None:
            self._packed.clear()
            self.generation += 1

    def program(self, program: int) -> Program:
        """The program of that id; raises `LaunchError`."""
        found = self._programs.get(program)
        if found is None:
            raise LaunchError(f"there is no program {program}")
        return found

    def program_name(self, program: int) -> str | None:
        found = self._programs.get(program)
        return found.spec.name if found else None

    # -- launches

    def launch(
        self,
        program: int,
        grid: Sequence[int] | None,
        block: Sequence[int] | None,
        arguments: Sequence[object],
        number: int,
        *,
        timed: bool = False,
    ) -> float:
        found = self.program(program)
        pipeline = found.ready()
        name = found.spec.name
        if block is not None:
            raise LaunchError(f"a launch of {name!r} has a block; programs in WGSL have theirs in @workgroup_size")
        if len(arguments) != len(pipeline.bindings):
            raise LaunchError(f"{name!r} takes {len(pipeline.bindings)} arguments, not {len(arguments)}")
        values = [self._value(found, k, letter, arguments[k]) for k, letter in enumerate(found.spec.signature)]
        sizes = self.grid(name, grid)
        bound = self.binder.bind(pipeline, name, values, alias=found.spec.alias)
        if not timed:
            self.encode(program, found, bound, sizes, self.work.now)
            return 0.0
        self.binder.before(bound)
        seconds = self.work.timed(lambda opened: self.binder.dispatch(opened, bound, sizes), self.work.now)
        self.binder.after(bound)
        return seconds

    def grid(self, name: str, grid: Sequence[int] | None) -> tuple[int, int, int]:
        """Workgroups in three dimensions, checked."""
        sizes = tuple(grid or ())
        most = self.limits["maxComputeWorkgroupsPerDimension"]
        if len(sizes) > 3 or not all(size >= 1 for size in sizes):
            raise LaunchError(f"the grid {list(sizes)!r:.80} of {name!r} is not one to three numbers of at least 1")
        if any(size > most for size in sizes):
            raise LimitExceeded(
                f"the grid {list(sizes)!r:.80} of {name!r} is over the device's "
                f"maxComputeWorkgroupsPerDimension of {most}",
                details={"grid": list(sizes), "limit": most},
            )
        x, y, z = (*sizes, 1, 1, 1)[:3]
        return x, y, z

    def encode(
        self, identity: int, program: Program, bound: Bound, grid: tuple[int, int, int], at: tuple[int, int]
    ) -> None:
        """Gather one launch; measured alone while a timeline is made."""
        work, trace = self.work, self.trace
        groups = grid[0] * grid[1] * grid[2]
        if trace is not None:
            work.finish()
        started = time.monotonic_ns()
        work.begin(program.pace, groups)
        self.binder.before(bound)
        self.binder.dispatch(work.compute(), bound, grid)
        self.binder.after(bound)
        work.end(program.pace, groups, at)
        if trace is not None:
            work.finish()
            trace.add(SpanKind.LAUNCH, started, number=at[0], program=identity)

    def launch_packed(self, words: memoryview, first: int) -> LaunchFailure | None:
        if words.nbytes % 4:
            return LaunchFailure(first, LaunchError(f"{words.nbytes} bytes are no packed launches"), None)
        data = bytes(words)
        numbers = memoryview(data).cast("I")
        at, number = 0, first
        while at < len(numbers):
            identity = numbers[at]
            try:
                program = self.program(identity)
                end = at + 2 + len(program.spec.signature)
                if end > len(numbers):
                    raise LaunchError(f"a packed launch of {program.spec.name!r} is cut off after {len(numbers)} words")
                key = data[4 * at : 4 * at + 4] + data[4 * at + 8 : 4 * end]
                known = self._packed.get(key)
                if known is None:
                    known = self._unpack(program, data[4 * at + 8 : 4 * end], key)
                grid = self.grid(program.spec.name, (numbers[at + 1] or 1,))
                self.encode(identity, *known, grid, (number, 0))
            except WsgradError as error:
                return LaunchFailure(number, error, self.program_name(identity))
            at = end
            number += 1
        return None

    def _unpack(self, program: Program, data: bytes, key: bytes) -> tuple[Program, Bound]:
        values: list[Value] = []
        pipeline = program.ready()
        for index, letter in enumerate(program.spec.signature):
            word = data[4 * index : 4 * index + 4]
            if letter == "p":
                values.append(self._range(program, index, int.from_bytes(word, "little")))
            else:
                values.append(word)
        bound = self.binder.bind(pipeline, program.spec.name, values, alias=program.spec.alias)
        if bound.lasts:
            self._packed[key] = program, bound
        return program, bound

    def _value(self, program: Program, index: int, letter: str, value: object) -> Value:
        name = program.spec.name
        if letter == "p":
            if type(value) is not int:
                raise LaunchError(f"argument {index} of {name!r} is {value!r:.40}, not a buffer")
            return self._range(program, index, value)
        if letter in _INTEGERS:
            low, high = _INTEGERS[letter]
            if not isinstance(value, int) or not low <= value < high:
                raise LaunchError(f"argument {index} of {name!r} is {value!r:.40}, which does not fit its type")
            return struct.pack("<" + letter, value)
        return pack_float(name, index, value)

    def _range(self, program: Program, index: int, buffer: int) -> tuple[Memory, int, int]:
        found = self._bound.get(buffer)
        if found is None:
            raise LaunchError(f"argument {index} of {program.spec.name!r} is buffer {buffer}, which does not exist")
        return found

    def prepare(self, part: DevicePart) -> Prepared:
        return WebGpuGraph(self, part)

    def settle(self) -> None:
        self.work.finish()

    def close(self) -> None:
        self._packed.clear()
        self.binder.close()
        self.work.close()


def pack_float(name: str, index: int, value: object) -> bytes:
    """A number as a 32-bit float."""
    if not isinstance(value, int | float):
        raise LaunchError(f"argument {index} of {name!r} is {value!r:.40}, not a number")
    try:
        return struct.pack("<f", value)
    except OverflowError:
        raise LaunchError(f"argument {index} of {name!r} is {value!r}, which is too large for a float") from None


def _text(fd: int, nbytes: int) -> str:
    try:
        return os.pread(fd, nbytes, 0).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DeviceError(f"a program's source can't be read: {error}") from error
