"""Puts a recording's items on the queues of their devices and places the waits between queues; it runs nothing.

A device has a queue for what it computes (launches, fills, copies inside it) and one for each direction of its
transfers, so that it sends, receives and computes at once. A transfer is two steps: a send on the source's device,
which waits for what the source needs, and a receive on the target's, which waits for what the target needs. A queue
runs its steps one after another in the order of their numbers, and a step waits only for steps with smaller numbers, so
nothing can stall. Only queues of the same device ever wait for each other: between devices, transfers are the order.

What is certain to be over when a step starts is kept as a clock: for each queue, how many of its steps. A wait whose
step the clock already holds, through other waits or the order of queues, is not placed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from wsgrad.graph.items import Copy, Device, Fill, Launch, Range, Transfer
from wsgrad.graph.merge import merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wsgrad.graph.hazards import Hazard
    from wsgrad.graph.merge import Unit
    from wsgrad.graph.recording import Recording


class Lane(enum.IntEnum):
    """The queues of a device."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue of one device."""

    device: Device
    lane: Lane

    @property
    def label(self) -> str:
        return f"{self.device.label} {self.lane.name.lower()}"


@dataclass(frozen=True, slots=True)
class Send:
    """The source's half of a transfer; the target's half is the step with the next number."""

    source: Range
    to: Device


@dataclass(frozen=True, slots=True)
class Receive:
    """The target's half of a transfer. It starts when bytes arrive: after the send, whose number is one less."""

    target: Range
    sender: Device


Action: TypeAlias = Launch | Copy | Fill | Send | Receive


@dataclass(frozen=True, slots=True)
class Wait:
    """A step waits until step `step` is over, because `item` (of its own items) meets `hazard`."""

    step: int
    item: int
    hazard: Hazard


@dataclass(frozen=True, slots=True)
class Step:
    """What a queue runs.

    Attributes:
        number: unique in the graph, from 1.
        queue: index into `Schedule.queues`.
        place: how many steps the queue runs before it.
        items: the recorded items in it; several where transfers were merged.
        clock: for each queue, how many of its steps are over when this one starts.
    """

    number: int
    queue: int
    place: int
    items: tuple[int, ...]
    action: Action
    waits: tuple[Wait, ...]
    clock: tuple[int, ...]


class Schedule:
    """The steps of a recording, in an order in which they could run one by one.

    Attributes:
        queues: those that are used, by device and lane.
        steps: step number n at place n - 1.
        signals: the steps that some other queue waits for.
    """

    def __init__(self, queues: list[Queue], steps: list[Step], first_step: list[int], transfers: list[bool]) -> None:
        self.queues = queues
        self.steps = steps
        self.signals = sorted({wait.step for step in steps for wait in step.waits})
        self._first_step = first_step
        self._transfers = transfers

    def step(self, number: int) -> Step:
        return self.steps[number - 1]

    def step_of(self, item: int, *, writes: bool = True) -> Step:
        """The step that runs an item; of a transfer the half that writes, or the one that reads."""
        return self.step(self._first_step[item] + (self._transfers[item] and writes))

    def precedes(self, before: Step, after: Step) -> bool:
        """Whether a step is certain to be over before another starts."""
        return after.clock[before.queue] > before.place


def schedule(recording: Recording) -> Schedule:
    """Plan a recording; its items are left alone."""
    units = merged(recording.items)
    queues = _queues(units, recording)
    index = {(queue.device, queue.lane): at for at, queue in enumerate(queues)}
    placer = _Placer(len(queues))
    first_step = [0] * len(recording.items)
    transfers = [isinstance(item, Transfer) for item in recording.items]

    def waits_for(hazards: Sequence[tuple[int, Hazard]]) -> dict[int, tuple[int, Hazard]]:
        """The first reason for each step that must be over; which half of a transfer that is, the buffer tells."""
        reasons: dict[int, tuple[int, Hazard]] = {}
        for item, hazard in hazards:
            before = recording.items[hazard.before]
            received = isinstance(before, Transfer) and before.target.buffer == hazard.range.buffer
            reasons.setdefault(first_step[hazard.before] + received, (item, hazard))
        return reasons

    for unit in units:
        items = tuple(unit.items)
        for item in items:
            first_step[item] = placer.next_number
        action = unit.action
        if not isinstance(action, Transfer):
            placer.place(index[action.device, Lane.COMPUTE], items, action, waits_for(unit.hazards))
            continue
        source, target = (recording.buffers[range_.buffer].device for range_ in (action.source, action.target))
        reading = waits_for([pair for pair in unit.hazards if pair[1].range.buffer == action.source.buffer])
        writing = waits_for([pair for pair in unit.hazards if pair[1].range.buffer == action.target.buffer])
        send = placer.place(index[source, Lane.SEND], items, Send(action.source, target), reading)
        receive = Receive(action.target, source)
        placer.place(index[target, Lane.RECEIVE], items, receive, writing, sender=send)
    return Schedule(queues, placer.steps, first_step, transfers)


def _queues(units: list[Unit], recording: Recording) -> list[Queue]:
    used: set[tuple[Device, Lane]] = set()
    for unit in units:
        if isinstance(unit.action, Transfer):
            used.add((recording.buffers[unit.action.source.buffer].device, Lane.SEND))
            used.add((recording.buffers[unit.action.target.buffer].device, Lane.RECEIVE))
        else:
            used.add((unit.action.device, Lane.COMPUTE))
    return [Queue(device, lane) for device, lane in sorted(used)]


class _Placer:
    """Appends steps to queues, each with its clock and the waits that the clock does not hold."""

    def __init__(self, queues: int) -> None:
        self.steps: list[Step] = []
        self._lengths = [0] * queues
        # What is over once the last step of a queue is, and once each step is.
        self._last = [(0,) * queues for _ in range(queues)]
        self._over: list[tuple[int, ...]] = []

    @property
    def next_number(self) -> int:
        return len(self.steps) + 1

    def place(
        self,
        queue: int,
        items: tuple[int, ...],
        action: Action,
        reasons: dict[int, tuple[int, Hazard]],
        *,
        sender: Step | None = None,
    ) -> Step:
        clock = self._last[queue]
        if sender is not None:
            # Bytes arrive only once the sender has started, so what it waited for is over here as well.
            clock = _later(clock, sender.clock)
        waits = []
        # From the latest on: a step that another one follows has the smaller number.
        for number in sorted(reasons, reverse=True):
            step = self.steps[number - 1]
            if clock[step.queue] <= step.place:
                clock = _later(clock, self._over[number - 1])
                waits.append(Wait(number, *reasons[number]))
        place = self._lengths[queue]
        made = Step(self.next_number, queue, place, items, action, tuple(reversed(waits)), clock)
        over = clock if sender is None else _later(clock, self._over[sender.number - 1])
        over = (*over[:queue], place + 1, *over[queue + 1 :])
        self.steps.append(made)
        self._over.append(over)
        self._last[queue] = over
        self._lengths[queue] = place + 1
        return made


def _later(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, one, other))
