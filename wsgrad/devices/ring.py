"""The memory that a server shares with one local node process: slots for bulk and a page that shows progress.

Another node of the same session may map it too, to read what is sent to it where its source has put it.

Nobody is woken through it; messages on the node's socket say when a slot is full or empty. The node runs a stranger's
machine code, so the server takes nothing in here as checked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Final

from wsgrad.devices import linux

SLOT_BYTES: Final = 1 << 20
SLOTS: Final = 8
"""The first half carries uploads, the second downloads, each used in order."""
UPLOAD_SLOTS: Final = range(4)
DOWNLOAD_SLOTS: Final = range(4, 8)
_CONTROL: Final = SLOTS * SLOT_BYTES
_NBYTES: Final = _CONTROL + 4096
_NUMBER: Final = struct.Struct("<Q")
_PROGRESS: Final = struct.Struct("<QQQQ")
_STEP_AT: Final = 24


class Ring:
    """One end of the ring; both ends map the same memory.

    Attributes:
        fd: the memfd, to be sent to the other end; -1 once given away.
        address: where slot 0 starts in this process.
        progress_address: where the native loop writes the number of the launch that it runs.
        step_address: where it writes which step of a graph it runs.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _NBYTES)
        self._view = memoryview(self._map)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.progress_address = self.address + _CONTROL
        self.step_address = self.progress_address + _STEP_AT
        self._counter = 0

    @classmethod
    def create(cls) -> Ring:
        """A new ring; its pages cost memory only once they are used."""
        fd = os.memfd_create("wsgrad-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _NBYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Ring:
        """The ring behind a descriptor that another process sent; the caller keeps the descriptor."""
        ring = cls(fd)
        ring.fd = -1
        return ring

    def slot(self, index: int) -> memoryview:
        """The writable bytes of one slot."""
        if not 0 <= index < SLOTS:
            raise IndexError(f"slot {index} of {SLOTS}")
        return self._view[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]

    def progress(self) -> tuple[int, bool]:
        """The number of the command that the node says it runs, and whether it says that it runs one."""
        number, running, _, _ = _PROGRESS.unpack_from(self._view, _CONTROL)
        return number, running != 0

    def step(self) -> int:
        """Which step of a graph the node says that it runs: the first is 1."""
        _, _, _, step = _PROGRESS.unpack_from(self._view, _CONTROL)
        return int(step)

    def set_progress(self, number: int, running: bool, step: int = 0) -> None:
        """Say which command runs now, and which step of its graph, or that the node waits."""
        self._counter += 1
        _PROGRESS.pack_into(self._view, _CONTROL, number, running, self._counter, step)

    def open_to_read(self) -> int:
        """A descriptor of the ring through which nobody can write to it; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap the ring. Slots that somebody still holds keep it mapped until they are dropped."""
        self.close_fd()
        self._anchor = None
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            # A view of a slot is still in use, by a receive under way for instance: it frees the mapping at its end.
            return


class LentRing:
    """The slots of another node's ring, mapped to be read; writing to them ends the process."""

    def __init__(self, fd: int) -> None:
        # Not by the module mmap, which duplicates the descriptor: a confined process may not do that.
        self._address = linux.mmap(0, _CONTROL, linux.PROT_READ, linux.MAP_SHARED, fd)
        self._view = memoryview((ctypes.c_char * _CONTROL).from_address(self._address)).cast("B")

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot."""
        return self._view[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]

    def close(self) -> None:
        """Unmap it; nothing may refer to its slots any more."""
        linux.munmap(self._address, _CONTROL)
