"""A hub's queue on this machine: its messages go to a node process of its own, what that says goes back, both checked.

The node process runs strangers' code. Whatever it forges must cost no more than its own queue, so it is held against
what was asked here, as a server does with its own nodes; the hub checks once more. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import trio

from wsgrad.errors import DeviceLost, ProtocolError, Timeout, WsgradError, error_code
from wsgrad.graph.parse import parse_device_part
from wsgrad.graph.part import ReceiveOp, SendOp
from wsgrad.server.outstanding import InvalidReply, Outstanding, Sent, Transfer
from wsgrad.server.trace import check_records, check_trace
from wsgrad.server.usage import Usage
from wsgrad.transport import cbor
from wsgrad.transport.commands import Download, Launch, Read, Upload, parse_command
from wsgrad.transport.messages import (
    CHUNK_BYTES,
    Abort,
    Ack,
    Batch,
    Chunk,
    Compiled,
    Credit,
    Fail,
    Failed,
    Graph,
    Launches,
    Profile,
    Program,
    ReadData,
    Replay,
    Result,
    Slot,
    Spans,
    Unrecord,
    message_array,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from wsgrad.server.port import DownloadChunk, Loss, Port
    from wsgrad.server.programs import Job, Programs, Want
    from wsgrad.transport.express import Answer
    from wsgrad.transport.messages import Attach, Message

_MAX_GRAPH_NBYTES: Final = 1 << 26
_MAX_ITEMS: Final = 1 << 26
_MAX_WAITING_NBYTES: Final = 16 << 20
"""A hub sends a queue 4 MiB of commands at most before it has their acknowledgement, and four chunks."""
_MAX_GRAPHS: Final = 4096
_KINDS: Final = {Read.KIND, Download.KIND, Upload.KIND, Launch.KIND}
"""Commands with answers or transfers; others need no look."""
_NOTHING: Final = memoryview(b"")


class Uplink(Protocol):
    """The way to the hub."""

    @property
    def paused(self) -> bool:
        """Whether work waits here until the machine's owner lets it go on."""

    def push(self, head: bytes, bulk: memoryview | bytes | None = None) -> None:
        """Send a message to the hub."""

    def hold_back(self) -> None:
        """Let messages gather until `let_go`."""

    def let_go(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Session:
    """What opening a device asks of a session: the hub's number for it, and how to run a task that ends with it."""

    number: int
    start: Callable[[Callable[[], Awaitable[None]]], None]
    processes: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(1))  # the hub counts those of its sessions


@dataclass(slots=True)
class _Item:
    """A message in the queue's order, on its way to the node."""

    message: Message
    raw: bytes
    bulk: memoryview | None
    slot: int = -1
    want: Want | None = None

    @property
    def job(self) -> Job | None:
        """How far a program is that is compiled here."""
        return None if self.want is None else self.want.job

    @property
    def nbytes(self) -> int:
        return len(self.raw) + (0 if self.bulk is None else len(self.bulk))


@dataclass(frozen=True, slots=True)
class _Part:
    """What is known of a graph: its steps, how many transfers it has, and place and size of those that send."""

    steps: int
    transfers: int
    sends: tuple[tuple[int, int], ...]


class JoinedQueue:
    """One queue of the hub, from its `Attach` to its `Close`. To its port it is the owner.

    Attributes:
        number: on the link to the hub, and towards the node.
        opening: whether the node has not said yet that it is ready.
        port: the way to the node; None once it is lost.
    """

    def __init__(self, attach: Attach, uplink: Uplink, session: Session, programs: Programs | None) -> None:
        self.number = attach.queue
        self.session = session
        self.opening = True
        self.port: Port | None = None
        self._uplink = uplink
        self._programs = programs
        self._out = Outstanding(Usage())
        self._items: deque[_Item] = deque()
        self._waiting_nbytes = 0
        self._pumping = False
        self._chunks: deque[DownloadChunk] = deque()
        self._compiling: set[int] = set()
        self._transferring = 0
        self._replays: deque[tuple[int, int]] = deque()
        self._parts: dict[int, _Part] = {}
        self._pieces: dict[int, bytearray] = {}
        self._announced = 0
        self._given = _NOTHING

    # -- from the hub

    def destination(self, nbytes: int) -> memoryview | None:
        """Where a chunk that is about to come may be received: in the ring, if nothing goes there before it."""
        self._announced += 1
        if self._announced > 1 or self.port is None or not self.port.has_room or nbytes > CHUNK_BYTES:
            return None
        slot = self.port.next_slot()
        if slot is not None:
            self._given = slot[:nbytes]
            return self._given
        return None

    def forget_announced(self) -> None:
        """The connection broke: chunks that it has begun will come anew, from their start."""
        self._announced = 0
        self._given = _NOTHING

    def submit(self, message: Message, raw: bytes, bulk: memoryview | None) -> None:
        """Take a message of the hub.

        Raises:
            ProtocolError: the hub breaks the protocol.
        """
        item = _Item(message, raw, bulk)
        match message:
            case Credit():
                self._credited(message.slots)
                return
            case Chunk():
                self._announced = max(0, self._announced - 1)
                given, self._given = self._given, _NOTHING
                if self.port is None:
                    return
                if bulk is None or len(bulk) > CHUNK_BYTES or not self.port.has_room:
                    raise ProtocolError("a chunk without credit, or of a wrong size", close_code=1008)
                item.slot, item.bulk = self.port.take_chunk(bulk, in_place=bulk is given)
            case Program():
                self._compile(item, message, bulk)
            case Batch() | Launches() | Abort() | Fail() | Graph() | Replay() | Unrecord() | Profile():
                pass
            case _:
                raise ProtocolError(f"a {type(message).__name__}, which is not for a queue of a node")
        if self.port is None:
            return  # the hub will hear, or has heard, that the device is lost
        if not isinstance(message, Chunk):
            self._waiting_nbytes += item.nbytes
            if self._waiting_nbytes > _MAX_WAITING_NBYTES:
                raise ProtocolError(f"more than {_MAX_WAITING_NBYTES} bytes for one queue", close_code=1008)
        self._items.append(item)
        self.pump()

    def pump(self) -> None:
        """Give the node what may go."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._items and not self._uplink.paused and not self.opening:
                port, item = self.port, self._items[0]
                if port is None or port.full or (item.job is not None and not item.job.done):
                    break
                self._items.popleft()
                if item.slot < 0:
                    self._waiting_nbytes -= item.nbytes
                self._send(port, item)
        finally:
            self._pumping = False

    def close(self) -> None:
        """End it, with its node. Idempotent."""
        port, self.port = self.port, None
        items, self._items = self._items, deque()
        self._chunks.clear()
        self._given = _NOTHING
        if port is not None:
            port.close()
        for item in items:
            if item.want is not None and self._programs is not None:
                self._programs.leave(item.want)

    def _send(self, port: Port, item: _Item) -> None:
        message = item.message
        match message:
            case Chunk():
                assert item.bulk is not None
                port.send_chunk(message.transfer, message.offset, item.slot, item.bulk, client=True)
                return
            case Program():
                self._out.add(Sent(message.number, message.number, 0, b""))
                assert item.bulk is not None
                if item.job is None:
                    port.send_program(message, item.bulk)
                    return
                port.send_binary(message, item.job.binary)
                ok = item.job.binary is not None
                self._tell(Compiled(self.number, message.program, ok, item.job.messages))
                return
            case Batch():
                self._out.add(self._batch(message))
            case Launches():
                self._out.add(Sent(message.first, message.first + message.count - 1, 0, b""))
            case Fail():
                if message.number > self._out.sent:
                    self._out.add(Sent(message.number, message.number, 0, b""))
            case Graph():
                self._graph(message, item.bulk or _NOTHING)
            case Replay():
                self._replay(message)
            case Profile(trace=trace, on=True):
                port.traces.add(trace)
            case _:
                pass
        port.send(item.raw, item.bulk)

    def _compile(self, item: _Item, message: Program, source: memoryview | None) -> None:
        item.bulk = _NOTHING if source is None else source
        if self.port is None:
            return
        if self.port.compiles:
            self._compiling.add(message.program)
            return
        assert self._programs is not None  # what compiles nothing itself came with them
        try:
            text = str(item.bulk, "utf-8")
        except UnicodeDecodeError as exc:
            raise ProtocolError("a program's source that is not UTF-8") from exc
        item.want = self._programs.compile(text, message, session=self.session, queue=self, finished=self.pump)

    def _batch(self, batch: Batch) -> Sent:
        """What the node may answer to a batch."""
        sent = Sent(batch.first, batch.first + len(batch.commands) - 1, 0, b"")
        for number, array in enumerate(batch.commands, batch.first):
            if not array or array[0] not in _KINDS:
                continue
            match parse_command(array):
                case Read() as read:
                    sent.reads.append((number, read.nbytes))
                case Launch(timed=True):
                    sent.timed.append(number)
                case Download() as download:
                    self._download(download.transfer, number, download.nbytes)
                case Upload():
                    self._transferring = number
                case _:
                    pass
        return sent

    def _download(self, transfer: int, number: int, nbytes: int) -> None:
        if transfer in self._out.downloads:
            raise ProtocolError(f"transfer {transfer} is in use")
        self._out.downloads[transfer] = Transfer(transfer, number, nbytes)
        self._transferring = number

    def _graph(self, message: Graph, piece: memoryview) -> None:
        pieces = self._pieces.setdefault(message.graph, bytearray())
        if message.offset != len(pieces) or len(pieces) + len(piece) > min(message.total, _MAX_GRAPH_NBYTES):
            raise ProtocolError("a piece of a graph that does not follow the one before")
        pieces += piece
        if len(pieces) < message.total:
            return
        del self._pieces[message.graph]
        array = cbor.decode(bytes(pieces), max_items=_MAX_ITEMS)
        if not isinstance(array, list) or len(array) != 2:
            raise ProtocolError("a graph that is no part with its bindings")
        part, _, _ = parse_device_part(array[0])
        sends, place = [], 0
        for step in part.by_number:
            if isinstance(step.op, SendOp):
                if nbytes := part.slots[step.op.source].nbytes:
                    sends.append((place, nbytes))
                place += 1
            elif isinstance(step.op, ReceiveOp):
                place += 1
        if len(self._parts) >= _MAX_GRAPHS:
            self._parts.clear()  # spans and replays of those fail; nobody keeps so many
        self._parts[message.graph] = _Part(len(part.by_number), place, tuple(sends))

    def _replay(self, message: Replay) -> None:
        part = self._parts.get(message.graph)
        if part is None:
            raise ProtocolError(f"a replay of graph {message.graph}, which is not there")
        self._out.add(Sent(message.number, message.number, 0, b""))
        self._replays.append((message.number, part.steps))
        for place, nbytes in part.sends:
            self._download(message.transfer + place, message.number, nbytes)
        if part.transfers:
            self._transferring = message.number

    def _credited(self, slots: int) -> None:
        if self.port is None:
            return
        if not 1 <= slots <= len(self._chunks):
            raise ProtocolError(f"credit for {slots} chunks, of {len(self._chunks)}")
        for _ in range(slots):
            self._chunks.popleft()()

    # -- from the node: what a port asks of its owner

    def lost(self, port: Port, loss: Loss) -> None:
        """The node is gone; the hub finds the words, since it knows the program."""
        if port is not self.port:
            return
        acked, sent = self._out.acked, self._out.sent
        number = loss.number if loss.number is not None and acked < loss.number <= sent else None
        if number is None:
            number = acked + 1 if acked < sent else 0
        code = (Timeout if loss.timed_out else DeviceLost).__name__
        if self.opening:
            self._tell(Failed(self.number, 0, code, loss.cause, {}))
        else:
            details: dict[str, object] = {"ended": loss.cause, "step": loss.step}
            self._tell(Failed(self.number, number, code, loss.cause, details))
        self.close()

    def refuse(self, error: WsgradError) -> None:
        """It can't be opened."""
        self._tell(Failed(self.number, 0, error_code(error), str(error), error.details))
        self.close()

    def reply(self, port: Port, array: list[object], raw: bytes, bulk: memoryview | None) -> None:
        """Check one reply of the node and pass it on.

        Raises:
            InvalidReply: it answers nothing that was asked.
        """
        if port is not self.port:
            return
        message = port.parse(array)
        if self.opening:
            self._opened(message, raw)
            return
        match message:
            case Ack():
                self._acknowledged(message.number)
            case ReadData():
                self._out.read(message.number, 0 if bulk is None else len(bulk))
                self._acknowledged(message.acked)
            case Result():
                self._out.result(message.number, message.value)
            case Slot():
                self._chunk(port, message)
                return
            case Credit():
                port.credit(message.slots)
            case Failed():
                self._out.failed(message.number)
            case Compiled() if message.program in self._compiling:
                self._compiling.discard(message.program)
            case Spans():
                check_trace(port, message)
                check_records(bulk, self._out.sent, {graph: part.steps for graph, part in self._parts.items()})
            case _:
                raise InvalidReply(f"a {type(message).__name__} that nobody asked for")
        self._uplink.push(raw, bulk)

    def answered(self, port: Port, answer: Answer) -> bool:
        """Never: `reply` decides."""
        return False

    def hold_back(self) -> None:
        self._uplink.hold_back()

    def let_go(self) -> None:
        self._uplink.let_go()

    def later(self) -> None:
        self.pump()

    def span(self) -> tuple[int, int]:
        return self._out.acked, self._out.sent

    def steps(self, number: int) -> int:
        return next((steps for replayed, steps in self._replays if replayed == number), 0)

    def may_idle(self) -> bool:
        return self._out.acked < self._transferring

    def _opened(self, message: Message, raw: bytes) -> None:
        match message:
            case Result(number=0):
                self.opening = False
                self._uplink.push(raw)
                self.pump()
            case Failed(number=0):
                self._uplink.push(raw)
                self.close()
            case _:
                raise InvalidReply(f"a {type(message).__name__} before it was ready")

    def _acknowledged(self, number: int) -> None:
        self._out.ack(number)
        while self._replays and self._replays[0][0] <= number:
            self._replays.popleft()

    def _chunk(self, port: Port, message: Slot) -> None:
        """A chunk of a download: it goes to the hub from its slot, which the node has back with the hub's credit."""
        seen = port.take_download()
        bulk = port.download_slot(message, seen)
        self._out.chunk(message.transfer, message.offset, len(bulk))
        self._chunks.append(seen)
        self._tell(Chunk(self.number, message.transfer, message.offset), bulk)

    def _tell(self, message: Message, bulk: memoryview | None = None) -> None:
        self._uplink.push(cbor.encode(message_array(message)), bulk)
