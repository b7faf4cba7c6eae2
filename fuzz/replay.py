"""Tries inputs of a target again without atheris: `python -m fuzz.replay TARGET FILE…`; without files, its seeds.

`--random N` tries N more, made of the seeds by changing some bytes; the same ones each time.
"""

from __future__ import annotations

import argparse
import importlib
import random
import time
from pathlib import Path


def main() -> None:
    """Raises what the first failing input raises."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.replay", description=__doc__)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("files", nargs="*", metavar="FILE", type=Path)
    parser.add_argument("--random", type=int, default=0, metavar="N")
    options = parser.parse_args()
    target = importlib.import_module(f"fuzz.targets.{options.target}")
    inputs = [file.read_bytes() for file in options.files] or list(target.seeds())
    rng = random.Random(1)
    inputs += [_changed(rng, rng.choice(inputs)) for _ in range(options.random)]
    started = time.perf_counter()
    for data in inputs:
        try:
            target.check(data)
        except BaseException:
            print(f"{options.target} fails on {data.hex()}")
            raise
    print(f"{len(inputs)} inputs held, in {time.perf_counter() - started:.3f} s")


def _changed(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


if __name__ == "__main__":
    main()
