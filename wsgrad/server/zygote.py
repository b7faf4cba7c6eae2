"""The server's end of the zygote: starts it, sets it up, asks it for node processes and compiles, starts it again.

Knows nothing of queues and sessions. If the zygote dies, its node processes die with it; whoever waits for one is told,
and the next requests go to a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.devices import elf
from wsgrad.errors import CompileError, DeviceLost
from wsgrad.transport import cbor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from wsgrad.devices.toolchain import Compiler

_log = logging.getLogger(__name__)
_PACKET_NBYTES: Final = 1 << 16
_MAX_PROGRAM_NBYTES: Final = 64 << 20
_RETRY_SECONDS: Final = (0.05, 5.0)
_READY_SECONDS: Final = 30.0


class NodeProcess:
    """A process that the zygote has forked for us.

    Attributes:
        pid: its process id, for logs.
        ended: set when it is gone.
        status: its wait status then; None where the zygote ended, so that nobody could collect it.
    """

    def __init__(self, pid: int, parent: int) -> None:
        self.pid = pid
        self.ended = trio.Event()
        self.status: int | None = None
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)  # OSError: no descriptor is left for it
            if _parent_of(pid) != parent:
                # It has ended already, and the number may be somebody else's by now.
                self._close()

    def kill(self) -> None:
        """End it now; harmless where it has ended."""
        if self._pidfd >= 0 and not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def has_ended(self, status: int | None) -> None:
        """Note how it ended."""
        self.status = status
        self.ended.set()
        self._close()

    def _close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Zygote:
    """The zygote of this server and whatever replaces it. `start` must be called in the main thread."""

    def __init__(
        self,
        *,
        compiler: Compiler | None,
        unconfined: bool,
        threads: int,
        driven: Sequence[tuple[str, str, dict[str, object]]] = (),
    ) -> None:
        """Make one; without a compiler it starts only nodes that need none.

        Args:
            driven: devices with drivers: kind, place among all that the driver has, what clients are told.
        """
        self.driven = driven
        self._compiler = compiler
        self._unconfined = unconfined
        self._threads = threads
        self._serials = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.settled = trio.Event()
        """Set once it was set up for the first time, or could not be; nodes can be asked for all the same."""
        self._ready = trio.Event()
        self._started = trio.Event()
        self._sending = trio.Lock()
        self._answers: dict[int | str, _Answer] = {}
        self._nodes: dict[int, NodeProcess] = {}

    @property
    def compiler(self) -> Compiler:
        """What compiles programs in C."""
        assert self._compiler is not None  # only cpu devices ask
        return self._compiler

    @property
    def processes(self) -> int:
        """Node processes that live."""
        return len(self._nodes)

    def start(self) -> None:
        """Start the process. In the main thread, since it ends with the thread that started it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "wsgrad.devices.zygote", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    # What ends the server's process group, such as Ctrl-C, is the server's to act on: it would end this
                    # process while that does not ignore signals yet, and another would be started.
                    process_group=0,
                )
        except BaseException:
            ours.close()
            raise
        self._socket = ours

    def stop(self) -> None:
        """End the process and with it all its children."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            # It kills and collects its children first, which takes milliseconds.
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    async def run(self, native: Callable[[], Awaitable[bytes]] | None) -> None:
        """Serve until cancelled; a zygote that dies is replaced.

        Args:
            native: gives the shared object of the native loop; called once the zygote can compile. None without cpu.
        """
        delay = _RETRY_SECONDS[0]
        try:
            while True:
                try:
                    if self._process is None:
                        self.start()
                except OSError as error:
                    # The system is short of something: what runs goes on, and there may be room in a while.
                    _log.error("the process that starts nodes can't be started: %s", error)
                else:
                    self._started.set()
                    async with trio.open_nursery() as nursery:
                        if native is not None:
                            nursery.start_soon(self._set_up, native)
                        else:
                            self.settled.set()
                        await self._read()
                        nursery.cancel_scope.cancel()
                    if self._ready.is_set() or native is None:
                        delay = _RETRY_SECONDS[0]
                    self._died(kill=True)
                    _log.error("the process that starts nodes has ended; starting another")
                await trio.sleep(delay)
                delay = min(2 * delay, _RETRY_SECONDS[1])
        finally:
            self._died(kill=False)

    async def wait_ready(self) -> None:
        """Wait until cpu nodes can be started.

        Raises:
            DeviceLost: it takes too long; why stands in the server's log.
        """
        await self._wait_until(self._ready)

    async def spawn(self, control: socket.socket, ring_fd: int, options: dict[str, object]) -> NodeProcess:
        """Start a node process for a cpu device.

        Raises:
            DeviceLost: it could not be started.
        """
        await self._wait_until(self._ready)
        serial = next(self._serials)
        return await self._spawn(serial, ["node", serial, options], control, ring_fd)

    async def spawn_driver(self, control: socket.socket, ring_fd: int, kind: str, place: str) -> NodeProcess:
        """Start a node process for the device at `place` of a kind whose driver needs a process of its own making.

        Raises:
            DeviceLost: it could not be started.
        """
        await self._wait_until(self._started)
        serial = next(self._serials)
        return await self._spawn(serial, ["exec", serial, kind, place], control, ring_fd)

    async def _wait_until(self, event: trio.Event) -> None:
        with trio.move_on_after(_READY_SECONDS):
            await event.wait()
            return
        raise DeviceLost("nodes can't be started on this server now; its log says why")

    async def _spawn(self, serial: int, request: list[object], control: socket.socket, ring_fd: int) -> NodeProcess:
        match await self._ask(serial, request, [control.fileno(), ring_fd]):
            case NodeProcess() as process:
                return process
            case str(text):
                raise DeviceLost(text)
            case _:
                raise DeviceLost("the process that starts nodes has ended")

    def serial(self) -> int:
        """A number for a compile."""
        return next(self._serials)

    async def compile(self, serial: int, text: str, seconds: float) -> bytes:
        """Compile a translation unit.

        Raises:
            CompileError: with the compiler's messages, or since it was stopped.
            DeviceLost: the zygote has ended meanwhile.
        """
        source = text.encode("utf-8", "surrogatepass")
        options: dict[str, object] = {
            "compiler": self.compiler.to_map(),
            "nbytes": len(source),
            "unconfined": self._unconfined,
            "seconds": max(1.0, math.ceil(seconds)),
        }
        fd = elf.memfd(source)
        try:
            answer = await self._ask(serial, ["compile", serial, options], [fd])
        finally:
            os.close(fd)
        match answer:
            case bytes() as program:
                return program
            case str(text):
                raise CompileError(text)
            case _:
                raise DeviceLost("the process that compiles programs has ended")

    def stop_compile(self, serial: int) -> None:
        """Ask for a compile to end soon without a result; where that is not possible it goes on to its end."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(cbor.encode(["stop", serial]))

    async def _set_up(self, native: Callable[[], Awaitable[bytes]]) -> None:
        try:
            program = await native()
        except (CompileError, DeviceLost) as error:
            _log.error("cpu devices don't work: the native loop does not compile: %s", error)
            self.settled.set()
            return
        options = {"unconfined": self._unconfined, "threads": self._threads, "nbytes": len(program)}
        fd = elf.memfd(program)
        try:
            await self._ask("setup", ["setup", options], [fd])
        finally:
            os.close(fd)
        self._ready.set()
        self.settled.set()

    async def _ask(self, key: int | str, request: list[object], fds: list[int]) -> object:
        """Send a request and wait for its answer; None where the zygote ends instead."""
        answer = self._answers[key] = _Answer()
        try:
            await self._send(cbor.encode(request), fds)
            await answer.arrived.wait()
        finally:
            # A cancelled request's answer is thrown away: its node leaves when it finds nobody at its socket.
            self._answers.pop(key, None)
        return answer.value

    async def _send(self, packet: bytes, fds: list[int]) -> None:
        async with self._sending:
            while (sock := self._socket) is not None:
                try:
                    socket.send_fds(sock, [packet], fds)
                    return
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(sock)
                except OSError:
                    break  # the reader sees the end, and answers for everybody
            if sock is None:
                raise DeviceLost("the process that starts nodes is not there")

    async def _read(self) -> None:
        sock = self._socket
        assert sock is not None
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                data, fds, _, _ = socket.recv_fds(
                    sock, _PACKET_NBYTES, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                continue
            except OSError:
                return
            if not data:
                return
            try:
                self._reply(cbor.decode(data), fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _reply(self, reply: object, fds: list[int]) -> None:
        match reply:
            case ["ready", _]:
                self._answer("setup", True)
            case ["node", int(serial), int(pid)]:
                assert self._process is not None
                try:
                    process = self._nodes[pid] = NodeProcess(pid, self._process.pid)
                except OSError as error:
                    # Without a descriptor it can't be ended safely; it leaves when it finds nobody at its socket.
                    self._answer(serial, f"no more node processes can be watched: {error}")
                else:
                    self._answer(serial, process)
            case ["error", int(serial), str(text)] | ["compiled", int(serial), False, str(text), _]:
                self._answer(serial, text)
            case ["compiled", int(serial), True, _, int(nbytes)]:
                program = os.pread(fds[0], min(nbytes, _MAX_PROGRAM_NBYTES), 0) if fds else b""
                self._answer(serial, program)
            case ["exited", int(pid), int(status)]:
                ended = self._nodes.pop(pid, None)
                if ended is not None:
                    ended.has_ended(status)
            case _:
                _log.error("the zygote says something unknown: %.80r", reply)

    def _answer(self, key: int | str, value: object) -> None:
        answer = self._answers.get(key)
        if answer is not None:
            answer.value = value
            answer.arrived.set()

    def _died(self, *, kill: bool) -> None:
        self._ready, self._started = trio.Event(), trio.Event()
        if kill and self._process is not None:
            self._process.kill()
        self.stop()
        for process in self._nodes.values():
            process.has_ended(None)
        self._nodes.clear()
        for answer in self._answers.values():
            answer.arrived.set()


class _Answer:
    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.value: object = None


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, so count from its end.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
