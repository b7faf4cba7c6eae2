"""Kills servers, nodes, zygotes, clients and tabs in the midst of work: who survives is told by name, and soon.

Each round has its victim. Everybody else either works on, and right, or raises the error that names what happened.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

import wsgrad
from benchmarks import soak_clients
from benchmarks.processes import ServerProcess, descendants, server_process
from benchmarks.report import Figure
from benchmarks.soak_command import SoakCommand

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from benchmarks.report import Report

_SETTINGS: Final = ("--resume-grace", "0.5", "--node-grace", "0.5", "--cpu-threads", "1")
_PATIENCE: Final = 60.0
_SURVIVORS: Final = 2
_NBYTES: Final = 1 << 20
_TARGET_SECONDS: Final = 1.0
_HEADLESS: Final = Path(__file__).parent.parent / "scripts" / "headless-tab"
_ADD: Final = """@group(0) @binding(0) var<storage, read_write> x: array<i32>;
@compute @workgroup_size(64) fn add(@builtin(global_invocation_id) at: vec3<u32>) {
    if (at.x < arrayLength(&x)) { x[at.x] = x[at.x] + 1; }
}"""


class Survivor:
    """A client in a thread that works until something ends it.

    Attributes:
        error: what ended it.
        at: when.
        rounds: how often it has seen a right result.
    """

    def __init__(self, server: ServerProcess, device: str | int = 0) -> None:
        self.error: BaseException | None = None
        self.at = 0.0
        self.rounds = 0
        self._server = server
        self._device = device
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with wsgrad.connect(self._server.url) as connected:
                self._work(connected.devices[self._device])
        except BaseException as error:
            self.error, self.at = error, time.monotonic()

    def _work(self, device: wsgrad.Device) -> None:
        c = device.kind == "cpu"
        data = np.random.default_rng().integers(0, 1000, _NBYTES // 4).astype(np.int32)
        array = device.array(data)
        add = device.program(soak_clients.PROGRAM, "add") if c else device.program(_ADD, "add", dialect="wgsl")
        while not self._stop:
            array.copy_from(data, timeout=_PATIENCE)
            for _ in range(3):
                if c:
                    add(array, np.int32(data.size))
                else:
                    add(array, grid=-(-data.size // 64))
            if not np.array_equal(array.numpy(timeout=_PATIENCE), data + 3):
                raise AssertionError("a device computed something else")
            self.rounds += 1

    def works(self) -> None:
        """Wait until it has seen another right result.

        Raises:
            AssertionError: it has ended instead, or does not get on.
        """
        wanted, give_up = self.rounds + 1, time.monotonic() + _PATIENCE
        while self.rounds < wanted:
            if self.error is not None:
                raise AssertionError(f"a client was ended by {self.error!r}") from self.error
            if time.monotonic() > give_up:
                raise AssertionError("a client does not get on")
            time.sleep(0.001)

    def raised(self, kind: type[wsgrad.WsgradError], since: float) -> float:
        """Wait for its error; the seconds that it took.

        Raises:
            AssertionError: it raises something else, or nothing.
        """
        self._thread.join(_PATIENCE)
        if not isinstance(self.error, kind):
            raise AssertionError(f"{self.error!r} where {kind.__name__} was to be raised") from self.error
        return self.at - since

    def stop(self) -> None:
        """End it; harmless where it has ended."""
        self._stop = True
        self._thread.join(_PATIENCE)


@dataclass
class Times:
    """Seconds until the survivors had their errors, and until the next client had a result."""

    raised: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)


@contextlib.contextmanager
def survivors(server: ServerProcess, count: int = _SURVIVORS, device: str | int = 0) -> Iterator[list[Survivor]]:
    """Clients that are all in the middle of their work."""
    clients: list[Survivor] = []
    try:
        clients += [Survivor(server, device) for _ in range(count)]
        for client in clients:
            client.works()
        time.sleep(random.uniform(0, 0.1))
        yield clients
    finally:
        for client in clients:
            client.stop()


def serve_next(server: ServerProcess, times: Times) -> None:
    """How long the next client takes from connecting to its result."""
    since = time.monotonic()
    with wsgrad.connect(server.url) as connected:
        soak_clients.work(connected)
    times.served.append(time.monotonic() - since)


def kill_node(server: ServerProcess, times: Times) -> None:
    """One client's node: that client is told, the other works on."""
    with survivors(server) as clients:
        victim = random.choice(soak_clients.nodes_of(server))
        since = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        serve_next(server, times)
        while not any(client.error for client in clients) and time.monotonic() < since + _PATIENCE:
            time.sleep(0.001)
        clients.sort(key=lambda client: client.error is None)
        times.raised.append(clients[0].raised(wsgrad.DeviceLost, since))
        for client in clients[1:]:
            client.works()


def kill_zygote(server: ServerProcess, times: Times) -> None:
    """The process that all nodes come from: all are told."""
    with survivors(server) as clients:
        [victim] = soak_clients.children(server.pid)
        since = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        times.raised += [client.raised(wsgrad.DeviceLost, since) for client in clients]
        serve_next(server, times)


def kill_client(server: ServerProcess, times: Times) -> None:
    """A client: the others work on, and nothing is left of it after its grace time."""

    def client(ready: int) -> None:
        with wsgrad.connect(server.url) as connected:
            soak_clients.work(connected)
            os.write(ready, b"r")
            while True:
                soak_clients.work(connected, rounds=100)

    with soak_clients.forked(client) as (pid, reading):  # before there are threads
        if not soak_clients.heard(reading):
            raise AssertionError("a client ended before it was killed")
        with survivors(server) as clients:
            os.kill(pid, signal.SIGKILL)
            since = time.monotonic()
            serve_next(server, times)
            while len(soak_clients.nodes_of(server)) > _SURVIVORS:
                if time.monotonic() > since + _PATIENCE:
                    raise AssertionError("the node of a killed client lives")
                time.sleep(0.01)
            for other in clients:
                other.works()


def kill_server(times: Times) -> None:
    """The server: all are told, its processes end with it, and another one on its port serves at once."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(server_process(_SETTINGS))
        below = descendants(server.pid)[1:]
        with survivors(server) as clients:
            below = descendants(server.pid)[1:]
            since = time.monotonic()
            os.kill(server.pid, signal.SIGKILL)
            times.raised += [client.raised(wsgrad.ConnectionLost, since) for client in clients]
            while alive := [pid for pid in below if os.path.exists(f"/proc/{pid}") and not _zombie(pid)]:
                if time.monotonic() > since + _PATIENCE:
                    raise AssertionError(f"processes of a killed server live: {alive}")
                time.sleep(0.01)
        port = server.url.rpartition("/#")[0].rpartition(":")[2]
        serve_next(stack.enter_context(server_process([*_SETTINGS, "--port", port])), times)


def kill_tab(times: Times, chromium: str) -> None:
    """A tab's renderer: its clients are told, and the server serves on."""
    with server_process(_SETTINGS) as server:
        page = server.url.partition("#")[0].replace("ws", "http", 1) + f"#token={server.node_token}"
        tab = subprocess.Popen(
            [sys.executable, str(_HEADLESS), "--software"],
            env=os.environ | {"WSGRAD_PAGE_URL": page},
            stdout=subprocess.PIPE,
        )
        try:
            assert tab.stdout is not None
            if tab.stdout.readline() != b"joined\n":
                raise AssertionError(f"no tab joined ({chromium})")
            with survivors(server, 1, "browser") as clients:
                renderers = [pid for pid in descendants(tab.pid) if b"--type=renderer" in _command(pid)]
                since = time.monotonic()
                for pid in renderers:
                    os.kill(pid, signal.SIGKILL)
                times.raised.append(clients[0].raised(wsgrad.DeviceLost, since))
                serve_next(server, times)
        finally:
            tab.terminate()
            tab.communicate(timeout=_PATIENCE)


def measure(report: Report, options: argparse.Namespace) -> None:
    """Take the figures.

    Raises:
        AssertionError: somebody was not told, or not what happened, or was not served.
    """
    random.seed(options.seed)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    wanted = options.victims.split(",")
    if chromium is None and "tab" in wanted:
        raise SystemExit("killing a tab needs Chromium; name the other --victims")
    times: defaultdict[str, Times] = defaultdict(Times)
    with server_process(_SETTINGS) as server:
        ways: dict[str, Callable[[Times], None]] = {
            "node": lambda found: kill_node(server, found),
            "zygote": lambda found: kill_zygote(server, found),
            "client": lambda found: kill_client(server, found),
            "server": kill_server,
            "tab": lambda found: kill_tab(found, str(chromium)),
        }
        for number in range(options.rounds):
            victim = wanted[number % len(wanted)]
            ways[victim](times[victim])
    for victim, found in times.items():
        count = f"{len(found.served)} killed"
        if found.raised:
            name = f"{victim} killed, until the last survivor has its error"
            report.add(Figure(name, max(found.raised), "s", _TARGET_SECONDS, "lower", count))
        name = f"{victim} killed, the slowest next client from connecting to its first result"
        report.add(Figure(name, max(found.served), "s", _TARGET_SECONDS, "lower", count))


def _zombie(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _command(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--rounds", type=int, default=100, help="kills in all, the victims in turn")
    parser.add_argument("--victims", default="server,node,zygote,client,tab", help="whom to kill, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of which node")


COMMAND: Final = SoakCommand("kills", "kills in the midst of work: who survives is told", add_arguments, measure)
