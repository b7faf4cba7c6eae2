"""One device in one session: commands in issue order to the node, replies back; it does no I/O of its own.

Commands are checked when they come and kept in order while something holds them: a device that is opening, a program
that compiles at its place, reads over the session's budget, a full way to the node. What the client is owed is pushed
to its session. Nothing here waits: `pump` goes on where it stopped whenever what held the queue has gone.
"""

from __future__ import annotations

import enum
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from wsgrad.errors import CompileError, DeviceLost, ProtocolError, Timeout, WsgradError, error_code, error_from_wire
from wsgrad.server.intake import Intake, Submitted, Waiting
from wsgrad.server.landing import Landing
from wsgrad.server.outstanding import ANSWER_NBYTES, InvalidReply, Outstanding, Sent
from wsgrad.server.port import Loss, Port, renumber
from wsgrad.server.submission import SLICE, Load, Piece, check_batch, check_launches, lost_upload, refusal
from wsgrad.server.tables import Tables
from wsgrad.transport import cbor
from wsgrad.transport.messages import (
    Abort,
    Ack,
    Batch,
    Chunk,
    Compiled,
    Credit,
    Failed,
    Launches,
    Message,
    Program,
    ReadData,
    Reopen,
    Result,
    Slot,
    message_array,
    parse_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.nodes import Device
    from wsgrad.server.programs import Job
    from wsgrad.server.session import Session
    from wsgrad.server.tables import ProgramEntry

_STEP: Final = 16
"""Messages to the node before others get a turn."""
_NOTHING: Final = memoryview(b"")


class State(enum.Enum):
    OPENING = "opening"
    RUNNING = "running"
    LOST = "lost"
    CLOSED = "closed"


_Item: TypeAlias = Sent | Load | Piece | Abort


class Queue:
    """A session's queue on one device; lives until the session closes it."""

    def __init__(self, session: Session, number: int, device: Device) -> None:
        self.session = session
        self.number = number
        self.device = device
        self.state = State.OPENING
        self._tables = Tables(
            session.quota, dialects=device.dialects, max_program_nbytes=session.limits.max_program_nbytes
        )
        self._in = Intake(number)
        self._out = Outstanding()
        self._opening = 0
        self._pending: deque[_Item] = deque()
        self._compiling: dict[int, ProgramEntry] = {}
        self._landing = Landing()
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
            "buffers": self._tables.buffers,
            "unacknowledged": self._in.next - 1 - self._out.acked,
        }

    def destination(self, nbytes: int) -> memoryview | None:
        """Where a chunk that is about to be received should go; None for memory of its own.

        Raises:
            ProtocolError: there is no credit for it, or it has no right size.
        """
        self._in.check_chunk(nbytes)
        ready = not self._in.waiting and self.state is not State.LOST
        return self._landing.place(self._port if ready else None, nbytes)

    def stop_receiving(self) -> bool:
        """The connection is over, no announced chunk will come. Returns whether one was on its way into a slot."""
        return self._landing.stop()

    def submit(self, message: Submitted, raw: bytes, bulk: memoryview | None) -> None:
        """Take what the client sent.

        Raises:
            ProtocolError: it breaks the rules of a queue, or holds more than a queue may.
        """
        if type(message) is Chunk:
            self._landing.submitted()
        now = self._in.admit(message, raw, _NOTHING if bulk is None else bulk)
        if now is None:
            self.session.later(self)
        else:
            idle = self._out.acked == self._out.sent
            self._process(now)
            self.pump()
            if idle and self._out.reading and not self._pending and self._port is not None:
                self._port.expect_answer()

    def work(self) -> None:
        """Go on with what waits, for a moment; asks the session for another turn if need be."""
        waiting = self._in.waiting
        budget = SLICE
        while waiting and budget > 0:
            if type(waiting[0].message) is Reopen and not self._may_reopen():
                break
            budget -= waiting[0].cost
            self._process(waiting.popleft())
        else:
            if waiting:
                self.session.later(self)
        self.pump()

    def close(self) -> None:
        """Free everything of the queue. Idempotent."""
        if self.state is State.CLOSED:
            return
        self._in.waiting.clear()
        self.state = State.CLOSED
        self._forget()

    # -- what the client submits --

    def _process(self, waiting: Waiting) -> None:
        message = waiting.message
        match message:
            case Chunk():
                self._in.held -= waiting.nbytes
                self._chunk(message, waiting.bulk)
            case Abort():
                self._in.held -= waiting.nbytes
                self._abort(message)
            case Reopen():
                self._in.begin(message.number, 1)
                self._in.held -= waiting.nbytes
                self._forget()
                self._open_port(message.number)
            case Batch():
                self._in.begin(message.first, len(message.commands))
                if self.state is State.LOST:
                    self._in.expect(lost_upload(message))
                    self._drop(waiting)
                else:
                    self._batch(message, waiting)
            case Launches():
                sent = check_launches(message, waiting.raw or b"", waiting.bulk, waiting.nbytes)
                self._in.begin(message.first, message.count)
                self.session.statistics.launches += message.count
                if self.state is State.LOST:
                    self._drop(waiting)
                else:
                    self._pending.append(sent)
            case Program():
                self._in.begin(message.number, 1)
                if self.state is State.LOST:
                    self._drop(waiting)
                else:
                    self._program(message, waiting)
            case _:
                assert_never(message)

    def _drop(self, waiting: Waiting) -> None:
        """The device is lost: what came counts as done."""
        self._in.held -= waiting.nbytes
        self._out.restart(self._in.next - 1)
        self._tell(Ack(self.number, self._in.next - 1))

    def _batch(self, batch: Batch, waiting: Waiting) -> None:
        checked = check_batch(batch, waiting.raw, waiting.nbytes, self._tables)
        self.session.statistics.refused += checked.refused
        for download in checked.downloads:
            if download.transfer in self._out.downloads:
                raise ProtocolError(f"transfer {download.transfer} is in use")
            self._out.downloads[download.transfer] = download
        self._in.expect(checked.upload)
        self._pending.extend(checked.sends)

    def _program(self, message: Program, waiting: Waiting) -> None:
        try:
            try:
                source = bytes(waiting.bulk).decode()
            except UnicodeDecodeError as exc:
                raise CompileError("the source is not valid UTF-8") from exc
            entry = self._tables.check_program(message, len(waiting.bulk))
        except WsgradError as error:
            self.session.statistics.refused += 1
            sent = refusal(self.number, message.number, error)
            sent.nbytes = waiting.nbytes
            self._pending.append(sent)
            return
        job = None
        assert self._port is not None  # only a lost or closed queue has none
        if self._port.compiles:
            self._compiling[message.program] = entry
        else:
            job = self.session.compile(source, message)
            job.when_done(partial(self._compiled, entry, message.program))
        self._pending.append(Load(message, waiting.bulk, job, waiting.nbytes))

    def _compiled(self, entry: ProgramEntry, program: int, job: Job) -> None:
        if job.binary is None:
            entry.error = job.messages
        # In another life of the device the id may be another program's.
        if self._tables.program(program) is entry:
            self._tell(Compiled(self.number, program, job.binary is not None, job.messages))
            self.pump()

    def _chunk(self, message: Chunk, bulk: memoryview) -> None:
        upload = self._in.chunk(message, len(bulk))
        self.session.statistics.uploaded += len(bulk)
        in_place = self._landing.take(bulk)
        if upload.refused or self._port is None or self.state is State.LOST:
            self._give_credit(1)
            return
        slot = self._port.take_chunk(bulk, in_place=in_place)
        self._pending.append(Piece(message.transfer, message.offset, slot, bulk))

    def _abort(self, message: Abort) -> None:
        upload = self._in.upload
        if upload is not None and upload.transfer == message.transfer:
            self._in.upload = None
            if not upload.refused and self.state is not State.LOST:
                self._pending.append(message)
        elif (download := self._out.downloads.get(message.transfer)) is not None and self._port is not None:
            if download.aborted:
                return  # said once; again would only fill the way to the node
            download.aborted = True
            if download.number <= self._out.sent:
                # It must not wait behind later commands: the node may be waiting for credit for this very transfer.
                self._port.send(cbor.encode(message_array(message)))
            else:
                self._pending.append(message)

    # -- to the node --

    def pump(self) -> None:
        """Send to the node what may go."""
        budget = _STEP
        port = self._port
        while self._pending and self.state is State.RUNNING and port is not None and not port.full:
            if not budget:
                self.session.later(self)
                return
            budget -= 1
            item = self._pending[0]
            match item:
                case Sent():
                    if item.reserved and not self.session.answers.take(item.reserved, self):
                        return
                    port.send(item.head, item.bulk)
                    self._out.add(item)
                case Load():
                    if item.job is not None and not item.job.done:
                        return
                    port.send_program(item.message, item.source, item.job)
                    number = item.message.number
                    self._out.add(Sent(number, number, item.nbytes, b""))
                case Piece():
                    port.send_chunk(item.transfer, item.offset, item.slot, item.bulk)
                case Abort():
                    port.send(cbor.encode(message_array(item)))
                case _:
                    assert_never(item)
            self._pending.popleft()

    def _may_reopen(self) -> bool:
        return self.state is State.LOST or (
            self.state is State.RUNNING and not self._pending and self._out.acked == self._in.next - 1
        )

    def _open_port(self, number: int) -> None:
        self.state = State.OPENING
        self._opening = number
        try:
            # Its node may have come back in the meantime, with the same ids.
            self.device = self.session.device(self.device.id) or self.device
            self._port = self.device.open(self)
        except WsgradError as error:
            self._lose(number, error, {"operation": "open"})

    # -- what the node says --

    def later(self) -> None:
        """The way to the node takes more now."""
        self.session.later(self)

    def hold_back(self) -> None:
        """Several replies come at once."""
        self.session.hold_back()

    def let_go(self) -> None:
        """They have come."""
        self.session.let_go()

    def span(self) -> tuple[int, int]:
        """The last command that is acknowledged, and the last that was sent."""
        return self._out.acked, self._out.sent

    def may_idle(self) -> bool:
        """Whether the node may be waiting for the client although it has commands: inside a transfer."""
        return self._in.upload is not None or bool(self._out.downloads)

    def reply(self, port: Port, array: list[object], raw: bytes, bulk: memoryview | None) -> None:
        """Check one reply of the node and hand it on.

        Raises:
            InvalidReply: it answers nothing that was asked.
        """
        if port is not self._port:
            return
        try:
            message = parse_message(array)
        except ProtocolError as exc:
            raise InvalidReply(str(exc)) from exc
        if len(array) < 2 or array[1] != port.number:
            raise InvalidReply(f"a message of kind {array[0]} that is not for its queue")
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
                port.take_download()
                bulk = port.download_slot(message) if isinstance(message, Slot) else bulk
                nbytes = 0 if bulk is None else len(bulk)
                self._out.chunk(message.transfer, message.offset, nbytes)
                self.session.statistics.downloaded += nbytes
                chunk = Chunk(self.number, message.transfer, message.offset)
                self.session.push(cbor.encode(message_array(chunk)), bulk, port.download_seen)
            case Credit():
                port.credit(message.slots)
                self._in.credit += message.slots
                self._relay(port, raw)
            case Failed():
                self._failed(port, message)
            case Compiled():
                entry = self._compiling.pop(message.program, None)
                if entry is None:
                    raise InvalidReply(f"program {message.program} compiled, which it was not asked to")
                entry.error = None if message.ok else message.message
                self._relay(port, raw)
            case _:
                raise InvalidReply(f"a {type(message).__name__}, which no node sends")

    def _acknowledged(self, number: int) -> bool:
        """Whether that is news."""
        before = self._out.acked
        done, freed = self._out.ack(number)
        if number == before:
            return False
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
        program = None if number is None else self._out.program_of(number, self._tables)
        entry = None if program is None else self._tables.program(program)
        details: dict[str, object] = {"operation": "launch", "program": entry.name} if entry is not None else {}
        opening = self._opening if self.state is State.OPENING else None
        if opening is None:
            opening = acked + 1 if number is None else number
        self._lose(opening, loss.error(self.device.id, None if entry is None else entry.name), details)

    def _opened(self, port: Port, message: Message) -> None:
        match message:
            case Result(number=0):
                self.state = State.RUNNING
                number = self._opening
                self._out.restart(number)
                self._tell(Result(self.number, number, message.value))
                if number:
                    self._tell(Ack(self.number, number))
                self.pump()
                if self._in.waiting:
                    self.session.later(self)
            case Failed(number=0):
                error = error_from_wire(message.code, message.message, {})
                self._lose(self._opening, error, message.details)
            case _:
                raise InvalidReply(f"a {type(message).__name__} before it was ready")

    def _failed(self, port: Port, message: Failed) -> None:
        self._out.failed(message.number)
        self.session.statistics.errors += 1
        error = error_from_wire(message.code, message.message, {})
        if isinstance(error, DeviceLost | Timeout):
            self._lose(message.number, error, message.details)
            return
        text, details = message.message, message.details
        if isinstance(error, CompileError):
            # A node that was given machine code does not know what the compiler said.
            program = self._out.program_of(message.number, self._tables)
            entry = None if program is None else self._tables.program(program)
            if entry is not None and entry.error is not None:
                text = f"program {entry.name!r} failed to compile\n{entry.error}"
                details = details | {"program": entry.name}
        self._tell(Failed(self.number, message.number, error_code(error), text, details))

    def _lose(self, number: int, error: WsgradError, details: dict[str, object]) -> None:
        self.session.statistics.lost += 1
        self._tell(Failed(self.number, number, error_code(error), str(error), details | {"lost": True}))
        before = self._out.acked
        self._forget()
        self.state = State.LOST
        if self._out.acked > before:
            self._tell(Ack(self.number, self._out.acked))
        if self._in.waiting:
            self.session.later(self)

    def _forget(self) -> None:
        """The node and all that was on it are gone; what came before counts as done."""
        if self._port is not None:
            self._port.close()
            self._port = None
        self._pending.clear()
        self._compiling.clear()
        self._landing.forget()
        self._tables.clear()
        self.session.answers.give(self._out.restart(self._in.next - 1))
        self._in.forget()
        if self.state is not State.CLOSED:
            self._give_credit(self._in.owed())

    # -- to the client --

    def _give_credit(self, slots: int) -> None:
        if slots:
            self._in.credit += slots
            self._tell(Credit(self.number, slots))

    def _relay(
        self, port: Port, raw: bytes, bulk: memoryview | None = None, seen: Callable[[], None] | None = None
    ) -> None:
        head = raw if port.number == self.number else renumber(raw, self.number)
        self.session.push(head, bulk, seen)

    def _tell(self, message: Message) -> None:
        self.session.push(cbor.encode(message_array(message)))
