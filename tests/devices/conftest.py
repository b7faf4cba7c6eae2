"""A zygote and its node processes as a server would drive them, over blocking sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from wsgrad.devices import elf, mathlib, native
from wsgrad.devices.compiler import cache_key, compile_source, find_compiler, full_source
from wsgrad.devices.program_cache import ProgramCache
from wsgrad.devices.ring import SLOT_BYTES, UPLOAD_SLOTS, Ring
from wsgrad.devices.sandbox import Profile, detect_profile
from wsgrad.transport import cbor
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

PATIENCE_SECONDS = 20.0


class Toolbox:
    """Compiles programs with this machine's compiler, each text once per test run."""

    def __init__(self, directory):
        self.compiler = find_compiler()
        self.profile = detect_profile()
        self._cache = ProgramCache(directory)

    def build(self, text: str) -> bytes:
        key = cache_key(self.compiler, text)
        program = self._cache.get(key)
        if program is None:
            program = compile_source(self.compiler, self.profile, text)
            self._cache.put(key, program)
        return program

    def program(self, source: str, entry: str, signature: str, *, alias: bool = False) -> bytes:
        return self.build(full_source(source, entry, signature, alias=alias))


@pytest.fixture(scope="session")
def toolbox(tmp_path_factory):
    return Toolbox(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def native_program(toolbox):
    return toolbox.build(native.source())


@pytest.fixture
def loop(native_program):
    """A native loop in this process."""
    with memfd(native_program) as fd:
        loop = native.Native(fd, len(native_program))
    yield loop
    loop.close()


@pytest.fixture
def mapped(toolbox):
    """Maps a program into this process and gives its call shim's address."""
    images = []

    def load(source, entry, signature, **keywords):
        data = toolbox.program(source, entry, signature, **keywords)
        images.append(elf.load_bytes(data, mathlib.addresses()))
        return images[-1].symbols["wsgrad_call"]

    yield load
    for image in images:
        elf.unload(image)


@contextlib.contextmanager
def memfd(data: bytes):
    fd = elf.memfd(data)
    try:
        yield fd
    finally:
        os.close(fd)


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

    def receive(self):
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 17, 4)
        assert data, "the zygote has left"
        return cbor.decode(data), fds

    def wait_for(self, kind, key=None):
        """The first reply of a kind (and serial or pid), whatever else comes before it."""

        def fits(reply):
            return reply[0] == kind and (key is None or reply[1] == key)

        for index, (reply, _) in enumerate(self._waiting):
            if fits(reply):
                return self._waiting.pop(index)
        while True:
            reply, fds = self.receive()
            if fits(reply):
                return reply, fds
            self._waiting.append((reply, fds))

    def setup(self, native_program, **options):
        with memfd(native_program) as fd:
            self.send(["setup", {"unconfined": False, "threads": 1, "nbytes": len(native_program), **options}], fd)
        self.wait_for("ready")

    def next_serial(self):
        self._serial += 1
        return self._serial

    def compile(self, compiler, text, **options):
        serial = self.next_serial()
        data = text.encode("utf-8", "surrogateescape")
        with memfd(data) as fd:
            request = {
                "compiler": compiler.to_map(),
                "nbytes": len(data),
                "unconfined": False,
                "seconds": 5.0,
                **options,
            }
            self.send(["compile", serial, request], fd)
        return serial

    def compiled(self, serial):
        (_, _, ok, log, nbytes), fds = self.wait_for("compiled", serial)
        data = b""
        for fd in fds:
            data = os.pread(fd, nbytes, 0)
            os.close(fd)
        return ok, log, data

    def open_node(self, **options):
        ring = Ring.create()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        serial = self.next_serial()
        with theirs:
            self.send(["node", serial, {}], theirs.fileno(), ring.fd)
        ring.close_fd()
        (_, _, pid), _ = self.wait_for("node", serial)
        node = NodeClient(self, ours, ring, pid)
        node.send(m.Attach(NodeClient.QUEUE, 1, 0, {"memory": 1 << 30, "threads": 1, **options}))
        node.info = node.wait_for(m.Result).value
        return node

    def close(self):
        self.socket.close()
        with subprocess_time():
            self.process.wait()


@contextlib.contextmanager
def subprocess_time():
    yield


@dataclass
class NodeClient:
    """The server's end of one local node process."""

    QUEUE = 7

    zygote: ZygoteClient
    socket: socket.socket
    ring: Ring
    pid: int
    number: int = 0
    info: dict = field(default_factory=dict)
    received: list = field(default_factory=list)
    upload_slot: int = 0
    upload_credit: int = len(UPLOAD_SLOTS)

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
        ready, _, _ = select.select([self.socket], [], [], PATIENCE_SECONDS)
        assert ready, "the node does not answer"
        try:
            packet = self.socket.recv(1 << 18)
        except ConnectionResetError:
            return None
        if not packet:
            return None
        end = cbor.scan(packet)
        bulk = None
        if end < len(packet):
            nbytes, start = cbor.read_bytes_head(packet, end)
            bulk = packet[start : start + nbytes]
        message = m.parse_message(cbor.decode(packet[:end]))
        if isinstance(message, m.Credit):
            self.upload_credit += message.slots
        self.received.append((message, bulk))
        return message, bulk

    def wait_for(self, kind, where=lambda message: True):
        while True:
            received = self.receive()
            assert received is not None, f"the node left instead of sending {kind.__name__}"
            message, bulk = received
            if isinstance(message, kind) and where(message):
                return message if bulk is None else (message, bulk)

    def batch(self, *commands):
        """Send commands as one batch; the number of the last."""
        first = self.number + 1
        self.number += len(commands)
        self.send(m.Batch(self.QUEUE, first, [c.command_array(command) for command in commands]))
        return self.number

    def run(self, *commands):
        """Send commands and wait until they have run; the messages that came meanwhile."""
        before = len(self.received)
        last = self.batch(*commands)
        self.wait_for(m.Ack, lambda message: message.number >= last)
        return self.received[before:]

    def launches(self, words: list[int], count: int):
        first = self.number + 1
        self.number += count
        self.send(m.Launches(self.QUEUE, first, count), struct.pack(f"<{len(words)}I", *words))
        return self.number

    def load(self, program, data, signature, *, entry="entry", name=None, writes=None, alias=False):
        self.number += 1
        message = m.Load(
            self.QUEUE, self.number, program, name or entry, entry, signature, writes, alias, len(data or b"")
        )
        if data is None:
            self.send(message)
        else:
            with memfd(data) as fd:
                self.send(message, fd=fd)
        return self.number

    def upload(self, buffer, data, offset=0, transfer=1):
        last = self.batch(c.Upload(transfer, buffer, offset, len(data)))
        for start in range(0, len(data), SLOT_BYTES):
            while not self.upload_credit:
                assert self.receive() is not None
            self.chunk(transfer, start, data[start : start + SLOT_BYTES])
        return last

    def chunk(self, transfer, offset, data):
        slot = UPLOAD_SLOTS[self.upload_slot]
        self.upload_slot = (self.upload_slot + 1) % len(UPLOAD_SLOTS)
        self.upload_credit -= 1
        self.ring.slot(slot)[: len(data)] = data
        self.send(m.Slot(self.QUEUE, transfer, offset, slot, len(data)))

    def download(self, buffer, nbytes, offset=0, transfer=2):
        self.batch(c.Download(transfer, buffer, offset, nbytes))
        data = bytearray()
        while len(data) < nbytes:
            slot = self.wait_for(m.Slot)
            assert slot.offset == len(data)
            data += self.ring.slot(slot.slot)[: slot.nbytes]
            self.send(m.Credit(self.QUEUE, 1))
        return bytes(data)

    def read(self, buffer, nbytes, offset=0):
        number = self.batch(c.Read(buffer, offset, nbytes))
        _, bulk = self.wait_for(m.ReadData, lambda message: message.number == number)
        return bulk

    def ended(self):
        """Wait until the process has ended; its wait status."""
        (_, _, status), _ = self.zygote.wait_for("exited", self.pid)
        return status

    def close(self):
        self.socket.close()
        self.ring.close()


@pytest.fixture(scope="session")
def zygote(native_program):
    zygote = ZygoteClient()
    zygote.setup(native_program)
    yield zygote
    zygote.close()


@pytest.fixture
def node(zygote):
    node = zygote.open_node()
    yield node
    node.close()
    node.ended()


assert Profile  # the profiles are compared in several tests
