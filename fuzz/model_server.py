"""A whole hub without sockets: its connections are two cores wired together, its nodes are models or liars.

Real are the hub, sessions, queues, tables, transfers, events, graphs, remote nodes and the port of a local one, with
its ring and its packet socket. Not real: the zygote behind that, compilers, and what nodes compute.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import trio
import trio.testing

from fuzz.model_node import ModelQueue
from wsgrad.devices.ring import DOWNLOAD_SLOTS, Ring
from wsgrad.errors import ProtocolError, WsgradError
from wsgrad.server import local
from wsgrad.server.config import Config
from wsgrad.server.hub import Hub
from wsgrad.server.machine import _open_cpu
from wsgrad.server.programs import Job, Want
from wsgrad.transport import cbor, express
from wsgrad.transport import messages as m
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.frames import Closed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fuzz.choices import Choices
    from wsgrad.server.limits import Limits
    from wsgrad.server.machine import Opening
    from wsgrad.server.port import Port
    from wsgrad.transport.connection import Destination
    from wsgrad.transport.link import Link

local._EXPECT_SECONDS = 0.0  # type: ignore[misc]  # the model answers in its turn, never while the server waits
CONFIG = Config(
    devices=(), name="box", cache_dir=".", cache_size=0, max_sessions=4, max_session_memory=8 << 20, max_buffers=24,
    max_programs=6, max_program_size=256, launch_seconds=1e9, resume_grace=1e6, handshake_seconds=1e6,
)  # fmt: skip
DEVICE = {"kind": "cpu", "dialects": ["c"]}


class Faults(logging.Handler):
    """What the server logs as an error of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logging.Formatter().format(record))


FAULTS = Faults()
logging.getLogger("wsgrad").addHandler(FAULTS)
logging.getLogger("wsgrad").propagate = False
logging.getLogger("wsgrad").setLevel(logging.ERROR)


class Wire:
    """Stands for a `TrioConnection` at one end; `give` is what the peer sends, `out` what it would receive."""

    peer = "fuzz"

    def __init__(self, *, client: bool = False) -> None:
        self.link: Link | None = None
        self.destination: Destination | None = None
        self.kinds = None
        self.out: list[tuple[bytes, bytes | None]] = []
        self.ended: Closed | None = None
        self.error: WsgradError | None = None
        self._handle: Callable[[Received], None] | None = None
        self._core = Connection(
            client=client,
            bulk_kinds=m.BULK_KINDS,
            max_bulk=m.CHUNK_BYTES,
            destination=lambda head, nbytes: self.destination(head, nbytes) if self.destination else None,
            shortcut=express.received,
        )
        self._other = Connection(client=not client, bulk_kinds=m.BULK_KINDS, max_bulk=m.CHUNK_BYTES)
        self._over = trio.Event()

    @property
    def closed(self) -> bool:
        return self.ended is not None

    def send(self, head: bytes, bulk: memoryview | bytes | None = None) -> None:
        if not self.closed:
            self.out.append((head, None if bulk is None else bytes(bulk)))

    def wake(self) -> None:
        while not self.closed and self.link is not None and (outgoing := self.link.pop()) is not None:
            self.out.append((outgoing.head, None if outgoing.bulk is None else bytes(outgoing.bulk)))

    def close(self, code: int, reason: str) -> None:
        if not self.closed:
            self.ended = Closed(code, reason)
            self._over.set()

    async def run(self, handle: Callable[[Received], None]) -> Closed:
        self._handle = handle
        try:
            await self._over.wait()
        finally:
            self.ended = self.ended or Closed(1006, "cancelled")
        if self.error is not None:
            raise self.error
        return self.ended

    def give(self, head: bytes, bulk: bytes | None = None, cut: int = 0) -> None:
        """The peer sends a message, in two pieces if `cut`, or a part of it if that is negative."""
        data = b"".join(bytes(part) for part in self._other.encode(head, bulk))
        pieces = (data[:cut], data[cut:]) if cut > 0 else (data[:cut],) if cut else (data,)
        for piece in pieces:
            if self.closed:
                return
            try:
                for event in self._core.feed(piece):
                    if isinstance(event, Received) and not self.closed:
                        assert self._handle is not None
                        self._handle(event)
            except WsgradError as exc:
                code = exc.close_code if isinstance(exc, ProtocolError) else 1011
                assert code in (1002, 1003, 1007, 1008, 1009, 1011), exc
                self.error = exc
                self.close(code, str(exc))

    def lose(self) -> None:
        """The connection breaks."""
        self.close(1006, "lost")

    def take(self) -> list[tuple[bytes, bytes | None]]:
        """What has been sent since."""
        self.wake()
        out, self.out = self.out, []
        return out


class _Process:
    """Stands for a node process: the other end of its socket, with a model behind it."""

    def __init__(self, control: socket.socket, ring_fd: int, world: World) -> None:
        self.pid = 1
        self.status: int | None = None
        self.ended = trio.Event()
        self.socket: socket.socket | None = socket.socket(fileno=os.dup(control.fileno()))
        self.socket.setblocking(False)
        self._ring = Ring.attach(ring_fd)
        self._world = world
        self._next = 0
        self.model: ModelQueue | None = None

    def kill(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            self._ring.close()
            self.status = 9
            self.ended.set()

    def send(self, packet: bytes) -> None:
        """A packet to the server."""
        if self.socket is not None:
            try:
                self.socket.send(packet)
            except OSError:
                self.kill()

    def reply(self, message: m.Message, bulk: bytes | None) -> None:
        head = cbor.encode(m.message_array(message))
        self.send(head if bulk is None else head + cbor.bytes_head(len(bulk)) + bulk)

    def chunk(self, message: m.Chunk, bulk: bytes) -> None:
        slot = DOWNLOAD_SLOTS[self._next % len(DOWNLOAD_SLOTS)]
        self._next += 1
        self._world.say(self, m.Slot(message.queue, message.transfer, message.offset, slot, len(bulk)), None)

    def pump(self) -> None:
        """Work off what the server has sent."""
        while self.socket is not None:
            try:
                packet, ancillary, _, _ = self.socket.recvmsg(1 << 18, socket.CMSG_SPACE(4))
            except BlockingIOError:
                return
            except OSError:
                self.kill()
                return
            for _, _, data in ancillary:
                os.close(struct.unpack("i", data[:4])[0])
            if not packet:
                self.kill()
                return
            end = cbor.scan(packet)
            message = m.parse_message(cbor.decode(packet[:end]))  # type: ignore[arg-type]
            head = cbor.read_bytes_head(packet, end) if end < len(packet) else None
            bulk = None if head is None else packet[head[1] :]
            if isinstance(message, m.Attach):
                self.model = self._world.model(self, message.queue)
                self._world.say(self, m.Result(message.queue, 0, {}), None)
            elif isinstance(message, m.Close):
                self.kill()
            elif self.model is not None and not isinstance(message, m.Lend):
                self.model.take(message, bulk)


class _Zygote:
    """Gives the processes."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def spawn(self, control: socket.socket, ring_fd: int, options: dict[str, object]) -> _Process:
        process = _Process(control, ring_fd, self._world)
        self._world.processes.append(process)
        return process


class _Programs:
    """Compiles nothing: what begins with `bad` fails, what begins with `late` is done when `settle` is called."""

    compiled = cached = 0

    def __init__(self) -> None:
        self._late: list[Job] = []

    def compile(
        self, source: str, message: m.Program, *, session: object, queue: object, finished: Callable[[], None]
    ) -> Want:
        job = Job((source, message.entry, message.signature, message.alias), message)
        want = Want(job, session, queue, finished)
        if source.startswith("late"):
            job.wants[want] = None
            self._late.append(job)
        else:
            self._finish(job)
        return want

    def _finish(self, job: Job) -> None:
        bad = job.key[0].startswith("bad")
        job.finish(None if bad else b"binary", "1:1: error: bad" if bad else "")

    def settle(self) -> None:
        late, self._late = self._late, []
        for job in late:
            self._finish(job)

    def hurry(self, want: Want) -> None:
        """Late is late."""

    def leave(self, want: Want) -> None:
        want.job.wants.pop(want, None)


class World:
    """The hub, a remote node `far/cpu/0` and a local device `box/cpu/0`."""

    def __init__(self, hub: Hub, choices: Choices, nursery: trio.Nursery) -> None:
        self.hub = hub
        self.choices = choices
        self.processes: list[_Process] = []
        self.programs = _Programs()
        self.liar: Liar | None = None
        self.node = Wire()
        self.models: dict[int, ModelQueue] = {}
        self._nursery = nursery
        self.secret: str | None = None
        self._faulty = False

    async def start(self) -> None:
        """Let the node join, and offer the local device."""
        hub: Any = self.hub
        hub._programs = self.programs
        hub._registry.join("box", None)
        hub._registry.add("box", [dict(DEVICE)], lambda queue, index: self.open_local(queue, index, hub._limits))
        await self.join_again()

    def open_local(self, queue: Opening, index: int, limits: Limits) -> Port:
        """A process for a queue, of this server or of a machine that has joined it."""
        zygote: Any = _Zygote(self)
        return _open_cpu(zygote, 1, queue, index, limits)

    async def serve(self, serve: Callable[[Any, str], Awaitable[None]], wire: Wire) -> None:
        """Let the hub serve a wire until it ends."""
        self._nursery.start_soon(serve, wire, wire.peer)
        while wire._handle is None:
            await trio.lowlevel.checkpoint()

    def model(self, way: Way, queue: int) -> ModelQueue:
        """A new model of a queue, reached this way."""

        def chunk(message: m.Chunk, bulk: bytes) -> None:
            if isinstance(way, _Process):
                way.chunk(message, bulk)
            else:
                self.say(way, message, bulk)

        return ModelQueue(queue, lambda message, bulk: self.say(way, message, bulk), chunk, self.fails)

    def fails(self) -> bool:
        """Whether a command fails on its node."""
        return self._faulty and self.choices.some(7) == 1

    def set_faulty(self) -> None:
        """From now on commands may fail."""
        self._faulty = True

    def say(self, way: Way, message: m.Message, bulk: bytes | None) -> None:
        """What a node says to the server; the liar may say something else."""
        if self.liar is not None:
            self.liar(self, way, message, bulk)
        else:
            self.tell(way, message, bulk)

    def tell(self, way: Way, message: m.Message, bulk: bytes | None) -> None:
        """The same without a liar in between."""
        if isinstance(way, Wire):
            way.give(cbor.encode(m.message_array(message)), bulk)
        else:
            way.reply(message, bulk)

    def raw(self, way: Way, array: list[object], bulk: bytes | None) -> None:
        """Any array, with bulk where its kind has some."""
        try:
            head = cbor.encode(array)
        except TypeError:
            return
        bulk = bulk or b""
        carries = bool(array) and type(array[0]) is int and array[0] in m.BULK_KINDS
        if isinstance(way, Wire):
            way.give(head, bulk if carries else None)
        else:
            way.send(head + (cbor.bytes_head(len(bulk)) + bulk if carries else b""))

    def bytes(self, way: Way, data: bytes) -> None:
        """Bytes that need not be a message."""
        if isinstance(way, Wire):
            way.give(data)
        else:
            way.send(data)

    async def join_again(self) -> None:
        """A node joins, in the place of the one that was sent away."""
        await self.turn(2)
        self.models.clear()
        self.node = Wire()
        await self.serve(self.hub.serve_node, self.node)
        self.node.give(cbor.encode(m.message_array(m.Join(1, "fuzz", "far", self.secret, [dict(DEVICE)]))))
        self._joined()

    def _joined(self) -> None:
        for head, _ in self.node.take():
            message = m.parse_message(cbor.decode(head))  # type: ignore[arg-type]
            if isinstance(message, m.Joined):
                assert message.name == "far"
                self.secret = message.secret

    def pump(self) -> None:
        """Let all nodes work off what they were sent."""
        for process in self.processes:
            process.pump()
        for head, bulk in self.node.take():
            message = m.parse_message(cbor.decode(head))  # type: ignore[arg-type]
            queue = getattr(message, "queue", 0)
            if isinstance(message, m.Attach):
                self.models[queue] = self.model(self.node, queue)
                self.say(self.node, m.Result(queue, 0, {}), None)
            elif isinstance(message, m.Close):
                self.models.pop(queue, None)
            elif queue in self.models:
                self.models[queue].take(message, bulk)

    async def end(self) -> None:
        """The session is over; with it every process is, or may be."""
        for process in self.processes:
            process.kill()

    async def turn(self, times: int = 1) -> None:
        """Let the server's tasks and the nodes go on."""
        for _ in range(times):
            self.pump()
            await trio.lowlevel.checkpoint()


Way: TypeAlias = Wire | _Process
"""Where something is said: to the other end of a connection, or by a process to its server."""
Liar: TypeAlias = "Callable[[World, Way, m.Message, bytes | None], None]"
"""Given the world, a way, and the message that should go there with its bulk."""
_W = TypeVar("_W", bound=World)


def run_world(choices: Choices, play: Callable[[_W], Awaitable[None]], kind: type[_W]) -> None:
    """Run one hub through `play`; raises what the server logged as an error of its own."""
    FAULTS.seen.clear()
    trio._core._run._r.seed(0)  # the order of tasks in a turn is drawn: the same each time

    async def main() -> None:
        async with Hub(CONFIG, None) as hub, trio.open_nursery() as nursery:
            world = kind(hub, choices, nursery)
            await world.start()
            await play(world)
            await world.end()
            nursery.cancel_scope.cancel()

    try:
        trio.run(main, clock=trio.testing.MockClock())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    assert not FAULTS.seen, FAULTS.seen[0]
