"""Opens and ends sessions against one real server and reports its memory, descriptors and processes after each part.

What must be flat is the server's and the zygote's; the clients live in this process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import wsgrad
from benchmarks.processes import descendants, pss_bytes, server_process
from benchmarks.report import Figure
from benchmarks.soak_command import SoakCommand

if TYPE_CHECKING:
    import argparse

    from benchmarks.report import Report


@dataclass(frozen=True, slots=True)
class Held:
    """What a server and its descendants hold: bytes of memory as PSS, open descriptors, processes."""

    memory: int
    descriptors: int
    processes: int

    @classmethod
    def by(cls, pid: int) -> Held:
        """What a process and everything below it holds now."""
        processes = descendants(pid)
        descriptors = sum(len(os.listdir(f"/proc/{one}/fd")) for one in processes)
        return cls(sum(pss_bytes(one) for one in processes), descriptors, len(processes))


def bye(url: str) -> None:
    """A session that works and says good-bye."""
    with wsgrad.connect(url) as server:
        array = server.devices[0].array(np.arange(4, dtype=np.int32))
        if array.numpy().tolist() != [0, 1, 2, 3]:
            raise AssertionError("the device has other bytes than were sent")


def measure(report: Report, options: argparse.Namespace) -> None:
    """Take the figures."""
    with server_process() as server:
        for done in range(options.count):
            bye(server.url)
            if (done + 1) % options.every == 0:
                held = Held.by(server.pid)
                detail = f"{held.descriptors} descriptors, {held.processes} processes"
                report.add(Figure(f"memory after {done + 1} sessions", held.memory / (1 << 20), "MiB", detail=detail))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--count", type=int, default=10_000, help="sessions in all")
    parser.add_argument("--every", type=int, default=1000, help="report after so many")


COMMAND = SoakCommand("sessions", "sessions that end in all ways: flat memory", add_arguments, measure)
