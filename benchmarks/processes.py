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
    """A running `wsgrad-serve`: its URL with the token, its process id, and the token of nodes."""

    url: str
    pid: int
    node_token: str = ""


@contextmanager
def server_process(arguments: Sequence[str] = (), *, state: str | None = None) -> Iterator[ServerProcess]:
    """A real server on a free port of loopback; it ends with the block.

    Args:
        arguments: its command line.
        state: the directory that it keeps its certificate in; the user's own if left out.
    """
    with _serving(["--port", "0", *arguments], {} if state is None else {"XDG_STATE_HOME": state}) as (ready, pid):
        yield ServerProcess(ready["url"], pid, ready["node_token"])


@contextmanager
def joined_process(server: ServerProcess, name: str, state: str, arguments: Sequence[str] = ()) -> Iterator[int]:
    """A machine that has joined a server under a name and keeps its secret in a directory; gives its process id."""
    address = server.url.partition("#")[0]
    variables = {"WSGRAD_NODE_TOKEN": server.node_token, "XDG_STATE_HOME": state}
    with _serving(["--join", address, "--name", name, *arguments], variables) as (_, pid):
        yield pid


@contextmanager
def _serving(arguments: Sequence[str], variables: dict[str, str]) -> Iterator[tuple[dict[str, str], int]]:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--log-level", "warning", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")} | variables
    process = subprocess.Popen(
        [*command, "--ready-fd", str(writing)], pass_fds=[writing], stdout=subprocess.DEVNULL, env=environment
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            # Read to its end only when it ends: a server stops where nobody reads this any more.
            yield json.loads(pipe.readline()), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
