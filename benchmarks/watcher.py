"""Prints the PSS of a process in bytes every 10 ms until it is killed: `python -m benchmarks.watcher PID`."""

from __future__ import annotations

import sys
import time

from benchmarks.processes import pss_bytes


def main() -> None:
    """Print until killed."""
    while True:
        print(pss_bytes(int(sys.argv[1])), flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
