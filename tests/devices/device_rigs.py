"""Three ways to reach an executor with the same messages: directly, in a node process, in a node that dialled in."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Request

from wsgrad.devices import elf
from wsgrad.devices.base import Outlet
from wsgrad.devices.compiler import cache_key, compile_source, find_compiler, full_source
from wsgrad.devices.cpu import CpuRuntime
from wsgrad.devices.executor import Executor
from wsgrad.devices.lanes import Worker
from wsgrad.devices.program_cache import ProgramCache
from wsgrad.devices.ring import SLOT_BYTES, UPLOAD_SLOTS, Ring
from wsgrad.devices.sandbox import detect_profile
from wsgrad.errors import CompileError
from wsgrad.transport import cbor, express
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.connection import Connection, Received

PATIENCE_SECONDS = 20.0


class Toolbox:
    """Compiles programs with this machine's compiler, each text once per test run."""

    def __init__(self, directory):
        self.compiler = find_compiler()
        self.profile = detect_profile()
        self._cache = ProgramCache(directory)
        self._built: dict[str, bytes | CompileError] = {}

    def build(self, text: str) -> bytes:
        built = self._built.get(text)
        if built is None:
            try:
                built = self._build(text)
            except CompileError as error:
                built = error
            self._built[text] = built
        if isinstance(built, CompileError):
            raise CompileError(str(built))
        return built

    def _build(self, text: str) -> bytes:
        key = cache_key(self.compiler, text)
        program = self._cache.get(key)
        if program is None:
            program = compile_source(self.compiler, self.profile, text)
            self._cache.put(key, program)
        return program

    def program(self, source: str, entry: str, signature: str, *, alias: bool = False) -> bytes:
        return self.build(full_source(source, entry, signature, alias=alias))


@contextlib.contextmanager
def memfd(data: bytes):
    fd = elf.memfd(data)
    try:
        yield fd
    finally:
        os.close(fd)


def acknowledged(message):
    """The last command that a reply says has run."""
    return message.number if isinstance(message, m.Ack) else message.acked


class Rig:
    """The server's end of one queue. What a kind of node does in its own way is below, in the classes of its name."""

    queue = 7

    def __init__(self, toolbox):
        self.toolbox = toolbox
        self.number = 0
        self.received = []
        self.upload_credit = len(UPLOAD_SLOTS)

    def wait_for(self, kind, where=lambda message: True):
        """The next message of a kind, with its bulk where it has one."""
        while True:
            received = self.receive()
            assert received is not None, f"the node left instead of sending {kind}"
            message, bulk = received
            if isinstance(message, m.Credit):
                self.upload_credit += message.slots
            self.received.append((message, bulk))
            if isinstance(message, kind) and where(message):
                return message if bulk is None else (message, bulk)

    def batch(self, *commands):
        """Send commands as one batch; the number of the last."""
        first = self.number + 1
        self.number += len(commands)
        self.send(m.Batch(self.queue, first, [c.command_array(command) for command in commands]))
        return self.number

    def settle(self):
        """Wait until everything so far has run; the messages that came meanwhile."""
        before = len(self.received)
        last = self.number
        self.wait_for(m.Ack | m.ReadData, lambda message: acknowledged(message) >= last)
        return [message for message, _ in self.received[before:]]

    def run(self, *commands):
        self.batch(*commands)
        return self.settle()

    def launches(self, *launches):
        """Send packed launches, each a list of words; the number of the last."""
        first = self.number + 1
        self.number += len(launches)
        words = [word for launch in launches for word in launch]
        self.send(m.Launches(self.queue, first, len(launches)), struct.pack(f"<{len(words)}I", *words))
        return self.number

    def read(self, buffer, nbytes, offset=0):
        number = self.batch(c.Read(buffer, offset, nbytes))
        message, bulk = self.wait_for(m.ReadData, lambda message: message.number == number)
        if message.acked < number:
            self.wait_for(m.Ack, lambda message: message.number >= number)
        return bytes(bulk)

    def read_as(self, layout, buffer, offset=0):
        return struct.unpack("<" + layout, self.read(buffer, struct.calcsize("<" + layout), offset))

    def upload(self, buffer, data, offset=0, transfer=1):
        """Upload as chunks, without waiting for the end."""
        number = self.batch(c.Upload(transfer, buffer, offset, len(data)))
        for start in range(0, len(data), SLOT_BYTES):
            while not self.upload_credit:
                self.wait_for(m.Credit)
            self.send_chunk(transfer, start, data[start : start + SLOT_BYTES])
        return number

    def download(self, buffer, nbytes, offset=0, transfer=2):
        self.batch(c.Download(transfer, buffer, offset, nbytes))
        data = b""
        while len(data) < nbytes:
            seen, start, chunk = self.receive_chunk()
            assert (seen, start) == (transfer, len(data))
            data += chunk
            self.send(m.Credit(self.queue, 1))
        return data


class LoadingRig(Rig):
    """A node to which the server sends compiled programs."""

    def program(self, program, source, signature, *, entry="entry", name=None, writes=None, alias=False):
        self.number += 1
        try:
            code = self.toolbox.program(source, entry, signature, alias=alias)
        except CompileError:
            code = None
        load = m.Load(
            self.queue, self.number, program, name or entry, entry, signature, writes, alias, len(code or b"")
        )
        if code is None:
            self.send(load)
        else:
            with memfd(code) as fd:
                self.send(load, fd=fd)
        return self.number


class ExecutorRig(LoadingRig):
    """The executor itself, called in this process."""

    def __init__(self, toolbox, loop, memory_bytes=1 << 30, worker=None):
        super().__init__(toolbox)
        self.answers = collections.deque()
        self.outlet = _ListOutlet(self.answers)
        self.progress = []
        self.runtime = CpuRuntime(loop, memory_bytes=memory_bytes, threads=1)
        self.executor = Executor(
            self.queue,
            self.runtime,
            reply=lambda message, bulk: self.answers.append((message, bulk)),
            outlet=self.outlet,
            progress=lambda number, step: self.progress.append((number, step)),
            worker=worker,
        )

    def send(self, message, bulk=None, fd=None):
        self.executor.handle(message, None if bulk is None else memoryview(bytearray(bulk)), fd)

    def receive(self):
        assert self.answers, "the executor has nothing more to say"
        return self.answers.popleft()

    def silent(self):
        return not self.answers

    def send_chunk(self, transfer, offset, data):
        self.upload_credit -= 1
        self.send(m.Chunk(self.queue, transfer, offset), data)

    def receive_chunk(self):
        message, bulk = self.wait_for(m.Chunk)
        return message.transfer, message.offset, bulk

    def close(self):
        self.executor.close()


class BesideRig(ExecutorRig):
    """The executor in this process, with another thread for what graphs launch."""

    def __init__(self, toolbox, loop):
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.errors = []
        self.worker = Worker(lock, failed=lambda: self.errors.append(sys.exc_info()))
        self.worker.after = self._after
        super().__init__(toolbox, loop, worker=self.worker)
        self.worker.start()

    def _after(self):
        self.executor.resume()
        self.changed.notify_all()

    def send(self, message, bulk=None, fd=None):
        with self.changed:
            super().send(message, bulk, fd)

    def receive(self):
        with self.changed:
            assert self.changed.wait_for(lambda: self.answers or self.errors, PATIENCE_SECONDS), "it does not answer"
            assert not self.errors, self.errors
            return self.answers.popleft()

    def silent(self):
        with self.changed:
            return not self.answers

    def close(self):
        with self.changed:
            assert self.changed.wait_for(lambda: not self.executor.computing, PATIENCE_SECONDS)
        self.worker.stop()
        super().close()


class _ListOutlet(Outlet):
    def __init__(self, answers):
        self._answers = answers
        self._credit = m.SLOTS
        self._place = memoryview(bytearray(m.CHUNK_BYTES))

    def add_credit(self, slots):
        self._credit += slots

    def place(self):
        return self._place if self._credit else None

    def send(self, transfer, offset, nbytes):
        self._credit -= 1
        self._answers.append((m.Chunk(ExecutorRig.queue, transfer, offset), bytes(self._place[:nbytes])))


class ZygoteClient:
    """The server's end of a zygote."""

    def __init__(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        ours.settimeout(PATIENCE_SECONDS)
        command = [sys.executable, "-m", "wsgrad.devices.zygote", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._serial = 0
        self._waiting = []

    def send(self, request, *fds):
        socket.send_fds(self.socket, [cbor.encode(request)], list(fds))

    def wait_for(self, kind, key=None):
        """The first reply of a kind (and serial or pid), whatever else comes before it; with its descriptors."""

        def fits(reply):
            return reply[0] == kind and (key is None or reply[1] == key)

        for index, (reply, _) in enumerate(self._waiting):
            if fits(reply):
                return self._waiting.pop(index)
        while True:
            data, fds, _, _ = socket.recv_fds(self.socket, 1 << 17, 4)
            assert data, "the zygote has left"
            reply = cbor.decode(data)
            if fits(reply):
                return reply, fds
            self._waiting.append((reply, fds))

    def set_up(self, native_program, **options):
        with memfd(native_program) as fd:
            self.send(["setup", {"unconfined": False, "threads": 1, "nbytes": len(native_program), **options}], fd)
        self.wait_for("ready")

    def next_serial(self):
        self._serial += 1
        return self._serial

    def compile(self, compiler, text, **options):
        """Ask for a program; the serial to wait for."""
        serial = self.next_serial()
        data = text.encode("utf-8", "surrogateescape")
        with memfd(data) as fd:
            wanted = {"compiler": compiler.to_map(), "nbytes": len(data), "unconfined": False, "seconds": 5.0}
            self.send(["compile", serial, wanted | options], fd)
        return serial

    def compiled(self, serial):
        (_, _, ok, log, nbytes), fds = self.wait_for("compiled", serial)
        data = b""
        for fd in fds:
            data = os.pread(fd, nbytes, 0)
            os.close(fd)
        return ok, log, data

    def open_node(self, toolbox, **options):
        return ProcessRig(toolbox, self, options)

    def close(self):
        self.socket.close()
        self.process.wait()


class ProcessRig(LoadingRig):
    """A local node process."""

    def __init__(self, toolbox, zygote, options):
        super().__init__(toolbox)
        self.zygote = zygote
        self.ring = Ring.create()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._slot = 0
        self._status = None
        self._rest = b""
        serial = zygote.next_serial()
        with theirs:
            zygote.send(["node", serial, {}], theirs.fileno(), self.ring.fd)
        self.ring.close_fd()
        (_, _, self.pid), _ = zygote.wait_for("node", serial)
        self.send(m.Attach(self.queue, 1, 0, {"memory": 1 << 30, "threads": 1, **options}))
        self.info = self.wait_for(m.Result).value

    def send(self, message, bulk=None, fd=None):
        packet = cbor.encode(m.message_array(message))
        if bulk is not None:
            packet += cbor.bytes_head(len(bulk)) + bulk
        if fd is None:
            self.socket.send(packet)
        else:
            socket.send_fds(self.socket, [packet], [fd])

    def receive(self):
        """The next message and its bulk; None when the node has left."""
        if not self._rest:
            ready, _, _ = select.select([self.socket], [], [], PATIENCE_SECONDS)
            assert ready, "the node does not answer"
            try:
                self._rest = self.socket.recv(1 << 18)
            except ConnectionResetError:
                return None
            if not self._rest:
                return None
        packet = self._rest
        end = cbor.scan(packet)
        message = m.parse_message(cbor.decode(packet[:end]))
        bulk = None
        if message.KIND in m.BULK_KINDS:
            nbytes, start = cbor.read_bytes_head(packet, end)
            end = start + nbytes
            bulk = packet[start:end]
        self._rest = packet[end:]
        return message, bulk

    def ask(self, buffer, nbytes):
        """Send a read in its fixed-width form; its number."""
        self.number += 1
        self.socket.send(express.request(self.queue, self.number, buffer, nbytes))
        return self.number

    def silent(self):
        return not self._rest and not select.select([self.socket], [], [], 0)[0]

    def send_chunk(self, transfer, offset, data):
        slot = UPLOAD_SLOTS[self._slot]
        self._slot = (self._slot + 1) % len(UPLOAD_SLOTS)
        self.upload_credit -= 1
        self.ring.slot(slot)[: len(data)] = data
        self.send(m.Slot(self.queue, transfer, offset, slot, len(data)))

    def receive_chunk(self):
        message = self.wait_for(m.Slot)
        return message.transfer, message.offset, bytes(self.ring.slot(message.slot)[: message.nbytes])

    def ended(self):
        """Wait until the process has ended; its wait status."""
        if self._status is None:
            (_, _, self._status), _ = self.zygote.wait_for("exited", self.pid)
        return self._status

    def close(self):
        self.socket.close()
        self.ring.close()
        self.ended()


class DialInServer:
    """A port where a real `wsgrad-serve --join` joins; what it says goes to the rig of its queue."""

    def __init__(self, toolbox, directory):
        self._toolbox = toolbox
        self._lock = threading.RLock()
        self._received = 0
        self._queues = {}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            home = {"XDG_CACHE_HOME": str(directory), "XDG_STATE_HOME": str(directory)}
            environment = dict(os.environ, WSGRAD_NODE_TOKEN="node-token-of-tests", **home)
            url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
            command = [sys.executable, "-m", "wsgrad.server", "--join", url, "--name", "Test", "--cpu-threads", "1"]
            self.process = subprocess.Popen([*command, "--log-level", "error"], env=environment)
            listener.settimeout(PATIENCE_SECONDS)
            self.socket, _ = listener.accept()
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(client=False, bulk_kinds=m.BULK_KINDS)
        self.request = self._shake_hands()
        self._events = []
        message, _ = self.next()
        assert isinstance(message, m.Join), message
        self.join = message
        self.send(m.Joined(m.VERSION, "test", "secret", {}))
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._keep_alive)
        self._heart.start()

    def _keep_alive(self):
        """Answer the node's heartbeats while no test waits for it, however long the tests between take."""
        while not self._over.wait(1.0):
            with self._lock:
                self._take_waiting()
                for event in [event for event in self._events if isinstance(event, Received)]:
                    if isinstance(message := m.parse_message(event.head), m.Ping):
                        self._events.remove(event)
                        self.send(m.Pong(message.token))

    def _take_waiting(self):
        while select.select([self.socket], [], [], 0)[0]:
            nbytes = self.socket.recv_into(self.connection.get_buffer())
            self._events += self.connection.buffer_updated(nbytes) if nbytes else self.connection.eof()
            if not nbytes:
                return

    def _shake_hands(self):
        core = WSConnection(ConnectionType.SERVER)
        while True:
            core.receive_data(self.socket.recv(4096))
            for event in core.events():
                assert isinstance(event, Request)
                self.socket.sendall(core.send(AcceptConnection(subprotocol=m.SUBPROTOCOL)))
                return event

    def next(self):
        with self._lock:
            while not self._events:
                nbytes = self.socket.recv_into(self.connection.get_buffer())
                self._events = self.connection.buffer_updated(nbytes) if nbytes else self.connection.eof()
            event = self._events.pop(0)
        if not isinstance(event, Received):
            return None
        message = m.parse_message(event.head)
        if message.KIND not in m.UNNUMBERED_KINDS:
            self._received += 1
            if self._received % 16 == 0:
                self.send(m.Seen(self._received))
        return message, event.bulk

    def send(self, message, bulk=None):
        with self._lock:
            for buffer in self.connection.encode(cbor.encode(m.message_array(message)), bulk):
                self.socket.sendall(buffer)

    def receive(self, queue):
        """The next message for one queue; what comes for others is kept."""
        kept = self._queues.setdefault(queue, collections.deque())
        while not kept:
            with self._lock:
                received = self.next()
                if received is None:
                    return None
                message = received[0]
                if isinstance(message, m.Ping):
                    self.send(m.Pong(message.token))
                elif not isinstance(message, m.Pong | m.Seen) and message.queue in self._queues:
                    self._queues[message.queue].append(received)
        return kept.popleft()

    def expect(self, queue):
        """A queue is opened: what comes for it is kept."""
        self._queues[queue] = collections.deque()

    def forget(self, queue):
        """A queue is closed: what still comes for it is thrown away."""
        self._queues.pop(queue, None)

    def silent(self, queue):
        """Whether nothing has come for a queue so far."""
        with self._lock:
            self._take_waiting()
            return not self._queues.get(queue) and not any(e.head[0] >= 16 and e.head[1] == queue for e in self._events)

    def open_queue(self, **options):
        return DialledRig(self._toolbox, self, options)

    def close(self):
        self._over.set()
        self._heart.join()
        self.socket.close()
        self.process.terminate()
        self.process.wait()


class DialledRig(Rig):
    """A queue on a node that dialled in: it compiles programs itself and takes chunks inside messages."""

    _queues = iter(range(1, 1 << 20))

    def __init__(self, toolbox, server, options):
        super().__init__(toolbox)
        self.queue = next(self._queues)
        self.server = server
        server.expect(self.queue)
        self.send(m.Attach(self.queue, 1, 0, {"memory": 1 << 30, **options}))
        self.info = self.wait_for(m.Result).value

    def send(self, message, bulk=None):
        self.server.send(message, bulk)

    def receive(self):
        return self.server.receive(self.queue)

    def silent(self):
        return self.server.silent(self.queue)

    def program(self, program, source, signature, *, entry="entry", name=None, writes=None, alias=False):
        self.number += 1
        name = name or entry
        message = m.Program(self.queue, self.number, program, "c", name, entry, signature, writes, alias)
        self.send(message, source.encode())
        return self.number

    def send_chunk(self, transfer, offset, data):
        self.upload_credit -= 1
        self.send(m.Chunk(self.queue, transfer, offset), data)

    def receive_chunk(self):
        message, bulk = self.wait_for(m.Chunk)
        return message.transfer, message.offset, bytes(bulk)

    def close(self):
        self.send(m.Close(self.queue))
        self.server.forget(self.queue)
