"""A client of random but structured messages over one session; it holds the answers against what it asked."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import trio

from fuzz.model_server import Wire, World
from fuzz.shared import load_test_module
from fuzz.targets.messages import c_array, m_array
from wsgrad.errors import _BY_CODE, ProtocolError
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.transport import cbor
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.link import Link

if TYPE_CHECKING:
    from fuzz.choices import Choices

_DEVICES = ("far/cpu/0", "far/cpu/0", "box/cpu/0", "box/cpu/0", "nowhere/cpu/0")
_OWN_CODE = "Own"
"""What this client calls an error of its own making; it is told of it by the same name."""
_parts = [
    part
    for seed in range(40)
    for part in Plan(load_test_module("graph/random_graphs").random_recording(random.Random(seed))).parts.values()
    if len(cbor.encode(part_array(part))) < 1500
][:12]


@dataclass
class ClientQueue:
    """What the client knows of a queue.

    Attributes:
        joint: once something of it may wait for others.
        cached: the numbers of uploads for which the server asks its cache, with their transfers and sizes.
        owed: those that it asked for after all, with how far they are.
    """

    number: int
    next: int = 1
    credit: int = m.SLOTS
    acked: int = 0
    upload: tuple[int, int, int] | None = None
    reads: dict[int, int] = field(default_factory=dict)
    downloads: dict[int, list[int]] = field(default_factory=dict)
    errors: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    known: dict[int, bytes] = field(default_factory=dict)
    cached: dict[int, tuple[int, int]] = field(default_factory=dict)
    owed: list[tuple[int, tuple[int, int, int]]] = field(default_factory=list)
    lost: bool = False
    joint: bool = False


class ModelClient:
    """One session. `wild` lets it also send what breaks the protocol."""

    def __init__(self, world: World, *, wild: bool) -> None:
        self.world = world
        self.choices: Choices = world.choices
        self.wild = wild
        self.queues: dict[int, ClientQueue] = {}
        self.link = Link()
        self.key: bytes | None = None
        self.wire = Wire()
        self.transfers = 0
        self.graphs: dict[int, tuple[Any, dict[int, int]]] = {}
        self.refused = False
        self.session: Any = None

    # -- connections

    async def connect(self) -> None:
        """Open the session, or go on with it."""
        self.wire = Wire()
        await self.world.serve(self.world.hub.serve_client, self.wire)
        self.wire.give(cbor.encode(m.message_array(m.Hello(1, "fuzz", self.key, self.link.received, {}))))
        out = self.wire.take()
        if not out:
            assert self.wire.closed
            return
        message = m.parse_message(cbor.decode(out[0][0]))  # type: ignore[arg-type]
        if not isinstance(message, m.Welcome):
            self.refused = True
            return
        if self.key is None:
            self.session = next(iter(self.world.hub._sessions.values()))
        self.key = message.key
        self.link.resume(message.received)
        for head, bulk in out[1:]:
            self._receive(head, bulk)
        self._flush()

    def send(self, message: m.Message, bulk: bytes | None = None, *, cut: int = 0) -> None:
        """Send a message now."""
        self.link.push(cbor.encode(m.message_array(message)), bulk, numbered=message.KIND >= 16)
        self._flush(cut)

    def _flush(self, cut: int = 0) -> None:
        while not self.wire.closed and (outgoing := self.link.pop()) is not None:
            self.wire.give(outgoing.head, None if outgoing.bulk is None else bytes(outgoing.bulk), cut)
            self.receive()

    def receive(self) -> None:
        """Take what the server has sent."""
        for head, bulk in self.wire.take():
            self._receive(head, bulk)

    def _receive(self, head: bytes, bulk: bytes | None) -> None:
        array = cbor.decode(head)
        assert isinstance(array, list)
        message = m.parse_message(array)
        assert (bulk is not None) == (message.KIND in m.BULK_KINDS), message
        if message.KIND >= 16:
            self.link.note_received(len(head) + len(bulk or b""))
        queue = self.queues.get(getattr(message, "queue", -1))
        match message:
            case m.Seen():
                self.link.seen(message.count)
            case m.Failed():
                assert message.code in _BY_CODE or message.code == _OWN_CODE, message
                if queue is not None:
                    # A device that is lost while nothing runs fails what would have come next.
                    assert message.number < queue.next + bool(message.details.get("lost")), message
                    queue.errors.append(message.number)
                    queue.reads.pop(message.number, None)
                    if message.details.get("lost"):
                        queue.lost = True
                        queue.reads.clear()
            case m.Ack() if queue is not None:
                self._acked(queue, message.number)
            case m.ReadData() if queue is not None:
                assert bulk is not None
                assert queue.reads.pop(message.number) == len(bulk), message
                if message.acked > queue.acked:
                    self._acked(queue, message.acked)
            case m.Credit() if queue is not None:
                queue.credit += message.slots
                assert queue.credit <= m.SLOTS, message
            case m.Chunk() if queue is not None:
                download = queue.downloads[message.transfer]
                assert message.offset == download[1], (message, download)
                assert bulk
                download[1] += len(bulk)
                assert download[1] <= download[2], (message, download)
            case m.Missing() if queue is not None:
                if message.number in queue.cached:
                    transfer, nbytes = queue.cached[message.number]
                    queue.owed.append((message.number, (transfer, message.offset, nbytes)))
                    queue.owed.sort()
                else:
                    queue.asked.append(message.number)

    def _acked(self, queue: ClientQueue, number: int) -> None:
        assert queue.acked <= number < queue.next, (queue, number)
        queue.acked = number

    # -- what it does

    def open(self, number: int, device: str, buffers: int = 0) -> None:
        """Open a device, and so many buffers there."""
        queue = self.queues[number] = ClientQueue(number)
        self.send(m.Open(number, device, {}))
        if buffers:
            arrays = [c.command_array(c.Alloc(buffer, 5000)) for buffer in range(buffers)]
            self.send(m.Batch(number, queue.next, arrays))
            queue.next += buffers

    async def step(self) -> None:
        """Do something."""
        choices = self.choices
        kind = choices.some(25)
        queue = self.queues.get(choices.some(3)) if self.queues else None
        if queue is None or kind == 0:
            self._open()
        elif kind < 9:
            self._batch(queue)
        elif kind < 11:
            self._launches(queue)
        elif kind < 13:
            self._program(queue)
        elif kind < 15:
            self._chunk(queue)
        elif kind == 15:
            self._answer(queue)
        elif kind == 16 and queue.upload is None:
            self._numbered(queue, m.Reopen(queue.number, queue.next))
            queue.lost = False
        elif kind == 17 and choices.some(3) == 0:
            del self.queues[queue.number]
            self.send(m.Close(queue.number))
        elif kind == 18:
            self._graph()
        elif kind == 19:
            self._event()
        elif kind == 20:
            self.wire.lose()
            await self.world.turn(2)
            await self.connect()
        elif kind == 21:
            self.world.programs.settle()
        elif kind == 22:
            self._odd()
        elif kind == 23 and self.wild:
            self._wild()
        elif kind == 24:
            self.send(m.Seen(self.link.received))
        else:
            await self.world.turn(1 + choices.some(3))
        self.receive()
        self.check()

    def _numbered(self, queue: ClientQueue, message: m.Message, bulk: bytes | None = None, count: int = 1) -> None:
        queue.next += count
        cut = self.choices.choice((0, 0, 0, 0, 3, 20))
        self.send(message, bulk, cut=cut)

    def _open(self) -> None:
        number = self.choices.some(3)
        if number not in self.queues:
            self.open(number, self.choices.choice(_DEVICES))

    def _batch(self, queue: ClientQueue) -> None:
        if queue.upload is not None:
            self._chunk(queue)
            return
        choices = self.choices
        commands: list[c.Command] = []
        first = queue.next
        for _ in range(1 + choices.some(3) + (70 if choices.some(40) == 7 else 0)):
            command = self._command(queue, first + len(commands))
            commands.append(command)
            if isinstance(command, c.Upload):
                break
        arrays = [c.command_array(command) for command in commands]
        message = m.Batch(queue.number, first, arrays)
        last = commands[-1]
        if isinstance(last, c.Upload) and last.nbytes:
            queue.upload = (last.transfer, 0, last.nbytes)
        self._numbered(queue, message, count=len(commands))

    def _command(self, queue: ClientQueue, number: int) -> c.Command:
        choices = self.choices
        buffer, other, program = choices.some(5), choices.some(5), choices.some(3)
        offset, nbytes = choices.choice((0, 0, 0, 1, 8)), choices.choice((0, 4, 16, 64, 64, 5000))
        match choices.some(19):
            case 0 | 1 | 2:
                return c.Alloc(buffer, choices.choice((0, 64, 64, 5000, 3 << 20)))
            case 3:
                return c.Free(buffer)
            case 4:
                return c.View(buffer, other, offset, nbytes)
            case 5 | 6:
                return c.Write(buffer, offset, bytes(nbytes))
            case 7 | 8:
                queue.reads[number] = nbytes
                return c.Read(buffer, offset, nbytes)
            case 9 | 10:
                self.transfers += 1
                return c.Upload(self.transfers, buffer, offset, choices.choice((nbytes, nbytes, 3 << 20)))
            case 11 | 12:
                self.transfers += 1
                size = choices.choice((nbytes, nbytes, 3 << 20))
                queue.downloads[self.transfers] = [number, 0, size]
                return c.Download(self.transfers, buffer, offset, size)
            case 13:
                return c.Copy(buffer, offset, other, 0, nbytes)
            case 14:
                return c.Fill(buffer, offset, nbytes, bytes(choices.choice((1, 4, 3))))
            case 15:
                return c.Launch(program, choices.choice((None, [1])), None, [buffer, 1], choices.some(1) == 1)
            case 16:
                return choices.choice((c.Drop(program), c.Clear(queue.errors[-1] if queue.errors else 0)))
            case 17:
                return c.Clear(queue.errors[-1] if queue.errors else 1)
        queue.joint = True
        transfer = choices.some(3)
        match choices.some(4):
            case 0:
                return c.Wait(choices.some(5))
            case 1:
                return c.Signal(choices.some(5)) if self.wild else c.Signal(1000 + self._fresh())
            case 2:
                return c.Send(100 + (transfer if self.wild else self._fresh()), buffer, offset, nbytes, 0)
            case 3:
                return c.Receive(100 + (transfer if self.wild else self._fresh() - 1), buffer, offset, nbytes, 0)
        queue.cached[number] = self._fresh() + 5000, nbytes
        return c.UploadCached(queue.cached[number][0], buffer, offset, nbytes, bytes(32))

    def _fresh(self) -> int:
        self.transfers += 1
        return self.transfers

    def _launches(self, queue: ClientQueue) -> None:
        if queue.upload is not None:
            return
        count = 1 + self.choices.some(2)
        words = [self.choices.some(5) for _ in range(4 * count)]
        self._numbered(
            queue, m.Launches(queue.number, queue.next, count), struct.pack(f"<{len(words)}I", *words), count=count
        )

    def _program(self, queue: ClientQueue) -> None:
        if queue.upload is not None:
            return
        choices = self.choices
        source = choices.choice((b"good", b"bad", b"late", b"x" * 300, b"\xff"))
        name = choices.choice(("", "name", "a/b"))
        fields: Any = (choices.some(6), "c", name, "entry", choices.choice(("pi", "pp", "z", "")), None, False, {})
        if choices.some(3):
            self._numbered(queue, m.Program(queue.number, queue.next, *fields), source)
        elif source != b"\xff":
            queue.known[queue.next] = source
            queue.joint = True
            digest = sha256(source).digest()
            self._numbered(queue, m.KnownProgram(queue.number, queue.next, *fields, len(source), digest))  # type: ignore[call-arg]

    def _chunk(self, queue: ClientQueue) -> None:
        if not self._may_send(queue):
            return
        if self.choices.some(7) == 1:
            self.send(m.Abort(queue.number, self._take_upload(queue)[1][0]))
        else:
            self._next_chunk(queue, cut=self.choices.choice((0, 0, 5, 40)))

    def _may_send(self, queue: ClientQueue) -> bool:
        """Whether a chunk may be sent: of what is owed, or if none that the cache is asked for comes first."""
        ready = queue.upload is not None and all(number <= queue.acked for number in queue.cached)
        return queue.credit > 0 and (ready or bool(queue.owed))

    def _take_upload(self, queue: ClientQueue) -> tuple[int, tuple[int, int, int]]:
        if queue.owed:
            return queue.owed.pop(0)
        upload, queue.upload = queue.upload or (0, 0, 0), None
        return 0, upload

    def _next_chunk(self, queue: ClientQueue, cut: int = 0) -> None:
        number, (transfer, offset, nbytes) = self._take_upload(queue)
        size = min(m.CHUNK_BYTES, nbytes - offset)
        if offset + size < nbytes and number:
            queue.owed.insert(0, (number, (transfer, offset + size, nbytes)))
        elif offset + size < nbytes:
            queue.upload = (transfer, offset + size, nbytes)
        queue.credit -= 1
        self.send(m.Chunk(queue.number, transfer, offset), bytes(size), cut=cut)

    def _answer(self, queue: ClientQueue) -> None:
        """Send a source that was asked for, or want no more of a download."""
        if queue.asked and (number := queue.asked[0]) in queue.known:
            queue.asked.pop(0)
            self.send(m.Source(queue.number, number), queue.known[number])
        elif queue.downloads and queue.upload is None:
            self.send(m.Abort(queue.number, next(reversed(queue.downloads))))

    def _graph(self) -> None:
        choices = self.choices
        graph = max(self.graphs, default=0)
        if graph and self.graphs[graph][0] is not None and choices.some(3):
            if choices.some(7) == 0:
                self.graphs[graph] = (None, {})
                self.send(m.Forget(graph))
                return
            part, queues = self.graphs[graph]
            if not all(number in self.queues and self.queues[number].upload is None for number in queues.values()):
                return
            numbers: list[list[object]] = []
            for number in queues.values():
                queue = self.queues[number]
                numbers.append([number, queue.next])
                queue.next += 1
                queue.joint = True
            values: list[object] = [low for _, low, _ in part.variables]
            self.send(m.Run(graph, numbers, [], values, 1 << 20))
            return
        graph += 1
        part = choices.choice(_parts)
        free = list(self.queues)
        if len(part.devices) > len(free):
            return
        queues = {device.index: free[index] for index, device in enumerate(part.devices)}
        bindings: list[Any] = [
            [number, choices.some(5)] for number, (device, _) in part.buffers.items() if device in queues
        ]
        self.graphs[graph] = (part, queues)
        pairs: list[list[object]] = [[device, number] for device, number in queues.items()]
        self.send(m.Record(graph, pairs, bindings, []), cbor.encode(part_array(part)))

    def _event(self) -> None:
        choices = self.choices
        if choices.some(1):
            self.send(m.Release([choices.some(5)]))
        elif self.wild:
            self.send(m.Settle(choices.some(5), choices.choice((None, "DeviceError", _OWN_CODE)), "x", {}))

    def _odd(self) -> None:
        choices = self.choices
        match choices.some(3):
            case 0:
                self.send(m.Clock(7))
            case 1:
                self.send(m.Trace(choices.some(2), choices.some(1) == 1))
            case 2:
                self.send(m.Peer(1 + self._fresh()))
            case _:
                self.send(m.Devices([]) if self.wild else m.Clock(8))

    def _wild(self) -> None:
        """Anything: what breaks the protocol ends the session by name."""
        choices = self.choices
        array = m_array(choices)
        if choices.some(1):
            array = [m.Batch.KIND, choices.some(3), choices.some(20), [c_array(choices)]]
        try:
            head = cbor.encode(array)
            message = m.parse_message(array)
        except (ProtocolError, TypeError):
            return
        if isinstance(message, m.Dial | m.Bye):
            return
        self.queues = {n: ClientQueue(n, next=1 << 53, credit=-(1 << 53)) for n in self.queues}
        for queue in self.queues.values():
            queue.joint = True
            queue.reads = _Any()
            queue.downloads = _AnyDownload()
        bulk = choices.randbytes(choices.some(20)) if message.KIND in m.BULK_KINDS else None
        self.link.push(head, bulk, numbered=message.KIND >= 16)
        self._flush()

    # -- what must hold

    def check(self) -> None:
        """The session's accounts are within its limits."""
        session = self.session
        if session is None:
            return
        quota = session.quota
        assert 0 <= quota.memory <= quota.max_memory
        assert 0 <= quota.buffers <= quota.max_buffers
        assert 0 <= quota.programs <= quota.max_programs
        assert session.answers._used >= 0

    async def settle(self) -> None:
        """Let everything run out; whatever concerns only its own queue is acknowledged then."""
        for _ in range(400):  # a reopening takes some turns, and each may wait for the one before
            self.world.programs.settle()
            await self.world.turn()
            self.receive()
            for queue in self.queues.values():
                while self._may_send(queue) and not self.wire.closed:
                    self._next_chunk(queue)
            if not self.wire.closed:
                self.send(m.Seen(self.link.received))
            if self.wire.closed or all(self._over(queue) for queue in self.queues.values()):
                break
        self.check()

    def _over(self, queue: ClientQueue) -> bool:
        return queue.joint or queue.lost or (queue.acked == queue.next - 1 and queue.credit == m.SLOTS)

    async def leave(self) -> None:
        """Say good-bye; nothing of the session is left."""
        if not self.wire.closed:
            self.wire.give(cbor.encode(m.message_array(m.Bye())))
        elif self.key is not None and self.session is not None and not self.session.ended.is_set():
            self.session.end(1000, "the target is over")
        if self.session is not None:
            while not self.session.freed.is_set():
                await self.world.turn()
            quota = self.session.quota
            assert (quota.memory, quota.buffers, quota.programs) == (0, 0, 0), f"{quota}"
        await trio.lowlevel.checkpoint()
        assert not self.world.hub._sessions


class _Any(dict[int, int]):
    """Of a client that has lost count."""

    def pop(self, key: int, *default: object) -> Any:  # noqa: ANN401
        return _Whatever()


class _Whatever(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class _AnyDownload(dict[int, list[int]]):
    def __missing__(self, key: int) -> list[int]:
        return [0, _Whatever(), 1 << 60]
