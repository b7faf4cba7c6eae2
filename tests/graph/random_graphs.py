"""Random recordings, and an interpreter that runs parts of a plan on byte arrays in any order that they allow."""

import json
import random
import zlib
from collections.abc import Iterator
from itertools import pairwise

from wsgrad.graph.items import Access, Copy, Device, Fill, Launch, Operand, Range, Transfer
from wsgrad.graph.parse import parse_part
from wsgrad.graph.part import CopyOp, FillOp, LaunchOp, Part, ReceiveOp, SendOp, part_array
from wsgrad.graph.recording import Recording
from wsgrad.graph.schedule import Receive, Schedule

UNIT = 4


def random_recording(rng: random.Random, *, most_items: int = 24) -> Recording:
    """A few devices on one or two servers, small buffers, and items of every kind, transfers often in a row."""
    devices = [Device(rng.randrange(2), index) for index in range(rng.randint(1, 4))]
    recording = Recording()
    homes: dict[Device, list[int]] = {}
    for device in devices:
        homes[device] = [
            recording.buffer(device, UNIT * rng.randint(1, 8), memory=(device, at), name=f"{device.label}:{at}")
            for at in range(rng.randint(1, 3))
        ]

    def some_range(device: Device, nbytes: int | None = None) -> Range | None:
        number = rng.choice(homes[device])
        units = recording.buffers[number].nbytes // UNIT
        size = rng.randint(1, units) if nbytes is None else nbytes // UNIT
        return Range(number, UNIT * rng.randint(0, units - size), UNIT * size) if size <= units else None

    def chain(one: Device, other: Device) -> Iterator[Transfer]:
        source, target = some_range(one), some_range(other)
        units = min(source.nbytes, target.nbytes) // UNIT
        places = list(range(units))
        if rng.random() < 0.3:
            places.reverse()
        for place in places:
            yield Transfer(
                Range(target.buffer, target.offset + UNIT * place, UNIT),
                Range(source.buffer, source.offset + UNIT * place, UNIT),
            )

    wanted = rng.randint(1, most_items)
    while len(recording.items) < wanted:
        device = rng.choice(devices)
        kind = rng.random()
        if kind < 0.45:
            operands = []
            for _ in range(rng.randint(1, 3)):
                range_ = some_range(device)
                free = all(
                    range_.buffer != o.range.buffer or range_.offset >= o.range.end or o.range.offset >= range_.end
                    for o in operands
                )
                access = rng.choice(list(Access)) if free else Access.READ
                operands.append(Operand(range_, access))
            program = len(recording.items)
            recording.add(Launch(device, program, "p" * len(operands), tuple(operands), name=f"k{program}"))
        elif kind < 0.55:
            source = some_range(device)
            target = some_range(device, source.nbytes)
            if target is not None:
                recording.add(Copy(device, target, source))
        elif kind < 0.65:
            recording.add(Fill(device, some_range(device), bytes(rng.randbytes(UNIT))))
        elif len(devices) > 1:
            one, other = rng.sample(devices, 2)
            for transfer in chain(one, other):
                recording.add(transfer)
                if rng.random() < 0.1:
                    break
    return recording


def conflicts(one: tuple[Range, Access], other: tuple[Range, Access]) -> bool:
    """Whether two accesses share a byte that one of them writes."""
    (a, first), (b, second) = one, other
    overlap = a.buffer == b.buffer and a.offset < b.end and b.offset < a.end
    return overlap and bool((first | second) & Access.WRITE)


def step_of(schedule: Schedule, recording: Recording, item: int, range_: Range) -> int:
    """The number of the step that makes an item's access."""
    recorded = recording.items[item]
    writes = isinstance(recorded, Transfer) and recorded.target == range_
    return schedule.step_of(item, writes=writes).number


def over_before(schedule: Schedule) -> tuple[list[int], list[int]]:
    """For each step, as bits by step number: which are over when it starts, and which when it is over."""
    at_start, at_end = [0], [0]
    previous = previous_in_queue(schedule)
    for step in schedule.steps:
        bits = 0
        for number in {wait.step for wait in step.waits} | previous[step.number]:
            bits |= at_end[number] | 1 << number
        if isinstance(step.action, Receive):
            bits |= at_start[step.number - 1]
        at_start.append(bits)
        over = bits
        if isinstance(step.action, Receive):
            over |= at_end[step.number - 1] | 1 << step.number - 1
        at_end.append(over)
    return at_start, at_end


def previous_in_queue(schedule: Schedule) -> dict[int, set[int]]:
    previous: dict[int, set[int]] = {step.number: set() for step in schedule.steps}
    for queue in range(len(schedule.queues)):
        for one, other in pairwise(step.number for step in schedule.steps if step.queue == queue):
            previous[other].add(one)
    return previous


class Memory:
    """The bytes of all buffers; several may share some."""

    def __init__(self, recording: Recording, shared: dict[int, int], rng: random.Random) -> None:
        self._places = {}
        one = bytearray(rng.randbytes(256))
        for buffer in recording.buffers:
            data = one if buffer.number in shared else bytearray(rng.randbytes(buffer.nbytes))
            self._places[buffer.number] = data, shared.get(buffer.number, 0)

    def view(self, range_: Range) -> memoryview:
        data, offset = self._places[range_.buffer]
        return memoryview(data)[offset + range_.offset : offset + range_.end]

    def contents(self) -> list[bytes]:
        return [bytes(data) for data, _ in self._places.values()]


class Running:
    """One step or item that has started: it has read, and scribbled over what it will write."""

    def __init__(self, memory: Memory, reads: list[Range], writes: list[tuple[Range, int]], salt: int) -> None:
        self._memory, self._reads, self._writes = memory, reads, writes
        self.seen = b"".join(bytes(memory.view(range_)) for range_ in reads)
        self._digest = zlib.crc32(self.seen + salt.to_bytes(4, "little"))
        for range_, stride in writes:
            view = memory.view(range_)
            for place in range(0, range_.nbytes, stride):
                view[place] ^= 0x5A
        self._after = [bytes(memory.view(range_)) for range_ in reads]

    def finish(self, data: bytes | None = None) -> None:
        assert [bytes(self._memory.view(r)) for r in self._reads] == self._after, "somebody wrote what is being read"
        for range_, stride in self._writes:
            view = self._memory.view(range_)
            for place in range(0, range_.nbytes, stride):
                made = data[place % len(data)] if data is not None else self._digest >> place % 24
                view[place] = made & 0xFF


def launch(memory: Memory, operands: list[tuple[Range, Access]], program: int) -> Running:
    """A launch that writes every other byte of what it only writes: what it leaves alone must be right as well."""
    reads = [range_ for range_, access in operands if access & Access.READ]
    writes = [(range_, 2 if access == Access.WRITE else 1) for range_, access in operands if access & Access.WRITE]
    return Running(memory, reads, writes, program)


def run_recorded(recording: Recording, memory: Memory) -> None:
    """Run the items one after another, as they were written."""
    for item in recording.items:
        match item:
            case Launch():
                launch(memory, list(item.accesses), item.program).finish()
            case Fill():
                Running(memory, [], [(item.target, 1)], 0).finish(item.pattern)
            case Copy() | Transfer():
                running = Running(memory, [item.source], [(item.target, 1)], 0)
                running.finish(running.seen)


def travelled(part: Part) -> Part:
    """The part as the other side has it."""

    def plain(value: object) -> object:
        return value.hex() if isinstance(value, bytes) else value

    array = part_array(part)
    json.dumps(array, default=plain)
    return parse_part(array)


def run_parts(parts: list[Part], recording: Recording, memory: Memory, rng: random.Random) -> None:
    """Run all queues of all parts at once, each time a random one of those that may go on."""
    accesses = {
        (item.device.server, item.device.index, item.program): [access for _, access in item.accesses]
        for item in recording.items
        if isinstance(item, Launch)
    }
    queues = [(part, device, list(lane)) for part in parts for device in part.devices for lane in device.lanes if lane]
    over: set[int] = set()
    started: dict[int, Running] = {}
    sent: dict[int, bytes] = {}
    while queues:
        ready = []
        for part, device, lane in queues:
            step = lane[0]
            received = isinstance(step.op, ReceiveOp)
            if step.number in started:
                if not received or step.number - 1 in over:
                    ready.append((part, device, lane))
            elif set(step.waits) <= over and (not received or step.number - 1 in started):
                ready.append((part, device, lane))
        assert ready, "nothing may go on"
        part, device, lane = rng.choice(ready)
        step = lane[0]
        op, slots = step.op, device.slots
        if step.number not in started:
            match op:
                case LaunchOp():
                    kinds = accesses[part.server, device.index, op.program]
                    operands = [(slots[at], kind) for at, kind in zip(op.arguments, kinds, strict=True)]
                    running = launch(memory, operands, op.program)
                case CopyOp():
                    running = Running(memory, [slots[op.source]], [(slots[op.target], 1)], 0)
                case FillOp():
                    running = Running(memory, [], [(slots[op.target], 1)], 0)
                case SendOp():
                    running = Running(memory, [slots[op.source]], [], 0)
                case ReceiveOp():
                    running = Running(memory, [], [(slots[op.target], 1)], 0)
            started[step.number] = running
            continue
        running = started[step.number]
        match op:
            case LaunchOp():
                running.finish()
            case CopyOp():
                running.finish(running.seen)
            case FillOp():
                running.finish(op.pattern)
            case SendOp():
                sent[step.number] = running.seen
                running.finish()
            case ReceiveOp():
                running.finish(sent.pop(step.number - 1))
        over.add(step.number)
        del lane[0]
        queues = [queue for queue in queues if queue[2]]
