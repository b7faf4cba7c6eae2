"""A graph's plan: made once from a recording, split into what each server is told, checked against each replay.

It sends nothing: the client gives each server its part once, and each replay's buffers and values after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from wsgrad.graph.explain import explained
from wsgrad.graph.items import Affine, Copy, Device, Fill, Launch, Operand, Range, Var, affine
from wsgrad.graph.part import LANES, CopyOp, DevicePart, FillOp, LaunchOp, Linear, Part, PartStep, ReceiveOp, SendOp
from wsgrad.graph.picture import drawn
from wsgrad.graph.schedule import Receive, Schedule, Send, schedule
from wsgrad.graph.substitution import check_shared, check_sizes, shared_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wsgrad.graph.items import Item, Size
    from wsgrad.graph.part import Argument, Op
    from wsgrad.graph.recording import Recording
    from wsgrad.graph.substitution import Placement

_KEPT_VERDICTS: Final = 256


class Plan:
    """What was planned for a recording, which must not grow any more.

    Attributes:
        recording: what was recorded.
        schedule: its steps on their queues.
        parts: what each server does, by the server's number.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.schedule: Schedule = schedule(recording)
        self.parts: dict[int, Part] = _parts(recording, self.schedule)
        self._allowed: set[tuple[tuple[int, int], ...]] = set()

    def check_substitutions(self, new: Mapping[int, Placement]) -> None:
        """Check what a replay puts in place of recorded buffers, by their numbers; quick where no memory is shared.

        Raises:
            LaunchError: a substitute does not fit, or two buffers share memory where the plan relies on their being
                apart; both are named.
        """
        check_sizes(self.recording, new)
        for offsets in shared_memory(self.recording, new):
            key = tuple(offsets.items())
            if key in self._allowed:
                continue
            check_shared(self.recording, self.schedule, offsets)
            if len(self._allowed) >= _KEPT_VERDICTS:
                self._allowed.clear()
            self._allowed.add(key)

    def values(self, given: Mapping[str, int]) -> list[int]:
        """A replay's values of the variables, in the order in which the parts list them.

        Raises:
            LaunchError: one is missing, unknown, no integer, or outside its range.
        """
        return self.recording.values(given)

    def items_of(self, step: int) -> tuple[Item, ...]:
        """What was recorded that runs in a step, to say what failed."""
        return tuple(self.recording.items[index] for index in self.schedule.step(step).items)

    def explain(self) -> str:
        """The plan as a table: queue by queue each step, its items, what it waits for and why."""
        return explained(self.recording, self.schedule)

    def svg(self) -> str:
        """The plan as a picture: a lane for each queue, a box for each step, an arrow for each wait."""
        return drawn(self.recording, self.schedule)


def _parts(recording: Recording, planned: Schedule) -> dict[int, Part]:
    touched = [recording.buffers[number] for number in sorted(recording.touched)]
    variables = {name: at for at, name in enumerate(recording.variables)}
    makers: dict[Device, _DeviceMaker] = {}
    for step in planned.steps:
        device = planned.queues[step.queue].device
        maker = makers.setdefault(device, _DeviceMaker(device, variables))
        waits = tuple(wait.step for wait in step.waits)
        maker.lanes[planned.queues[step.queue].lane].append(PartStep(step.number, maker.op(step.action), waits))
    parts = {}
    for server in sorted({device.server for device in makers}):
        parts[server] = Part(
            server,
            tuple(makers[device].made() for device in sorted(makers) if device.server == server),
            {
                buffer.number: (buffer.device.index, buffer.nbytes)
                for buffer in touched
                if buffer.device.server == server
            },
            tuple((var.name, var.low, var.high) for var in recording.variables.values()),
        )
    return parts


class _DeviceMaker:
    """Collects what one device does."""

    def __init__(self, device: Device, variables: dict[str, int]) -> None:
        self.lanes: list[list[PartStep]] = [[] for _ in range(LANES)]
        self._device = device
        self._variables = variables
        self._programs: dict[int, str] = {}
        self._slots: dict[Range, int] = {}

    def made(self) -> DevicePart:
        lanes = tuple(tuple(lane) for lane in self.lanes)
        return DevicePart(self._device.index, self._programs, tuple(self._slots), lanes)

    def op(self, action: Launch | Copy | Fill | Send | Receive) -> Op:
        match action:
            case Launch():
                self._programs[action.program] = action.signature
                grid = None if action.grid is None else tuple(self._size(size) for size in action.grid)
                arguments: list[Argument] = []
                for argument in action.arguments:
                    if isinstance(argument, Operand):
                        arguments.append(self._slot(argument.range))
                    elif isinstance(argument, int | float | Var | Affine):
                        arguments.append(argument if isinstance(argument, float) else self._size(argument))
                return LaunchOp(action.program, grid, action.block, tuple(arguments))
            case Copy():
                return CopyOp(self._slot(action.target), self._slot(action.source))
            case Fill():
                return FillOp(self._slot(action.target), action.pattern)
            case Send():
                return SendOp(self._slot(action.source), action.to.server, action.to.index)
            case Receive():
                return ReceiveOp(self._slot(action.target), action.sender.server, action.sender.index)
            case _:
                assert_never(action)

    def _slot(self, range_: Range) -> int:
        return self._slots.setdefault(range_, len(self._slots))

    def _size(self, size: Size) -> int | Linear:
        if isinstance(size, int):
            return size
        linear = affine(size)
        return Linear(self._variables[linear.var.name], linear.scale, linear.offset)
