"""The runtime of this machine's processors: memory, programs and launches of one session; knows no queue or socket."""

from __future__ import annotations

import ctypes
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wsgrad.devices import elf, mathlib, native
from wsgrad.devices.base import LaunchFailure, Prepared, ProgramSpec, Runtime
from wsgrad.devices.compiler import CALL
from wsgrad.devices.memory import ALIGNMENT, Memory
from wsgrad.devices.native import Native, Stop
from wsgrad.devices.overlap import both_written
from wsgrad.errors import CompileError, DeviceError, LaunchError, WsgradError
from wsgrad.graph.native import PATCH, native_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wsgrad.graph.native import NativeWords, Run
    from wsgrad.graph.part import DevicePart

_INTEGERS: Final = {"i": (-(1 << 31), 1 << 31), "I": (0, 1 << 32), "q": (-(1 << 63), 1 << 63), "Q": (0, 1 << 64)}
_MAX_GRID: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A program: mapped, or with the error that each launch of it raises."""

    spec: ProgramSpec
    image: elf.Image | None
    failure: WsgradError


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class CpuRuntime(Runtime):
    """Launches through the native loop of this process.

    `memory` is an address; `Memory` gives and takes it.
    """

    slots_from = native.MAX_BUFFERS

    def __init__(self, loop: Native, *, memory_bytes: int | None, threads: int, step_address: int = 0) -> None:
        """Make one.

        Args:
            loop: the process's.
            memory_bytes: what buffers may take together.
            threads: how many run a grid, for those who ask.
            step_address: where replays of graphs show the step that runs.
        """
        self._native = loop
        self._table = loop.table
        self._step_address = step_address
        self._memory = Memory(limit_bytes=memory_bytes)
        self._memory_bytes = memory_bytes
        self._threads = threads
        self._bound: dict[int, tuple[int, int]] = {}
        self._programs: dict[int, _Loaded] = {}

    def describe(self) -> dict[str, object]:
        return {"memory": self._memory_bytes, "threads": self._threads, "alignment": ALIGNMENT}

    # -- memory

    def allocate(self, nbytes: int) -> int:
        return self._memory.allocate(nbytes)

    def release(self, memory: int) -> None:
        self._memory.free(memory)

    def bind(self, buffer: int, memory: int, offset: int, nbytes: int) -> None:
        if buffer >= self._table.count:
            raise DeviceError(f"a graph has more slots than {native.MAX_SLOTS}")
        self._table.set_buffer(buffer, memory + offset, nbytes)
        self._bound[buffer] = memory + offset, nbytes

    def unbind(self, buffer: int) -> None:
        if self._bound.pop(buffer, None) is not None:
            self._table.set_buffer(buffer, 0, 0)

    def write(self, memory: int, offset: int, data: bytes | memoryview) -> None:
        if isinstance(data, bytes):
            ctypes.memmove(memory + offset, data, len(data))
        elif data.nbytes:
            ctypes.memmove(memory + offset, _address_of(data), data.nbytes)

    def read(self, memory: int, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(memory + offset, nbytes)

    def read_into(self, memory: int, offset: int, target: memoryview) -> None:
        if target.nbytes:
            ctypes.memmove(_address_of(target), memory + offset, target.nbytes)

    def copy(self, target: int, target_offset: int, source: int, source_offset: int, nbytes: int) -> None:
        ctypes.memmove(target + target_offset, source + source_offset, nbytes)

    def fill(self, memory: int, offset: int, nbytes: int, pattern: bytes) -> None:
        start = memory + offset
        if len(pattern) == 1:
            ctypes.memset(start, pattern[0], nbytes)
            return
        done = min(nbytes, len(pattern))
        ctypes.memmove(start, pattern, done)
        while done < nbytes:
            step = min(done, nbytes - done)
            ctypes.memmove(start + done, start, step)
            done += step

    # -- programs

    def load(self, program: int, spec: ProgramSpec, code: tuple[int, int] | None) -> None:
        if program >= native.MAX_PROGRAMS:
            raise DeviceError(f"program id {program} is too large; ids go up to {native.MAX_PROGRAMS - 1}")
        self.drop(program)
        image: elf.Image | None = None
        failure: WsgradError | None = None
        try:
            if code is not None:
                image = elf.load(*code, mathlib.addresses())
        except CompileError as error:
            failure = error
        except OSError as error:
            failure = DeviceError(f"program {spec.name!r} could not be mapped: {error}")
        address = image.symbols.get(CALL, 0) if image else 0
        self._native.set_program(program, address, spec.signature, spec.writes, alias=spec.alias)
        self._programs[program] = _Loaded(
            spec, image, failure or CompileError(f"program {spec.name!r} did not compile")
        )
        if failure is not None:
            raise failure

    def drop(self, program: int) -> None:
        entry = self._programs.pop(program, None)
        if entry is not None:
            self._native.drop_program(program)
            if entry.image is not None:
                elf.unload(entry.image)

    def program_name(self, program: int) -> str | None:
        entry = self._programs.get(program)
        return entry.spec.name if entry else None

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
        words = self._pack(program, grid, block, arguments)
        start = time.perf_counter()
        failure = self.launch_packed(memoryview(words), number)
        seconds = time.perf_counter() - start
        if failure is not None:
            raise failure.error
        return seconds

    def _pack(
        self, program: int, grid: Sequence[int] | None, block: Sequence[int] | None, arguments: Sequence[object]
    ) -> bytearray:
        entry = self._programs.get(program)
        if entry is None:
            raise LaunchError(f"there is no program {program}")
        spec = entry.spec
        if block is not None:
            raise LaunchError(f"a launch of {spec.name!r} has a block; programs in C take only a grid")
        if grid is not None and (len(grid) != 1 or not 1 <= grid[0] <= _MAX_GRID):
            raise LaunchError(f"the grid {list(grid)!r} of {spec.name!r} is not one number from 1 to {_MAX_GRID}")
        letters = spec.signature.replace("x", "")
        if len(arguments) != len(letters):
            raise LaunchError(f"{spec.name!r} takes {len(letters)} arguments, not {len(arguments)}")
        packed = bytearray(struct.pack("<II", program, grid[0] if grid else 0))
        for index, (letter, value) in enumerate(zip(letters, arguments, strict=True)):
            packed += _pack_argument(spec.name, index, letter, value)
        return packed

    def launch_packed(self, words: memoryview, first: int) -> LaunchFailure | None:
        if words.nbytes % 4:
            return LaunchFailure(first, LaunchError(f"{words.nbytes} bytes are no packed launches"), None)
        if not words.nbytes:
            return None
        address = _address_of(words)
        if address % 4:
            # Behind a message's head the words may start anywhere.
            words = memoryview(bytearray(words))
            address = _address_of(words)
        return self.run_words(self._table, words, address, 0, words.nbytes // 4, first)

    def prepare(self, part: DevicePart) -> Prepared:
        return _CpuGraph(self, self._native, native_words(part), len(part.slots), self._step_address)

    def run_words(
        self, table: native.Table, words: memoryview, address: int, start: int, count: int, number: int
    ) -> LaunchFailure | None:
        """Run launches from word `start` up to word `count`, the first of number `number`, up to one that fails."""
        while True:
            ran = table.run(address, count, start, number, self._trace_address)
            if ran.stop is Stop.DONE:
                return None
            number += ran.launches
            at = ran.at
            if ran.stop is Stop.NO_ROOM and self.trace is not None:
                self.trace.flush()
                start = at
                continue
            program = int.from_bytes(words[4 * at : 4 * at + 4], "little")
            error = self._why(ran, words, program)
            if error is None:
                error = self._launch_overlapping(table, words[4 * at :], program, number)
            if error is not None:
                return LaunchFailure(number, error, self.program_name(program))
            start = at + 2 + native.argument_words(self._programs[program].spec.signature)
            number += 1

    @property
    def _trace_address(self) -> int:
        return 0 if self.trace is None else self.trace.address

    def _why(self, ran: native.Ran, words: memoryview, program: int) -> WsgradError | None:
        name = self.program_name(program)
        match ran.stop:
            case Stop.TRUNCATED:
                return LaunchError(f"a packed launch of {name or program!r} is cut off after {words.nbytes // 4} words")
            case Stop.BAD_PROGRAM:
                return LaunchError(f"there is no program {program}")
            case Stop.PROGRAM_FAILED:
                failure = self._programs[program].failure
                return type(failure)(str(failure))
            case Stop.BAD_BUFFER:
                buffer = int.from_bytes(words[4 * ran.word : 4 * ran.word + 4], "little")
                return LaunchError(f"a launch of {name!r} takes buffer {buffer}, which does not exist")
            case _:
                return None

    def _launch_overlapping(
        self, table: native.Table, words: memoryview, program: int, number: int
    ) -> WsgradError | None:
        """One launch with arguments that share bytes: what is only read is read from a copy taken before."""
        spec = self._programs[program].spec
        patched = bytearray(words[: 4 * (2 + native.argument_words(spec.signature))])
        ranges: dict[int, tuple[int, int, int]] = {}
        at = 8
        for index, letter in enumerate(spec.signature):
            if letter == "p":
                buffer = int.from_bytes(patched[at : at + 4], "little")
                ranges[index] = (at, *table.buffer(buffer))
            at += 4 * native.argument_words(letter)
        written = [k for k in ranges if spec.writes is None or k in spec.writes]
        copies: list[int] = []
        try:
            for k, (at, low, nbytes) in ranges.items():
                shared = [w for w in written if w != k and _share(ranges[w], ranges[k])]
                if k in written:
                    for w in shared:
                        if not (spec.alias and ranges[w][1:] == ranges[k][1:]):
                            return both_written(spec.name, *sorted((k, w)), alias=spec.alias)
                elif shared:
                    copy = self._memory.allocate(nbytes)
                    temporary = table.count + len(copies)
                    copies.append(copy)
                    ctypes.memmove(copy, low, nbytes)
                    table.set_buffer(temporary, copy, nbytes)
                    patched[at : at + 4] = temporary.to_bytes(4, "little")
            view = memoryview(patched)
            if self.trace is not None:
                self.trace.settle()  # this one span must have room
            ran = table.run(_address_of(view), len(patched) // 4, 0, number, self._trace_address)
            return None if ran.stop is Stop.DONE else LaunchError(f"a launch of {spec.name!r} failed: {ran.stop.name}")
        except WsgradError as error:
            return error
        finally:
            for index, copy in enumerate(copies):
                table.set_buffer(table.count + index, 0, 0)
                self._memory.free(copy)

    def close(self) -> None:
        for program in list(self._programs):
            self.drop(program)
        for buffer in list(self._bound):
            self.unbind(buffer)
        self._memory.close()


class _CpuGraph(Prepared):
    """A graph's launches as a stream of the native loop, with a table in which its slots are the buffers."""

    def __init__(self, runtime: CpuRuntime, loop: Native, words: NativeWords, slots: int, step_address: int) -> None:
        self.queue = words.queue
        self._runtime = runtime
        self._loop = loop
        self._table = native.Table(loop, slots, step_address)
        self._words = memoryview(bytearray(words.words))
        self._address = _address_of(self._words) if words.words else 0
        self._patches = words.patches
        self._patch_count = len(words.patches) // PATCH.size

    def bind(self, slot: int, memory: int, offset: int, nbytes: int) -> None:
        self._table.set_buffer(slot, memory + offset, nbytes)

    def patch(self, values: Sequence[int]) -> None:
        if self._patch_count:
            packed = struct.pack(f"<{len(values)}q", *values)
            self._loop.patch(self._address, self._patches, self._patch_count, packed)

    def run(self, run: Run, first: int) -> LaunchFailure | None:
        return self._runtime.run_words(self._table, self._words, self._address, run.first, run.end, first)

    def close(self) -> None:
        self._table.close()


def _share(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[2] > 0 and b[2] > 0 and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]


def _pack_argument(name: str, index: int, letter: str, value: object) -> bytes:
    if letter == "p":
        if isinstance(value, int) and 0 <= value < native.MAX_BUFFERS + native.MAX_SLOTS:
            return struct.pack("<I", value)
        raise LaunchError(f"argument {index} of {name!r} is {value!r:.40}, not a buffer")
    if letter in _INTEGERS:
        low, high = _INTEGERS[letter]
        if isinstance(value, int) and low <= value < high:
            return struct.pack("<" + letter, value)
        raise LaunchError(f"argument {index} of {name!r} is {value!r:.40}, which does not fit its type")
    if not isinstance(value, int | float):
        raise LaunchError(f"argument {index} of {name!r} is {value!r:.40}, not a number")
    try:
        return struct.pack("<" + letter, value)
    except OverflowError:
        raise LaunchError(f"argument {index} of {name!r} is {value!r}, which is too large for a float") from None
