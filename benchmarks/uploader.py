"""A process that uploads 256 MiB once: `python -m benchmarks.uploader raw|URL`, the load of an interference benchmark.

It prints a line when the upload starts and ends when it is done.
"""

from __future__ import annotations

import sys

import numpy as np

import wsgrad
from benchmarks.raw import raw_peer

NBYTES = 256 << 20


def main() -> None:
    """Upload to a bare TCP peer, or to the first CPU device of a server."""
    array = np.ones(NBYTES, np.uint8)
    if sys.argv[1] == "raw":
        with raw_peer() as peer:
            peer.upload(array[: 1 << 20])
            print("go", flush=True)
            peer.upload(array)
        return
    with wsgrad.connect(sys.argv[1]) as server:
        buffer = server.devices["cpu"].empty(NBYTES, np.uint8)
        buffer.copy_from(array)
        print("go", flush=True)
        buffer.copy_from(array)


if __name__ == "__main__":
    main()
