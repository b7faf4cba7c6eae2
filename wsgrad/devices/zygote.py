"""The process that local node processes and compile jobs are forked from; runs no stranger's code itself.

`python -m wsgrad.devices.zygote FD` speaks CBOR arrays over a packet socket: `setup`, `node`, `exec`, `compile` and
`stop` come in; `ready`, `node`, `error`, `compiled` and `exited` go out. It has one thread and has imported what its
children need, so that a fork is quick and safe. When the server's end closes, everything it started ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from wsgrad.devices import elf, linux, node
from wsgrad.devices.compiler import compile_source
from wsgrad.devices.native import Native
from wsgrad.devices.sandbox import Profile, detect_profile
from wsgrad.devices.toolchain import Compiler
from wsgrad.errors import WsgradError
from wsgrad.transport import cbor

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKET_BYTES: Final = 1 << 16
_MAX_FDS: Final = 2
_DRIVERS: Final = {"webgpu": "wsgrad.devices.webgpu.node", "tinygrad": "wsgrad.devices.tinygrad.node"}
_DRIVER_VARIABLES: Final = {"MESA_SHADER_CACHE_DISABLE": "true", "__GL_SHADER_DISK_CACHE": "0"}
"""Caches of drivers are files, which their processes can't write."""


class Zygote:
    """Forks on request and reports what ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._native: Native | None = None
        self._options: dict[str, object] = {}
        self._profile: Profile | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        # By pidfd: the process, and the serial of its compile job (None for a node).
        self._children: dict[int, tuple[int, int | None]] = {}

    def run(self) -> None:
        """Serve until the server's end closes."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._socket.fileno():
                    self._reap(fd)
                elif not self._receive():
                    return

    def end_children(self) -> None:
        """Kill and collect everything that still runs."""
        for pid, _ in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pidfd, (pid, _) in self._children.items():
            os.waitpid(pid, 0)
            os.close(pidfd)
        self._children.clear()

    def _receive(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        try:
            request = cbor.decode(data)
            assert isinstance(request, list)
            self._handle(request, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _handle(self, request: Sequence[Any], fds: list[int]) -> None:
        match request, fds:
            case ["setup", dict() as options], [native]:
                self._native = Native(native, options["nbytes"])
                self._options = {name: options[name] for name in ("unconfined", "threads") if name in options}
                # What lives now is shared with every child; a collection there would copy its pages.
                gc.collect()
                gc.freeze()
                self._send(["ready", {}])
            case ["node", int() as serial, dict() as options], [control, ring]:
                try:
                    self._start_node(serial, options, control, ring)
                except OSError as error:
                    self._send(["error", serial, f"the node process could not be started: {error}"])
            case ["exec", int() as serial, str() as kind, str() as place], [control, ring]:
                try:
                    self._start_driver(serial, _DRIVERS[kind], place, control, ring)
                except OSError as error:
                    self._send(["error", serial, f"the node process could not be started: {error}"])
            case ["compile", int() as serial, dict() as options], [source]:
                try:
                    self._start_compile(serial, options, source)
                except OSError as error:
                    self._send(["compiled", serial, False, f"the compiler could not be started: {error}", 0])
            case ["stop", int() as serial], []:
                self._stop_compile(serial)
            case _:
                raise AssertionError(f"unknown request {request[:2]!r} with {len(fds)} descriptors")

    def _send(self, reply: list[object], fd: int | None = None) -> None:
        packet = cbor.encode(reply)
        if fd is None:
            self._socket.send(packet)
        else:
            socket.send_fds(self._socket, [packet], [fd])

    # -- children

    def _fork(self, serial: int | None) -> int:
        """0 in the child, which then has its own death tied to ours."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            linux.die_with_parent()
            if os.getppid() != parent:
                os._exit(0)
            return 0
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # ours and not collected yet, so nobody else has its number
            os.waitpid(pid, 0)
            raise
        self._children[pidfd] = pid, serial
        self._poll.register(pidfd, select.POLLIN)
        return pid

    def _start_node(self, serial: int, options: dict[str, object], control: int, ring: int) -> None:
        if self._native is None:
            self._send(["error", serial, "no node can start before the native loop is set up"])
            return
        pid = self._fork(None)
        if pid == 0:
            node.serve(socket.socket(fileno=control), ring, self._native, self._options | options)
        self._send(["node", serial, pid])

    def _start_driver(self, serial: int, module: str, place: str, control: int, ring: int) -> None:
        """A node whose driver has threads: a new interpreter, which keeps what ties it to us."""
        pid = self._fork(None)
        if pid == 0:
            try:
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                for fd in (control, ring):
                    os.set_inheritable(fd, True)
                command = [sys.executable, "-m", module, str(control), str(ring), place]
                os.execve(sys.executable, command, os.environ | _DRIVER_VARIABLES)
            finally:
                os._exit(node.EXIT_FAILED)
        self._send(["node", serial, pid])

    def _start_compile(self, serial: int, options: dict[str, Any], source: int) -> None:
        if self._profile is None:
            self._profile = detect_profile()
        if self._fork(serial) == 0:
            self._compile(serial, options, source)

    def _stop_compile(self, serial: int) -> None:
        # Only what runs in a root of its own leaves nothing behind when it is killed.
        if self._profile is Profile.NAMESPACES:
            for pid, job in self._children.values():
                if job == serial:
                    os.kill(pid, signal.SIGKILL)  # ours and not collected yet, so nobody else has its number

    def _compile(self, serial: int, options: dict[str, Any], source: int) -> NoReturn:
        """The forked job: answers on the zygote's own socket, where a packet is never torn."""
        assert self._profile is not None
        try:
            if self._profile is not Profile.NAMESPACES and not options.get("unconfined", False):
                reason = "this system can't confine the compiler fully; see `wsgrad doctor`, or give --unconfined"
                self._send(["compiled", serial, False, reason, 0])
                os._exit(0)
            text = os.pread(source, options["nbytes"], 0).decode("utf-8", "surrogateescape")
            compiler = Compiler.from_map(options["compiler"])
            seconds = max(1, round(options["seconds"]))
            program = compile_source(compiler, self._profile, text, seconds=seconds)
            self._send(["compiled", serial, True, "", len(program)], elf.memfd(program))
        except WsgradError as error:
            self._send(["compiled", serial, False, str(error), 0])
        except BaseException as error:
            self._send(["compiled", serial, False, f"the compile job failed: {type(error).__name__}", 0])
        finally:
            os._exit(0)

    def _reap(self, pidfd: int) -> None:
        pid, serial = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if serial is None:
            self._send(["exited", pid, status])
        elif status != 0:
            self._send(["compiled", serial, False, f"the compile job ended with status {status}", 0])


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    # Ctrl-C reaches the whole terminal's group, but the server still drains its nodes: they end when it closes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        zygote = Zygote(sock)
        try:
            zygote.run()
        except (BrokenPipeError, ConnectionError, struct.error):
            pass  # the server left in the middle of something
        finally:
            zygote.end_children()


if __name__ == "__main__":
    main()
