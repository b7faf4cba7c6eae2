"""One queue's local node process: its socket, its ring, its end; the process runs strangers' code and is not believed.

Messages go out without waiting, what the socket does not take is written by a task. The node process ends with its
port, whatever happens, and its exit status becomes the reason that the client is told.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

import trio

from wsgrad.devices import elf
from wsgrad.devices.node import EXIT_LOST
from wsgrad.devices.ring import DOWNLOAD_SLOTS, SLOTS, UPLOAD_SLOTS, Ring
from wsgrad.errors import DeviceLost, ProtocolError
from wsgrad.server.outstanding import InvalidReply
from wsgrad.server.port import DownloadChunk, Loss, Owner, Port
from wsgrad.server.watchdog import Watchdog
from wsgrad.transport import cbor, express
from wsgrad.transport.messages import INLINE_BYTES, Lend, Load, ReadData, Slot, Spans, message_array
from wsgrad.transport.tracing import MAX_SPANS_NBYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from wsgrad.server.limits import Limits
    from wsgrad.server.transfers import FlowChunk
    from wsgrad.server.zygote import NodeProcess, Zygote
    from wsgrad.transport.messages import Program

_PACKET_NBYTES: Final = (1 << 17) + 64
_PACKETS: Final = 8
"""Packets of one node that are worked off before others get a turn."""
_EXPECT_SECONDS: Final = 200e-6
"""How long everybody waits for the answer of a node that was idle; a turn of the event loop costs about as much."""
_SELECT_FDS: Final = 1024
"""What select takes; poll takes any descriptor, but waits for whole milliseconds."""
_SHORT_NBYTES: Final = 64
_END_SECONDS: Final = 2.0
_OPEN_SECONDS: Final = 30.0
_WHAT: Final = {
    signal.SIGSEGV: "address error",
    signal.SIGBUS: "address error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
    signal.SIGTRAP: "trap",
    signal.SIGABRT: "aborted",
    signal.SIGSYS: "a system call that programs may not make",
    signal.SIGKILL: "killed by the system, perhaps for lack of memory",
    signal.SIGXCPU: "processor time used up",
}

_ORPHANED: Final = "the process that starts nodes ended, and its nodes with it; open the device again"

_BULK_NBYTES: Final[dict[object, int]] = {ReadData.KIND: INLINE_BYTES, Spans.KIND: MAX_SPANS_NBYTES}

_Packet: TypeAlias = tuple[list[bytes | memoryview], int]


def describe_status(status: int | None) -> str:
    """A wait status in words for the client."""
    if status is None:
        return "its process ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number)
        except ValueError:
            return f"signal {number}"
        return f"{name.name} ({_WHAT[name]})" if name in _WHAT else name.name
    if os.WEXITSTATUS(status) == EXIT_LOST:
        return "its driver lost it, as after a launch that takes too long for the system"
    return f"its process left with status {os.WEXITSTATUS(status)}"


class LocalPort(Port):
    """A queue's node process on this machine. `start` runs a task of the queue's session.

    Its ring, its socket and its process are made by that task, within the `room` that the session has for them: one
    that is closed before that has cost nothing, however many come.
    """

    def __init__(
        self,
        owner: Owner,
        zygote: Zygote,
        limits: Limits,
        *,
        index: int,
        session: int,
        threads: int,
        start: Callable[[Callable[[], Awaitable[None]]], None],
        room: trio.Semaphore,
    ) -> None:
        super().__init__(owner, owner.number)
        self._room = room
        self._made = False
        self._zygote = zygote
        self._index = index
        self._session = session
        self._options: dict[str, object] = {
            "memory": limits.max_session_memory,
            "launch_seconds": limits.launch_seconds,
            "threads": threads,
        }
        self._watchdog = Watchdog(limits.launch_seconds)
        self._downloaded = 0
        self._lenders: dict[LocalPort, int] = {}
        self._lent = 0
        self._ring: Ring
        self._socket: socket.socket
        self._theirs: socket.socket
        self._buffer = memoryview(b"")
        self._backlog: deque[_Packet] = deque()
        self._writable = trio.Event()
        self._process: NodeProcess | None = None
        self._loss: Loss | None = None
        self._life = trio.CancelScope()
        start(self._run)

    @property
    def full(self) -> bool:
        return bool(self._backlog)

    @property
    def has_room(self) -> bool:
        return self._made and super().has_room

    @property
    def compiles(self) -> bool:
        return False

    def next_slot(self) -> memoryview | None:
        return self._ring.slot(UPLOAD_SLOTS[self._free[0]]) if self.has_room else None

    def send_binary(self, message: Program, binary: bytes | None) -> None:
        load = Load(
            self.number,
            message.number,
            message.program,
            message.name or message.entry,
            message.entry,
            message.signature,
            message.writes,
            message.alias,
            0 if binary is None else len(binary),
        )
        # A descriptor for each node: one node could write to what another is going to run.
        fd = -1 if binary is None else elf.memfd(binary)
        self._write([cbor.encode(message_array(load))], fd)

    def download_slot(self, message: Slot, chunk: DownloadChunk) -> memoryview:
        expected = DOWNLOAD_SLOTS[self._downloaded % len(DOWNLOAD_SLOTS)]
        if message.slot != expected:
            raise InvalidReply(f"slot {message.slot} where {expected} comes next")
        self._downloaded += 1
        slot = self._ring.slot(expected)
        if message.nbytes > len(slot):
            raise InvalidReply(f"{message.nbytes} bytes in a slot of {len(slot)}")
        chunk.slot = expected
        return slot[: message.nbytes]

    def pass_on(self, transfer: int, offset: int, chunk: FlowChunk) -> None:
        # Another local node's chunk stays where it is until ours has read it there: it is not copied here.
        lent = chunk.taken
        if (
            self.closed
            or not isinstance(lent, DownloadChunk)
            or lent.slot is None
            or (ring := self._ring_of(lent.port)) is None
        ):
            super().pass_on(transfer, offset, chunk)
            return
        self._with_node.append((self._free.popleft(), False, lent))
        message = Slot(self.number, transfer, offset, SLOTS * ring + lent.slot, len(chunk.bulk))
        self._write([cbor.encode(message_array(message))])

    def _ring_of(self, lender: Port) -> int | None:
        """By which number our node knows another's ring; None where it can't be lent."""
        ring = self._lenders.get(lender) if isinstance(lender, LocalPort) else None
        if ring is not None or not isinstance(lender, LocalPort) or lender._session != self._session:
            return ring
        in_use = {lent.port for _, _, lent in self._with_node if lent is not None}
        for gone in [port for port in self._lenders if port.closed and port not in in_use]:
            self._write([cbor.encode(message_array(Lend(self.number, self._lenders.pop(gone))))])
        try:
            fd = lender._ring.open_to_read()
        except OSError:
            return None
        self._lent += 1
        self._lenders[lender] = self._lent
        self._write([cbor.encode(message_array(Lend(self.number, self._lent)))], fd)
        return self._lent

    # -- Port

    def _keep(self, slot: int, bulk: memoryview, *, owned: bool) -> memoryview:
        place = self._ring.slot(UPLOAD_SLOTS[slot])[: len(bulk)]
        place[:] = bulk
        return place

    def _send_slot(self, transfer: int, offset: int, slot: int, bulk: memoryview) -> None:
        message = Slot(self.number, transfer, offset, UPLOAD_SLOTS[slot], len(bulk))
        self._write([cbor.encode(message_array(message))])

    def _send(self, head: bytes, bulk: memoryview | None) -> None:
        self._write([head] if bulk is None else [head, cbor.bytes_head(len(bulk)), bulk])

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._life.cancel()

    # -- writing

    def _write(self, parts: list[bytes | memoryview], fd: int = -1) -> None:
        """Write one packet now or, behind others, later; owns the descriptor."""
        if not self._made:
            return  # closed before it began: there is nobody to tell
        if self._backlog or not self._write_now(parts, fd):
            self._backlog.append((parts, fd))
            self._writable.set()

    def _write_now(self, parts: list[bytes | memoryview], fd: int) -> bool:
        try:
            if fd < 0:
                self._socket.sendmsg(parts)
            else:
                socket.send_fds(self._socket, parts, [fd])
        except BlockingIOError:
            return False
        except OSError:
            pass  # the node is gone; the reader sees it too and says why
        if fd >= 0:
            os.close(fd)
        return True

    async def _write_backlog(self) -> None:
        while True:
            await self._writable.wait()
            self._writable = trio.Event()
            while self._backlog:
                await trio.lowlevel.wait_writable(self._socket)
                while self._backlog and self._write_now(*self._backlog[0]):
                    self._backlog.popleft()
            self.owner.later()

    # -- the life of the process

    async def _run(self) -> None:
        with self._life:
            async with self._room:
                if self._make():
                    try:
                        await self._live()
                    finally:
                        await self._clean_up()
        if not self.closed:
            self.owner.lost(self, self._loss or Loss(describe_status(None)))

    def _make(self) -> bool:
        try:
            self._ring = Ring.create()
            try:
                self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError:
                self._ring.close()
                raise
        except OSError as error:
            self._loss = Loss(f"the server has no room for another device: {error}")
            return False
        self._socket.setblocking(False)
        self._buffer = memoryview(bytearray(_PACKET_NBYTES))
        self._made = True
        return True

    async def _spawn(self, control: socket.socket, ring_fd: int) -> NodeProcess:
        return await self._zygote.spawn(control, ring_fd, {})

    async def _live(self) -> None:
        try:
            with self._theirs:
                self._process = await self._spawn(self._theirs, self._ring.fd)
        except DeviceLost as error:
            self._loss = Loss(str(error))
            return
        self.attach(self._session, self._index, self._options)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_backlog)
            nursery.start_soon(self._watch)
            try:
                await self._read()
            except InvalidReply as error:
                self._refuse(error)
            nursery.cancel_scope.cancel()
        if self._loss is None:
            # Closing its socket is the last that a process does, so its status is not far.
            with trio.move_on_after(_END_SECONDS):
                await self._process.ended.wait()
            orphaned = self._process.ended.is_set() and self._process.status is None
            cause = _ORPHANED if orphaned else describe_status(self._process.status)
            self._loss = Loss(cause, self._ring.progress()[0], self._ring.step())

    def _refuse(self, error: InvalidReply) -> None:
        self._loss = Loss(f"its node sent an invalid reply: {error}", self._ring.progress()[0], self._ring.step())
        assert self._process is not None  # it has said something
        self._process.kill()

    async def _clean_up(self) -> None:
        if self._process is not None:
            self._process.kill()
            with trio.move_on_after(_END_SECONDS, shield=True):
                await self._process.ended.wait()
        self._socket.close()
        self._theirs.close()
        for _, fd in self._backlog:
            if fd >= 0:
                os.close(fd)
        self._backlog.clear()
        self._ring.close()

    async def _read(self) -> None:
        while not self.closed:
            await trio.lowlevel.wait_readable(self._socket)
            # What a replay's or many launches' answers make the session send goes out in one write.
            self.owner.hold_back()
            try:
                if not self._packets():
                    return
            finally:
                self.owner.let_go()

    def _packets(self) -> bool:
        """Work off what has come, for a moment; whether the node is still there."""
        for _ in range(_PACKETS):
            try:
                nbytes = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not nbytes:
                return False
            if self._packet(self._buffer[:nbytes]) or self.closed:
                break
        return True

    def expect_answer(self) -> None:
        sock, fd = self._socket, self._socket.fileno()
        if self._backlog or fd >= _SELECT_FDS or not select.select((fd,), (), (), _EXPECT_SECONDS)[0]:
            return
        try:
            nbytes = sock.recv_into(self._buffer)
            if nbytes <= _SHORT_NBYTES:
                answer = express.read_answer(bytes(self._buffer[:nbytes]))
                if answer is not None and self.owner.answered(self, answer):
                    return
            self._packet(self._buffer[:nbytes])
        except OSError:
            pass  # the reader sees it too
        except InvalidReply as error:
            self._refuse(error)

    def _packet(self, packet: memoryview) -> bool:
        """Work off a packet; whether a message stood for bulk, which takes so long to move that others get a turn."""
        moved = False
        start = 0
        while start < len(packet) and not self.closed:
            start, bulk = self._message(packet, start)
            moved = moved or bulk
        return moved

    def _message(self, packet: memoryview, start: int) -> tuple[int, bool]:
        """Work off the message at `start`; returns where the next one begins, and whether it stood for bulk."""
        try:
            end = cbor.scan(packet, start)
            raw = bytes(packet[start:end])
            array = cbor.decode_scanned(raw)
            if not isinstance(array, list) or not array:
                raise InvalidReply("a message that is no array")
            bulk = None
            limit = _BULK_NBYTES.get(array[0]) if type(array[0]) is int else None
            if limit is not None:
                head = cbor.read_bytes_head(packet, end)
                if head is None or head[0] > min(limit, len(packet) - head[1]):
                    raise InvalidReply("a message whose bytes don't fit their packet")
                end = head[1] + head[0]
                bulk = memoryview(bytes(packet[head[1] : end]))
        except cbor.NeedMore:
            raise InvalidReply("a message that is cut off") from None
        except ProtocolError as exc:
            raise InvalidReply(str(exc)) from exc
        self.owner.reply(self, array, raw, bulk)
        return end, array[0] in (Slot.KIND, Spans.KIND)

    async def _watch(self) -> None:
        """End the process when one command has run for too long, or when it does not become ready."""
        opened_by = trio.current_time() + _OPEN_SECONDS
        while True:
            await trio.sleep(self._watchdog.interval)
            number, running = self._ring.progress()
            step = self._ring.step()
            acked, sent = self.owner.span()
            expired = self._watchdog.look(
                trio.current_time(),
                acked=acked,
                sent=sent,
                number=number,
                running=running,
                step=step if step <= self.owner.steps(number) else 0,
                may_idle=self.owner.may_idle(),
            )
            process = self._process
            assert process is not None
            if expired:
                cause = f"ran longer than the limit of {self._watchdog.limit:g} s (--launch-seconds)"
                self._loss = Loss(cause, number, step, timed_out=True)
                process.kill()
                return
            if self.owner.opening and trio.current_time() > opened_by:
                self._loss = Loss(f"its node was not ready after {_OPEN_SECONDS:g} s")
                process.kill()
                return
