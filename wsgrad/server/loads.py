"""Programs of one queue on their way to its node: checked, compiled unless the node does it; it does no I/O of its own.

Where a client only names a source, it is looked up or asked for. A program takes its place in the queue at once, and
only a launch of it waits until it is compiled. A node that compiles itself gets it with its source, in its place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from wsgrad.errors import CompileError, ProtocolError, WsgradError
from wsgrad.server.graphs import ReplaySent
from wsgrad.server.outstanding import Sent, launched
from wsgrad.server.sources import MIN_NBYTES
from wsgrad.server.submission import NOTHING, refusal
from wsgrad.transport import cbor
from wsgrad.transport.messages import Batch, Compiled, KnownProgram, Missing, Program, message_array
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wsgrad.server.intake import Waiting
    from wsgrad.server.port import Port
    from wsgrad.server.programs import Want
    from wsgrad.server.session import Session
    from wsgrad.server.tables import ProgramEntry, Tables
    from wsgrad.transport.messages import Message, Source

_FIELDS: Final = tuple(field.name for field in fields(Program))
_MAX_LATE_NBYTES: Final = 8 << 20
"""Sources that may wait for compilers with their places taken, unless a single one is larger."""


@dataclass(slots=True, eq=False)
class Load:
    """A program in the queue's order.

    Attributes:
        source: None until the client has sent it.
        want: that it be compiled; None where the node does that itself, or while there is no source.
        nbytes: what it counts against the queue's limit.
        size: bytes of its source.
        compiles: whether the node compiles it.
        placed: whether its place in the queue has gone to the node; its code may come later.
    """

    message: Program
    entry: ProgramEntry
    source: memoryview | None
    nbytes: int
    size: int
    compiles: bool
    want: Want | None = None
    started: int = 0
    placed: bool = False

    @property
    def done(self) -> bool:
        """Whether the server has compiled it, or could not."""
        return self.want is not None and self.want.job.done


class Loads:
    """Owned by a queue.

    Attributes:
        compiled: programs that took their places before and whose code is there now; `deliver` sends it.
    """

    def __init__(
        self,
        queue: int,
        session: Session,
        tables: Tables,
        *,
        tell: Callable[[Message], None],
        later: Callable[[], None],
    ) -> None:
        self.compiled: list[Load] = []
        self._queue = queue
        self._session = session
        self._tables = tables
        self._tell = tell
        self._later = later
        self._compiling: dict[int, ProgramEntry] = {}
        self._asked: dict[int, tuple[Load, KnownProgram]] = {}
        self._wanted: dict[Load, None] = {}
        self._late: dict[int, Load] = {}
        self._late_nbytes = 0
        self._holding: Load | None = None

    def admit(self, message: Program | KnownProgram, waiting: Waiting, *, compiles: bool) -> Load | Sent:
        """A program has come. Returns what takes its place in the queue: a refused one fails there."""
        bulk, nbytes = waiting.bulk, waiting.nbytes
        program = message if isinstance(message, Program) else Program(*(getattr(message, name) for name in _FIELDS))
        try:
            if waiting.refused is not None:
                raise waiting.refused
            if isinstance(message, KnownProgram):
                found = self._session.sources.find(message.digest)
                known = found is not None and len(found) == message.nbytes
                source = memoryview(found) if found is not None and known else None
                entry = self._tables.check_program(program, message.nbytes)
                self._session.statistics.known_programs += known
            else:
                source = bulk
                _text(bulk)
                entry = self._tables.check_program(program, len(bulk))
                if len(bulk) >= MIN_NBYTES:
                    self._session.sources.add(bytes(bulk))
        except WsgradError as error:
            self._session.statistics.refused += 1
            sent = refusal(self._queue, message.number, error)
            sent.nbytes = nbytes
            return sent
        size = message.nbytes if isinstance(message, KnownProgram) else len(bulk)
        load = Load(program, entry, source, nbytes, size, compiles)
        if source is not None:
            self._compile(load, source)
        else:
            assert isinstance(message, KnownProgram)
            self._asked[message.number] = load, message
            self._tell(Missing(self._queue, message.number, 0))
        return load

    def source(self, message: Source, bulk: memoryview, nbytes: int) -> bool:
        """The source that was asked for. Returns whether it counts against the queue's limit from now on.

        Raises:
            ProtocolError: it is not the one that was named.
        """
        asked = self._asked.pop(message.number, None)
        if asked is None:
            return False
        load, known = asked
        if len(bulk) != known.nbytes or sha256(bulk).digest() != known.digest:
            raise ProtocolError(f"the source of program {known.program} is not the one that was named")
        try:
            _text(bulk)
        except CompileError as exc:
            raise ProtocolError(f"program {known.program}: {exc}") from exc
        self._session.sources.add(bytes(bulk))
        load.source = bulk
        self._compile(load, bulk)
        self._later()
        if not load.placed:
            load.nbytes += nbytes
        return not load.placed

    # -- in the queue's order

    def place(self, load: Load, port: Port) -> Sent | None:
        """Give a program its place on the node; its code follows when it is compiled. None where it has to wait.

        A node that compiles itself gets all in order.
        """
        message = load.message
        if load.compiles:
            if load.source is None:
                return None
            port.send_program(message, load.source)
        elif load.done:
            assert load.want is not None
            port.send_binary(message, load.want.job.binary)
        elif self._late_nbytes and self._late_nbytes + load.size > _MAX_LATE_NBYTES:
            self._holding = load
            return None
        else:
            self._late[message.program] = load
            self._late_nbytes += load.size
            port.send(cbor.encode(message_array(Batch(self._queue, message.number, [NOTHING]))))
        load.placed = True
        return Sent(message.number, message.number, load.nbytes, b"")

    def deliver(self, port: Port) -> None:
        """Send the code that has come for programs which have their places."""
        compiled, self.compiled = self.compiled, []
        for load in compiled:
            assert load.want is not None
            port.send_binary(replace(load.message, number=0), load.want.job.binary)

    def holds(self, sent: Sent) -> bool:
        """Whether what goes to the node next launches a program whose code is not there: that one is compiled first."""
        if not self._late:
            return False
        load = self._holding
        if load is not None and self._late.get(load.message.program) is load:
            return True
        if isinstance(sent, ReplaySent):
            programs: Iterable[int] = () if sent.graph is None else sent.graph.programs
        else:
            programs = (program for _, program in launched(sent, self._tables))
        self._holding = load = next((late for program in programs if (late := self._late.get(program))), None)
        if load is not None and load.want is not None:
            self._session.programs.hurry(load.want)
        return load is not None

    def drop(self, program: int) -> None:
        """A program goes, and nothing before that still needs it."""
        load = self._late.pop(program, None)
        if load is not None:
            self._late_nbytes -= load.size
            self._leave(load)
            self._asked.pop(load.message.number, None)

    def compiled_by_node(self, program: int) -> ProgramEntry | None:
        """The node has compiled a program; None if it was not asked to."""
        return self._compiling.pop(program, None)

    def forget(self) -> None:
        """The node is gone: nobody wants these programs or to hear of them."""
        for load in list(self._wanted):
            self._leave(load)
        self._compiling.clear()
        self._asked.clear()
        self._late.clear()
        self._late_nbytes = 0
        self.compiled.clear()

    def _compile(self, load: Load, source: memoryview) -> None:
        message = load.message
        if load.compiles:
            self._compiling[message.program] = load.entry
            return
        load.started = time.monotonic_ns()
        finished = partial(self._done, load)
        load.want = self._session.programs.compile(
            _text(source), message, session=self._session, queue=self, finished=finished
        )
        if load.done:
            self._done(load)
            return
        self._wanted[load] = None
        if load is self._holding:
            self._session.programs.hurry(load.want)

    def _leave(self, load: Load) -> None:
        if load in self._wanted and load.want is not None:
            del self._wanted[load]
            self._session.programs.leave(load.want)

    def _done(self, load: Load) -> None:
        self._wanted.pop(load, None)
        assert load.want is not None
        job, message = load.want.job, load.message
        trace = self._session.trace
        if trace is not None:
            name = message.name or message.entry
            now = time.monotonic_ns()
            trace.add(SpanKind.COMPILING, name, load.started, now, queue=self._queue, number=message.number)
        if job.binary is None:
            load.entry.error = job.messages
        self._tell(Compiled(self._queue, message.program, job.binary is not None, job.messages))
        if load.placed:
            del self._late[message.program]
            self._late_nbytes -= load.size
            self.compiled.append(load)
        self._later()


def _text(source: memoryview) -> str:
    try:
        return str(source, "utf-8")
    except UnicodeDecodeError as exc:
        raise CompileError("the source is not valid UTF-8") from exc
