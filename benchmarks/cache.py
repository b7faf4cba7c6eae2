"""Measures uploads that the server's cache knows, over a link of 1 Gbit/s: `python -m benchmarks.cache --json -`.

The first session sends everything, a second one only the hash; both hash, and both end when the device has the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import wsgrad
from benchmarks.processes import server_process
from benchmarks.report import Figure, Report
from benchmarks.shaped import ShapedLink

NBYTES = 256 << 20
BYTES_PER_SECOND = 1e9 / 8
_WRITTEN_SECONDS = 60.0


def upload(link: ShapedLink, data: np.ndarray[tuple[int], np.dtype[np.uint8]], *, cache: bool) -> tuple[float, int]:
    """Upload in a session of its own; returns seconds and the bytes that the link has carried."""
    with wsgrad.connect(link.url, cache=cache) as server:
        buffer = server.devices[0].zeros(data.shape, data.dtype)
        buffer[:8].numpy()
        before, start = link.passed, time.perf_counter()
        buffer.copy_from(data)
        seconds = time.perf_counter() - start
        last = data[-8:]
        if not np.array_equal(buffer[-8:].numpy(), last):
            raise AssertionError("the device has other bytes than were sent")
        return seconds, link.passed - before


def wait_until_kept(directory: Path) -> None:
    """The server writes an upload down behind the upload itself."""
    give_up = time.perf_counter() + _WRITTEN_SECONDS
    while not any(len(path.name) == 64 for path in directory.iterdir()):
        if time.perf_counter() > give_up:
            raise TimeoutError("the server has not kept the upload")
        time.sleep(0.01)


def measure(report: Report, *, nbytes: int, rounds: int) -> None:
    """Take the figures."""
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "blobs"
        with (
            server_process(["--cache-dir", str(directory)]) as server,
            ShapedLink(server.url, bytes_per_second=BYTES_PER_SECOND) as link,
        ):
            off, _ = upload(link, data, cache=False)
            first, sent = upload(link, data, cache=True)
            wait_until_kept(directory)
            again = [upload(link, data, cache=True) for _ in range(rounds)]
    second = statistics.median(seconds for seconds, _ in again)
    mib = nbytes >> 20
    report.add(Figure(f"upload of {mib} MiB, cache off", off, "s", detail="1 Gbit/s"))
    report.add(Figure(f"first upload of {mib} MiB, cache on", first, "s", detail=f"{sent:,} bytes sent"))
    report.add(Figure("second upload", second, "s", detail=f"median of {rounds}; {again[0][1]:,} bytes sent"))
    report.add(Figure("second upload, times faster than the first", first / second, "×", 4.0))
    report.add(Figure("first upload against cache off", first / off, "×", better="lower"))


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON; - for standard output")
    parser.add_argument("--mib", type=int, default=NBYTES >> 20, help="size of the upload")
    parser.add_argument("--rounds", type=int, default=3, help="uploads that the cache brings")
    options = parser.parse_args()
    report = Report("the cache of uploads")
    measure(report, nbytes=options.mib << 20, rounds=options.rounds)
    report.show(options.json)


if __name__ == "__main__":
    main()
