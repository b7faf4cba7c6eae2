"""A server process of our own on this machine: started with a pipe, found by what it writes there, ended with us.

Nothing of the server is imported here. The server ends when the pipe's other end closes, however this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import IO

from wsgrad.errors import ConnectionLost
from wsgrad.transport.wakeup import Poll

_STOP_SECONDS = 7.0
_MAX_LINE = 1 << 16


class EmbeddedServer:
    """A running `python -m wsgrad.server`.

    Attributes:
        url: its address with its client token.
    """

    def __init__(self, *, timeout: float) -> None:
        """Start one and wait until it accepts connections.

        Raises:
            ConnectionLost: it ended, or was not ready in time; the message holds what it said.
        """
        reader, writer = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._reader = reader
        command = [sys.executable, "-m", "wsgrad.server", "--host", "127.0.0.1", "--port", "0"]
        command += ["--ready-fd", str(writer), "--log-level", "warning"]
        # Settings of a server that is meant for others, such as its port or certificate, are not for this one.
        environment = {name: value for name, value in os.environ.items() if not _is_servers_own(name)}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(writer,),
                # Ctrl-C in a terminal reaches the whole foreground group, but this server's end is ours to decide.
                start_new_session=True,
                env=environment,
            )
        except BaseException:
            os.close(reader)
            self._log.close()
            raise
        finally:
            os.close(writer)
        _running.add(self)
        try:
            self.url = self._await_ready(time.monotonic() + timeout, timeout)
        except BaseException:
            self._process.kill()
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def said(self) -> str:
        """What the server has written to its log: warnings and errors."""
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self._log.fileno()).st_size
            return os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return ""

    def stop(self) -> None:
        """End it and wait for its end. Idempotent."""
        self._close_pipe()
        if self._process.returncode is None:
            self._wait(_STOP_SECONDS)
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        self._log.close()

    def abandon(self) -> None:
        """End it without waiting: a thread collects it."""
        self._close_pipe()
        # At the very end of the interpreter no thread can be started; then the system collects it.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.stop, name="wsgrad-stop", daemon=True).start()

    def _close_pipe(self) -> None:
        reader, self._reader = self._reader, -1
        if reader >= 0:
            os.close(reader)

    def _await_ready(self, deadline: float, timeout: float) -> str:
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConnectionLost(f"the embedded server was not ready within {timeout:g} s; it said: {self.said()}")
            poll = Poll()
            poll.watch(self._reader)
            if not poll.wait(left):
                continue
            data = os.read(self._reader, _MAX_LINE)
            if not data or len(line) > _MAX_LINE:
                self._wait(1.0)
                raise ConnectionLost(
                    f"the embedded server ended (status {self._process.poll()}) before it was ready; "
                    f"it said: {self.said()}"
                )
            line += data
        url = json.loads(line)["url"]
        assert isinstance(url, str)
        return url

    def _wait(self, seconds: float) -> None:
        """Wait for its end; `Popen.wait` with a time-out would look only every 50 ms."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(self._process.pid)
                try:
                    poll = Poll()
                    poll.watch(fd)
                    poll.wait(seconds)
                finally:
                    os.close(fd)
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def _is_servers_own(name: str) -> bool:
    return name.startswith("WSGRAD_") and name not in _KEPT and not name.startswith("WSGRAD_MAX_")


_KEPT = frozenset(
    {"WSGRAD_CC", "WSGRAD_DEVICE", "WSGRAD_UNCONFINED", "WSGRAD_CPU_THREADS", "WSGRAD_LAUNCH_SECONDS"}
    | {"WSGRAD_COMPILE_SECONDS", "WSGRAD_RESUME_GRACE", "WSGRAD_IDLE_SECONDS"}
)

_running: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _after_fork() -> None:
    # The child's copy of the pipe would keep the server alive after its parent's end.
    for server in list(_running):
        with contextlib.suppress(OSError):
            server._close_pipe()
        server._process.returncode = 0  # not this process's child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
