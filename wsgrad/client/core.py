"""One session as its client sees it, without I/O: opening and resuming, devices, queues, and who is told when it ends.

Both faces and their drivers share it. A driver gives it a connection's messages through `handle`, asks `destination`
where bulk goes, and sends what `link` holds; callers issue work through `queues` and wait for `Wait`s.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from wsgrad.client.blobs import Sources, new_statistics
from wsgrad.client.events import SessionEvents
from wsgrad.client.exchange import RELAYED, Exchange
from wsgrad.client.queue import Queue
from wsgrad.client.session_graphs import SessionGraphs
from wsgrad.client.waits import Failure, Wait
from wsgrad.errors import ProtocolError, WsgradError, error_code
from wsgrad.transport.cbor import encode
from wsgrad.transport.express import Answer
from wsgrad.transport.link import Link
from wsgrad.transport.messages import (
    VERSION,
    Abort,
    Ack,
    Bye,
    Chunk,
    Close,
    Compiled,
    Credit,
    Devices,
    Dialled,
    Failed,
    Hello,
    Message,
    Missing,
    Open,
    ReadData,
    Refused,
    Result,
    Seen,
    Ticket,
    Time,
    Traced,
    Welcome,
    message_array,
    parse_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.client.trace import SessionTrace
    from wsgrad.transport.connection import Received

T = TypeVar("T")

_MAX_IDS: Final = 1 << 32
_NUMBERED: Final = 16
GRACE_SECONDS: Final = 60.0
"""How long a session outlives its connection where the server doesn't say."""


class Session:
    """Owned by a server object and driven by its driver, which serialises all calls.

    Attributes:
        link: the numbered messages of the session.
        key: what attaching again needs; None until the server has welcomed us.
        info: what the server says of itself: name, version, limits.
        devices: properties of the server's devices.
        attached: whether the present connection has been welcomed.
        refused: the error that the server answered the present connection with.
        ended: why nothing works any more, or None.
        sources: of programs, as far as they were sent.
        statistics: counters since the session was opened.
        graphs: what was recorded.
        trace: measures while a timeline is made; None most of the time.
        traces: timelines so far.
        events: what devices have signalled and wait for.
        exchange: what is done for other sessions of this client.
        asleep: whether `wake` must be called once something was issued; see `wake`.
        wake: set by the driver, which sends on its own what nobody flushes. May be called from any thread.
        release: set by the driver while it has a connection: no more may be received into this object's memory.
    """

    def __init__(self, *, agent: str, debug: bool = False) -> None:
        self.link = Link()
        self.key: bytes | None = None
        self.info: dict[str, object] = {}
        self.devices: list[dict[str, object]] = []
        self.attached = False
        self.refused: WsgradError | None = None
        self.ended: Failure | None = None
        self.debug = debug
        self.sources = Sources()
        self.statistics = new_statistics()
        self.graphs = SessionGraphs(self.link)
        self.trace: SessionTrace | None = None
        self.traces = 0
        self.events = SessionEvents(self)
        self.exchange = Exchange(self)
        self.asleep = False
        self.wake: Callable[[], None] = lambda: None
        self.release: Callable[[object], None] | None = None
        self._agent = agent
        self._queues: dict[int, Queue] = {}
        self._next_queue = 0
        self._parsed: tuple[list[object], Message] | None = None
        self._conditions: list[tuple[Callable[[], bool], Wait[Any]]] = []
        self._unopened: list[Queue] = []
        self._told = False  # whether a caller has met what ended the session

    # -- connections --------------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """The head of a new connection's first message."""
        self.attached = False
        self.refused = None
        return encode(message_array(Hello(VERSION, self._agent, self.key, self.link.received, {})))

    def detached(self) -> None:
        """The connection is gone; the session waits for another one."""
        self.attached = False
        self.release = None

    def end(self, error: WsgradError) -> None:
        """The session is over: whatever waits, and every later call, gets this error."""
        if self.ended is not None:
            return
        self.ended = Failure(-1, error_code(error), str(error), error.details)
        self.attached = False
        for queue in self._queues.values():
            self._told |= queue.end(self.ended)
        self.exchange.end(self.ended)
        for _, wait in self._conditions:
            self._told |= not wait.done
            wait.fail(self.ended.error())
        self._conditions.clear()

    @property
    def over(self) -> bool:
        """Whether nothing works any more."""
        return self.ended is not None

    @property
    def grace_seconds(self) -> float:
        """How long the server keeps the session without a connection."""
        limits = self.info.get("limits")
        value = limits.get("resume_grace") if isinstance(limits, dict) else None
        return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e6 else GRACE_SECONDS

    def check(self) -> None:
        """Raise what ended the session, if anything did."""
        if self.ended is not None:
            self._told = True
            raise self.ended.error()

    def bye(self) -> None:
        """Tell the server to end the session, after what was sent so far."""
        self.link.push(encode(message_array(Bye())), numbered=False)

    # -- issuing ------------------------------------------------------------------------------------------------------

    def open_queue(self, device: str) -> Queue:
        """A new queue on a device; what is issued on it doesn't wait for the answer."""
        self.check()
        number = self._next_queue
        self._next_queue += 1
        queue = Queue(
            self.link,
            number,
            device,
            max_buffers=self._limit("max_buffers"),
            max_programs=self._limit("max_programs"),
            max_cost=self._limit("max_queue_size"),
            max_commands=self._limit("max_queue_commands"),
            debug=self.debug,
        )
        queue.release = self._release
        queue.sources = self.sources
        queue.outbox.statistics = self.statistics
        self._queues[number] = queue
        if self.trace is not None:
            self.trace.queues[number] = device
        self.link.push(encode(message_array(Open(number, device, {}))))
        return queue

    def close_queue(self, queue: Queue) -> None:
        """Free everything on a queue. What still waits for it fails."""
        if self._queues.pop(queue.number, None) is not None:
            queue.flush()
            queue.gone = True
            queue.end(Failure(-1, "DeviceError", f"the device {queue.device!r} was closed by this client"))
            queue.outbox.leave()
            self.link.push(encode(message_array(Close(queue.number))))

    @property
    def queues(self) -> list[Queue]:
        """The open ones."""
        return list(self._queues.values())

    @property
    def dirty(self) -> bool:
        """Whether something was issued that is in no message yet."""
        return self.exchange.posted or any(queue.dirty for queue in list(self._queues.values()))

    @property
    def posted(self) -> bool:
        """Whether other sessions wait for something to be sent here."""
        return self.exchange.posted

    @property
    def attentive(self) -> bool:
        """Whether what the server says is needed although nobody may be waiting for it here."""
        return self.exchange.attentive or any(queue.signals.awaited for queue in list(self._queues.values()))

    @property
    def blocked(self) -> bool:
        """Whether commands wait for the server's acknowledgement or credit."""
        return any(queue.outbox for queue in self._queues.values())

    def flush(self) -> None:
        """Put everything issued so far into messages, and into the link what may be sent."""
        trace, started = (self.trace, time.monotonic_ns()) if self.trace is not None and self.dirty else (None, 0)
        for queue in self._queues.values():
            queue.flush()
        self.graphs.flush()
        self.exchange.flush()
        self.events.flush()
        if trace is not None:
            trace.flushed(started)

    def flushed(self) -> Wait[None]:
        """A wait until everything issued so far is with the link."""
        return self.after_flush(lambda: not self.blocked)

    def after_flush(self, condition: Callable[[], bool]) -> Wait[None]:
        """Flush, frees included, and wait until this has come about."""
        self.flush()
        return self.when(condition)

    @overload
    def when(self, condition: Callable[[], bool]) -> Wait[None]: ...
    @overload
    def when(self, condition: Callable[[], bool], finish: Callable[[object], T]) -> Wait[T]: ...
    def when(self, condition: Callable[[], bool], finish: Callable[[object], Any] = lambda _: None) -> Wait[Any]:
        """A wait until what the server says has brought this about; `finish` makes its result."""
        wait: Wait[Any] = Wait(finish)
        self._conditions.append((condition, wait))
        self._settle_conditions()
        return wait

    def drained(self) -> list[Wait[None]]:
        """Waits for everything on every queue that lives."""
        return [queue.synchronize() for queue in self._queues.values() if queue.life.dead is None]

    def take_unraised(self) -> WsgradError | None:
        """The first error that no caller has met, for the end of the session."""
        for queue in [*self._queues.values(), *self._unopened]:
            failure, queue.unraised = queue.unraised, None
            if failure is not None:
                return failure.error()
        if self.ended is not None and not self._told:
            self._told = True
            return self.ended.error()
        return None

    # -- what the server says -----------------------------------------------------------------------------------------

    def destination(self, head: list[object], nbytes: int) -> memoryview | None:
        """Where the bulk of this message goes; None for fresh memory.

        Raises:
            ProtocolError: nothing of this kind or size is due.
        """
        message = parse_message(head)
        self._parsed = (head, message)
        if isinstance(message, Traced):
            return None
        if not isinstance(message, ReadData | Chunk):
            raise ProtocolError(f"the server sent {type(message).__name__}, which only clients send")
        queue = self._queues.get(message.queue)
        if queue is None:
            return None  # of a queue that was closed meanwhile, or on its way to another server
        if isinstance(message, ReadData):
            return queue.pending.read_destination(message.number, nbytes)
        return queue.pending.chunk_destination(message.transfer, message.offset, nbytes)

    def handle(self, received: Received) -> None:
        """Take one message of the connection.

        Raises:
            ProtocolError: it is malformed, not due, or not the server's to send.
        """
        if self.trace is None:
            self._handle(received)
        else:
            self.trace.handling(self._handle, received)

    def _handle(self, received: Received) -> None:
        answer = received.express
        if type(answer) is Answer and self.attached and (asked := self._queues.get(answer.queue)) is not None:
            # What a caller who waits for one value gets: half of the way below in a tenth of its steps.
            if self.link.note_received(received.nbytes):
                self._tell_seen()
            asked.pending.on_read_data(answer.number, answer.data)
            asked.on_ack(answer.acked)
            if self._conditions:
                self._settle_conditions()
            return
        head = received.head
        parsed, self._parsed = self._parsed, None
        message = parsed[1] if parsed is not None and parsed[0] is head else parse_message(head)
        if not self.attached:
            self._attach(message)
            self._settle_conditions()
            return
        if message.KIND >= _NUMBERED:
            # Counted first: whatever this message causes to be sent tells of it.
            if self.link.note_received(received.nbytes):
                self._tell_seen()
            match message:
                case Ticket():
                    self.exchange.on_ticket(message)
                case Dialled():
                    self.exchange.on_dialled(message)
                case Chunk() | Credit() | Ack() | Failed() | Abort() if message.queue >= RELAYED:
                    self.exchange.carry(message.queue, received.raw, received.bulk)
                case _:
                    self._handle_queue(message, received.bulk)
            return
        match message:
            case Seen(count):
                self.link.seen(count)
            case Devices(devices):
                self.devices = devices
            case Time():
                if self.trace is not None:
                    self.trace.answer(message)
            case _:
                raise ProtocolError(f"the server sent {type(message).__name__} in the middle of a session")
        self._settle_conditions()

    def tell_seen(self) -> None:
        """Tell the server what has arrived, if it wasn't told; for a driver that has a moment."""
        if self.attached and self.link.untold:
            self._tell_seen()

    def _tell_seen(self) -> None:
        self.link.told()
        self.link.push(encode([Seen.KIND, self.link.received]), numbered=False)

    def _attach(self, message: Message) -> None:
        match message:
            case Welcome(version, key, received, info):
                if version != VERSION:
                    raise ProtocolError(
                        f"the server ({info.get('server')!s:.80}) speaks version {version} of the protocol, "
                        f"{self._agent} version {VERSION}: update whichever is older"
                    )
                if self.key is not None and key != self.key:
                    raise ProtocolError("the server attached another session than ours")
                self.key = key
                self.info = info
                devices = info.get("devices")
                if isinstance(devices, list) and all(isinstance(device, dict) for device in devices):
                    self.devices = devices
                self.link.resume(received)
                self.attached = True
            case Refused(code, text):
                self.refused = Failure(-1, code, text).error()
            case _:
                raise ProtocolError(f"the server sent {type(message).__name__} instead of a welcome")

    def _handle_queue(self, message: Message, bulk: memoryview | None) -> None:
        if isinstance(message, Traced):
            if self.trace is not None:
                self.trace.traced(message, bulk)
                self._settle_conditions()
            return
        number = getattr(message, "queue", None)
        queue = self._queues.get(number) if isinstance(number, int) else None
        if queue is None:
            if not isinstance(number, int) or number >= self._next_queue:
                raise ProtocolError(f"the server sent {type(message).__name__} for queue {number}, which isn't open")
            return  # of a queue that was closed meanwhile
        match message:
            case ReadData(_, answered, last):
                assert bulk is not None
                queue.pending.on_read_data(answered, bulk)
                queue.on_ack(last)
                self._settle_conditions()
            case Ack(_, last):
                queue.on_ack(last)
                self._settle_conditions()
            case Chunk(_, transfer, _):
                assert bulk is not None
                queue.pending.on_chunk(transfer, bulk)
            case Credit(_, slots):
                queue.on_credit(slots)
                self._settle_conditions()
            case Result(_, answered, value):
                queue.on_result(answered, value)
            case Compiled(_, program, ok, text):
                queue.pending.on_compiled(program, ok, text)
            case Missing(_, lacked, offset):
                queue.on_missing(lacked, offset)
            case Failed(_, failed, code, text, details):
                self._failed(queue, Failure(failed, code, text, details))
                self._settle_conditions()
            case _:
                raise ProtocolError(f"the server sent {type(message).__name__}, which only clients send")

    def _failed(self, queue: Queue, failure: Failure) -> None:
        queue.on_failed(self.graphs.named(self.exchange.named(failure)))
        if not failure.number:
            # It never opened. Its device gets another queue when it is used next.
            self._queues.pop(queue.number, None)
            queue.gone = True
            queue.outbox.leave()
            self._unopened.append(queue)
            self.link.push(encode(message_array(Close(queue.number))))

    def _settle_conditions(self) -> None:
        if self._conditions:
            waiting = []
            for condition, wait in self._conditions:
                if condition():
                    wait.settle()
                elif not wait.done:
                    waiting.append((condition, wait))
            self._conditions = waiting

    def _release(self, memory: object) -> None:
        if self.release is not None:
            self.release(memory)

    def _limit(self, name: str) -> int:
        limits = self.info.get("limits")
        value = limits.get(name) if isinstance(limits, dict) else None
        return value if type(value) is int and 0 < value <= _MAX_IDS else _MAX_IDS
