"""Measures graphs beside eager launches on the same devices: `python -m benchmarks.graphs --json -`.

Each function takes the figures of one row of the table and leaves the devices as it found them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import wsgrad
from benchmarks.chain import chain
from benchmarks.delayed import DelayedLink
from benchmarks.processes import server_process
from benchmarks.report import Figure, Report

if TYPE_CHECKING:
    from collections.abc import Callable

ITEMS = 1000
DELAY_SECONDS = 0.015
NOTHING = "void nothing(int *y) { }"
SPIN = "void spin(long n) { for (volatile long i = 0; i < n; i++); }"


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_replay(report: Report, device: wsgrad.Device, *, rounds: int) -> None:
    """A graph of empty kernels: waited for, and back to back."""
    nothing = device.program(NOTHING, "nothing")
    word = device.zeros(1, np.int32)
    with wsgrad.record(device) as graph:
        for _ in range(ITEMS):
            nothing(word)

    def eager() -> None:
        for _ in range(ITEMS):
            nothing(word)
        device.synchronize()

    graph.run(wait=True)
    reads, runs, launches = [], [], []
    for _ in range(rounds):
        reads.append(seconds(word.numpy))
        runs.append(seconds(lambda: graph.run(wait=True)))
    for _ in range(max(5, rounds // 10)):
        launches.append(seconds(eager))
    read, run, launch = (statistics.median(values) for values in (reads, runs, launches))
    report.add(Figure("read of 4 bytes", read * 1e3, "ms", detail=f"median of {rounds}"))
    report.add(Figure(f"run and wait of {ITEMS} empty kernels", run * 1e3, "ms", detail=f"median of {rounds}"))
    report.add(Figure("run and wait, above a read", (run - read) * 1e3, "ms", 0.2, "lower"))
    report.add(Figure(f"{ITEMS} eager launches and wait", launch * 1e3, "ms"))
    count = rounds * 10

    def back_to_back() -> None:
        for _ in range(count):
            graph.run()
        graph.wait()

    rate = ITEMS * count / min(seconds(back_to_back) for _ in range(3))
    report.add(Figure("back to back", rate, "items/s", 5e6, detail=f"best of 3, {count} runs"))
    report.add(Figure("eager launches", ITEMS / launch, "items/s"))


def measure_delay(report: Report, url: str, *, rounds: int) -> None:
    """Launches and one read over a link with a delay in each direction."""
    with DelayedLink(url, seconds=DELAY_SECONDS) as link, wsgrad.connect(link.url) as server:
        device = server.devices[0]
        nothing = device.program(NOTHING, "nothing")
        word = device.zeros(1, np.int32)
        with wsgrad.record(device) as graph:
            for _ in range(100):
                nothing(word)

        def eager() -> None:
            for _ in range(100):
                nothing(word)
            word.numpy()

        def replayed() -> None:
            graph.run()
            word.numpy()

        for name, call in (("100 launches and one read", eager), ("a graph of 100 launches and one read", replayed)):
            call()
            trips = statistics.median(seconds(call) for _ in range(rounds)) / (2 * DELAY_SECONDS)
            detail = f"{DELAY_SECONDS * 1e3:g} ms each way"
            report.add(Figure(name, trips, "round trips", 2.0, "lower", detail))


def measure_transfer(report: Report, source: wsgrad.Device, target: wsgrad.Device, *, nbytes: int, rounds: int) -> None:
    """A transfer inside a graph beside one thread's memcpy into memory that was used before."""
    x, y = source.zeros(nbytes, np.uint8), target.zeros(nbytes, np.uint8)
    x.fill(7)
    with wsgrad.record(source, target) as graph:
        y.copy_from(x)
    graph.run(wait=True)
    a, b = np.full(nbytes, 7, np.uint8), np.full(nbytes, 1, np.uint8)
    pairs = [(seconds(lambda: np.copyto(b, a)), seconds(lambda: graph.run(wait=True))) for _ in range(rounds)]
    copied, moved = (statistics.median(values) for values in zip(*pairs, strict=True))
    mib = nbytes >> 20
    report.add(Figure("memcpy of one thread", nbytes / copied / 1e6, "MB/s", detail=f"median of {rounds}"))
    report.add(Figure(f"transfer of {mib} MiB between two devices", nbytes / moved / 1e6, "MB/s"))
    report.add(Figure("transfer, share of memcpy", statistics.median(c / m for c, m in pairs), "", 0.2))
    if not np.array_equal(y[-8:].numpy(), np.full(8, 7)):
        raise AssertionError("the target has other bytes than were sent")


def measure_servers(report: Report, urls: list[str], *, nbytes: int, rounds: int) -> None:
    """A transfer from server to server beside raw TCP through as many processes: node, server, server, node."""
    with wsgrad.connect_all([f"{url}*1" for url in urls]) as servers, chain(processes=4, nbytes=nbytes) as raw:
        source, target = servers.devices
        x, y = source.zeros(nbytes, np.uint8), target.zeros(nbytes, np.uint8)
        x.fill(7)

        def moved() -> None:
            y.copy_from(x)
            target.synchronize()

        moved()
        raw.send()
        pairs = [(raw.send(), seconds(moved)) for _ in range(rounds)]
        if servers.statistics["relayed"]:
            raise AssertionError("the servers had no link")
        if not np.array_equal(y[-8:].numpy(), np.full(8, 7)):
            raise AssertionError("the target has other bytes than were sent")
    mib = nbytes >> 20
    theirs, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
    report.add(Figure("raw TCP through four processes", nbytes / theirs / 1e6, "MB/s", detail=f"median of {rounds}"))
    report.add(Figure(f"transfer of {mib} MiB between two servers", nbytes / ours / 1e6, "MB/s"))
    share = statistics.median(raw_s / our_s for raw_s, our_s in pairs)
    report.add(Figure("transfer between servers, share of raw TCP", share, "", 0.5))


def intervals(path: Path, category: str) -> list[tuple[float, float]]:
    """When the kernels, or the copies, of a timeline ran on their device, by category, in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == category]


def overlap(server: wsgrad.Server, graph: wsgrad.Graph) -> float:
    """How long a kernel and copies of a graph ran at once, by a timeline of one run; a share of the shorter."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.json"
        with server.trace(path):
            graph.run(wait=True)
        kernels, copies = intervals(path, "kernel"), intervals(path, "copy")
    both = sum(max(0.0, min(k[1], c[1]) - max(k[0], c[0])) for k in kernels for c in copies)
    return both / min(sum(end - start for start, end in spans) for spans in (kernels, copies))


def measure_overlap(
    report: Report, server: wsgrad.Server, one: wsgrad.Device, other: wsgrad.Device, *, nbytes: int, rounds: int
) -> None:
    """A kernel of one thread on one device and a copy on another, alone and in one graph."""
    spin = one.program(SPIN, "spin")
    x, y = other.zeros(nbytes, np.uint8), other.zeros(nbytes, np.uint8)

    def copies() -> None:
        for _ in range(4):
            y.copy_from(x)

    def copied() -> None:
        copies()
        other.synchronize()

    copied()
    spin.ready()
    copy = min(seconds(copied) for _ in range(3))
    count = np.int64(10_000_000)
    count = np.int64(count * copy / min(spin.timed(count) for _ in range(3)))
    with wsgrad.record(one, other) as graph:
        spin(count)
        copies()
    graph.run(wait=True)
    trials = [(spin.timed(count), seconds(copied), seconds(lambda: graph.run(wait=True))) for _ in range(rounds)]
    kernel, copy, _ = (statistics.median(values) for values in zip(*trials, strict=True))
    report.add(Figure("a kernel alone", kernel * 1e3, "ms"))
    report.add(Figure("copies on another device alone", copy * 1e3, "ms"))
    share = statistics.median(both / max(kernel, copy) for kernel, copy, both in trials)
    report.add(Figure("both, against the longer", share, "×", 1.4, "lower", detail=f"median of {rounds}"))
    at_once = statistics.median(overlap(server, graph) for _ in range(5))
    report.add(Figure("both at once in the trace, share of the shorter", at_once, "", 0.5, detail="median of 5"))


def measure(report: Report, *, rounds: int, nbytes: int) -> None:
    """Take all figures on one server with two devices."""
    with server_process(["--device", "cpu*2", "--cpu-threads", "1"]) as process:
        with wsgrad.connect(process.url) as server:
            one, other = server.devices
            measure_replay(report, one, rounds=rounds)
            measure_transfer(report, one, other, nbytes=nbytes, rounds=max(5, rounds // 20))
            measure_overlap(report, server, one, other, nbytes=nbytes // 4, rounds=max(5, rounds // 20))
        measure_delay(report, process.url, rounds=max(3, rounds // 20))
        with server_process(["--device", "cpu", "--cpu-threads", "1"]) as second:
            measure_servers(report, [process.url, second.url], nbytes=nbytes, rounds=max(5, rounds // 20))


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON; - for standard output")
    parser.add_argument("--rounds", type=int, default=200, help="runs of which the median counts")
    parser.add_argument("--mib", type=int, default=256, help="size of transfers")
    options = parser.parse_args()
    report = Report("graphs")
    measure(report, rounds=options.rounds, nbytes=options.mib << 20)
    report.show(options.json)


if __name__ == "__main__":
    main()
