"""Measures tinygrad on wsgrad against tinygrad in process and its old REMOTE device: `python -m benchmarks.tinygrad`.

Every figure is taken in interleaved pairs, one after the other on either side; the value is the median of the pairs'
ratios, with the interval in which that median lies with 95 %. tinygrad 0.11.0, the last one with REMOTE, needs an
environment of its own: `python -m venv peer && peer/bin/pip install tinygrad==0.11.0 numpy`; `--peer` names its Python.
tinygrad's CPU device needs clang; name it with CC. What the machine did besides stands in each figure's detail, as the
load average when its pairs were done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from benchmarks.delayed import DelayedLink
from benchmarks.processes import server_process
from benchmarks.report import Figure, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WORKER = Path(__file__).with_name("tinygrad_worker.py")
DELAY_SECONDS = 0.015
_RESAMPLES = 2000


class Side:
    """A worker process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds(self, figure: str) -> float:
        """One measurement."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{figure}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            word, _, seconds = line.partition(" ")
            if word == "seconds":  # tinygrad, too, prints
                return float(seconds)
        raise RuntimeError(f"the worker ended while it measured {figure}; its words are above")


@contextmanager
def side(python: str, **environment: str) -> Iterator[Side]:
    """A worker under that interpreter; it ends with the block."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")}
    process = subprocess.Popen(
        [python, "-P", str(WORKER)],  # not this folder: this module has the library's name
        env=kept | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Side(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def remote_server(python: str) -> Iterator[str]:
    """tinygrad 0.11's server on its CPU device, at a free port; where it is."""
    code = "import sys; from tinygrad.runtime.ops_remote import remote_server; remote_server(int(sys.argv[1]))"
    port = str(free_port())
    with subprocess.Popen(
        [python, "-c", code, port],
        env=os.environ | {"REMOTEDEV": "CPU"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    ) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 %, by resampling."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (_RESAMPLES, len(values))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def add(
    report: Report,
    name: str,
    pairs: Sequence[tuple[float, float]],
    target: float | None,
    *,
    better: Literal["higher", "lower"],
) -> None:
    """A figure of pairs (ours, theirs) of seconds: theirs/ours where higher is better, ours/theirs where lower is."""
    ratios = [theirs / ours if better == "higher" else ours / theirs for ours, theirs in pairs]
    low, high = interval(ratios)
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    detail = f"{low:.3g} to {high:.3g}; ours {ours * 1e3:.4g} ms, theirs {theirs * 1e3:.4g} ms, {len(pairs)} pairs"
    detail += f", load {os.getloadavg()[0]:.1f}"
    report.add(Figure(name, statistics.median(ratios), "×", target, better=better, detail=detail))


def pairs_of(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Interleaved measurements, after one of each that is not counted; each side goes first in turn."""
    ours(), theirs()
    pairs = []
    for number in range(count):
        if number % 2:
            second = theirs()
            pairs.append((ours(), second))
        else:
            pairs.append((ours(), theirs()))
    return pairs


def against_remote(report: Report, url: str, peer: str, *, pairs: int, wanted: set[str]) -> None:
    """The figures against tinygrad 0.11's REMOTE device."""
    rows: list[tuple[str, str, float]] = [
        ("up", "64 MiB up, times REMOTE", 8.0),
        ("down", "64 MiB down, times REMOTE", 5.0),
        ("calls", "runtime calls a second, times REMOTE", 15.0),
        ("kernel", "one kernel and a wait, times REMOTE", 4.0),
        ("jitted", "jitted call of 1,000 kernels, times REMOTE", 3.0),
    ]
    with ExitStack() as stack:
        host = stack.enter_context(remote_server(peer))
        ours = stack.enter_context(side(sys.executable, DEV="WS", WSGRAD_URL=url))
        theirs = stack.enter_context(side(peer, REMOTE="1", HOST=host))
        for figure, name, target in rows:
            if figure in wanted:
                found = pairs_of(lambda f=figure: ours.seconds(f), lambda f=figure: theirs.seconds(f), pairs)  # type: ignore[misc]
                add(report, name, found, target, better="higher")


def against_local(report: Report, url: str, *, pairs: int, wanted: set[str]) -> None:
    """The figures against the same tinygrad in process."""
    rows: list[tuple[str, str, float, Literal["higher", "lower"]]] = [
        ("mlp", "MLP step, time against in process", 1.2, "lower"),
        ("conv", "conv step, time against in process", 1.1, "lower"),
        ("decode", "decode of 200 tokens, speed against in process", 0.9, "higher"),
    ]
    with side(sys.executable, DEV="WS", WSGRAD_URL=url) as ours, side(sys.executable, DEV="CPU") as theirs:
        for figure, name, target, better in rows:
            if figure in wanted:
                found = pairs_of(lambda f=figure: ours.seconds(f), lambda f=figure: theirs.seconds(f), pairs)  # type: ignore[misc]
                add(report, name, found, target, better=better)


def raw_seconds(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    """How long plain TCP takes to send this into fresh memory, with an answer at the end."""

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            view = memoryview(np.empty(data.nbytes, np.uint8))
            while view:
                view = view[connection.recv_into(view) :]
            connection.sendall(b".")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = threading.Thread(target=receive)
        receiver.start()
        with socket.create_connection(listener.getsockname()) as connection:
            start = time.perf_counter()
            connection.sendall(data)
            connection.recv(1)
            seconds = time.perf_counter() - start
        receiver.join()
    return seconds


def loading(report: Report, url: str, *, nbytes: int, pairs: int) -> None:
    """Weights from a file, against a raw socket that sends the same mapped file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.safetensors")
        header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
        header += b" " * (-len(header) % 8)
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tofile(file)
        mapped = np.memmap(path, np.uint8, "r")
        with side(sys.executable, DEV="WS", WSGRAD_URL=url, BENCH_WEIGHTS=str(path)) as ours:
            found = pairs_of(lambda: ours.seconds("load"), lambda: raw_seconds(mapped), pairs)
    add(report, f"loading {nbytes >> 20} MiB of weights, share of raw TCP", found, 0.6, better="higher")


def delayed(report: Report, url: str, *, pairs: int) -> None:
    """Twenty MLP steps and one read of the loss, with and without a delay."""
    with (
        DelayedLink(url, seconds=DELAY_SECONDS) as link,
        side(sys.executable, DEV="WS", WSGRAD_URL=link.url) as far,
        side(sys.executable, DEV="WS", WSGRAD_URL=url) as near,
    ):
        found = pairs_of(lambda: far.seconds("mlp20"), lambda: near.seconds("mlp20"), pairs)
    add(report, "20 MLP steps with 15 ms each way, time against none", found, 1.3, better="lower")


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    remote, local = ["up", "down", "calls", "kernel", "jitted"], ["mlp", "conv", "decode"]
    every = [*remote, *local, "load", "delayed"]
    parser.add_argument("--rows", metavar="A,B", default=",".join(every), help="what to measure; default: %(default)s")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of an environment with tinygrad 0.11.0")
    parser.add_argument("--pairs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--weights", type=int, default=1000, metavar="MIB", help="size of the weights")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON; - for standard output")
    options = parser.parse_args()
    wanted = set(options.rows.split(","))
    if unknown := sorted(wanted - set(every)):
        parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(every)}")
    if options.pairs < 1:
        parser.error("a median needs at least one pair")
    compiler = os.environ.get("CC", "clang")
    if wanted & {*local, *(remote if options.peer else ())} and shutil.which(compiler) is None:
        parser.error(f"tinygrad's own CPU device needs clang, and there is no {compiler}: name one with CC")
    if not options.peer and (left := [row for row in remote if row in wanted]):
        print(f"not measured without --peer: {', '.join(left)}", file=sys.stderr)
    report = Report("tinygrad")
    with server_process(["--device", "cpu", "--cache-size", "0"]) as server:
        if options.peer and wanted & set(remote):
            against_remote(report, server.url, options.peer, pairs=options.pairs, wanted=wanted)
        if wanted & set(local):
            against_local(report, server.url, pairs=options.pairs, wanted=wanted)
        if "load" in wanted:
            loading(report, server.url, nbytes=options.weights << 20, pairs=options.pairs)
        if "delayed" in wanted:
            delayed(report, server.url, pairs=options.pairs)
    report.show(options.json)


if __name__ == "__main__":
    main()
