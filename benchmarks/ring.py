"""Sends a number around a ring of three servers, with events, and counts rounds: `python -m benchmarks.ring --json -`.

In each turn a device adds one, signals, the next one waits for that, and gets the sum: nothing is ever waited for here.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import numpy as np

import wsgrad
from benchmarks.processes import server_process
from benchmarks.report import Figure, Report

ADD = "void add(int *y) { y[0] += 1; }"
ROUNDS = 10_000


def measure(report: Report, *, rounds: int, servers: int = 3) -> None:
    """Issue all rounds, wait once, check the sum."""
    with contextlib.ExitStack() as stack:
        urls = [f"{stack.enter_context(server_process()).url}*1" for _ in range(servers)]
        ring = stack.enter_context(wsgrad.connect_all(urls))
        devices = list(ring.devices)
        programs = [device.program(ADD, "add") for device in devices]
        places = [device.zeros(1, np.int32) for device in devices]
        start = time.perf_counter()
        for _ in range(rounds):
            for at, device in enumerate(devices):
                after = (at + 1) % servers
                programs[at](places[at])
                devices[after].wait(device.signal())
                places[after].copy_from(places[at])
        issued = time.perf_counter() - start
        total = int(places[0].numpy()[0])
        seconds = time.perf_counter() - start
        if total != rounds * servers:
            raise AssertionError(f"{total} after {rounds} rounds of {servers} turns")
        relayed = ring.statistics["relayed"]
    report.add(Figure("rounds of the ring", rounds, "", detail=f"{servers} servers, {relayed} copies by the client"))
    report.add(Figure("all rounds", seconds, "s", better="lower", detail=f"issued after {issued:.1f} s"))
    report.add(Figure("a turn", 1e3 * seconds / rounds / servers, "ms", better="lower"))


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON; - for standard output")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    report = Report("a ring of servers")
    measure(report, rounds=options.rounds)
    report.show(options.json)


if __name__ == "__main__":
    main()
