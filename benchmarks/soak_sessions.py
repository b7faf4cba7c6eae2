"""Opens and ends sessions in all ways against one real server and reports what it holds after each part: it stays flat.

What is measured is the server and its descendants; the clients are this process and its children.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.request import Request, urlopen

from benchmarks import soak_clients
from benchmarks.processes import descendants, pss_bytes, server_process
from benchmarks.report import Figure
from benchmarks.soak_command import SoakCommand

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import NoReturn

    from benchmarks.processes import ServerProcess
    from benchmarks.report import Report

_SETTINGS: Final = ("--resume-grace", "0.2", "--launch-seconds", "1", "--max-session-memory", "64MiB")
_PATIENCE: Final = 60.0
_LOOKS: Final = 10
_LOOK_SECONDS: Final = 0.05
_MIB: Final = 1 << 20
_GROWN_MIB: Final = 8.0
"""What a server may hold more at the end than after the first part: its allocator's holes, not its sessions."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a server and its descendants hold: bytes of memory, open descriptors, mapped memfds, processes."""

    pss: int
    rss: int
    descriptors: int
    memfds: int
    processes: int

    @classmethod
    def by(cls, pid: int) -> Held:
        """What a process and everything below it holds now."""
        pids = descendants(pid)
        pss = rss = descriptors = memfds = 0
        for one in pids:
            pss += pss_bytes(one)
            descriptors += len(os.listdir(f"/proc/{one}/fd"))
            with open(f"/proc/{one}/statm") as file:
                rss += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with open(f"/proc/{one}/maps") as file:
                memfds += sum("/memfd:" in line for line in file)
        return cls(pss, rss, descriptors, memfds, len(pids))

    @classmethod
    def quiet(cls, pid: int) -> Held:
        """The same once the last connection, by which it was asked whether it is done, is closed at its end too."""
        looks = []
        for _ in range(_LOOKS):
            looks.append(cls.by(pid))
            time.sleep(_LOOK_SECONDS)
        return min(looks, key=lambda held: (held.processes, held.descriptors))


def status(server: ServerProcess) -> dict[str, object]:
    """A server's `/status.json`."""
    url, _, token = server.url.partition("#token=")
    request = Request(url.replace("ws", "http", 1) + "status.json", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=_PATIENCE) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def settle(server: ServerProcess) -> None:
    """Wait until no session is left, and no process of one.

    Raises:
        AssertionError: something is left.
    """
    give_up = time.monotonic() + _PATIENCE
    while (sessions := status(server)["sessions"]) or soak_clients.nodes_of(server):
        if time.monotonic() > give_up:
            raise AssertionError(f"left: sessions {sessions}, processes {soak_clients.nodes_of(server)}")
        time.sleep(0.02)


def run(server: ServerProcess, names: Sequence[str], workers: int) -> None:
    """Run sessions that end in these ways, some at the same time.

    Raises:
        AssertionError: one did not end as it should; its worker has said why on standard error.
    """
    with tempfile.NamedTemporaryFile() as lock:
        pids = []
        for index in range(workers):
            if not (pid := os.fork()):
                _run_share(server, names[index::workers], lock.name)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]  # all, before one of them counts
        if any(statuses):
            raise AssertionError("a session did not end as it should")


def _run_share(server: ServerProcess, names: Sequence[str], lock: str) -> NoReturn:
    try:
        random.seed(os.getpid())
        with open(lock) as file:
            for name in names:
                # Whose node it is can't be seen from outside, so nobody else may have one then.
                fcntl.flock(file, fcntl.LOCK_EX if name == "node killed" else fcntl.LOCK_SH)
                soak_clients.WAYS[name][0](server)
                fcntl.flock(file, fcntl.LOCK_UN)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def measure(report: Report, options: argparse.Namespace) -> None:
    """Take the figures.

    Raises:
        AssertionError: a session left something behind, or a way did not end as it should.
    """
    random.seed(options.seed)
    names = list(soak_clients.WAYS)
    weights = [share for _, share in soak_clients.WAYS.values()]
    ended: Counter[str] = Counter()
    parts: list[Held] = []
    with server_process(_SETTINGS) as server:
        started = time.monotonic()
        for done in range(0, options.count, options.every):
            ways = random.choices(names, weights, k=min(options.every, options.count - done))
            run(server, ways, options.workers)
            ended.update(ways)
            settle(server)
            held = Held.quiet(server.pid)
            parts.append(held)
            detail = (
                f"RSS {held.rss / _MIB:.1f} MiB, {held.descriptors} descriptors, {held.memfds} memfds mapped, "
                f"{held.processes} processes"
            )
            report.add(Figure(f"PSS after {done + len(ways)} sessions", held.pss / _MIB, "MiB", detail=detail))
        seconds = time.monotonic() - started
    first, last = parts[0], parts[-1]
    kinds = ", ".join(f"{count} {name}" for name, count in ended.most_common())
    report.add(Figure("sessions a second", options.count / seconds, "1/s", detail=kinds))
    grown = (last.pss - first.pss) / _MIB
    report.add(Figure("grown since the first part", grown, "MiB", _GROWN_MIB, "lower"))
    left = [max(0, getattr(last, name) - getattr(first, name)) for name in ("descriptors", "memfds", "processes")]
    report.add(Figure("descriptors, mapped memfds and processes left", sum(left), "", 0, "lower"))
    if any(left):
        raise AssertionError(f"more descriptors, mapped memfds, processes than after the first part: {left}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--count", type=int, default=10_000, help="sessions in all")
    parser.add_argument("--every", type=int, default=1000, help="look at the server after so many")
    parser.add_argument("--workers", type=int, default=4, help="sessions at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which the ways come")


COMMAND: Final = SoakCommand("sessions", "sessions that end in all ways: nothing is left", add_arguments, measure)
