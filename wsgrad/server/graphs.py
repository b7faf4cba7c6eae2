"""The graphs of one session: checks the parts that a client recorded and turns its runs into replays for the nodes.

A part is checked once, when it comes; what its buffers and programs are is checked in the order of each queue, before
each run, as for any command. A graph or run that is refused fails in its place on every queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import trio

from wsgrad.errors import DeviceError, LaunchError, LimitExceeded, ProtocolError, WsgradError, error_code
from wsgrad.graph.parse import check_values, device_arrays, parse_part
from wsgrad.graph.part import LaunchOp, ReceiveOp, SendOp
from wsgrad.server.events import Failure
from wsgrad.server.outstanding import Habit, Sent
from wsgrad.server.transfers import Flow
from wsgrad.transport import cbor
from wsgrad.transport.commands import Receive, Send
from wsgrad.transport.messages import Fail, Forget, Graph, Record, Replay, Run, Unrecord, message_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from wsgrad.graph.part import DevicePart, Part, PartStep
    from wsgrad.server.intake import Waiting
    from wsgrad.server.journal import Journal
    from wsgrad.server.limits import Limits
    from wsgrad.server.port import Port
    from wsgrad.server.queue import Queue
    from wsgrad.server.tables import Tables

MAX_RUN_FLOWS: Final = 4096
"""Transfers inside of runs that may be under way, unless a single run has more; other runs wait."""
_QUICK_NBYTES: Final = 4 << 10
"""Parts up to this size are checked at once, larger ones in a thread."""
_MAX_ITEMS: Final = 1 << 21
_PIECE_NBYTES: Final = 60_000

Bindings: TypeAlias = dict[int, tuple[int, int]]
"""Buffers of a queue with offsets, by the numbers of a graph's buffers."""


@dataclass(slots=True, eq=False)
class Plain:
    """A message to a node that is no command."""

    head: bytes
    bulk: memoryview | None = None


@dataclass(frozen=True, slots=True)
class End:
    """What a queue sends or receives in each run.

    Attributes:
        place: which of the queue's transfers it is, from 0.
        key: the number of the transfer's sending step.
        route: the way to the other end's server, or 0 if it is this one.
    """

    place: int
    key: int
    nbytes: int
    sends: bool
    route: int


class QueueGraph:
    """A graph's part on one queue.

    Attributes:
        steps: in the order in which the node runs them.
        ends: the transfers among them that move anything.
        transfers: how many there are in all.
        launches: how many launches.
        habit: whether its runs are over at once.
        programs: what they launch, with their signatures.
    """

    def __init__(
        self,
        graph: int,
        part: DevicePart,
        buffers: dict[int, int],
        bindings: dict[int, int],
        blob: bytes,
        routes: dict[int, tuple[int, int]],
    ) -> None:
        self.graph = graph
        self.steps: list[PartStep] = part.by_number
        self.ends: list[End] = []
        self.transfers = 0
        self.launches = sum(isinstance(step.op, LaunchOp) for step in self.steps)
        for step in self.steps:
            if isinstance(step.op, SendOp | ReceiveOp):
                sends = isinstance(step.op, SendOp)
                route = routes[step.op.server][not sends]
                nbytes = part.slots[step.op.source if isinstance(step.op, SendOp) else step.op.target].nbytes
                if nbytes:
                    self.ends.append(End(self.transfers, step.number - (not sends), nbytes, sends, route))
                self.transfers += 1
        self.programs = part.programs
        self._buffers = buffers
        self._bindings = bindings
        self._blob = memoryview(blob)
        self._port: Port | None = None
        self._generation = -1
        self._unfit: dict[int, WsgradError] = {}
        self.habit = Habit()

    def introduce(self, queue: int, port: Port | None) -> list[Plain]:
        """What a node has to know before the first replay."""
        if port is self._port:
            return []
        self._port = port
        total = len(self._blob)
        return [
            Plain(cbor.encode(message_array(Graph(queue, self.graph, at, total))), self._blob[at : at + _PIECE_NBYTES])
            for at in range(0, total, _PIECE_NBYTES)
        ]

    def check(self, bindings: Bindings, tables: Tables) -> list[list[object]]:
        """Check what a replay uses; returns what of the bindings is this queue's.

        Raises:
            WsgradError: a buffer or program is not there or does not fit.
        """
        if self._generation != tables.generation or self._unfit:
            self._look(tables)
        for number, error in self._unfit.items():
            if number not in bindings:
                raise type(error)(str(error), details=error.details)
        mine: list[list[object]] = []
        for number, (buffer, offset) in bindings.items():
            if number in self._buffers:
                tables.check_range("graph", buffer, offset, self._buffers[number])
                mine.append([number, buffer, offset])
        return mine

    def details(self, step: int, tables: Tables) -> tuple[str | None, dict[str, object]]:
        """The program that the node says it ran as its `step`th step, from 1, and what to tell the client."""
        if not 1 <= step <= len(self.steps):
            return None, {"operation": "replay", "graph": self.graph}
        found = self.steps[step - 1]
        details: dict[str, object] = {"operation": "replay", "graph": self.graph, "step": found.number}
        entry = tables.program(found.op.program) if isinstance(found.op, LaunchOp) else None
        if entry is None:
            return None, details
        return entry.name, details | {"operation": "launch", "program": entry.name}

    def program_at(self, step: int) -> int | None:
        """The program that step number `step` launches."""
        return next(
            (found.op.program for found in self.steps if found.number == step and isinstance(found.op, LaunchOp)), None
        )

    def _look(self, tables: Tables) -> None:
        """Ids may mean something else than at the last run."""
        self._generation = -1
        for program, signature in self.programs.items():
            entry = tables.program(program)
            if entry is None or not entry.live or entry.signature != signature:
                raise LaunchError(f"the graph launches program {program} with signature {signature!r}: there is none")
        self._unfit = {}
        for number, nbytes in self._buffers.items():
            try:
                tables.check_range("graph", self._bindings[number], 0, nbytes)
            except WsgradError as error:
                self._unfit[number] = error
        self._generation = tables.generation


@dataclass(slots=True, eq=False)
class SessionGraph:
    """A graph of a session; empty until its part has been checked, or with the reason why it was refused."""

    graph: int
    nbytes: int
    ready: bool = False
    error: WsgradError | None = None
    part: Part | None = None
    queues: dict[int, QueueGraph] = field(default_factory=dict)


class RunFlows:
    """The transfers inside of one run; they are made when the first of its queues comes to it.

    Attributes:
        queues: on which it runs.
        transfer: where the ids of those to and from other servers begin.
        flows: by the numbers of their sending steps; None until they are made.
    """

    def __init__(self, graphs: Graphs, graph: SessionGraph, queues: frozenset[int], transfer: int) -> None:
        self.graph = graph
        self.transfer = transfer
        self.queues = queues
        self.flows: dict[int, Flow] | None = None
        self._graphs = graphs

    def make(self, *, anyway: bool = False) -> bool:
        """Make them if there is room, or anyway. Returns whether they are there."""
        return self.flows is not None or self._graphs.make(self, anyway=anyway)


@dataclass(slots=True, eq=False)
class GraphRun:
    """A run as one command of a queue."""

    queue: int
    number: int
    graph: SessionGraph
    bindings: Bindings
    values: list[object]
    flows: RunFlows

    @property
    def ready(self) -> bool:
        """Whether it may be looked into now; else its queue is asked for later."""
        return self.graph.ready and self.flows.make()

    def ends(self) -> list[tuple[End, Flow]]:
        """What this queue sends and receives in it."""
        mine = self.graph.queues.get(self.queue)
        if mine is None or not mine.ends:
            return []
        self.flows.make(anyway=True)
        flows = self.flows.flows
        assert flows is not None
        return [(end, flows[end.key]) for end in mine.ends]

    def drop(self, failure: Failure) -> None:
        """It will not run on this queue: the other ends of its transfers fail."""
        for end, flow in self.ends():
            if end.sends:
                flow.source_failed(failure)
            else:
                flow.target_failed(failure)


@dataclass(slots=True, eq=False)
class GraphEnd:
    """After all its runs, a queue's node may forget a graph."""

    queue: int
    graph: SessionGraph


@dataclass(slots=True)
class ReplaySent(Sent):
    """A replay on its way to a node; one with transfers is encoded when it leaves."""

    graph: QueueGraph | None = None
    replay: Replay | None = None
    ends: list[tuple[End, Flow]] = field(default_factory=list)


class Graphs:
    """Owned by a session.

    Args:
        find: the session's queue of a number, if it is open.
        start: runs a task of the session.
        ready: called when queues may go on.
        flow_from: begins the source's end of a transfer to another server.
        flow_to: begins the target's end of one from there.
        limits: how many graphs there may be, and what their parts may take together.
    """

    def __init__(
        self,
        find: Callable[[int], Queue | None],
        start: Callable[[Callable[[], Any]], None],
        ready: Callable[[Queue], None],
        flow_from: Callable[[Send], Flow],
        flow_to: Callable[[Receive], Flow],
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._find = find
        self._start = start
        self._ready = ready
        self._flow_from = flow_from
        self._flow_to = flow_to
        self._graphs: dict[int, SessionGraph] = {}
        self._last = 0
        self._nbytes = 0
        self._open: set[tuple[RunFlows, int]] = set()
        self._waiting: list[RunFlows] = []

    def record(self, message: Record, bulk: memoryview | None) -> None:
        """Take a graph; checking it goes on while the session does.

        Raises:
            ProtocolError: its id was used before, or its part is malformed.
        """
        if message.graph <= self._last:
            raise ProtocolError(f"graph {message.graph} after graph {self._last}: ids of graphs only grow")
        self._last = message.graph
        data = b"" if bulk is None else bytes(bulk)
        queues = {row[0]: row[1] for row in _pairs(message.queues, 2)}
        bindings = {row[0]: row[1] for row in _pairs(message.bindings, 2)}
        routes = {row[0]: (row[1], row[2]) for row in _pairs(message.routes, 3)}
        graph = self._graphs[message.graph] = SessionGraph(message.graph, len(data))
        self._nbytes += len(data)
        graph.error = self._over_limit(len(data))
        if graph.error is not None:
            graph.ready = True
            self._nbytes -= graph.nbytes
            graph.nbytes = 0  # nothing of it is kept
        elif len(data) <= _QUICK_NBYTES:
            _fill(graph, data, queues, bindings, routes)
        else:

            async def check() -> None:
                await trio.to_thread.run_sync(_fill, graph, data, queues, bindings, routes)
                self._wake(queues.values())

            self._start(check)

    def run(self, message: Run) -> list[GraphRun]:
        """The commands that a run is, for the queues that are open.

        Raises:
            ProtocolError: there is no such graph, or something is malformed.
        """
        graph = self._graph(message.graph)
        bindings = {number: (buffer, offset) for number, buffer, offset in _pairs(message.bindings, 3)}
        numbers = [(queue, number) for queue, number in _pairs(message.numbers, 2) if self._find(queue) is not None]
        flows = RunFlows(self, graph, frozenset(queue for queue, _ in numbers), message.transfer)
        return [GraphRun(queue, number, graph, bindings, message.values, flows) for queue, number in numbers]

    def forget(self, message: Forget) -> list[GraphEnd]:
        """A graph goes, behind its runs."""
        graph = self._graph(message.graph)
        del self._graphs[message.graph]
        self._nbytes -= graph.nbytes
        return [GraphEnd(queue, graph) for queue in graph.queues]

    def make(self, run: RunFlows, *, anyway: bool) -> bool:
        """Make the transfers of a run; without `anyway` only if not too many are under way."""
        ends = [(queue, end) for queue, mine in run.graph.queues.items() for end in mine.ends]
        if self._open and len(self._open) + len(ends) // 2 > MAX_RUN_FLOWS and not anyway:
            self._waiting.append(run)
            return False
        flows = run.flows = {}
        for _, end in ends:
            if end.route and end.sends:
                flow = self._flow_from(Send(run.transfer + end.key, 0, 0, end.nbytes, end.route))
            elif end.route:
                flow = self._flow_to(Receive(run.transfer + end.key, 0, 0, end.nbytes, end.route))
            elif end.sends:
                flow = Flow(end.key, _nothing)
                flow.send(end.nbytes)
                flow.receive(end.nbytes)
            else:
                continue  # of the same flow as its source
            flow.over = partial(self._over, run, end.key)
            flows[end.key] = flow
            self._open.add((run, end.key))
        closed = Failure("DeviceError", "a device that the graph runs on was closed")
        for queue, end in ends:
            if queue not in run.queues:
                (flows[end.key].source_failed if end.sends else flows[end.key].target_failed)(closed)
        return True

    def _over(self, run: RunFlows, key: int) -> None:
        self._open.discard((run, key))
        waiting, self._waiting = self._waiting, []
        for other in waiting:
            self._wake(other.queues)

    def _over_limit(self, nbytes: int) -> LimitExceeded | None:
        """Why the graph that was just counted is one too many."""
        most, size = self._limits.max_graphs, self._limits.max_graphs_nbytes
        if len(self._graphs) > 2 * most:
            raise ProtocolError(f"{len(self._graphs)} graphs, most of which were refused", close_code=1008)
        if len(self._graphs) > most:
            return LimitExceeded(f"a session may have {most} graphs; drop some, or raise it with --max-graphs")
        if self._nbytes > size:
            words = f"a graph of {nbytes} bytes beside {self._nbytes - nbytes} of others exceeds the session's limit of"
            return LimitExceeded(f"{words} {size}; drop some, or raise it with --max-graphs-size")
        return None

    def _wake(self, queues: Iterable[int]) -> None:
        for number in queues:
            queue = self._find(number)
            if queue is not None:
                self._ready(queue)

    def _graph(self, number: int) -> SessionGraph:
        graph = self._graphs.get(number)
        if graph is None:
            raise ProtocolError(f"there is no graph {number}")
        return graph


def replay_messages(
    run: GraphRun, tables: Tables, port: Port | None, waiting: Waiting, journal: Journal, device: str
) -> list[Plain | Sent]:
    """What a run becomes for a queue's node, or what fails in its place.

    Args:
        run: of a graph that is ready.
        tables: the queue's.
        port: the way to its node.
        waiting: what the run counts against the queue's limit, and whether it is over it.
        journal: of the queue; it learns what is sent.
        device: what the queue's failures are called by.
    """
    graph = run.graph
    ends = run.ends()
    for end, flow in ends:
        if end.sends:
            journal.add(run.number, flow)
    assert graph.ready
    mine = graph.queues.get(run.queue)
    details: dict[str, object] = {"operation": "replay", "graph": graph.graph}
    try:
        if (refused := waiting.refused or graph.error) is not None:
            raise type(refused)(str(refused), details=refused.details)
        if mine is None or graph.part is None:
            raise DeviceError("the graph was not recorded for this queue")
        values = check_values(graph.part, run.values)
        bindings = mine.check(run.bindings, tables)
    except WsgradError as error:
        failure = Failure.of(error, device=device)
        for end, flow in ends:
            if not end.sends:
                flow.target_failed(failure)
        fail = Fail(run.queue, run.number, error_code(error), str(error), details | error.details)
        return [Sent(run.number, run.number, waiting.nbytes, cbor.encode(message_array(fail)))]
    replay = Replay(run.queue, run.number, graph.graph, 0, list(bindings), list(values))
    sent = ReplaySent(run.number, run.number, waiting.nbytes, b"", graph=mine, replay=replay, ends=ends)
    if not ends:
        sent.head = cbor.encode(message_array(replay))
        sent.habit = mine.habit
    return [*mine.introduce(run.queue, port), sent]


def end_messages(end: GraphEnd) -> list[Plain]:
    """What tells a queue's node that a graph goes."""
    mine = end.graph.queues.get(end.queue)
    if mine is None or mine._port is None:
        return []
    return [Plain(cbor.encode(message_array(Unrecord(end.queue, end.graph.graph))))]


def _nothing() -> None:
    """Nobody else keeps a flow inside of a server."""


def _fill(
    graph: SessionGraph,
    data: bytes,
    queues: dict[int, int],
    bindings: dict[int, int],
    routes: dict[int, tuple[int, int]],
) -> None:
    """Check a part; runs in a thread, and nobody looks at the graph before it is ready."""
    try:
        array = cbor.decode(data, max_items=_MAX_ITEMS)
        part = parse_part(array)
        assert isinstance(array, list)
        arrays = device_arrays(array)
        if set(part.buffers) != set(bindings):
            raise ProtocolError("a graph whose bindings are not those of its buffers")
        ways = routes | {part.server: (0, 0)}
        for device in part.devices:
            if device.index not in queues:
                raise ProtocolError(f"a graph with a device {device.index} that has no queue")
            for lane in device.lanes[1:]:
                for step in lane:
                    assert isinstance(step.op, SendOp | ReceiveOp)
                    way = (0, 0) if step.op.server == part.server else routes.get(step.op.server, (0, 0))
                    if step.op.server != part.server and not way[isinstance(step.op, ReceiveOp)]:
                        raise LaunchError(f"a graph with a transfer to or from server {step.op.server}, without a way")
            buffers = {number: nbytes for number, (index, nbytes) in part.buffers.items() if index == device.index}
            mine = {number: bindings[number] for number in buffers}
            blob = cbor.encode([arrays[device.index], [list(pair) for pair in mine.items()]])
            graph.queues[queues[device.index]] = QueueGraph(graph.graph, device, buffers, mine, blob, ways)
        graph.part = part
    except WsgradError as error:
        graph.error = error
    except Exception as error:  # a thread's error has nowhere to go but here
        graph.error = DeviceError(f"the graph could not be read: {type(error).__name__}")
    graph.ready = True


def _pairs(rows: Sequence[Sequence[object]], width: int) -> list[list[int]]:
    """Arrays of as many unsigned integers, as they came from a peer."""
    for row in rows:
        if len(row) != width or not all(type(item) is int and 0 <= item < 1 << 53 for item in row):
            raise ProtocolError(f"{row!r:.100} among the pairs of a graph")
    return rows  # type: ignore[return-value]
