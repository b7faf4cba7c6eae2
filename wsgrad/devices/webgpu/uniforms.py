"""Keeps small values where launches can bind them, equal ones once, and writes them before a submission."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from wsgrad.devices.webgpu.work import Work

_UNIFORM, _COPY_DST = 0x40, 0x8
_NBYTES: Final = 64 << 10
SLOT_NBYTES: Final = 32
"""The most that one value may take."""


class Uniforms:
    """The values of one device. A table that is full is left to the bind groups that refer to it, and a new one begins.

    Attributes:
        generation: counts the tables; places of an older one are not given any more.
    """

    def __init__(self, work: Work, alignment: int) -> None:
        self.generation = 0
        self._work = work
        self._step = max(alignment, SLOT_NBYTES)
        self._places: dict[bytes, int] = {}
        self._data = bytearray(_NBYTES)
        self._written = 0
        self._buffer: Any = None
        work.before_submit(self._write)
        self._begin()

    def place(self, value: bytes) -> tuple[Any, int]:
        """The buffer and the offset where a value of at most `SLOT_NBYTES` bytes will be."""
        at = self._places.get(value)
        if at is None:
            at = len(self._places) * self._step
            if at + self._step > _NBYTES:
                self._write()
                self._begin()
                at = 0
            self._places[value] = at
            self._data[at : at + len(value)] = value
        return self._buffer, at

    def _begin(self) -> None:
        self.generation += 1
        self._places.clear()
        self._data = bytearray(_NBYTES)
        self._written = 0
        self._buffer = self._work.device.create_buffer(size=_NBYTES, usage=_UNIFORM | _COPY_DST)

    def _write(self) -> None:
        end = len(self._places) * self._step
        if end > self._written:
            data = memoryview(self._data)[self._written : end]
            self._work.device.queue.write_buffer(self._buffer, self._written, data)
            self._written = end
