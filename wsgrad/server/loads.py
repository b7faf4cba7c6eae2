"""Programs of one queue on their way to its node: checked, compiled unless the node does it; it does no I/O of its own.

Where a client only names a source, it is looked up or asked for. A program keeps its place in the queue, and compiling
or a source that comes late holds the queue only there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from wsgrad.errors import CompileError, ProtocolError, WsgradError
from wsgrad.server.sources import MIN_NBYTES
from wsgrad.server.submission import refusal
from wsgrad.transport.messages import Compiled, KnownProgram, Missing, Program
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.outstanding import Sent
    from wsgrad.server.programs import Job
    from wsgrad.server.session import Session
    from wsgrad.server.tables import ProgramEntry, Tables
    from wsgrad.transport.messages import Message, Source

_FIELDS: Final = tuple(field.name for field in fields(Program))


@dataclass(slots=True, eq=False)
class Load:
    """A program in the queue's order.

    Attributes:
        source: None until the client has sent it.
        job: its compiling; None where the node does that itself, or while there is no source.
        nbytes: what it counts against the queue's limit.
        compiles: whether the node compiles it.
    """

    message: Program
    entry: ProgramEntry
    source: memoryview | None
    nbytes: int
    compiles: bool
    job: Job | None = None
    started: int = 0

    @property
    def ready(self) -> bool:
        """Whether it may go to the node."""
        return self.source is not None and (self.job is None or self.job.done)


class Loads:
    """Owned by a queue."""

    def __init__(
        self,
        queue: int,
        session: Session,
        tables: Tables,
        *,
        tell: Callable[[Message], None],
        pump: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._session = session
        self._tables = tables
        self._tell = tell
        self._pump = pump
        self._life = object()
        self._compiling: dict[int, ProgramEntry] = {}
        self._asked: dict[int, tuple[Load, KnownProgram]] = {}

    def admit(self, message: Program | KnownProgram, bulk: memoryview, nbytes: int, *, compiles: bool) -> Load | Sent:
        """A program has come. Returns what takes its place in the queue: a refused one fails there."""
        program = message if isinstance(message, Program) else Program(*(getattr(message, name) for name in _FIELDS))
        try:
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
        load = Load(program, entry, source, nbytes, compiles)
        if source is not None:
            self._compile(load, source)
        else:
            assert isinstance(message, KnownProgram)
            self._asked[message.number] = load, message
            self._tell(Missing(self._queue, message.number, 0))
        return load

    def source(self, message: Source, bulk: memoryview, nbytes: int) -> bool:
        """The source that was asked for. Returns whether it is still wanted.

        Raises:
            ProtocolError: it is not the one that was named.
        """
        asked = self._asked.pop(message.number, None)
        if asked is None:
            return False
        load, known = asked
        if len(bulk) != known.nbytes or sha256(bulk).digest() != known.digest:
            raise ProtocolError(f"the source of program {known.program} is not the one that was named")
        load.nbytes += nbytes
        try:
            _text(bulk)
        except CompileError as exc:
            raise ProtocolError(f"program {known.program}: {exc}") from exc
        self._session.sources.add(bytes(bulk))
        load.source = bulk
        self._compile(load, bulk)
        self._pump()
        return True

    def compiled(self, program: int) -> ProgramEntry | None:
        """The node has compiled a program; None if it was not asked to."""
        return self._compiling.pop(program, None)

    def forget(self) -> None:
        """The node is gone: nobody wants to hear of these programs."""
        self._life = object()
        self._compiling.clear()
        self._asked.clear()

    def _compile(self, load: Load, source: memoryview) -> None:
        message = load.message
        if load.compiles:
            self._compiling[message.program] = load.entry
        else:
            load.started = time.monotonic_ns()
            load.job = self._session.compile(_text(source), message)
            load.job.when_done(partial(self._done, self._life, load))

    def _done(self, life: object, load: Load, job: Job) -> None:
        trace = self._session.trace
        if trace is not None:
            number, name = load.message.number, load.message.name or load.message.entry
            trace.add(SpanKind.COMPILING, name, load.started, time.monotonic_ns(), queue=self._queue, number=number)
        if job.binary is None:
            load.entry.error = job.messages
        if life is self._life:
            self._tell(Compiled(self._queue, load.message.program, job.binary is not None, job.messages))
            self._pump()


def _text(source: memoryview) -> str:
    try:
        return str(source, "utf-8")
    except UnicodeDecodeError as exc:
        raise CompileError("the source is not valid UTF-8") from exc
