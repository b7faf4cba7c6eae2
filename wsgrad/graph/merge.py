"""Joins a recording's adjacent transfers into larger ones and notes every item's hazards; it places nothing.

Transfers between the same two buffers that continue each other on both sides become one, at the place of the first,
unless something recorded in between must come before the later one: then bytes would be overwritten that are still
read, or read before they are there. Where joining would make anybody wait longer it is done only for small transfers,
for which the cost of a transfer counts more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from wsgrad.graph.hazards import Hazard, Tracker
from wsgrad.graph.items import Copy, Fill, Launch, Range, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wsgrad.graph.items import Item

SMALL_NBYTES: Final = 1 << 20

Action: TypeAlias = Launch | Copy | Fill | Transfer


@dataclass(slots=True)
class Unit:
    """What is placed as one: an item, or transfers that were joined.

    Attributes:
        items: their indices; the first one gives the place.
        hazards: each with the item that meets it.
        awaited: something recorded later must come after it.
    """

    items: list[int]
    action: Action
    hazards: list[tuple[int, Hazard]]
    awaited: bool = False


def merged(items: Sequence[Item]) -> list[Unit]:
    """The units of a recording, in the order of their first items."""
    tracker = Tracker()
    units: list[Unit] = []
    unit_of: list[Unit] = []
    # The latest transfer between two buffers that ends, or starts, at a place.
    ends: dict[tuple[int, int, int, int], Unit] = {}
    starts: dict[tuple[int, int, int, int], Unit] = {}
    for index, item in enumerate(items):
        hazards = tracker.add(index, item.accesses)
        unit = _joined(index, item, hazards, unit_of, ends, starts) if isinstance(item, Transfer) else None
        if unit is None:
            unit = Unit([index], item, [])
            units.append(unit)
        for hazard in hazards:
            unit_of[hazard.before].awaited = True
            unit.hazards.append((index, hazard))
        unit_of.append(unit)
        if isinstance(unit.action, Transfer) and unit.action.source.nbytes:
            source, target = unit.action.source, unit.action.target
            between = source.buffer, target.buffer, target.offset - source.offset
            ends[*between, source.end] = starts[*between, source.offset] = unit
    return units


def _joined(
    index: int,
    item: Transfer,
    hazards: list[Hazard],
    unit_of: list[Unit],
    ends: dict[tuple[int, int, int, int], Unit],
    starts: dict[tuple[int, int, int, int], Unit],
) -> Unit | None:
    """The unit that a transfer was joined to, None if there is none."""
    between = item.source.buffer, item.target.buffer, item.target.offset - item.source.offset
    for unit in (ends.get((*between, item.source.offset)), starts.get((*between, item.source.end))):
        if unit is None or not isinstance(unit.action, Transfer):
            continue
        first, source, target = unit.items[0], unit.action.source, unit.action.target
        # This also leaves alone a unit that has grown past the place where it was noted: its bytes were written since.
        if any(hazard.before >= first for hazard in hazards):
            continue
        nbytes = source.nbytes + item.source.nbytes
        free = not unit.awaited and _nothing_new(unit, hazards, unit_of)
        if not (free or nbytes <= SMALL_NBYTES):
            continue
        unit.items.append(index)
        unit.action = Transfer(
            Range(target.buffer, min(target.offset, item.target.offset), nbytes),
            Range(source.buffer, min(source.offset, item.source.offset), nbytes),
        )
        return unit
    return None


def _nothing_new(unit: Unit, hazards: list[Hazard], unit_of: list[Unit]) -> bool:
    """Whether a unit already waits for all that these hazards name, or for later work of the same queue."""
    latest: dict[object, int] = {}
    for _, hazard in unit.hazards:
        queue = _queue(unit_of[hazard.before])
        latest[queue] = max(latest.get(queue, -1), hazard.before)
    return all(hazard.before <= latest.get(_queue(unit_of[hazard.before]), -1) for hazard in hazards)


def _queue(unit: Unit) -> object:
    """What tells units apart that may run at once; transfers by their two buffers, which is close enough."""
    action = unit.action
    if isinstance(action, Transfer):
        return action.source.buffer, action.target.buffer
    return action.device
