"""A node in one plain process that dials in to a server and serves any number of sessions, kept apart by queue number.

It speaks what a browser tab speaks and shares the executor and the cpu runtime with local node processes, but it runs
programs in its own process: nothing confines them, and a crash ends every session on it. So it has to be asked for with
`--unconfined`; a machine that should lend its processors safely runs a server of its own.

`python -m wsgrad.devices.dialin ws://host:6667 --unconfined` takes its token from `WSGRAD_NODE_TOKEN` or the fragment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import sys
import time
from typing import TYPE_CHECKING, Final

from wsgrad.devices import elf, native
from wsgrad.devices.base import Outlet
from wsgrad.devices.compiler import ProgramCache, cache_key, compile_source, find_compiler, full_source
from wsgrad.devices.cpu import CpuRuntime
from wsgrad.devices.executor import Executor
from wsgrad.devices.program_cache import default_directory
from wsgrad.devices.sandbox import detect_profile
from wsgrad.errors import ConnectionLost, ProtocolError, WsgradError, error_from_wire
from wsgrad.transport import cbor
from wsgrad.transport import messages as m
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.dial import dial
from wsgrad.transport.frames import Closed
from wsgrad.transport.timing import DEAD_SECONDS
from wsgrad.transport.url import Endpoint, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

_HANDSHAKE_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 5.0
_SEND_SECONDS: Final = 15.0


class Builder:
    """Compiles programs for this process, each text once."""

    def __init__(self) -> None:
        self.compiler = find_compiler()
        self._profile = detect_profile()
        self._cache = ProgramCache(default_directory())

    def text(self, text: str) -> bytes:
        """The shared object of a whole translation unit; raises `CompileError`."""
        key = cache_key(self.compiler, text)
        program = self._cache.get(key)
        if program is None:
            program = compile_source(self.compiler, self._profile, text)
            self._cache.put(key, program)
        return program

    def program(self, message: m.Program, source: str) -> tuple[int, int]:
        """What the executor asks for: a descriptor and a size."""
        code = self.text(full_source(source, message.entry, message.signature, alias=message.alias))
        return elf.memfd(code), len(code)


class _ChunkOutlet(Outlet):
    """Downloads as chunks on the connection, as many at a time as the server allows."""

    def __init__(self, queue: int, send: Callable[[m.Message, memoryview | None], None]) -> None:
        self._queue = queue
        self._send = send
        self._credit = m.SLOTS
        self._chunk = memoryview(bytearray(m.CHUNK_BYTES))

    def add_credit(self, slots: int) -> None:
        self._credit += slots

    def place(self) -> memoryview | None:
        return self._chunk if self._credit else None

    def send(self, transfer: int, offset: int, nbytes: int) -> None:
        self._credit -= 1
        self._send(m.Chunk(self._queue, transfer, offset), self._chunk[:nbytes])


class DialedNode:
    """One connection to a server and the queues on it.

    Attributes:
        name: what the server calls this node.
        secret: what to join with next time to get the same name.
    """

    def __init__(self, endpoint: Endpoint, *, token: str, name: str, secret: str | None, builder: Builder) -> None:
        """Dial and join.

        Raises:
            Unauthorized: the server does not take the token.
            ConnectionLost: there is no server, or it refused the node.
        """
        self._builder = builder
        self._executors: dict[int, tuple[Executor, native.Native]] = {}
        self._native = builder.text(native.source())
        self._connection = Connection(client=True, bulk_kinds=m.BULK_KINDS)
        self._socket, leftover = dial(endpoint, route="/v1/node", token=token, cafile=None, timeout=_HANDSHAKE_SECONDS)
        # The server never stops reading, so a send that blocks this long means that it is gone.
        self._socket.settimeout(_SEND_SECONDS)
        self._last_received = time.monotonic()
        self._last_sent = self._last_received
        self._pending = self._connection.feed(leftover)
        try:
            joined = self._join(name, secret)
        except BaseException:
            self._socket.close()
            raise
        self.name = joined.name
        self.secret = joined.secret

    def run(self) -> Closed:
        """Serve until the connection ends."""
        try:
            while True:
                received = self._next()
                if isinstance(received, Closed):
                    return received
                self._handle(m.parse_message(received.head), received.bulk)
        finally:
            for queue in list(self._executors):
                self._detach(queue)
            self._socket.close()

    def close(self) -> None:
        """Leave: the server frees everything of this node's sessions."""
        self._send(m.Bye())

    def _join(self, name: str, secret: str | None) -> m.Joined:
        device: dict[str, object] = {
            "kind": "cpu",
            "label": name,
            "dialects": ["c"],
            "compiler": self._builder.compiler.version,
            "arch": platform.machine(),
            "threads": 1,
            "alignment": 64,
            "f64": True,
            "confined": False,
        }
        self._send(m.Join(m.VERSION, "wsgrad dialin", name, secret, [device]))
        received = self._next()
        if isinstance(received, Closed):
            raise ConnectionLost(f"the server closed the connection: {received.code} {received.reason}")
        match m.parse_message(received.head):
            case m.Joined() as joined:
                return joined
            case m.Refused(code, message):
                raise error_from_wire(code, message, {})
            case other:
                raise ProtocolError(f"the server answered Join with {type(other).__name__}")

    # -- the connection

    def _send(self, message: m.Message, bulk: bytes | memoryview | None = None) -> None:
        for buffer in self._connection.encode(cbor.encode(m.message_array(message)), bulk):
            self._socket.sendall(buffer)
        self._last_sent = time.monotonic()

    def _next(self) -> Received | Closed:
        while not self._pending:
            self._wait_readable()
            nbytes = self._socket.recv_into(self._connection.get_buffer())
            self._last_received = time.monotonic()
            try:
                self._pending = self._connection.buffer_updated(nbytes) if nbytes else self._connection.eof()
            finally:
                control = self._connection.take_control()
                if control:
                    self._socket.sendall(control)
        return self._pending.pop(0)

    def _wait_readable(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            now = time.monotonic()
            if now - self._last_received > DEAD_SECONDS:
                raise ConnectionLost(f"the server has been silent for {DEAD_SECONDS:g} s")
            if now - max(self._last_received, self._last_sent) > _SILENCE_SECONDS:
                self._send(m.Ping(0))
            if poll.poll(1000):
                return

    # -- what the server says

    def _handle(self, message: m.Message, bulk: memoryview | None) -> None:
        match message:
            case m.Ping():
                self._send(m.Pong(message.token))
            case m.Clock():
                self._send(m.Time(message.token, time.monotonic_ns()))
            case m.Pong() | m.Seen():
                pass
            case m.Attach():
                self._attach(message)
            case m.Close():
                self._detach(message.queue)
            case (
                m.Batch() | m.Launches() | m.Program() | m.Chunk() | m.Abort() | m.Credit() | m.Fail()
                | m.Graph() | m.Replay() | m.Unrecord() | m.Profile()
            ):  # fmt: skip
                attached = self._executors.get(message.queue)
                if attached is None:
                    raise ProtocolError(f"{type(message).__name__} for queue {message.queue}, which is not attached")
                attached[0].handle(message, bulk)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a node that dialled in")

    def _attach(self, attach: m.Attach) -> None:
        memory = attach.options.get("memory")
        fd = elf.memfd(self._native)
        try:
            loop = native.Native(fd, len(self._native))
        finally:
            os.close(fd)
        runtime = CpuRuntime(loop, memory_bytes=memory if isinstance(memory, int) else None, threads=1)
        executor = Executor(
            attach.queue,
            runtime,
            reply=self._send,
            outlet=_ChunkOutlet(attach.queue, self._send),
            build=self._builder.program,
        )
        self._executors[attach.queue] = executor, loop
        self._send(m.Result(attach.queue, 0, runtime.describe()))

    def _detach(self, queue: int) -> None:
        """Free everything of a queue, the loop that ran it included."""
        attached = self._executors.pop(queue, None)
        if attached is not None:
            executor, loop = attached
            executor.close()
            loop.close()


def main() -> None:
    """Dial in and serve; writes one JSON line with the node's name once it has joined."""
    parser = argparse.ArgumentParser(prog="python -m wsgrad.devices.dialin", description=__doc__)
    parser.add_argument("url", help="the server, as ws://host:port or wss://host:port")
    parser.add_argument("--name", default=platform.node() or "node", help="the name to ask for")
    parser.add_argument(
        "--unconfined", action="store_true", help="run programs in this process, with nothing around it"
    )
    options = parser.parse_args()
    if not options.unconfined:
        parser.error("programs would run unconfined in this process; say --unconfined if that is what you want")
    try:
        endpoint = parse_endpoint(options.url)
        token = os.environ.get("WSGRAD_NODE_TOKEN") or endpoint.token
        if not token:
            parser.error("there is no node token; set WSGRAD_NODE_TOKEN")
        node = DialedNode(endpoint, token=token, name=options.name, secret=None, builder=Builder())
        print(json.dumps({"name": node.name}), flush=True)
        closed = node.run()
    except (WsgradError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"the server closed the connection: {closed.code} {closed.reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
