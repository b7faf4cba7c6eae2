"""One session's share of a timeline, on the client: measures calls and frames, keeps what the server measures.

What is measured goes into a temporary file, so that a long timeline takes no memory; `trace_file` reads it at the end.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from wsgrad.client.program import BaseProgram
from wsgrad.errors import ProtocolError, WsgradError
from wsgrad.graph.explain import what
from wsgrad.transport.cbor import encode
from wsgrad.transport.messages import MESSAGE_NAMES, Trace, Traced, message_array
from wsgrad.transport.tracing import MAX_SPANS_NBYTES, RECORD, Alignment, Clock, FrameWatch, SpanKind, Time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from wsgrad.client.base import BaseServer
    from wsgrad.client.waits import Wait
    from wsgrad.transport.connection import Received

_PACKAGE: Final = str(Path(__file__).parent.parent) + "/"
_ROWS_KEPT: Final = 1024
_MAX_NAMES: Final = 1 << 16
_MAX_CALLERS: Final = 1 << 12
_MAX_GRAPHS: Final = 1 << 10
_CALL: Final = int(SpanKind.CALL)
_pack: Final = RECORD.pack
now = time.monotonic_ns


class Callers:
    """The threads or tasks that called, of all sessions of a timeline: one that uses several servers is one.

    Attributes:
        names: by number.
        numbers: of those that are known, by what tells them apart.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: dict[object, int] = {}
        self._adding = threading.Lock()

    def number(self, key: object) -> int:
        """The number of a caller; the last ones of very many share one."""
        number = self.numbers.get(key)
        if number is None:
            with self._adding:
                number = len(self.names)
                if number < _MAX_CALLERS:
                    self.numbers[key] = number
                    self.names.append(str(getattr(key, "name", "") or threading.current_thread().name))
        return number


class SessionTrace:
    """Owned by the timeline; `session.trace` while it lasts. Methods are called with the driver's lock, but `add`.

    Attributes:
        server: whose session it is.
        started: nanoseconds.
        recording: whether calls are measured.
        names: what the server's spans are called, by number.
        own_names: what ours are called, by number.
        callers: the threads or tasks that called.
        dropped: spans that were lost.
        queues: what device each queue is on.
        graphs: of each graph the steps, in order: the number of its first item, and what it does.
    """

    def __init__(self, server: BaseServer[Any], callers: Callers) -> None:
        self.server = server
        self.started = now()
        self.recording = False
        self.names: dict[int, str] = {}
        self.own_names: list[str] = ["?"]
        self.callers = callers
        self.dropped = 0
        self.queues: dict[int, str] = {}
        self._session = server._session
        self._number = 0
        self._ended = False
        self._before = Alignment(self._ask)
        self._after = Alignment(self._ask)
        self._aligned_at = [0, 0]
        self._own: dict[str, int] = {"?": 0}
        self._launches: dict[str, int] = {}
        self._caller = server._caller
        self._rows: deque[bytes] = deque()
        self._spooling = threading.Lock()
        self._spool = tempfile.TemporaryFile(prefix="wsgrad-trace-")  # noqa: SIM115  (closed by `close`)
        self.graphs: dict[int, list[tuple[int, str]]] = {}

    # -- from beginning to end

    def begin(self) -> Wait[None]:
        """Ask the server to measure, and compare clocks; a wait for that.

        Raises:
            WsgradError: the session is over, or in another timeline.
        """
        session = self._session
        session.check()
        if session.trace is not None:
            raise WsgradError("this session is in a timeline already: end that before you begin another one")
        session.traces += 1
        self.queues = {queue.number: queue.device for queue in session.queues}
        self._number = session.traces
        session.trace = self
        session.graphs.forgotten = self._forgotten
        session.link.observer = FrameWatch(self._sent)
        session.flush()
        self._tell(on=True)
        self._before.start()
        self._aligned_at[0] = now()
        return session.when(lambda: self._before.done)

    @property
    def begun(self) -> bool:
        """Whether the session is in this timeline."""
        return self._session.trace is self

    def drained(self) -> Wait[None]:
        """A wait for all that was issued; what fails of it is told to others."""
        session = self._session
        session.check()
        session.flush()
        ends = [(queue, queue.last) for queue in session.queues]

        def over() -> bool:
            return all(q.gone or q.life.dead is not None or q.pending.acknowledged >= last for q, last in ends)

        return session.after_flush(over)

    def end(self) -> Wait[None]:
        """Ask the server for its last spans, and compare clocks again; a wait for that."""
        session = self._session
        session.check()
        self._after.start()
        self._aligned_at[1] = now()
        self._tell(on=False)
        return session.when(lambda: self._ended and self._after.done)

    def detach(self) -> None:
        """Measure nothing more."""
        session = self._session
        self.recording = False
        self.queues |= {queue.number: queue.device for queue in session.queues}
        for graph in list(session.graphs.known):
            self._forgotten(graph)
        if session.trace is self:
            session.trace = None
            session.link.observer = None
            session.graphs.forgotten = None

    def close(self) -> None:
        """Give the temporary file back."""
        self._spool.close()

    # -- what the server says

    def answer(self, message: Time) -> None:
        """The server's clock."""
        self._before.answer(message)
        self._after.answer(message)

    def traced(self, message: Traced, bulk: memoryview | None) -> None:
        """Spans of the server and its nodes.

        Raises:
            ProtocolError: they are none.
        """
        data = bulk or b""
        if len(data) % RECORD.size or len(data) > MAX_SPANS_NBYTES:
            raise ProtocolError(f"{len(data)} bytes of spans, which are no records")
        if message.trace != self._number:
            return
        for row in message.names:
            match row:
                case [int(number), str(text)]:
                    if len(self.names) < _MAX_NAMES:
                        self.names[number] = text[:128]
                case _:
                    raise ProtocolError(f"{row!r:.60} does not introduce a name")
        self.dropped = message.dropped
        self._ended = message.last
        with self._spooling:
            self._spool.write(data)

    # -- what we measure

    def handling(self, handle: Callable[[Received], None], received: Received) -> None:
        """Work off a message and note it."""
        start = now()
        handle(received)
        kind = received.head[0]
        if kind != Traced.KIND and isinstance(kind, int):
            self.add(SpanKind.CLIENT_RECEIVED, MESSAGE_NAMES.get(kind, "?"), start, now(), nbytes=received.nbytes)

    def calling(self) -> Call:
        """For `with`: a public call of the package."""
        return Call(self)

    def launched(self, program: str, start: int) -> None:
        """A launch was issued. There may be hundreds of thousands a second: what they share is looked up at once."""
        if not self.recording:
            return
        number = self._launches.get(program)
        caller = self.callers.numbers.get(self._caller())
        if number is None or caller is None:
            name = f"launch {program}"
            self.add(SpanKind.CALL, name, start, now(), caller=self.caller())
            self._launches[program] = self._own.get(name, 0)
            return
        rows = self._rows
        rows.append(_pack(_CALL, 0, number, caller, 0, 0, 0, 0, start, now(), 0))
        if len(rows) >= _ROWS_KEPT:
            self._save()

    def add(self, kind: SpanKind, name: str, start: int, end: int, *, caller: int = 0, nbytes: int = 0) -> None:
        """Note a span. May be called from any thread."""
        number = self._own.get(name)
        if number is None:
            number = self._new_name(name)
        self._rows.append(RECORD.pack(kind, 0, number, caller, 0, 0, 0, 0, start, end, nbytes))
        if len(self._rows) >= _ROWS_KEPT:
            self._save()

    def caller(self) -> int:
        """The number of the thread or task that calls."""
        return self.callers.number(self._caller())

    def flushed(self, start: int) -> None:
        """What was issued has been put into messages."""
        self.add(SpanKind.FLUSH, "flush", start, now())

    def _sent(self, kind: int, nbytes: int, start: int, end: int) -> None:
        self.add(SpanKind.CLIENT_SENT, MESSAGE_NAMES.get(kind, "?"), start, end, nbytes=nbytes)

    def _new_name(self, name: str) -> int:
        with self._spooling:
            if len(self.own_names) >= _MAX_NAMES:
                return 0
            number = self._own[name] = len(self.own_names)
            self.own_names.append(name)
            return number

    def _save(self) -> None:
        with self._spooling:
            rows = self._rows
            self._spool.write(b"".join([rows.popleft() for _ in range(len(rows))]))

    def _ask(self, clock: Clock) -> None:
        self._session.link.push(encode(message_array(clock)), numbered=False)

    def _tell(self, *, on: bool) -> None:
        self._session.link.push(encode(message_array(Trace(self._number, on))))

    def _forgotten(self, graph: int) -> None:
        """A graph will not be known any more: keep how its steps are called."""
        plan = self._session.graphs.known[graph][0]
        if len(self.graphs) < _MAX_GRAPHS:
            steps = plan.schedule.steps
            self.graphs[graph] = [(step.items[0], what(plan.recording, step)) for step in steps]

    # -- for the file

    def spans(self) -> Iterator[tuple[int, ...]]:
        """All records, as they came."""
        self._save()
        self._spool.seek(0)
        while data := self._spool.read(1024 * RECORD.size):
            yield from RECORD.iter_unpack(data)

    def step(self, graph: int, step: int) -> tuple[int, str] | None:
        """A graph's step: the number of its item and what that is, in words."""
        steps = self.graphs.get(graph)
        return steps[step - 1] if steps is not None and 1 <= step <= len(steps) else None

    def offset(self) -> Callable[[int], int]:
        """How far the server's clock is ahead of ours, by its own time: the two drift apart steadily."""
        before, after = self._before, self._after
        first = before.offset if before.known else after.offset
        last = after.offset if after.known else first
        if first == last:
            return lambda _: first
        since, until = self._aligned_at
        slope = (last - first) / max(1, until - since)
        return lambda at: first + int((at - first - since) * slope)


class Call:
    """A public call, from its beginning to its end."""

    __slots__ = ("_name", "_start", "_trace")

    def __init__(self, trace: SessionTrace) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        self._name = _called(sys._getframe(1)) if self._trace.recording else ""
        self._start = now()

    def __exit__(self, *_: object) -> None:
        trace = self._trace
        if self._name:
            trace.add(SpanKind.CALL, self._name, self._start, now(), caller=trace.caller())


def _called(frame: FrameType) -> str:
    """What the user has called: the outermost function of this package in a row of them."""
    while (back := frame.f_back) is not None and back.f_code.co_filename.startswith(_PACKAGE):
        frame = back
    name = frame.f_code.co_qualname.removeprefix("Base")
    program = frame.f_locals.get("self")
    if isinstance(program, BaseProgram):
        return f"launch {program.name}" if name.endswith(".__call__") else f"{name} {program.name}"
    return name
