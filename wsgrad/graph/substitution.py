"""Tells whether a plan stays right when a replay puts other memory in place of recorded buffers; it changes no plan.

A plan's hazards are those of the recorded buffers, which lie apart. Put in their place, memory may be shared: by two
buffers that were given the same new one, or by one that was given what the graph also uses as another. Then the hazards
of the shared memory are found anew, and each must already be ordered by the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wsgrad.errors import LaunchError
from wsgrad.graph.hazards import Tracker
from wsgrad.graph.items import Access, Launch, Operand, Range, Transfer
from wsgrad.graph.recording import written_twice

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from wsgrad.graph.hazards import Hazard
    from wsgrad.graph.items import Device, Item
    from wsgrad.graph.recording import Buffer, Recording
    from wsgrad.graph.schedule import Schedule, Step


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a replay finds a buffer: bytes from `offset` of some memory, told apart as `Buffer.memory` is."""

    device: Device
    nbytes: int
    memory: Hashable
    offset: int = 0
    name: str = ""


def check_sizes(recording: Recording, new: Mapping[int, Placement]) -> None:
    """Check that each substitute fits the buffer in whose place it stands.

    Raises:
        LaunchError: another device or another size, or a buffer that the graph does not know.
    """
    for number, placement in new.items():
        if not 0 <= number < len(recording.buffers):
            raise LaunchError(f"the graph has no buffer {number} to put {placement.name or 'another one'} in place of")
        old = recording.buffers[number]
        name = placement.name or "the buffer"
        if placement.device != old.device:
            raise LaunchError(
                f"{name} on {placement.device.label} can't stand for {old.label}, recorded on {old.device.label}"
            )
        if placement.nbytes != old.nbytes:
            raise LaunchError(
                f"{name} with {placement.nbytes} bytes can't stand for {old.label} with {old.nbytes}: sizes must match"
            )


def shared_memory(recording: Recording, new: Mapping[int, Placement]) -> list[dict[int, int]]:
    """The buffers that a replay would put into the same memory.

    Returns:
        For each memory that several of the graph's touched buffers lie in: the offset of each, from the lowest of them.
    """
    users: dict[Hashable, dict[int, int]] = {}
    for number, placement in new.items():
        if number in recording.touched:
            users.setdefault(placement.memory, {})[number] = placement.offset
    for memory, offsets in users.items():
        kept = recording.find(memory)
        if kept is not None and kept.number not in new and kept.number in recording.touched:
            offsets[kept.number] = 0
    groups = []
    for offsets in users.values():
        if len(offsets) > 1:
            low = min(offsets.values())
            groups.append({number: offsets[number] - low for number in sorted(offsets)})
    return groups


def check_shared(recording: Recording, schedule: Schedule, offsets: Mapping[int, int]) -> None:
    """Check one entry of `shared_memory` against a plan.

    Raises:
        LaunchError: two buffers share bytes in a way that the plan does not order.
    """
    tracker = Tracker()
    moved: dict[int, list[tuple[Buffer, Range, Access]]] = {}
    for index, item in enumerate(recording.items):
        accesses = []
        for range_, access in item.accesses:
            if range_.buffer in offsets:
                place = Range(0, range_.offset + offsets[range_.buffer], range_.nbytes)
                accesses.append((recording.buffers[range_.buffer], place, access))
        if not accesses:
            continue
        moved[index] = accesses
        _check_one(recording, item, offsets)
        for hazard in tracker.add(index, [(place, access) for _, place, access in accesses]):
            before, after = (_step(recording, schedule, at, offsets) for at in (hazard.before, index))
            if not schedule.precedes(before, after):
                one, other = _culprits(moved[hazard.before], accesses, hazard)
                raise LaunchError(
                    f"{one.label} and {other.label} would share memory in this replay, and the graph was planned for "
                    f"them apart: items {hazard.before} and {index} may run at once. Give each memory of its own, or "
                    f"record the graph with the shared one"
                )


def _check_one(recording: Recording, item: Item, offsets: Mapping[int, int]) -> None:
    """A launch must not write what is shared twice."""
    if not isinstance(item, Launch):
        return
    written = []
    owners = []
    for argument in item.arguments:
        if isinstance(argument, Operand) and argument.range.buffer in offsets and argument.access & Access.WRITE:
            range_ = argument.range
            place = Range(0, range_.offset + offsets[range_.buffer], range_.nbytes)
            owners.append(recording.buffers[range_.buffer])
            written.append(replace(argument, range=place))
    clash = written_twice(written, alias=item.alias)
    if clash is not None:
        one, other = (owners[place].label for place in clash)
        raise LaunchError(
            f"{item.name or f'program {item.program}'} would write overlapping ranges of {one} and {other}, which "
            f"share memory in this replay: give each memory of its own"
        )


def _step(recording: Recording, schedule: Schedule, index: int, offsets: Mapping[int, int]) -> Step:
    """The step that uses the shared memory; of a transfer only one half does, as the other is on another device."""
    item = recording.items[index]
    return schedule.step_of(index, writes=isinstance(item, Transfer) and item.target.buffer in offsets)


def _culprits(
    before: list[tuple[Buffer, Range, Access]], after: list[tuple[Buffer, Range, Access]], hazard: Hazard
) -> tuple[Buffer, Buffer]:
    """The two buffers of an unordered hazard; they differ, since the plan orders those of one buffer."""
    for other, later, access in after:
        for one, earlier, first in before:
            overlap = earlier.offset < later.end and later.offset < earlier.end
            if later == hazard.range and overlap and (first | access) & Access.WRITE and one is not other:
                return one, other
    raise AssertionError("a hazard within one buffer was left unordered by the plan")
