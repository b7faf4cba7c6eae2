"""Tries inputs of a target again without atheris: `python -m fuzz.replay TARGET FILE…`; without files, its seeds."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path


def main() -> None:
    """Raises what the first failing input raises."""
    target = importlib.import_module(f"fuzz.targets.{sys.argv[1]}")
    inputs = [Path(name).read_bytes() for name in sys.argv[2:]] or list(target.seeds())
    for data in inputs:
        started = time.perf_counter()
        target.check(data)
        print(f"{len(data)} bytes held, in {time.perf_counter() - started:.4f} s")


if __name__ == "__main__":
    main()
