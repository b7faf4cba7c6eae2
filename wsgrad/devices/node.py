"""The local node process: one queue on one runtime, over its socket and ring; with `cpu`, confined before it runs any.

The server sends one message a packet, the node one or more, as in `docs/protocol.md`. The peer is the server that
started this process, so what it sends is checked for shape only; a message that breaks the rules ends the process,
which the server sees as a lost device.
"""

from __future__ import annotations

import _thread
import os
import socket
import struct
from typing import TYPE_CHECKING, Final, NoReturn

from wsgrad.devices import confine
from wsgrad.devices.base import Outlet
from wsgrad.devices.cpu import CpuRuntime
from wsgrad.devices.executor import Executor
from wsgrad.devices.lanes import Worker
from wsgrad.devices.ring import DOWNLOAD_SLOTS, SLOTS, LentRing, Ring
from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor, express
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wsgrad.devices.base import Runtime
    from wsgrad.devices.native import Native

PACKET_BYTES: Final = m.MAX_HEAD + m.MAX_WORDS_BYTES + 64
EXIT_FAILED: Final = 70
EXIT_LOST: Final = 71
"""The driver has lost the device."""
_SHORT_NBYTES: Final = 64
_OWN_BYTES: Final = 512 << 20
"""Address space for the process itself on top of a session's memory: threads' stacks, tables, alignment of blocks."""


class RingOutlet(Outlet):
    """Downloads through the ring's second half, its slots in order."""

    def __init__(self, ring: Ring, queue: int, send: Sender) -> None:
        self._ring = ring
        self._queue = queue
        self._send = send
        self._credit = len(DOWNLOAD_SLOTS)
        self._next = 0

    def add_credit(self, slots: int) -> None:
        self._credit += slots
        if self._credit > len(DOWNLOAD_SLOTS):
            raise ProtocolError(f"credit for {self._credit} slots of {len(DOWNLOAD_SLOTS)}")

    def place(self) -> memoryview | None:
        return self._ring.slot(DOWNLOAD_SLOTS[self._next]) if self._credit else None

    def send(self, transfer: int, offset: int, nbytes: int) -> None:
        slot = DOWNLOAD_SLOTS[self._next]
        self._next = (self._next + 1) % len(DOWNLOAD_SLOTS)
        self._credit -= 1
        self._send(m.Slot(self._queue, transfer, offset, slot, nbytes), None)
        self._send.flush()


class Sender:
    """Writes messages to the socket. An answer waits for the one behind it, never for the next command's run.

    A read's data and its acknowledgement thus are one packet, which wakes the server once and not twice.

    Attributes:
        lock: whoever uses the queue holds it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.lock = _thread.RLock()
        self._socket = sock
        self._held = b""

    def __call__(self, message: m.Message, bulk: bytes | None) -> None:
        packet = cbor.encode(m.message_array(message))
        if bulk is not None:
            packet += cbor.bytes_head(len(bulk)) + bulk
        with self.lock:  # a timeline's spans come without it, from the thread that runs launches
            if len(self._held) + len(packet) > PACKET_BYTES:
                self.flush()
            self._held += packet

    def flush(self) -> None:
        """Send what was held back."""
        with self.lock:
            if self._held:
                self._socket.send(self._held)
                self._held = b""


class Receiver:
    """Reads messages from a packet socket into memory of its own, with at most one descriptor beside each."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(PACKET_BYTES)
        self._view = memoryview(self._buffer)
        self._into = [self._view]

    def receive(
        self, shortcut: Callable[[bytes], bool] = lambda packet: False
    ) -> tuple[m.Message, memoryview | None, int | None] | None:
        """The next message, its bulk (valid until the next call) and its descriptor; None when the peer has left.

        Packets that `shortcut` takes are not returned.
        """
        while True:
            nbytes, ancillary, _, _ = self._socket.recvmsg_into(
                self._into, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
            if nbytes == 0:
                return None
            if nbytes > _SHORT_NBYTES or ancillary or not shortcut(bytes(self._view[:nbytes])):
                break
        fd = None
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(data) >= 4:
                (fd,) = struct.unpack_from("i", data)
        packet = self._view[:nbytes]
        try:
            end = cbor.scan(packet)
        except cbor.NeedMore as error:
            raise ProtocolError(f"a packet of {nbytes} bytes holds no whole message") from error
        head = cbor.decode_scanned(bytes(packet[:end]))
        if not isinstance(head, list):
            raise ProtocolError("a message is not an array")
        message = m.parse_message(head)
        bulk = None
        if end < nbytes:
            read = cbor.read_bytes_head(packet, end)
            if read is None or read[0] != nbytes - read[1]:
                raise ProtocolError("a packet's byte string does not end with it")
            bulk = packet[read[1] :]
        return message, bulk, fd


def serve(sock: socket.socket, ring_fd: int, native: Native, options: Mapping[str, object]) -> NoReturn:
    """Be a node process until the server closes its end; never returns.

    Args:
        options: `unconfined` and `threads` as the zygote was told.
    """
    try:
        _serve(sock, ring_fd, native, options)
        os._exit(0)
    except BaseException:
        # Nobody could read a traceback: a confined process has no file to write it to.
        os._exit(EXIT_FAILED)


def _serve(sock: socket.socket, ring_fd: int, native: Native, options: Mapping[str, object]) -> None:
    receiver = Receiver(sock)
    first = receiver.receive()
    if first is None or not isinstance(first[0], m.Attach):
        return
    attach = first[0]
    ring = Ring.attach(ring_fd)
    native.table.report_to(ring.progress_address)
    memory = _whole(attach.options.get("memory"))
    threads = _whole(attach.options.get("threads")) or _whole(options.get("threads")) or 1
    required = not options.get("unconfined", False)
    confine.prepare_node(
        keep=(sock.fileno(),), memory_bytes=None if memory is None else memory + _OWN_BYTES, required=required
    )
    send = Sender(sock)
    # In each of its threads the codec asks for random bytes once, which a confined process may not.
    worker = Worker(send.lock, failed=lambda: os._exit(EXIT_FAILED), prepare=lambda: cbor.decode(cbor.encode([])))
    native.start_threads(threads)
    worker.start()
    confine.seal_node(required=required)
    runtime = CpuRuntime(native, memory_bytes=memory, threads=threads, step_address=ring.step_address)

    def progress(number: int, step: int) -> None:
        send.flush()
        ring.set_progress(number, True, step)

    converse(sock, receiver, send, ring, attach.queue, runtime, progress=progress, worker=worker)


def converse(
    sock: socket.socket,
    receiver: Receiver,
    send: Sender,
    ring: Ring,
    queue: int,
    runtime: Runtime,
    *,
    progress: Callable[[int, int], None],
    build: Callable[[m.Program, str], tuple[int, int]] | None = None,
    worker: Worker | None = None,
) -> None:
    """Say that the device is open, and run what comes for its queue until it is closed or the server has gone.

    Args:
        progress: told of each command before it runs, and of the steps of graphs.
        build: as the executor takes it.
        worker: the same; its lock is the sender's.
    """
    outlet = RingOutlet(ring, queue, send)
    executor = Executor(queue, runtime, reply=send, outlet=outlet, progress=progress, build=build, worker=worker)

    def rest() -> None:
        send.flush()
        if not executor.computing:
            ring.set_progress(0, False)

    def after() -> None:
        executor.resume()
        rest()

    if worker is not None:
        worker.after = after

    def answer(packet: bytes) -> bool:
        # A read of an idle queue: what is below takes three times as long (20 against 60 µs, measured).
        request = express.read_request(packet)
        if request is None or request.queue != queue or not 0 < request.nbytes <= express.MAX_DATA:
            return False
        with send.lock:
            data = executor.read_now(request.number, request.buffer, request.nbytes)
            if data is None:
                return False
            sock.send(express.answer(request.queue, request.number, request.number, data))
        return True

    lent: dict[int, LentRing] = {}

    def take(message: m.Message, bulk: memoryview | None, fd: int | None) -> None:
        match message:
            case m.Slot():
                number, slot = divmod(message.slot, SLOTS)
                bulk = (lent[number] if number else ring).slot(slot)[: message.nbytes]
                executor.handle(m.Chunk(message.queue, message.transfer, message.offset), bulk)
            case (
                m.Batch() | m.Launches() | m.Load() | m.Abort() | m.Fail() | m.Credit()
                | m.Graph() | m.Replay() | m.Unrecord() | m.Profile()
            ):  # fmt: skip
                if bulk is not None and executor.waiting:
                    bulk = memoryview(bytearray(bulk))
                executor.handle(message, bulk, fd)
            case m.Lend() if fd is not None:
                lent[message.ring] = LentRing(fd)
            case m.Lend():
                lent.pop(message.ring).close()
            case m.Program() if fd is not None:
                executor.handle(message, memoryview(os.pread(fd, os.fstat(fd).st_size, 0)))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a local node")

    send(m.Result(queue, 0, runtime.describe()), None)
    while True:
        with send.lock:
            rest()
        received = receiver.receive(answer)
        if received is None or isinstance(received[0], m.Close):
            return
        with send.lock:
            take(*received)
        if received[2] is not None:
            os.close(received[2])


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
