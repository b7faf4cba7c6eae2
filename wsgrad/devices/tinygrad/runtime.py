"""Runs one session's memory and programs on one of tinygrad's devices; opens no device and knows no process.

Launches follow each other without waiting where the runtime lets them, as long as what runs should be over in a small
part of the time that one launch may take: whoever watches this process can then tell a long queue from a launch that
hangs. The first launch of each program is waited for.
"""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from wsgrad.devices.base import DriverRuntime, LaunchFailure
from wsgrad.devices.overlap import shared_reads
from wsgrad.devices.pace import Pace
from wsgrad.devices.tinygrad.memory import store_of
from wsgrad.devices.tinygrad.programs import Compiled
from wsgrad.errors import CompileError, DeviceError, DeviceLost, LaunchError, OutOfMemory, WsgradError
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wsgrad.devices.base import ProgramSpec
    from wsgrad.devices.scratch import Scratch

_LEAST_BUDGET_SECONDS: Final = 0.002
_MOST_VIEWS: Final = 1024
_FORMATS: Final = {"p": "I", "i": "i", "I": "I", "q": "q", "Q": "Q", "f": "f", "d": "d", "x": ""}


@dataclass(slots=True, eq=False)
class Memory:
    """A buffer of a client; `buffer` is tinygrad's."""

    buffer: Any
    nbytes: int
    views: dict[tuple[int, int], Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a buffer."""

    memory: Memory
    offset: int
    nbytes: int


class Program:
    """A program, or the error that each launch of it raises."""

    def __init__(self, spec: ProgramSpec, compiled: Compiled | None, failure: WsgradError) -> None:
        self.spec = spec
        self.pace = Pace()
        self.words = struct.Struct("<II" + "".join(_FORMATS[letter] for letter in spec.signature))
        self._compiled = compiled
        self._failure = failure

    def ready(self) -> Compiled:
        """What can be launched; raises why it can't."""
        if self._compiled is None:
            raise type(self._failure)(str(self._failure))
        return self._compiled


class TinygradRuntime(DriverRuntime):
    """Launches through tinygrad's own runtime. `memory` is a number that is never used again."""

    def __init__(
        self,
        device: Any,  # noqa: ANN401  # tinygrad's classes are its own
        *,
        memory_bytes: int | None,
        launch_seconds: float,
        report: Callable[[int, int], None] = lambda number, step: None,
        lost: Callable[[], None] = lambda: None,
        scratch: Scratch | None = None,
    ) -> None:
        """Make one.

        Args:
            device: tinygrad's, the runtime's own from now on.
            memory_bytes: what buffers may take together.
            launch_seconds: how long one launch may run; only for deciding what runs together.
            report: told the number of the command, and the step of a graph, that the device is believed to run.
            lost: called when the driver has lost the device; nothing works any more then.
            scratch: goes with the runtime.
        """
        self.device = device
        self.store = store_of(device)
        self._memory_bytes = memory_bytes
        self._budget = max(_LEAST_BUDGET_SECONDS, launch_seconds / 8)
        self._report = report
        self._lost = lost
        self._scratch = scratch
        self._used_bytes = 0
        self._memories: dict[int, Memory] = {}
        self._last_memory = 0
        self._bound: dict[int, Range] = {}
        self._programs: dict[int, Program] = {}
        self._now = (0, 0)
        self._expected = 0.0
        self._suspect: tuple[float, tuple[int, int]] | None = None

    def describe(self) -> dict[str, object]:
        return {"memory": self._memory_bytes, "alignment": self.store.alignment}

    def progress(self, number: int, step: int) -> None:
        self._now = number, step
        self._report(number, step)

    # -- memory

    def allocate(self, nbytes: int) -> int:
        if self._memory_bytes is not None and self._used_bytes + nbytes > self._memory_bytes:
            raise OutOfMemory(
                f"{nbytes} bytes don't fit: {self._used_bytes} of the device's {self._memory_bytes} bytes are in use",
                details={"nbytes": nbytes, "used": self._used_bytes, "limit": self._memory_bytes},
            )
        memory = Memory(self._new(nbytes), nbytes)
        self.store.fill(memory.buffer, 0, nbytes, b"\0")
        self._last_memory += 1
        self._memories[self._last_memory] = memory
        self._used_bytes += nbytes
        return self._last_memory

    def release(self, memory: int) -> None:
        held = self._memories.pop(memory)
        self._used_bytes -= held.nbytes
        self.settle()
        for view in held.views.values():
            self.store.drop_view(view)
        self.store.free(held.buffer, held.nbytes)

    def bind(self, buffer: int, memory: int, offset: int, nbytes: int) -> None:
        self._bound[buffer] = Range(self._memories[memory], offset, nbytes)

    def unbind(self, buffer: int) -> None:
        self._bound.pop(buffer, None)

    def write(self, memory: int, offset: int, data: bytes | memoryview) -> None:
        self.settle()
        self.store.write(self._memories[memory].buffer, offset, memoryview(data).cast("B"))

    def read(self, memory: int, offset: int, nbytes: int) -> bytes:
        found = bytearray(nbytes)
        self.read_into(memory, offset, memoryview(found))
        return bytes(found)

    def read_into(self, memory: int, offset: int, target: memoryview) -> None:
        self.settle()
        self.store.read(self._memories[memory].buffer, offset, target)

    def copy(self, target: int, target_offset: int, source: int, source_offset: int, nbytes: int) -> None:
        to, whence = self._memories[target].buffer, self._memories[source].buffer
        self.store.copy(to, target_offset, whence, source_offset, nbytes)

    def fill(self, memory: int, offset: int, nbytes: int, pattern: bytes) -> None:
        self.store.fill(self._memories[memory].buffer, offset, nbytes, pattern)

    # -- programs

    def load(self, program: int, spec: ProgramSpec, code: tuple[int, int] | None) -> None:
        self.drop(program)
        compiled: Compiled | None = None
        failure: WsgradError = CompileError(f"program {spec.name!r} did not compile")
        if code is not None:
            try:
                compiled = Compiled(self.device, spec, _text(*code))
            except WsgradError as error:
                failure = error
        self._programs[program] = Program(spec, compiled, failure)
        if code is not None and compiled is None:
            raise failure

    def drop(self, program: int) -> None:
        if self._programs.pop(program, None) is not None:
            self.settle()

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
        return self._launch(program, self._program(program), grid, block, arguments, self._now, timed=timed)

    def launch_packed(self, words: memoryview, first: int) -> LaunchFailure | None:
        if words.nbytes % 4:
            return LaunchFailure(first, LaunchError(f"{words.nbytes} bytes are no packed launches"), None)
        at, number = 0, first
        while at < words.nbytes:
            identity = int.from_bytes(words[at : at + 4], "little")
            try:
                program = self._program(identity)
                name, size = program.spec.name, program.words.size
                if at + size > words.nbytes:
                    raise LaunchError(f"a packed launch of {name!r} is cut off after {words.nbytes // 4} words")
                _, grid, *arguments = program.words.unpack_from(words, at)
                self._launch(identity, program, (grid,) if grid else None, None, arguments, (number, 0))
            except WsgradError as error:
                return LaunchFailure(number, error, self.program_name(identity))
            at += size
            number += 1
        return None

    def settle(self) -> None:
        if self._suspect is None:
            return
        self._report(*self._suspect[1])
        try:
            self.device.synchronize()
        except Exception as error:
            self._lost()
            raise DeviceLost(f"the driver has lost the device: {error!s:.500}") from error
        finally:
            self._suspect = None
            self._expected = 0.0
            self._report(*self._now)

    def close(self) -> None:
        for number in list(self._memories):
            self.release(number)
        if self._scratch is not None:
            self._scratch.close()

    # -- inside

    def _new(self, nbytes: int) -> Any:  # noqa: ANN401
        try:
            return self.store.new(nbytes)
        except (MemoryError, RuntimeError) as error:
            raise OutOfMemory(
                f"the driver has no room for {nbytes} bytes: {error}", details={"nbytes": nbytes}
            ) from error

    def _program(self, program: int) -> Program:
        found = self._programs.get(program)
        if found is None:
            raise LaunchError(f"there is no program {program}")
        return found

    def _launch(
        self,
        identity: int,
        program: Program,
        grid: Sequence[int] | None,
        block: Sequence[int] | None,
        arguments: Sequence[object],
        at: tuple[int, int],
        *,
        timed: bool = False,
    ) -> float:
        """One launch, with copies of what it can't be given in place; the seconds it took, if it was waited for."""
        compiled, spec = program.ready(), program.spec
        if len(arguments) != len(compiled.letters):
            raise LaunchError(f"{spec.name!r} takes {len(compiled.letters)} arguments, not {len(arguments)}")
        sizes = compiled.sizes(grid, block)
        numbers = [compiled.bits(place, arguments[place]) for place in compiled.numbers]
        ranges = {place: self._range(spec.name, place, arguments[place]) for place in compiled.buffers}
        read = shared_reads(spec.name, ranges, spec.writes, alias=spec.alias)
        copies: dict[tuple[int, int, int], tuple[Any, Range, bool]] = {}
        buffers = []
        try:
            for place, range_ in ranges.items():
                buffers.append(self._given(range_, place, spec, copies, copied=place in read))
            return self._run(
                identity, program, compiled, buffers, numbers, sizes, at, list(copies.values()), timed=timed
            )
        finally:
            if copies:
                self.settle()
            for temporary, range_, _ in copies.values():
                self.store.free(temporary, range_.nbytes)

    def _given(
        self,
        range_: Range,
        place: int,
        spec: ProgramSpec,
        copies: dict[tuple[int, int, int], tuple[Any, Range, bool]],
        *,
        copied: bool,
    ) -> Any:  # noqa: ANN401
        """What tinygrad is given for a range: its buffer, a view, or a temporary copy."""
        memory, offset, nbytes = range_.memory, range_.offset, range_.nbytes
        if not copied and (offset == 0 or nbytes == 0):
            return memory.buffer
        if not copied and offset % self.store.alignment == 0:
            view = memory.views.get((offset, nbytes))
            if view is None:
                if len(memory.views) >= _MOST_VIEWS:
                    self.settle()
                    for old in memory.views.values():
                        self.store.drop_view(old)
                    memory.views.clear()
                view = memory.views[offset, nbytes] = self.store.view(memory.buffer, offset, nbytes)
            return view
        written = spec.writes is None or place in spec.writes
        key = (id(memory), offset, nbytes)
        if key not in copies:
            temporary = self._new(nbytes)
            copies[key] = temporary, range_, written
            self.store.copy(temporary, 0, memory.buffer, offset, nbytes)
        return copies[key][0]

    def _run(
        self,
        identity: int,
        program: Program,
        compiled: Compiled,
        buffers: Sequence[Any],
        numbers: Sequence[int],
        sizes: tuple[tuple[int, int, int], tuple[int, int, int]],
        at: tuple[int, int],
        copies: Sequence[tuple[Any, Range, bool]],
        *,
        timed: bool,
    ) -> float:
        groups, pace, trace = math.prod(sizes[0]), program.pace, self.trace
        wait = timed or trace is not None or pace.seconds is None or compiled.in_c
        expected = 0.0 if pace.seconds is None else pace.expect(groups)
        if wait or self._expected + expected > self._budget:
            self.settle()
            wait = wait or expected > self._budget
        self._report(*at)
        started, clock = time.monotonic_ns(), time.perf_counter()
        seconds = compiled.run(buffers, numbers, sizes, wait=wait)
        if wait:
            pace.seconds, pace.groups = time.perf_counter() - clock, groups
            if trace is not None:
                trace.add(SpanKind.LAUNCH, started, number=at[0], program=identity)
        else:
            self._expected += expected
            if self._suspect is None or expected > self._suspect[0]:
                self._suspect = expected, at
        for temporary, range_, written in copies:
            if written:
                self.store.copy(range_.memory.buffer, range_.offset, temporary, 0, range_.nbytes)
        return seconds

    def _range(self, name: str, place: int, buffer: object) -> Range:
        found = self._bound.get(buffer) if isinstance(buffer, int) else None
        if found is None:
            raise LaunchError(f"argument {place} of {name!r} is buffer {buffer!r:.40}, which does not exist")
        return found


def _text(fd: int, nbytes: int) -> str:
    try:
        return os.pread(fd, nbytes, 0).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DeviceError(f"a program's source can't be read: {error}") from error
