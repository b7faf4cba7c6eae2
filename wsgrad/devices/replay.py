"""Runs a graph's steps on one runtime: binds its slots, gives it a replay's values, stops where a transfer comes.

Launches in a row go to the runtime in one call where it prepared them, else one by one; steps run in the order of their
numbers. What is transferred, how, and what becomes of an error is the executor's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from wsgrad.devices.lanes import Lanes
from wsgrad.devices.trace import now
from wsgrad.errors import LaunchError, ProtocolError, WsgradError
from wsgrad.graph.native import Run
from wsgrad.graph.parse import parse_device_part
from wsgrad.graph.part import CopyOp, FillOp, LaunchOp, Linear, ReceiveOp, SendOp
from wsgrad.transport import cbor
from wsgrad.transport import messages as m
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wsgrad.devices.base import Runtime
    from wsgrad.devices.lanes import Worker
    from wsgrad.graph.part import Argument, PartStep, Size

    Place = tuple[int, int]
    """A runtime's memory and an offset in it."""
    Lookup = Callable[[int, int, int], Place]
    """Finds a range of a client's buffer; raises `DeviceError` where there is none."""

MAX_NBYTES: Final = 1 << 26
_MAX_ITEMS: Final = 1 << 26
_BRIEF_NANOSECONDS: Final = 100_000
"""Launches that took no longer the last time are run at once: to give them to another thread takes about as long."""


@dataclass(frozen=True, slots=True)
class Halt:
    """A replay has come to a transfer, which is the executor's to do before it goes on.

    Attributes:
        place: which transfer of the device it is, counted from 0.
        position: which step of the device it is, counted from 1.
        sends: which way.
    """

    place: int
    position: int
    sends: bool
    at: Place
    nbytes: int


class ReplayFailure(Exception):
    """A step failed; the ones before it have run.

    Attributes:
        step: its number in the graph.
        program: what it would have launched.
    """

    def __init__(self, step: int, error: WsgradError | MemoryError, program: str | None = None) -> None:
        super().__init__(str(error))
        self.step = step
        self.error = error
        self.program = program


class Graph:
    """A graph's part on one queue.

    Attributes:
        transfers: how many steps send or receive.
    """

    def __init__(self, data: bytes | memoryview, runtime: Runtime) -> None:
        """Make it ready.

        Args:
            data: in CBOR the device's part and, in pairs, the buffer numbers with the buffers that they stand for.
            runtime: what runs it.

        Raises:
            ProtocolError: it is no such thing.
        """
        array = cbor.decode(data, max_items=_MAX_ITEMS)
        if not isinstance(array, list) or len(array) != 2:
            raise ProtocolError("a graph that is no part with its bindings")
        part, sizes, self._variables = parse_device_part(array[0])
        self._bindings = {number: (buffer, 0) for number, buffer in _rows(array[1], 2)}
        if set(self._bindings) != set(sizes):
            raise ProtocolError("a graph whose bindings are not those of its buffers")
        self._part = part
        self._runtime = runtime
        self._prepared = runtime.prepare(part)
        self._queue: Sequence[Run | PartStep] = part.by_number
        if self._prepared is not None:
            entries = [*self._prepared.queue, *part.lanes[1], *part.lanes[2]]
            self._queue = sorted(entries, key=_number)
        self.transfers = len(part.lanes[1]) + len(part.lanes[2])
        self._places = list(_places(self._queue))
        self._lengthy = {position for position, _, transfer in self._places if transfer is None and self.transfers}
        self._slots: list[Place] = []
        self._bound: tuple[int, dict[int, tuple[int, int]]] | None = None

    def replay(
        self,
        lookup: Lookup,
        generation: int,
        bindings: Sequence[object],
        values: Sequence[object],
        progress: Callable[[int], None],
    ) -> Iterator[Halt]:
        """Run the graph once, up to the next transfer at a time.

        Args:
            lookup: finds a buffer's memory.
            generation: changes whenever an id may have come to mean another range.
            bindings: `[buffer number, buffer, offset]` for what stands for something else in this replay.
            values: of the variables.
            progress: told, before they run, how many steps come before the next ones, plus one.

        Raises:
            ReplayFailure: a step failed.
            WsgradError: a buffer or value does not fit; nothing was run.
        """
        checked = self._fill_in(lookup, generation, bindings, values)
        for position, entry, transfer in self._places:
            progress(position)
            if transfer is not None:
                if self._runtime.trace is not None:
                    self._runtime.trace.step = position
                yield self._halt(position, transfer)
            else:
                self._enter(checked, position, entry)

    def lanes(
        self,
        lookup: Lookup,
        generation: int,
        bindings: Sequence[object],
        values: Sequence[object],
        progress: Callable[[int], None],
        worker: Worker,
    ) -> Lanes:
        """The same for one whose launches go on in `worker` while there are transfers."""
        checked = self._fill_in(lookup, generation, bindings, values)
        return Lanes(
            worker,
            entries=[(position, entry) for position, entry, transfer in self._places if transfer is None],
            transfers=[
                (entry, self._halt(position, transfer))
                for position, entry, transfer in self._places
                if transfer is not None and not isinstance(entry, Run)
            ],
            lane_of={step.number: index for index, lane in enumerate(self._part.lanes) for step in lane},
            brief=lambda position: position not in self._lengthy,
            progress=progress,
            run=partial(self._enter, checked),
        )

    @property
    def parallel(self) -> bool:
        """Whether launches should run beside its transfers: some that may be long, or have never run."""
        return self._prepared is not None and bool(self._lengthy)

    def _fill_in(
        self, lookup: Lookup, generation: int, bindings: Sequence[object], values: Sequence[object]
    ) -> list[int]:
        """Bind buffers and values for this run; the values, checked."""
        self._bind(lookup, generation, {number: (buffer, offset) for number, buffer, offset in _rows(bindings, 3)})
        checked = self._values(values)
        if self._prepared is not None and checked:
            self._prepared.patch(checked)
        return checked

    def _halt(self, position: int, transfer: tuple[int, bool, int]) -> Halt:
        place, sends, slot = transfer
        return Halt(place, position, sends, self._slots[slot], self._part.slots[slot].nbytes)

    def _enter(self, values: Sequence[int], position: int, entry: Run | PartStep) -> None:
        """Run launches, or a step that is no transfer."""
        trace = self._runtime.trace
        if trace is not None:
            trace.step = position
        started = now()
        if isinstance(entry, Run):
            assert self._prepared is not None
            failure = self._prepared.run(entry, position)
            if failure is not None:
                raise ReplayFailure(entry.steps[failure.number - position].number, failure.error, failure.program)
        else:
            self._run(entry, values, position)
            if trace is not None and isinstance(entry.op, CopyOp | FillOp):
                kind = SpanKind.COPY if isinstance(entry.op, CopyOp) else SpanKind.FILL
                trace.add(kind, started, number=0, nbytes=self._part.slots[entry.op.target].nbytes)
        if now() - started <= _BRIEF_NANOSECONDS:
            self._lengthy.discard(position)
        elif self.transfers:
            self._lengthy.add(position)

    def close(self) -> None:
        """Forget everything."""
        if self._prepared is not None:
            self._prepared.close()
        elif self._bound is not None:
            for slot in range(len(self._part.slots)):
                self._runtime.unbind(self._runtime.slots_from + slot)

    def _bind(self, lookup: Lookup, generation: int, new: dict[int, tuple[int, int]]) -> None:
        if self._bound == (generation, new):
            return
        if not new.keys() <= self._bindings.keys():
            raise ProtocolError("a replay that substitutes a buffer which its graph does not have")
        bindings = self._bindings | new
        runtime, prepared = self._runtime, self._prepared
        self._bound = None
        self._slots = []
        for slot, range_ in enumerate(self._part.slots):
            buffer, offset = bindings[range_.buffer]
            memory, at = lookup(buffer, offset + range_.offset, range_.nbytes)
            self._slots.append((memory, at))
            if prepared is not None:
                prepared.bind(slot, memory, at, range_.nbytes)
            else:
                runtime.bind(runtime.slots_from + slot, memory, at, range_.nbytes)
        self._bound = generation, new

    def _values(self, values: Sequence[object]) -> list[int]:
        if len(values) != len(self._variables):
            raise LaunchError(f"a graph with {len(self._variables)} variables was given {len(values)} values")
        checked = []
        for (name, low, high), value in zip(self._variables, values, strict=True):
            if type(value) is not int or not low <= value <= high:
                raise LaunchError(f"{name}={value!r:.100} is not an integer from {low} to {high}")
            checked.append(value)
        return checked

    def _run(self, step: PartStep, values: Sequence[int], position: int) -> None:
        """A step for which the runtime has nothing prepared."""
        runtime = self._runtime
        slots = self._part.slots
        program: str | None = None
        try:
            match step.op:
                case LaunchOp(identity, grid, block, arguments):
                    program = runtime.program_name(identity)
                    letters = self._part.programs[identity].replace("x", "")
                    sizes = None if grid is None else [_whole(size, values) for size in grid]
                    given = [self._argument(*pair, values) for pair in zip(letters, arguments, strict=True)]
                    runtime.launch(identity, sizes, block, given, position)
                case CopyOp(target, source):
                    runtime.copy(*self._slots[target], *self._slots[source], slots[target].nbytes)
                case FillOp(target, pattern):
                    runtime.fill(*self._slots[target], slots[target].nbytes, pattern)
                case other:
                    raise AssertionError(f"{other} is the executor's")
        except (WsgradError, MemoryError) as error:
            raise ReplayFailure(step.number, error, program) from error

    def _argument(self, letter: str, argument: Argument, values: Sequence[int]) -> int | float:
        if letter == "p":
            assert isinstance(argument, int)
            return self._runtime.slots_from + argument
        return argument if isinstance(argument, float) else _whole(argument, values)


def _whole(size: Size, values: Sequence[int]) -> int:
    return size.scale * values[size.var] + size.offset if isinstance(size, Linear) else size


def _places(queue: Sequence[Run | PartStep]) -> Iterator[tuple[int, Run | PartStep, tuple[int, bool, int] | None]]:
    """With each entry the position of its first step and, if it is one, which transfer it is, its way and its slot."""
    position, place = 1, 0
    for entry in queue:
        transfer = None
        if not isinstance(entry, Run):
            match entry.op:
                case SendOp(slot):
                    transfer = place, True, slot
                case ReceiveOp(slot):
                    transfer = place, False, slot
        yield position, entry, transfer
        place += transfer is not None
        position += len(entry.steps) if isinstance(entry, Run) else 1


def _number(entry: Run | PartStep) -> int:
    return entry.steps[0].number if isinstance(entry, Run) else entry.number


def _rows(value: object, width: int) -> list[list[int]]:
    """Arrays of unsigned integers, all of the same length."""
    if not isinstance(value, list):
        raise ProtocolError("bindings that are no array")
    for row in value:
        if not isinstance(row, list) or len(row) != width or not all(type(item) is int and item >= 0 for item in row):
            raise ProtocolError(f"a binding that is {row!r:.100}")
    return value


class Graphs:
    """The graphs of one queue, and the chunks that came for their replays before these got to them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._graphs: dict[int, Graph] = {}
        self._pieces: dict[int, bytearray] = {}
        self._kept: dict[int, deque[tuple[m.Chunk, memoryview]]] = {}
        self._failures: dict[int, m.Fail] = {}

    def add(self, message: m.Graph, piece: memoryview) -> None:
        """Take a piece of a graph; with the last one it is made ready.

        Raises:
            ProtocolError: the pieces don't fit together, or are no graph.
        """
        pieces = self._pieces.setdefault(message.graph, bytearray())
        if message.offset != len(pieces) or message.offset + len(piece) > message.total or message.total > MAX_NBYTES:
            raise ProtocolError(f"{len(piece)} bytes at {message.offset} of a graph do not follow {len(pieces)} bytes")
        pieces += piece
        if len(pieces) == message.total:
            del self._pieces[message.graph]
            self.forget(message.graph)
            self._graphs[message.graph] = Graph(bytes(pieces), self._runtime)

    def forget(self, graph: int) -> None:
        """A graph goes, if there is one."""
        known = self._graphs.pop(graph, None)
        if known is not None:
            known.close()

    def announced(self, replay: m.Replay) -> None:
        """A replay will come: chunks for it may come before.

        Raises:
            ProtocolError: of a graph that is not there.
        """
        for transfer in self._transfers(replay):
            self._kept[transfer] = deque()

    def start(self, replay: m.Replay) -> Graph:
        """The graph that a replay runs."""
        return self._graphs[replay.graph]

    def over(self, replay: m.Replay) -> int:
        """A replay is over, or was dropped. Returns how many chunks had come for it and go unused."""
        self._failures.pop(replay.number, None)
        return sum(len(self._kept.pop(transfer)) for transfer in self._transfers(replay))

    def keep(self, chunk: m.Chunk, data: memoryview) -> bool:
        """Keep a chunk if it is for an announced replay."""
        kept = self._kept.get(chunk.transfer)
        if kept is not None:
            kept.append((chunk, data))
        return kept is not None

    def take(self, transfer: int) -> tuple[m.Chunk, memoryview] | None:
        """The next chunk that came for a transfer."""
        kept = self._kept[transfer]
        return kept.popleft() if kept else None

    def fail(self, failure: m.Fail) -> None:
        """The server knows that a replay can't go on: what it waits for will not come."""
        self._failures[failure.number] = failure

    def failure(self, replay: m.Replay) -> m.Fail | None:
        """Why a replay can't go on."""
        return self._failures.get(replay.number)

    def close(self) -> None:
        """Forget everything."""
        for graph in list(self._graphs):
            self.forget(graph)

    def _transfers(self, replay: m.Replay) -> range:
        graph = self._graphs.get(replay.graph)
        if graph is None:
            raise ProtocolError(f"a replay of graph {replay.graph}, which is not here")
        return range(replay.transfer, replay.transfer + graph.transfers)
