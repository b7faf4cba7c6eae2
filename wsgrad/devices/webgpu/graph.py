"""Replays a graph's launches: bind groups are made once, a replay encodes them and writes its numbers in one go."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from wsgrad.devices.base import LaunchFailure, Prepared
from wsgrad.errors import WsgradError
from wsgrad.graph.native import PATCHES, Run, launch_runs, value_words
from wsgrad.graph.part import LaunchOp, Linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wsgrad.devices.pace import Pace
    from wsgrad.devices.webgpu.binding import Bound, Memory, Range, Value
    from wsgrad.devices.webgpu.runtime import Program, WebGpuRuntime
    from wsgrad.graph.part import DevicePart, PartStep, Size

_SCALAR_NBYTES: Final = 16


@dataclass(slots=True)
class _Launch:
    """One launch of the graph; `bound` once its slots are known and it needs no copies."""

    identity: int
    program: Program | None
    op: LaunchOp
    numbers: dict[int, Range | bytes]
    bound: Bound | None = None
    grid: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True, slots=True)
class _Flat:
    """A run whose launches are all bound: what to encode, and what each program should take of it."""

    calls: list[tuple[Any, Any, int, int, int]]
    paces: list[tuple[Pace, int, int, int]]
    """A pace, its most workgroups, how many launches, and the place of the first."""


class WebGpuGraph(Prepared):
    """The launches of a graph's part on one runtime."""

    def __init__(self, runtime: WebGpuRuntime, part: DevicePart) -> None:
        self._runtime = runtime
        self._signatures = part.programs
        self._launches: list[_Launch] = []
        self._variables: list[tuple[int, str, Linear]] = []
        """Where in the uniform buffer, the type's letter, and the value."""
        self._step = max(runtime.alignment, _SCALAR_NBYTES)
        queue: list[Run | PartStep] = []
        for entry in launch_runs(part, lambda op: op.block is None):
            if isinstance(entry, tuple):
                first = len(self._launches)
                for step in entry:
                    assert isinstance(step.op, LaunchOp)
                    self._launches.append(_Launch(step.op.program, None, step.op, {}))
                queue.append(Run(first, len(self._launches), entry))
            else:
                queue.append(entry)
        self.queue = tuple(queue)
        self._ranges: list[Range | None] = [None] * len(part.slots)
        self._users: dict[int, list[_Launch]] = {}
        self._flats: dict[int, _Flat] = {}
        self._generation = -1
        self._uniforms: Memory | None = None
        self._data = bytearray()
        self._values: list[int] = []
        places: list[tuple[_Launch, int, int]] = []
        for launch in self._launches:
            self._read(launch, places)
        if places:
            self._uniforms = runtime.new_memory(len(self._data))
            for launch, index, at in places:
                launch.numbers[index] = self._uniforms, at, _SCALAR_NBYTES

    def bind(self, slot: int, memory: int, offset: int, nbytes: int) -> None:
        self._ranges[slot] = self._runtime.place(memory, offset, nbytes)
        for launch in self._users.get(slot, ()):
            launch.bound = None
            self._flats.clear()

    def patch(self, values: Sequence[int]) -> None:
        values = list(values)
        if values == self._values:
            return
        self._values = values
        self._flats.clear()  # the bind groups stay; grids may hold variables
        for launch in self._launches:
            if any(isinstance(size, Linear) for size in launch.op.grid or ()):
                launch.bound = None
        if not self._variables:
            return
        for at, letter, value in self._variables:
            words = value_words(PATCHES[letter], value.scale * values[value.var] + value.offset)
            struct.pack_into("<I", self._data, at, words[0])
        assert self._uniforms is not None
        self._runtime.work.write(self._uniforms.buffer, 0, memoryview(self._data))

    def run(self, run: Run, first: int) -> LaunchFailure | None:
        runtime, work = self._runtime, self._runtime.work
        if self._generation != runtime.generation:
            self._reset()
        flat = self._flats.get(run.first)
        if flat is not None and runtime.trace is None:
            expected = sum((pace.expect(groups) * count for pace, groups, count, _ in flat.paces), 0.0)
            if not work.has_room(expected):
                work.finish()
            if work.has_room(expected):
                self._encode(flat, first)
                return None
        lasting = True
        for place in range(run.first, run.end):
            launch = self._launches[place]
            position = first + place - run.first
            if runtime.trace is not None:
                runtime.trace.step = position
            try:
                bound = launch.bound or self._bind(launch)
                assert launch.program is not None
                runtime.encode(launch.identity, launch.program, bound, launch.grid, (work.now[0], position))
            except WsgradError as error:
                return LaunchFailure(position, error, runtime.program_name(launch.identity))
            lasting = lasting and bound.lasts
        if lasting:
            self._flats[run.first] = self._flatten(self._launches[run.first : run.end])
        return None

    def close(self) -> None:
        if self._uniforms is not None:
            self._runtime.binder.forget(self._uniforms)
            self._runtime.work.doom(self._uniforms.buffer)
            self._uniforms = None
        self._launches.clear()
        self._flats.clear()

    # -- inside

    def _read(self, launch: _Launch, places: list[tuple[_Launch, int, int]]) -> None:
        """Find a place for the numbers of a launch, and note its slots. `places` gets those of its variables."""
        letters = self._signatures[launch.identity].replace("x", "")
        for index, (letter, value) in enumerate(zip(letters, launch.op.arguments, strict=True)):
            if letter == "p":
                assert isinstance(value, int)
                self._users.setdefault(value, []).append(launch)
            elif isinstance(value, Linear):
                self._variables.append((len(self._data), letter, value))
                places.append((launch, index, len(self._data)))
                self._data += bytes(self._step)
            elif letter in "iIf":
                launch.numbers[index] = struct.pack("<I", value_words(PATCHES[letter], value)[0])

    def _reset(self) -> None:
        """Programs have come or gone: look all of them up again."""
        self._generation = self._runtime.generation
        self._flats.clear()
        for launch in self._launches:
            launch.bound = None

    def _bind(self, launch: _Launch) -> Bound:
        runtime = self._runtime
        program = launch.program = runtime.program(launch.identity)
        pipeline = program.ready()
        name = program.spec.name
        values: list[Value] = []
        for index, (letter, argument) in enumerate(zip(program.spec.signature, launch.op.arguments, strict=True)):
            if letter == "p":
                assert isinstance(argument, int)
                range_ = self._ranges[argument]
                assert range_ is not None
                values.append(range_)
            else:
                values.append(launch.numbers[index])
        launch.grid = runtime.grid(name, None if launch.op.grid is None else [self._size(s) for s in launch.op.grid])
        bound = runtime.binder.bind(pipeline, name, values, alias=program.spec.alias)
        if bound.lasts:
            launch.bound = bound
        return bound

    def _size(self, size: Size) -> int:
        return size.scale * self._values[size.var] + size.offset if isinstance(size, Linear) else size

    def _flatten(self, launches: list[_Launch]) -> _Flat:
        calls = []
        paces: dict[Pace, tuple[int, int, int]] = {}
        for place, launch in enumerate(launches):
            assert launch.bound is not None
            assert launch.program is not None
            calls.append((launch.bound.pipeline, launch.bound.group, *launch.grid))
            pace = launch.program.pace
            most, count, at = paces.get(pace, (0, 0, place))
            paces[pace] = max(most, launch.grid[0] * launch.grid[1] * launch.grid[2]), count + 1, at
        return _Flat(calls, [(pace, *rest) for pace, rest in paces.items()])

    def _encode(self, flat: _Flat, first: int) -> None:
        work = self._runtime.work
        opened = work.compute()
        set_pipeline, set_bind_group, dispatch = opened.set_pipeline, opened.set_bind_group, opened.dispatch_workgroups
        present = work.pipeline
        for pipeline, group, x, y, z in flat.calls:
            if pipeline is not present:
                present = pipeline
                set_pipeline(pipeline)
            set_bind_group(0, group)
            dispatch(x, y, z)
        work.pipeline = present
        number = work.now[0]
        for pace, groups, count, place in flat.paces:
            work.expect(pace, pace.expect(groups), count, (number, first + place))
