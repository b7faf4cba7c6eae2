"""Measures what planning a graph costs in Python: recording, planning, splitting, packing; no server takes part.

Run it with `python -m benchmarks.planning --json -`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.report import Figure, Report
from wsgrad.graph.items import Access, Device, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.native import native_words
from wsgrad.graph.parse import parse_part
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.graph.schedule import schedule
from wsgrad.graph.substitution import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

ITEMS = 1000


def layers() -> Recording:
    """One device: each launch reads two of 32 buffers and writes a third."""
    recording = Recording()
    device, n = Device(0, 0), Var("n", 1, 64)
    buffers = [recording.buffer(device, 4096, memory=at) for at in range(32)]
    for at in range(ITEMS):
        reads = [Operand(Range(buffers[(at + k) % 32], 0, 4096), Access.READ) for k in (0, 7)]
        write = Operand(Range(buffers[(at + 1) % 32], 0, 4096), Access.WRITE)
        recording.add(Launch(device, at % 8, "pppi", (*reads, write, n), grid=(n,)))
    return recording


def ring() -> Recording:
    """Eight devices on two servers: each launches, then sends a slice to the next."""
    recording = Recording()
    devices = [Device(at // 4, at % 4) for at in range(8)]
    buffers = [recording.buffer(device, 1 << 20, memory=at) for at, device in enumerate(devices)]
    for at in range(ITEMS // 2):
        one, other, offset = at % 8, (at + 1) % 8, (at // 8) % 64 * 4096
        recording.add(Launch(devices[one], 0, "p", (Operand(Range(buffers[one], offset, 4096)),)))
        recording.add(Transfer(Range(buffers[other], offset, 4096), Range(buffers[one], offset, 4096)))
    return recording


def slices() -> Recording:
    """One device: launches on overlapping ranges of one buffer that start and end anywhere."""
    recording = Recording()
    device = Device(0, 0)
    buffer = recording.buffer(device, 1 << 20, memory=0)
    for at in range(ITEMS):
        operand = Operand(Range(buffer, at * 7919 * 64 % (1 << 19), 64 + at * 104729 % (1 << 18)), Access(1 + at % 3))
        recording.add(Launch(device, 0, "p", (operand,)))
    return recording


def best(call: Callable[[], object], rounds: int = 5) -> float:
    """The shortest of a few runs, in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH", nargs="?", const="-", help="write JSON here, - for standard output")
    options = parser.parse_args()
    report = Report(f"planning {ITEMS} items")
    for make in (layers, ring, slices):
        recording = make()
        report.add(Figure(f"record, {make.__name__}", best(make), "ms"))
        report.add(Figure(f"schedule, {make.__name__}", best(partial(schedule, recording)), "ms", 50, "lower"))
        report.add(Figure(f"plan with parts, {make.__name__}", best(partial(Plan, recording)), "ms"))
    plan = Plan(layers())
    array = part_array(plan.parts[0])
    part = parse_part(array)
    report.add(Figure("check a part, layers", best(lambda: parse_part(array)), "ms"))
    report.add(Figure("native words, layers", best(lambda: native_words(part.devices[0])), "ms"))
    new = {0: Placement(Device(0, 0), 4096, "new")}
    report.add(Figure("check a substitute", 1000 * best(lambda: plan.check_substitutions(new)), "µs"))
    report.show(options.json)


if __name__ == "__main__":
    main()
