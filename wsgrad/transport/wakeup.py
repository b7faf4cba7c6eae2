"""Waiting for descriptors from threads: a poll, and a socket that other threads and signal handlers make readable."""

from __future__ import annotations

import contextlib
import select
import socket

# A poll counts milliseconds in 32 bits; whoever has more time polls again.
_LONG_SECONDS = 86_400.0


class Wakeup:
    """A socket that a poll can wait for and anybody may make readable."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to wait for, -1 once it is closed."""
        return self._reader.fileno()

    def set(self) -> None:
        """Make it readable. Never blocks, never raises."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make it unreadable."""
        with contextlib.suppress(OSError):
            self._reader.recv(1024)

    def close(self) -> None:
        """Give the descriptors back; `set` does nothing from now on."""
        self._reader.close()
        self._writer.close()


class Poll:
    """Waits for descriptors: by `select.poll` where there is one."""

    def __init__(self) -> None:
        self._poll = select.poll() if hasattr(select, "poll") else None
        self._reading: set[int] = set()
        self._writing: set[int] = set()

    def watch(self, fd: int, *, writing: bool = False) -> None:
        """Wait until this one can be read, or perhaps written; replaces what was said of it before."""
        if self._poll is not None:
            self._poll.register(fd, select.POLLIN | (select.POLLOUT if writing else 0))
            return
        self._reading.add(fd)
        self._writing.discard(fd)
        if writing:
            self._writing.add(fd)

    def forget(self, fd: int) -> None:
        """Don't wait for this one any more."""
        if self._poll is not None:
            self._poll.unregister(fd)
        self._reading.discard(fd)
        self._writing.discard(fd)

    def wait(self, seconds: float | None) -> list[int]:
        """Return the descriptors that are ready or have failed; none after so many seconds, or a day."""
        if self._poll is not None:
            # Rounded up: to wait for 0 ms over and over would burn the processor.
            milliseconds = None if seconds is None else int(min(seconds, _LONG_SECONDS) * 1000) + 1
            return [fd for fd, _ in self._poll.poll(milliseconds)]
        if seconds is not None:
            seconds = min(seconds, _LONG_SECONDS)
        readable, writable, _ = select.select(self._reading, self._writing, [], seconds)
        return [*readable, *writable]
