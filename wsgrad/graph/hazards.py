"""Finds what must come before what: hazards on byte ranges of base buffers. It knows no queues and orders nothing.

For each buffer a `Tracker` keeps the bytes cut into segments, each with its last writer and who has read it since, so
an access costs what it overlaps, not what came before. Reported are the hazards that matter: one that follows from two
others (a write after a write that somebody has read in between) is left out.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsgrad.graph.items import Access, Range

if TYPE_CHECKING:
    from collections.abc import Iterable


class Kind(enum.Enum):
    """Why one access must come after another."""

    RAW = "read after write"
    WAR = "write after read"
    WAW = "write after write"


@dataclass(frozen=True, slots=True)
class Hazard:
    """The item at hand must come after item `before`: its own access to `range` shares bytes with it."""

    before: int
    kind: Kind
    range: Range


class _Segment:
    """Bytes that were last written by one item (-1: by none) and read since by these."""

    __slots__ = ("readers", "writer")

    def __init__(self, writer: int, readers: dict[int, int]) -> None:
        self.writer = writer
        self.readers = readers


class _Buffer:
    """The segments of one buffer; they cover it without end, so no size is needed."""

    __slots__ = ("segments", "starts")

    def __init__(self) -> None:
        self.starts = [0]
        self.segments = [_Segment(-1, {})]

    def cut(self, range_: Range) -> tuple[int, int]:
        """Make segments start and end where the range does; which ones lie in it."""
        first = self._cut_at(range_.offset)
        return first, self._cut_at(range_.end)

    def _cut_at(self, position: int) -> int:
        starts = self.starts
        at = bisect_left(starts, position)
        if at == len(starts) or starts[at] != position:
            whole = self.segments[at - 1]
            starts.insert(at, position)
            self.segments.insert(at, _Segment(whole.writer, dict(whole.readers)))
        return at


class Tracker:
    """Takes items in their order and tells what each one must come after.

    With a `lane` for each item, only the latest reader of a lane is kept: enough where a lane runs in order, and it
    keeps a buffer that is read for ever from collecting readers.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}

    def add(self, item: int, accesses: Iterable[tuple[Range, Access]], *, lane: int | None = None) -> list[Hazard]:
        """Note an item and its accesses; items come in ascending order.

        Returns:
            Its hazards, at most one for each earlier item and each access.
        """
        key = item if lane is None else lane
        hazards: list[Hazard] = []
        writes: list[tuple[_Buffer, Range]] = []
        for range_, access in accesses:
            if not range_.nbytes:
                continue
            buffer = self._buffers.get(range_.buffer)
            if buffer is None:
                buffer = self._buffers[range_.buffer] = _Buffer()
            if access & Access.READ:
                self._read(buffer, range_, item, key, hazards)
            if access & Access.WRITE:
                writes.append((buffer, range_))
        # Reads first: an item reads what was there before it.
        for buffer, range_ in writes:
            self._write(buffer, range_, item, hazards)
        return hazards

    def forget(self, buffer: int) -> None:
        """A buffer is gone: its number may come again for another."""
        self._buffers.pop(buffer, None)

    @staticmethod
    def _read(buffer: _Buffer, range_: Range, item: int, key: int, hazards: list[Hazard]) -> None:
        first, end = buffer.cut(range_)
        seen = set()
        for segment in buffer.segments[first:end]:
            segment.readers[key] = item
            writer = segment.writer
            if writer >= 0 and writer not in seen:
                seen.add(writer)
                hazards.append(Hazard(writer, Kind.RAW, range_))

    @staticmethod
    def _write(buffer: _Buffer, range_: Range, item: int, hazards: list[Hazard]) -> None:
        first, end = buffer.cut(range_)
        seen = {item}
        for segment in buffer.segments[first:end]:
            for reader in segment.readers.values():
                if reader not in seen:
                    seen.add(reader)
                    hazards.append(Hazard(reader, Kind.WAR, range_))
            if not segment.readers and segment.writer >= 0 and segment.writer not in seen:
                seen.add(segment.writer)
                hazards.append(Hazard(segment.writer, Kind.WAW, range_))
        buffer.starts[first:end] = [range_.offset]
        buffer.segments[first:end] = [_Segment(item, {})]
