"""One session's timeline on the server: measures frames, waits and compiles, checks what nodes measure, sends it all.

Spans wait in a bounded ring, from which the oldest go and are counted, until the client has seen those before them.
What a node says is checked like any reply; the names in it are looked up here, so a node can't bring its own.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
import trio

from wsgrad.server.graphs import GraphRun
from wsgrad.server.outstanding import InvalidReply
from wsgrad.transport import cbor
from wsgrad.transport.messages import (
    MESSAGE_NAMES,
    Batch,
    KnownProgram,
    Launches,
    Message,
    Profile,
    Program,
    Reopen,
    Spans,
    Traced,
    message_array,
)
from wsgrad.transport.tracing import MAX_SPANS_NBYTES, RECORD, FrameWatch, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from wsgrad.server.graphs import SessionGraph
    from wsgrad.server.port import Port
    from wsgrad.server.queue import Queue
    from wsgrad.transport.link import Link

    Push = Callable[[bytes, memoryview, Callable[[], None]], None]

_RING_NBYTES: Final = 4 << 20
_WINDOW_NBYTES: Final = 1 << 20
"""So much may be on its way to the client before it has seen it."""
_PERIOD_SECONDS: Final = 0.05
_ALIGN_PERIODS: Final = 100
_END_SECONDS: Final = 2.0
"""How long nodes have to send their last spans; one that runs a program answers only after it."""
_MAX_NAMES: Final = 1 << 16
_NAMES_AT_ONCE: Final = 128
_MAX_NAME: Final = 64
_MAX_RENAMES: Final = 1024
_MAX_GRAPHS: Final = 1024
_DTYPE: Final = np.dtype(
    {
        "names": ["kind", "zero", "name", "queue", "graph", "step", "unused", "number", "start", "end", "nbytes"],
        "formats": ["<u2", "<u2", "<u4", "<u4", "<u4", "<u4", "<u4", "<u8", "<i8", "<i8", "<u8"],
    }
)
_MAX_NANOSECONDS: Final = 1 << 62
_NODE_KINDS: Final = (SpanKind.LAUNCH, SpanKind.COMPILE)
now = time.monotonic_ns


class SessionTrace:
    """The timeline of a session, from `Trace` on to the last `Traced`; `run` is a task of the session.

    Attributes:
        number: what the client calls it.
        started: nanoseconds; nothing before it belongs here.
        queues: those that take part.
        done: whether the last message is with the client's link.
    """

    def __init__(self, number: int, push: Push) -> None:
        self.number = number
        self.started = now()
        self.queues: set[QueueTrace] = set()
        self.done = False
        self._push = push
        self._rows = bytearray()
        self._ring: deque[bytes] = deque()
        self._ring_nbytes = 0
        self._way_nbytes = 0
        self._dropped = 0
        self._names: dict[str, int] = {}
        self._news: list[list[object]] = []
        self._ending = trio.Event()
        self._over = trio.Event()
        self._link: Link | None = None
        assert _DTYPE.itemsize == RECORD.size

    def watch(self, link: Link) -> None:
        """Measure the messages that a link gives out."""
        self._link = link
        link.observer = FrameWatch(self._sent)

    def end(self) -> None:
        """The client wants no more of it; its last follows. Idempotent."""
        if self._link is not None:
            self._link.observer = None
            self._link = None
        for queue in list(self.queues):
            queue.end()
        self._ending.set()
        self.ended()

    @property
    def ending(self) -> bool:
        """Whether the client wants no more of it."""
        return self._ending.is_set()

    def ended(self) -> None:
        """A queue has sent its last, or is gone."""
        if self._ending.is_set() and not any(queue.asked for queue in self.queues):
            self._over.set()

    async def run(self) -> None:
        """Send what was measured, until the end."""
        periods = 0
        while not self._ending.is_set():
            with trio.move_on_after(_PERIOD_SECONDS):
                await self._ending.wait()
            periods += 1
            if periods % _ALIGN_PERIODS == 0:
                for queue in self.queues:
                    queue.align()
            self._cut()
            self._pump()
        with trio.move_on_after(_END_SECONDS):
            await self._over.wait()
        for queue in list(self.queues):
            queue.close()
        self.done = True
        self._cut()
        self._pump()

    # -- spans

    def name(self, text: str) -> int:
        """The number that stands for a name; 0 for one too many."""
        number = self._names.get(text)
        if number is None:
            if len(self._names) >= _MAX_NAMES:
                return 0
            number = self._names[text] = len(self._names) + 1
            self._news.append([number, text])
        return number

    def add(
        self,
        kind: SpanKind,
        name: str,
        start: int,
        end: int,
        *,
        queue: int = 0,
        number: int = 0,
        count: int = 0,
        nbytes: int = 0,
    ) -> None:
        """Note a span, as far as it belongs here: a compile may have begun before."""
        start = max(start, self.started)
        self._rows += RECORD.pack(kind, 0, self.name(name), queue, 0, count, 0, number, start, end, nbytes)
        if len(self._rows) >= MAX_SPANS_NBYTES:
            self._cut()

    def received(self, message: Message, nbytes: int, start: int) -> None:
        """A message of the client has been worked off."""
        self.add(SpanKind.RECEIVED, type(message).__name__, start, now(), nbytes=nbytes)

    def extend(self, rows: bytes) -> None:
        """Note spans that were checked: whole records, no more than fit one message."""
        self._cut()
        self._keep(rows)

    def drop(self, count: int) -> None:
        """Spans are lost."""
        self._dropped += count

    def _sent(self, kind: int, nbytes: int, start: int, end: int) -> None:
        if kind != Traced.KIND:
            self.add(SpanKind.SENT, MESSAGE_NAMES.get(kind, "?"), start, end, nbytes=nbytes)

    def _cut(self) -> None:
        if self._rows:
            rows, self._rows = bytes(self._rows), bytearray()
            for at in range(0, len(rows), MAX_SPANS_NBYTES):
                self._keep(rows[at : at + MAX_SPANS_NBYTES])

    def _keep(self, rows: bytes) -> None:
        self._ring.append(rows)
        self._ring_nbytes += len(rows)
        while self._ring_nbytes > _RING_NBYTES:
            oldest = self._ring.popleft()
            self._ring_nbytes -= len(oldest)
            self._dropped += len(oldest) // RECORD.size

    # -- to the client

    def _pump(self) -> None:
        while self._ring and self._way_nbytes < _WINDOW_NBYTES:
            rows = self._ring.popleft()
            self._ring_nbytes -= len(rows)
            self._tell(rows)
        if self.done and not self._ring and self.number >= 0:
            self._tell(b"", last=True)
            self.number = -1

    def _tell(self, rows: bytes, *, last: bool = False) -> None:
        while len(self._news) > _NAMES_AT_ONCE:
            self._send(b"", last=False)
        self._send(rows, last=last)

    def _send(self, rows: bytes, *, last: bool) -> None:
        names, self._news = self._news[:_NAMES_AT_ONCE], self._news[_NAMES_AT_ONCE:]
        self._way_nbytes += len(rows)

        def seen() -> None:
            self._way_nbytes -= len(rows)
            self._pump()

        head = cbor.encode(message_array(Traced(self.number, names, self._dropped, last)))
        self._push(head, memoryview(rows), seen)


class QueueTrace:
    """A queue's share of a timeline, whatever becomes of its node."""

    def __init__(self, sink: SessionTrace, queue: Queue) -> None:
        self.trace = sink.number
        self._sink = sink
        self._owner = queue
        self._queue = queue.number
        self._port: Port | None = None
        self._programs = {program: [(0, entry.name)] for program, entry in queue._tables.programs.items()}
        self._graphs: dict[int, SessionGraph] = {}
        self._steps: dict[int, NDArray[np.uint32]] = {}
        self._waiting: deque[tuple[int, int, int, str]] = deque()
        self._running: deque[tuple[int, int, int, str]] = deque()
        sink.queues.add(self)
        if not queue.opening:
            self.opened()

    @property
    def asked(self) -> bool:
        """Whether the node will send more."""
        return self._port is not None

    def opened(self) -> None:
        """The node is ready: it may be asked."""
        port = self._owner._port
        if port is not None and not self._sink.ending:
            self._port = port
            port.traces.add(self.trace)
            port.align()
            port.send_message(Profile(port.number, self.trace, True))

    def align(self) -> None:
        """Compare the clocks once more."""
        if self._port is not None:
            self._port.align()

    def end(self) -> None:
        """Ask the node for its last."""
        if self._port is not None:
            self._port.send_message(Profile(self._port.number, self.trace, False))

    def lost(self, number: int) -> None:
        """The node is gone; commands up to this one count as done."""
        self.acked(number)
        self._port = None
        self._sink.ended()

    def close(self) -> None:
        """The queue is closed, or the timeline over."""
        self._port = None
        if self._owner.trace is self:
            self._owner.trace = None
        self._sink.queues.discard(self)
        self._sink.ended()

    # -- what the server itself sees

    def received(self, message: object) -> None:
        """The client has sent something for the queue."""
        match message:
            case Batch():
                last, count = message.first + len(message.commands) - 1, len(message.commands)
            case Launches():
                last, count = message.first + message.count - 1, message.count
            case Program() | KnownProgram():
                last, count = message.number, 1
                names = self._programs.setdefault(message.program, [])
                names.append((message.number, (message.name or message.entry)[:_MAX_NAME]))
                del names[:-_MAX_RENAMES]
            case GraphRun():
                last, count = message.number, 1
                if len(self._graphs) >= _MAX_GRAPHS:
                    self._graphs.clear()
                self._graphs[message.graph.graph] = message.graph
            case Reopen():
                last, count = message.number, 1
            case _:
                return
        self._waiting.append((last, count, now(), type(message).__name__))

    def sent(self, number: int, at: int) -> None:
        """The node has been given the commands up to this one."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= number:
            last, count, since, name = waiting.popleft()
            self._sink.add(SpanKind.QUEUED, name, since, max(at, since), queue=self._queue, number=last, count=count)
            self._running.append((last, count, at, name))

    def acked(self, number: int) -> None:
        """It has worked them off."""
        self.sent(number, now())
        running = self._running
        while running and running[0][0] <= number:
            last, count, since, name = running.popleft()
            self._sink.add(SpanKind.RUNNING, name, since, now(), queue=self._queue, number=last, count=count)

    # -- what the node says

    def spans(self, message: Spans, bulk: memoryview | None, sent: int) -> None:
        """Check spans and note them.

        Args:
            message: of this node.
            bulk: the records.
            sent: the last command that the node was given.

        Raises:
            InvalidReply: they can't be what the node has measured.
        """
        port = self._port
        data = b"" if bulk is None else bulk
        if len(data) % RECORD.size or len(data) > MAX_SPANS_NBYTES:
            raise InvalidReply(f"{len(data)} bytes of spans, which are no records")
        if port is None or message.trace != self.trace:
            return
        if data:
            rows = np.frombuffer(data, _DTYPE).copy()
            _check(rows, sent)
            rows = self._placed(rows, port)
            self._name(rows)
            self._sink.extend(rows.tobytes())
        if message.last:
            self._port = None
            self._sink.ended()

    def _placed(self, rows: NDArray[np.void], port: Port) -> NDArray[np.void]:
        """The spans in our time, without those that can't have been then."""
        offset, slack = port.clock
        if offset is None:
            self._sink.drop(len(rows))
            return rows[:0]
        rows["start"] -= offset
        rows["end"] -= offset
        inside = (rows["start"] >= self._sink.started - slack) & (rows["end"] <= now() + slack)
        if not inside.all():
            if not slack:
                raise InvalidReply("spans from before they were asked for, or from the future")
            self._sink.drop(len(rows) - int(inside.sum()))
            rows = rows[inside]
        return rows

    def _name(self, rows: NDArray[np.void]) -> None:
        """Put in our numbers for names, queue and steps."""
        rows["queue"] = self._queue
        programs, places = np.unique(rows["name"], return_inverse=True)
        named = np.zeros(len(rows), np.uint32)
        for place, program in enumerate(programs.tolist()):
            names = self._programs.get(program)
            if names is None:
                continue
            mine = places == place
            if len(names) == 1:
                named[mine] = self._sink.name(names[0][1])
            else:
                numbers = rows["number"][mine].tolist()
                named[mine] = [self._sink.name(_name_at(names, number)) for number in numbers]
        launched = (rows["kind"] == SpanKind.LAUNCH) | (rows["kind"] == SpanKind.COMPILE)
        rows["name"] = np.where(launched, named, 0)
        for graph in np.unique(rows["graph"]).tolist():
            if graph:
                mine = rows["graph"] == graph
                rows["step"][mine] = self._numbers(graph, rows["step"][mine])

    def _numbers(self, graph: int, places: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The numbers of a graph's steps by their places in the device's order; 0 for none."""
        numbers = self._steps.get(graph)
        if numbers is None:
            known = self._graphs.get(graph)
            mine = known.queues.get(self._queue) if known is not None else None
            if mine is None:
                return np.zeros_like(places)
            if len(self._steps) >= _MAX_GRAPHS:
                self._steps.clear()
            numbers = self._steps[graph] = np.array([0, *(step.number for step in mine.steps)], np.uint32)
        if int(places.max()) >= len(numbers):
            raise InvalidReply(f"a span of step {int(places.max())} in a graph of {len(numbers) - 1} steps")
        return numbers[places]


def check_trace(port: Port, message: Spans) -> None:
    """Check that a node was asked for these spans.

    Raises:
        InvalidReply: it was not, or has sent its last.
    """
    if message.trace not in port.traces:
        raise InvalidReply("spans that nobody asked for")
    if message.last:
        port.traces.discard(message.trace)


def check_records(bulk: memoryview | None, sent: int, steps: Mapping[int, int]) -> None:
    """Check spans that are passed on to another server, which would not forgive them.

    Args:
        bulk: the records.
        sent: the last command that the node was given.
        steps: how many steps each graph has.

    Raises:
        InvalidReply: they can't be what a node has measured.
    """
    data = b"" if bulk is None else bulk
    if len(data) % RECORD.size or len(data) > MAX_SPANS_NBYTES:
        raise InvalidReply(f"{len(data)} bytes of spans, which are no records")
    if not data:
        return
    rows = np.frombuffer(data, _DTYPE)
    _check(rows, sent)
    for graph in np.unique(rows["graph"]).tolist():
        last = int(rows["step"][rows["graph"] == graph].max())
        if graph and last > steps.get(graph, 0):
            raise InvalidReply(f"a span of step {last} in a graph of {steps.get(graph, 0)} steps")


def _check(rows: NDArray[np.void], sent: int) -> None:
    """What no honest node gets wrong."""
    kinds = rows["kind"]
    if not ((kinds >= _NODE_KINDS[0]) & (kinds <= _NODE_KINDS[1])).all():
        raise InvalidReply("spans of a kind that no node measures")
    if rows["zero"].any() or rows["unused"].any() or rows["queue"].any():
        raise InvalidReply("spans with something where zeros belong")
    if int(rows["number"].max()) > sent:
        raise InvalidReply(f"spans of command {int(rows['number'].max())} when {sent} were sent")
    start, end = rows["start"], rows["end"]
    if (start > end).any() or int(start.min()) < -_MAX_NANOSECONDS or int(end.max()) > _MAX_NANOSECONDS:
        raise InvalidReply("spans that end before they begin")
    if int(rows["nbytes"].max()) >= 1 << 53:
        raise InvalidReply("spans of more bytes than there are")


def _name_at(names: list[tuple[int, str]], number: int) -> str:
    """The name that a program's id had at a command."""
    return next((name for since, name in reversed(names) if since <= number), names[0][1])
