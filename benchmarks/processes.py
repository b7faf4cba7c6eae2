"""What the benchmarks need of processes: a real server, its descendants, and their memory as PSS.

Linux only: it reads /proc. PSS counts a page shared by n processes as 1/n in each, so a sum counts it once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process in bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def descendants(pid: int) -> list[int]:
    """The process and everything below it."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def tree_pss_bytes(pid: int) -> int:
    """PSS of a process and everything below it, in bytes."""
    return sum(pss_bytes(one) for one in descendants(pid))


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running `wsgrad-serve`: its URL with the token, and its process id."""

    url: str
    pid: int


@contextmanager
def server_process(arguments: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A real server on a free port of loopback; it ends with the block."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--log-level", "warning", *arguments]
    process = subprocess.Popen([*command, "--ready-fd", str(writing)], pass_fds=[writing], stdout=subprocess.DEVNULL)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            ready = json.loads(pipe.readline())
            yield ServerProcess(ready["url"], process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
