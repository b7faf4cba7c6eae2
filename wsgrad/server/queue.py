"""One device in one session: commands in issue order to the node, replies back; it does no I/O of its own.

Commands are checked as they come and given to the feed, which keeps them in order while something holds them. Replies
are checked against what was asked; what the client is owed is pushed to its session. Nothing here waits.
"""

from __future__ import annotations

import enum
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from wsgrad.errors import CompileError, DeviceLost, ProtocolError, Timeout, WsgradError, error_code, error_from_wire
from wsgrad.server.cached import CachedUploads
from wsgrad.server.events import Failure
from wsgrad.server.faults import loss_error, program_of, reported_loss, what_ran, with_compiler_words
from wsgrad.server.feed import Feed
from wsgrad.server.graphs import GraphEnd, GraphRun, ReplaySent, end_messages, replay_messages
from wsgrad.server.intake import Intake, Submitted, Waiting
from wsgrad.server.joints import drop, drop_waiting, tie
from wsgrad.server.journal import Journal
from wsgrad.server.loads import Loads
from wsgrad.server.outstanding import ANSWER_NBYTES, InvalidReply, Outstanding
from wsgrad.server.port import Loss, Port, renumber
from wsgrad.server.small_reads import SmallReads
from wsgrad.server.submission import SLICE, CachedUpload, check_batch, check_launches
from wsgrad.server.tables import Tables
from wsgrad.server.trace import QueueTrace, check_trace
from wsgrad.server.uploads import take_abort, take_chunk
from wsgrad.transport import cbor
from wsgrad.transport.messages import (
    Abort,
    Ack,
    Batch,
    Chunk,
    Compiled,
    Credit,
    Failed,
    KnownProgram,
    Launches,
    Message,
    Program,
    ReadData,
    Reopen,
    Result,
    Slot,
    Source,
    Spans,
    message_array,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.nodes import Device
    from wsgrad.server.session import Session
    from wsgrad.server.trace import SessionTrace
    from wsgrad.transport.express import Request

_NOTHING: Final = memoryview(b"")


class State(enum.Enum):
    OPENING = "opening"
    RUNNING = "running"
    LOST = "lost"
    CLOSED = "closed"


class Queue:
    """A session's queue on one device; lives until the session closes it."""

    def __init__(self, session: Session, number: int, device: Device) -> None:
        self.session = session
        self.hold_back, self.let_go = session.hold_back, session.let_go
        self.number = number
        self.device = device
        self.state = State.OPENING
        self.trace: QueueTrace | None = None
        self._tables: Tables = Tables(
            session.quota, dialects=device.dialects, max_program_nbytes=session.limits.max_program_nbytes
        )
        self.usage = session.usage_of(device.id)
        self._out = Outstanding(self.usage)
        self._in = Intake(number, self.usage, self._out, session.limits, session.upload_rate, self._tell)
        self._small = SmallReads(self, self._in, self._out, self._tables)
        self.answered = self._small.answered
        self._cached = CachedUploads(
            number,
            session.blobs,
            self._in,
            session.statistics,
            tell=self._tell,
            give_credit=self._in.give_credit,
            later=self.later,
        )
        self._journal = Journal()
        self._loads = Loads(number, session, self._tables, tell=self._tell, later=self.later)
        self._feed = Feed(self, self._out, self._journal, self._cached, self._loads)
        self._opening = 0
        self._lost: Failure | None = None
        self._port: Port | None = None
        self._open_port(0)

    # -- for the session --

    @property
    def idle(self) -> bool:
        """Whether everything that came has been worked off."""
        return (
            not self._in.waiting and self.state is not State.OPENING and self._out.acked == self._in.next - 1
        ) or self.state is State.CLOSED

    @property
    def opening(self) -> bool:
        """Whether the node has not said yet that it is ready."""
        return self.state is State.OPENING

    def describe(self) -> dict[str, object]:
        """The queue for the status page."""
        return {
            "queue": self.number,
            "device": self.device.id,
            "state": self.state.value,
            **self._tables.describe(),
            "unacknowledged": self._in.next - 1 - self._out.acked,
        }

    def destination(self, nbytes: int) -> memoryview | None:
        """Where a chunk that is about to be received should go; None for memory of its own.

        Raises:
            ProtocolError: there is no credit for it, or it has no right size.
        """
        self._in.check_chunk(nbytes)
        waiting = self._in.waiting or self._in.late or self._port is None or self.state is State.LOST
        return self._feed.announce(nbytes, ready=not waiting)

    def stop_receiving(self) -> bool:
        """The connection is over, no announced chunk will come. Returns whether one was on its way into a slot."""
        return self._feed.stop_receiving()

    def submit(self, message: Submitted, raw: bytes, bulk: memoryview | None) -> None:
        """Take what the client sent.

        Raises:
            ProtocolError: it breaks the rules of a queue, or holds more than a queue may.
        """
        if type(message) is Chunk:
            self._feed.submitted()
        now = self._in.admit(message, raw, _NOTHING if bulk is None else bulk, busy=self._feed.busy)
        if self.trace is not None:
            self.trace.received(message)
        if now is None:
            self.session.later(self)
        else:
            idle = self._out.acked == self._out.sent
            self._process(now)
            self._feed.pump()
            if idle and not self._feed and self._port is not None and self._out.expected:
                self._port.expect_answer()
                self._out.awaited()

    def read_now(self, asked: Request, raw: bytes) -> bool:
        """Take a batch of one small read the short way; returns False where `submit` must decide."""
        return self.state is State.RUNNING and not self._feed and self._small.ask(self._port, asked, raw)

    def work(self) -> None:
        """Go on with what waits, for a moment; asks the session for another turn if need be."""
        waiting = self._in.waiting
        budget = SLICE
        while waiting and budget > 0:
            message = waiting[0].message
            if self._feed.busy or (type(message) is Reopen and not self._may_reopen()):
                break
            if type(message) is GraphRun and not message.ready:
                break
            budget -= waiting[0].cost
            self._process(waiting.popleft())
        else:
            if waiting:
                self.session.later(self)
        self._feed.pump()

    def close(self) -> None:
        """Free everything of the queue. Idempotent."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        if self._lost is None:
            self._lost = Failure("DeviceError", f"device {self.device.id!r} was closed", {"cause": self.device.id})
        drop_waiting(self._in.waiting, self.session, self._lost)
        self._forget(self._lost)
        if self.trace is not None:
            self.trace.close()

    # -- what the client submits --

    def _process(self, waiting: Waiting) -> None:
        message = waiting.message
        match message:
            case Chunk():
                self._in.held -= waiting.nbytes
                take_chunk(self, message, waiting.bulk)
            case Abort():
                self._in.held -= waiting.nbytes
                take_abort(self, message)
            case Reopen():
                self._in.begin(message.number, 1)
                self._in.held -= waiting.nbytes
                self._forget(Failure("DeviceLost", f"device {self.device.id!r} was reopened"))
                self._journal.reset()
                self._open_port(message.number)
            case Batch():
                self._in.begin(message.first, len(message.commands))
                if self.state is State.LOST and self._lost is not None:
                    self._in.expect(drop(message, self.session, self._lost))
                    self._drop(waiting)
                else:
                    self._batch(message, waiting)
            case Launches():
                raw, bulk = waiting.raw or b"", waiting.bulk
                sends = check_launches(message, raw, bulk, waiting.nbytes, waiting.refused)
                self._in.begin(message.first, message.count)
                self.usage.launched(message.count)
                if self.state is State.LOST:
                    self._drop(waiting)
                else:
                    for sent in sends:
                        self._feed.add(sent)
            case Program() | KnownProgram():
                self._in.begin(message.number, 1)
                if self.state is State.LOST:
                    self._drop(waiting)
                else:
                    assert self._port is not None  # only a lost or closed queue has none
                    compiles = self._port.compiles
                    self._feed.add(self._loads.admit(message, waiting, compiles=compiles))
            case GraphRun():
                self._in.begin(message.number, 1)
                if self.state is State.LOST and self._lost is not None:
                    message.drop(self._lost)
                    self._drop(waiting)
                else:
                    tables, port, journal = self._tables, self._port, self._journal
                    for item in replay_messages(message, tables, port, waiting, journal, self.device.id):
                        self._feed.add(item)
            case GraphEnd():
                self._in.held -= waiting.nbytes
                if self.state is not State.LOST:
                    for item in end_messages(message):
                        self._feed.add(item)
            case Source():
                if not self._loads.source(message, waiting.bulk, waiting.nbytes):
                    self._in.held -= waiting.nbytes
            case _:
                assert_never(message)

    def _drop(self, waiting: Waiting) -> None:
        """The device is lost: what came counts as done."""
        self._in.held -= waiting.nbytes
        self._out.restart(self._in.next - 1)
        self._tell(Ack(self.number, self._in.next - 1))

    def _batch(self, batch: Batch, waiting: Waiting) -> None:
        checked = check_batch(batch, waiting.raw, waiting.nbytes, self._tables, waiting.refused)
        self.usage.checked(checked)
        for download in checked.downloads:
            if download.transfer in self._out.downloads:
                raise ProtocolError(f"transfer {download.transfer} is in use")
            self._out.downloads[download.transfer] = download
        self._in.expect(checked.upload)
        tie(checked, self.session, self._journal)
        for item in checked.sends:
            if isinstance(item, CachedUpload):
                self._cached.admit(item)
            self._feed.add(item)

    def begin_trace(self, trace: SessionTrace) -> None:
        """Be part of a timeline."""
        self.trace = QueueTrace(trace, self)

    # -- to the node --

    def _may_reopen(self) -> bool:
        return self.state is State.LOST or (
            self.state is State.RUNNING and not self._feed and self._out.acked == self._in.next - 1
        )

    def _open_port(self, number: int) -> None:
        self.state = State.OPENING
        self._lost = None
        self._opening = number
        try:
            # Its node may have come back in the meantime, with the same ids.
            self.device = self.session.device(self.device.id) or self.device
            self._port = self._feed.port = self.device.open(self)
        except WsgradError as error:
            error.details.setdefault("operation", "open")
            self._lose(number, error)
        if self.session.trace is not None and self.trace is None:
            self.begin_trace(self.session.trace)

    # -- what the node says --

    def later(self) -> None:
        """The way to the node takes more now."""
        self.session.later(self)

    def span(self) -> tuple[int, int]:
        """The last command that is acknowledged, and the last that was sent."""
        return self._out.acked, self._out.sent

    def steps(self, number: int) -> int:
        """How many steps command `number` may show as its progress."""
        sent = self._out.message_of(number)
        return len(sent.graph.steps) if isinstance(sent, ReplaySent) and sent.graph is not None else 0

    def may_idle(self) -> bool:
        """Whether the node may be waiting for the client although it has commands: inside a transfer."""
        return self._in.upload is not None or bool(self._out.downloads) or self._feed.receiving or self._cached.feeding

    def reply(self, port: Port, array: list[object], raw: bytes, bulk: memoryview | None) -> None:
        """Check one reply of the node and hand it on.

        Raises:
            InvalidReply: it answers nothing that was asked.
        """
        if port is not self._port:
            return
        message = port.parse(array)
        if self.state is State.OPENING:
            self._opened(port, message)
            return
        match message:
            case Ack():
                if self._acknowledged(message.number):
                    self._relay(port, raw)
            case ReadData():
                nbytes = 0 if bulk is None else len(bulk)
                self.session.answers.give(self._out.read(message.number, nbytes))
                seen = partial(self.session.answers.give, nbytes + ANSWER_NBYTES)
                self._relay(port, raw, bulk, seen)
                self._acknowledged(message.acked)
            case Result():
                self.session.answers.give(self._out.result(message.number, message.value))
                self._relay(port, raw, None, partial(self.session.answers.give, ANSWER_NBYTES))
            case Slot() | Chunk():
                self._download(port, message, bulk)
            case Spans():
                check_trace(port, message)
                if self.trace is not None:
                    self.trace.spans(message, bulk, self._out.sent)
            case Credit():
                self._in.give_credit(port.credit(message.slots))
                self._feed.pump()
            case Failed():
                self._failed(port, message)
            case Compiled():
                entry = self._loads.compiled_by_node(message.program)
                if entry is None:
                    raise InvalidReply(f"program {message.program} compiled, which it was not asked to")
                entry.error = None if message.ok else message.message
                self._relay(port, raw)
            case _:
                raise InvalidReply(f"a {type(message).__name__}, which no node sends")

    def _download(self, port: Port, message: Slot | Chunk, bulk: memoryview | None) -> None:
        seen = port.take_download()
        owned = isinstance(message, Chunk)
        if isinstance(message, Slot):
            bulk = port.download_slot(message, seen)
        elif bulk is None:
            bulk = _NOTHING
        download = self._out.chunk(message.transfer, message.offset, len(bulk))
        if download.flow is not None:
            self.session.statistics.transferred += len(bulk)
            download.flow.offer(bulk, seen, owned=owned)
            return
        self.session.statistics.downloaded += len(bulk)
        chunk = Chunk(self.number, message.transfer, message.offset)
        self.session.push(cbor.encode(message_array(chunk)), bulk, seen)

    def _acknowledged(self, number: int) -> bool:
        """Whether that is news."""
        if self.trace is not None:
            self.trace.acked(number)
        before = self._out.acked
        done, freed = self._out.ack(number)
        if number == before:
            return False
        self._journal.acked(number)
        self._in.held -= done
        self.session.answers.give(freed)
        if self._in.waiting:
            self.session.later(self)
        return True

    def lost(self, port: Port, loss: Loss) -> None:
        """The node is gone."""
        if port is not self._port:
            return
        acked, sent = self._out.acked, self._out.sent
        number = loss.number if loss.number is not None and acked < loss.number <= sent else None
        error = loss_error(loss, self.device.id, *what_ran(self._out, self._tables, number, loss.step))
        opening = self._opening if self.state is State.OPENING else None
        if opening is None:
            opening = acked + 1 if number is None else number
        self._lose(opening, error)

    def _opened(self, port: Port, message: Message) -> None:
        match message:
            case Result(number=0):
                self.state = State.RUNNING
                self._feed.running = True
                if self.trace is not None:
                    self.trace.opened()
                number = self._opening
                self._out.begin(number)
                self._tell(Result(self.number, number, message.value))
                if number:
                    self._tell(Ack(self.number, number))
                self._feed.pump()
                if self._in.waiting:
                    self.session.later(self)
            case Failed(number=0):
                self._lose(self._opening, error_from_wire(message.code, message.message, message.details))
            case _:
                raise InvalidReply(f"a {type(message).__name__} before it was ready")

    def _failed(self, port: Port, message: Failed) -> None:
        if (loss := reported_loss(message)) is not None:
            self.lost(port, loss)
            return
        self._out.failed(message.number)
        passed_on = self._journal.expected(message.number)
        if passed_on is not None:
            self.session.statistics.errors += 1
            self._journal.failed(message.number, passed_on)
            self._tell(Failed(self.number, message.number, passed_on.code, passed_on.message, passed_on.details))
            return
        error = error_from_wire(message.code, message.message, message.details)
        if isinstance(error, DeviceLost | Timeout):
            self._lose(message.number, error)
            return
        if isinstance(error, CompileError):
            error = with_compiler_words(error, program_of(self._out, self._tables, message))
        self.session.failed(self.device.id, error)
        self._journal.failed(message.number, Failure.of(error, device=self.device.id))
        self._tell(Failed(self.number, message.number, error_code(error), str(error), error.details))

    def _lose(self, number: int, error: WsgradError) -> None:
        self.session.failed(self.device.id, error, lost=True)
        self._tell(Failed(self.number, number, error_code(error), str(error), error.details | {"lost": True}))
        before = self._out.acked
        self._journal.acked(number - 1)
        self._lost = Failure.of(error, device=self.device.id)
        self._forget(self._lost)
        self.state = State.LOST
        if self._out.acked > before:
            self._tell(Ack(self.number, self._out.acked))
        if self._in.waiting:
            self.session.later(self)

    def _forget(self, failure: Failure) -> None:
        """The node and all that was on it are gone; what came before counts as done, what others wait for fails."""
        if self._port is not None:
            self._port.close()
            self._port = self._feed.port = None
        self._feed.running = False
        self._feed.drop(failure)
        self._journal.drop(failure)
        self._cached.forget()
        self._loads.forget()
        self._tables.clear()
        self.session.answers.give(self._out.restart(self._in.next - 1))
        if self.trace is not None:
            self.trace.lost(self._in.next - 1)
        self._in.forget()
        if self.state is not State.CLOSED:
            self._in.give_credit(self._in.owed())

    # -- to the client --

    def _relay(
        self, port: Port, raw: bytes, bulk: memoryview | None = None, seen: Callable[[], None] | None = None
    ) -> None:
        head = raw if port.number == self.number else renumber(raw, self.number)
        self.session.push(head, bulk, seen)

    def _tell(self, message: Message) -> None:
        self.session.push(cbor.encode(message_array(message)))
