"""Many sessions at once on one server: whether results stay right, shares fair, memory flat and small reads quick.

The sessions live in a few processes of `benchmarks.soak_client`, which this starts, tells when to work, and ends.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.processes import server_process, tree_pss_bytes
from benchmarks.report import Figure
from benchmarks.soak_command import SoakCommand

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benchmarks.report import Report

_END_SECONDS: Final = 60.0
_MIB: Final = 1 << 20


class Clients:
    """A process with some sessions."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def opened(self) -> None:
        """Wait until its sessions are open."""
        if self._answer() != "open\n":
            raise AssertionError("a process of clients did not open its sessions")

    def begin(self, seconds: float) -> None:
        """Let it work for so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def done(self) -> dict[str, Any]:
        """Wait for it; returns what it says."""
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def clients(kind: str, url: str, sessions: int, processes: int, *, first: int = 0) -> Iterator[list[Clients]]:
    """Processes that share so many sessions, all of them open; they end with the block."""
    shares = [sessions // processes + (index < sessions % processes) for index in range(processes)]
    with ExitStack() as stack:
        started = []
        for share in shares:
            command = [sys.executable, "-m", "benchmarks.soak_client", kind, url, str(share), str(first)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(_end, process)
            started.append(Clients(process))
            first += share
        for each in started:
            each.opened()
        yield started


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def rss_bytes(pid: int) -> int:
    """Resident memory of one process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def load(report: Report, *, sessions: int, processes: int, seconds: float, every: float) -> tuple[list[int], int]:
    """All sessions at once; returns the rounds of each, and how many were wrong."""
    held: list[float] = []
    with (
        server_process(["--device", "cpu", "--cpu-threads", "1"]) as server,
        clients("rounds", server.url, sessions, processes) as started,
    ):
        start = time.monotonic()
        for each in started:
            each.begin(seconds)
        for number in range(1, int(seconds / every) + 1):
            time.sleep(max(0.0, start + number * every - time.monotonic()))
            held.append(rss_bytes(server.pid) / _MIB)
            name = f"server's resident memory after {number * every:g} s"
            report.add(Figure(name, held[-1], "MiB", detail=f"tree {tree_pss_bytes(server.pid) / _MIB:.0f} MiB"))
        answers = [each.done() for each in started]
    rounds = [count for answer in answers for count in answer["rounds"]]
    wrong = sum(answer["wrong"] for answer in answers)
    mean = statistics.fmean(rounds)
    report.add(Figure("rounds", sum(rounds), "", detail=f"{sum(rounds) / seconds:.0f} a second"))
    report.add(Figure("wrong results", wrong, "", 0.0, better="lower"))
    report.add(
        Figure(
            "slowest session's share of the mean", min(rounds) / mean, "×", 0.5, detail=f"{min(rounds)} of {mean:.0f}"
        )
    )
    if len(held) > 1:
        report.add(
            Figure("memory at the end by that after the first part", max(held[1:]) / held[0], "×", 1.05, "lower")
        )
    return rounds, wrong


def measure_load(report: Report, options: argparse.Namespace) -> None:
    """Take the figures of the load."""
    _, wrong = load(
        report,
        sessions=options.sessions,
        processes=options.processes,
        seconds=60 * options.minutes,
        every=min(60.0, 60 * options.minutes),
    )
    if wrong:
        raise AssertionError(f"{wrong} rounds had other results than NumPy")


def latency(report: Report, *, sessions: int, seconds: float, phases: int) -> tuple[float, int]:
    """Phases of one session alone and of all; returns the ratio, and how many reads were wrong."""
    alone: list[float] = []
    together: list[float] = []
    wrong = 0
    with (
        server_process(["--device", "cpu", "--cpu-threads", "1"]) as server,
        clients("reads", server.url, sessions, sessions) as started,
    ):
        for _ in range(phases):
            for working, times in ((started[:1], alone), (started, together)):
                for each in working:
                    each.begin(seconds / phases / 2)
                for answer in [each.done() for each in working]:
                    times += [value for session in answer["times"] for value in session]
                    wrong += answer["wrong"]
    median, high = statistics.median(alone), _percentile(together, 0.99)
    detail = f"{_percentile(alone, 0.99) * 1e6:.0f} µs the 99th percentile, {len(alone)} reads"
    report.add(Figure("one session's median read", median * 1e6, "µs", better="lower", detail=detail))
    detail = f"{statistics.median(together) * 1e6:.0f} µs the median, {len(together)} reads"
    report.add(Figure(f"99th percentile of {sessions} sessions", high * 1e6, "µs", better="lower", detail=detail))
    report.add(Figure("times one session's median", high / median, "×", 10.0, better="lower"))
    report.add(Figure("wrong results", wrong, "", 0.0, better="lower"))
    return high / median, wrong


def measure_latency(report: Report, options: argparse.Namespace) -> None:
    """Take the figures of small reads."""
    _, wrong = latency(report, sessions=options.sessions, seconds=options.seconds, phases=options.phases)
    if wrong:
        raise AssertionError(f"{wrong} reads had other bytes than were uploaded")


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What `load` takes."""
    parser.add_argument("--sessions", type=int, default=64, help="sessions at once")
    parser.add_argument("--processes", type=int, default=4, help="processes that they live in")
    parser.add_argument("--minutes", type=float, default=10, help="how long")


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """What `latency` takes."""
    parser.add_argument("--sessions", type=int, default=8, help="sessions at once, each in a process of its own")
    parser.add_argument("--seconds", type=float, default=60, help="how long in all")
    parser.add_argument("--phases", type=int, default=6, help="phases of one alone and of all in turn")


LOAD = SoakCommand("load", "many sessions at once: right, fair and flat", add_load_arguments, measure_load)
LATENCY = SoakCommand("latency", "small reads beside other sessions' work", add_latency_arguments, measure_latency)
