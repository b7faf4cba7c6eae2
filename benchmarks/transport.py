"""Speed and size of the whole path, beside raw TCP sockets and stock trio-websocket in one run.

`python -m benchmarks.transport [--json FILE]`. From a client object to device buffers and back: a real server process,
its token checked, a node process, the CPU device. Measurements of the peers are interleaved and reported as medians of
ratios, because the machines this runs on are shared and drift.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import wsgrad
from benchmarks.processes import descendants, pss_bytes, server_process, tree_pss_bytes
from benchmarks.raw import RawPeer, raw_peer
from benchmarks.report import Figure, Report
from benchmarks.stock import stock_peer
from wsgrad.client import bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.processes import ServerProcess
    from benchmarks.stock import StockPeer

MIB = 1 << 20


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e6:,.0f} MB/s"


def bulk(report: Report, device: wsgrad.Device, raw: RawPeer, stock: StockPeer, *, rounds: int) -> None:
    """Uploads and downloads of 64 and 256 MiB."""
    for mib in (64, 256):
        nbytes = mib * MIB
        array = np.arange(nbytes // 8, dtype=np.float64)
        back = np.empty_like(array)
        buffer = device.array(array)
        buffer.copy_to(back)
        assert np.array_equal(array, back), "the bytes that came back differ"
        for label, raw_call, our_call, stock_call in (
            ("upload", raw.upload, buffer.copy_from, stock.upload),
            ("download", raw.download, buffer.copy_to, stock.download),
        ):
            target = array if label == "upload" else back
            pairs = [(raw_call(target), _seconds(lambda: our_call(target))) for _ in range(rounds)]  # noqa: B023
            share = statistics.median(raw_s / our_s for raw_s, our_s in pairs)
            ours = statistics.median(our_s for _, our_s in pairs)
            theirs = statistics.median(raw_s for raw_s, _ in pairs)
            report.add(
                Figure(
                    f"{label} of {mib} MiB, share of raw TCP",
                    share,
                    "",
                    0.5,
                    detail=f"{_speed(nbytes, ours)} of {_speed(nbytes, theirs)}",
                )
            )
            slow = statistics.median(stock_call(64 * MIB) for _ in range(2 if mib == 64 else 1)) * mib / 64
            again = statistics.median(_seconds(lambda: our_call(target)) for _ in range(3))  # noqa: B023
            report.add(
                Figure(
                    f"{label} of {mib} MiB, times stock trio-websocket",
                    slow / again,
                    "×",
                    10,
                    detail=f"stock {_speed(nbytes, slow)}, measured with 64 MiB",
                )
            )
        fresh_up = statistics.median(_seconds(lambda: device.array(array)) for _ in range(3))  # noqa: B023
        fresh_down = statistics.median(_seconds(buffer.numpy) for _ in range(3))
        report.add(Figure(f"upload of {mib} MiB into fresh memory", nbytes / fresh_up / 1e6, "MB/s"))
        report.add(Figure(f"download of {mib} MiB into fresh memory", nbytes / fresh_down / 1e6, "MB/s"))
        buffer.free()


def round_trips(report: Report, device: wsgrad.Device, raw: RawPeer, stock: StockPeer, *, count: int) -> None:
    """A blocking 4-byte read beside a raw round trip."""
    buffer = device.array(np.ones(1, np.float32))
    target = np.empty(1, np.float32)
    ours, theirs = [], []
    for _ in range(count):
        theirs.append(raw.round_trip())
        ours.append(_seconds(lambda: buffer.copy_to(target)))
    our_median, raw_median = statistics.median(ours), statistics.median(theirs)
    detail = f"{our_median * 1e6:.0f} µs against {raw_median * 1e6:.0f} µs"
    report.add(Figure("blocking 4-byte read, times raw TCP", our_median / raw_median, "×", 6, "lower", detail))
    report.add(
        Figure(
            "round trip, stock trio-websocket", statistics.median(stock.round_trip() for _ in range(500)) * 1e6, "µs"
        )
    )


def launches(report: Report, device: wsgrad.Device) -> None:
    """Empty kernels, issued by one thread."""
    rate = statistics.median(bench.measure_launches(device) for _ in range(5))
    report.add(Figure("launches of an empty kernel, pipelined", rate, "/s", 150_000))


def _probe(device: wsgrad.Device, busy: subprocess.Popen[bytes]) -> list[float]:
    """Round trips of a 4-byte read while another process uploads."""
    buffer = device.array(np.ones(1, np.float32))
    target = np.empty(1, np.float32)
    samples = []
    while busy.poll() is None:
        samples.append(_seconds(lambda: buffer.copy_to(target)))
        time.sleep(0.001)
    return samples


def interference(report: Report, server: ServerProcess, *, rounds: int) -> None:
    """A second client's round trips while a first uploads 256 MiB, against the same beside a raw upload."""
    shares, details = [], []
    with wsgrad.connect(server.url) as second:
        device = second.devices["cpu"]
        for _ in range(rounds):
            worst = []
            for what in ("raw", server.url):
                command = [sys.executable, "-m", "benchmarks.uploader", what]
                with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
                    assert busy.stdout is not None
                    busy.stdout.readline()
                    samples = _probe(device, busy)
                worst.append(float(np.percentile(samples, 99)))
            shares.append(worst[1] / worst[0])
            details.append(f"{worst[1] * 1e6:.0f}/{worst[0] * 1e6:.0f}")
    detail = "µs, wsgrad/raw: " + " ".join(details)
    value = statistics.median(shares)
    report.add(Figure("second client's p99 during an upload, times beside raw", value, "×", 3, "lower", detail))


def server_memory(report: Report, server: ServerProcess) -> None:
    """What the server process grows by during an upload of 1 GiB."""
    array = np.ones(1 << 28, np.float32)
    with wsgrad.connect(server.url) as client:
        device = client.devices["cpu"]
        buffer = device.empty(array.shape, np.float32)
        device.synchronize()
        idle = pss_bytes(server.pid)
        command = [sys.executable, "-m", "benchmarks.watcher", str(server.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
            for _ in range(2):
                buffer.copy_from(array)
            watcher.kill()
            assert watcher.stdout is not None
            peak = max(int(line) for line in watcher.stdout.read().split())
    growth = (peak - idle) / MIB
    report.add(Figure("server memory above idle during a 1 GiB upload", growth, "MiB", 32, "lower"))


def sessions(report: Report, server: ServerProcess, *, count: int) -> None:
    """Opening a session and its first device, and what an idle one holds."""
    bench.measure_open(server.url)
    seconds = statistics.median(bench.measure_open(server.url) for _ in range(count))
    report.add(Figure("opening a session and its first device", seconds * 1e3, "ms", 20, "lower"))
    before = tree_pss_bytes(server.pid)
    clients = [wsgrad.connect(server.url) for _ in range(8)]
    for client in clients:
        client.devices["cpu"].array(np.ones(4, np.float32)).numpy()
    time.sleep(0.2)
    nodes = len(descendants(server.pid))
    held = (tree_pss_bytes(server.pid) - before) / len(clients) / MIB
    for client in clients:
        client.close()
    detail = f"mean of {len(clients)} sessions, {nodes} processes"
    report.add(Figure("memory of an idle session with one CPU device", held, "MiB", 15, "lower", detail))


def imports(report: Report, *, rounds: int) -> None:
    """`import wsgrad`, alone and with what connecting needs, beside importing numpy and trio; whole processes."""
    codes = ("import numpy, trio", "import wsgrad", "import wsgrad; wsgrad.connect")
    samples: dict[str, list[float]] = {code: [] for code in codes}
    for _ in range(rounds):
        for code in codes:
            samples[code].append(_seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True)))  # noqa: B023
    reference = samples[codes[0]]
    for code, target in ((codes[1], 1.2), (codes[2], None)):
        value = statistics.median(ours / theirs for ours, theirs in zip(samples[code], reference, strict=True))
        medians = statistics.median(samples[code]) * 1e3, statistics.median(reference) * 1e3
        detail = f"{medians[0]:.0f} ms against {medians[1]:.0f} ms, whole processes"
        report.add(Figure(f"{code}, times importing numpy and trio", value, "×", target, "lower", detail))


def main() -> None:
    """Run everything and print or write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the figures as JSON ('-': standard output)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of each transfer (default 9)")
    arguments = parser.parse_args()
    report = Report("wsgrad: the whole path on the CPU device, over loopback")
    with raw_peer() as raw, stock_peer() as stock, server_process() as server:
        with wsgrad.connect(server.url) as client:
            device = client.devices["cpu"]
            round_trips(report, device, raw, stock, count=3000)
            launches(report, device)
            bulk(report, device, raw, stock, rounds=arguments.rounds)
        interference(report, server, rounds=5)
        server_memory(report, server)
        sessions(report, server, count=20)
    imports(report, rounds=11)
    report.show(arguments.json)


if __name__ == "__main__":
    main()
