"""What the ids of one queue's buffers and views stand for: ranges of memory that goes with the last id on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsgrad.errors import DeviceError

if TYPE_CHECKING:
    from wsgrad.devices.base import Runtime
    from wsgrad.transport.commands import View


@dataclass(slots=True)
class _Base:
    """Memory and how many buffers and views stand on it."""

    memory: int
    references: int = 1


@dataclass(frozen=True, slots=True)
class _Range:
    """What an id stands for: bytes `offset … offset + nbytes` of a base."""

    base: _Base
    offset: int
    nbytes: int


class Ranges:
    """The ids of one queue.

    Attributes:
        frees: how many ids were freed: only then may one come to stand for something else.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.frees = 0
        self._runtime = runtime
        self._ranges: dict[int, _Range] = {}

    def alloc(self, buffer: int, nbytes: int) -> None:
        """New memory under a new id."""
        self._check_new(buffer)
        memory = self._runtime.allocate(nbytes)
        try:
            self._runtime.bind(buffer, memory, 0, nbytes)
        except BaseException:
            self._runtime.release(memory)
            raise
        self._ranges[buffer] = _Range(_Base(memory), 0, nbytes)

    def view(self, command: View) -> None:
        """A range of a buffer under a new id."""
        self._check_new(command.view)
        memory, offset = self.place(command.buffer, command.offset, command.nbytes)
        base = self._ranges[command.buffer].base
        self._runtime.bind(command.view, memory, offset, command.nbytes)
        self._ranges[command.view] = _Range(base, offset, command.nbytes)
        base.references += 1

    def free(self, buffer: int) -> None:
        """An id goes; one that there never was is let pass."""
        held = self._ranges.pop(buffer, None)
        if held is None:
            return  # what should have made it was dropped
        self.frees += 1
        self._runtime.unbind(buffer)
        held.base.references -= 1
        if not held.base.references:
            self._runtime.release(held.base.memory)

    def place(self, buffer: int, offset: int, nbytes: int) -> tuple[int, int]:
        """The memory of a range of a buffer or view, checked."""
        held = self._ranges.get(buffer)
        if held is None:
            raise DeviceError(f"there is no buffer {buffer}; it was freed, or an earlier error kept it from being made")
        if offset + nbytes > held.nbytes:
            raise DeviceError(f"bytes {offset} to {offset + nbytes} are outside buffer {buffer} of {held.nbytes} bytes")
        return held.base.memory, held.offset + offset

    def find(self, buffer: int, nbytes: int) -> tuple[int, int] | None:
        """Where the first bytes of a buffer or view are; None if it is not there or has not so many."""
        held = self._ranges.get(buffer)
        return None if held is None or nbytes > held.nbytes else (held.base.memory, held.offset)

    def clear(self) -> None:
        """Forget all ids; the memory is the runtime's to free."""
        self._ranges.clear()

    def _check_new(self, buffer: int) -> None:
        if buffer in self._ranges:
            raise DeviceError(f"there is a buffer {buffer} already")
        if buffer >= self._runtime.slots_from:
            raise DeviceError(f"buffer id {buffer} is too large; ids go up to {self._runtime.slots_from - 1}")
