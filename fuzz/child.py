"""Runs one target under atheris in a process that may crash: `python -m fuzz.child TARGET STATE RUNS [flags]`."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import atheris

_TRANSPORT = [f"wsgrad.transport.{module}" for module in ("cbor", "fields", "frames", "connection", "express")]
_ELSEWHERE = dict.fromkeys(("sessions", "replies", "joining"), _TRANSPORT)
"""What a target goes through all the time and others are for: without its coverage there are twice as many inputs."""
_PAGE = resource.getpagesize()


def _resident() -> int:
    """Bytes of this process and of those that it started, without what only waits to be collected."""
    gc.collect()
    pids = ["self", *Path("/proc/thread-self/children").read_text(encoding="ascii").split()]
    return sum(int(Path("/proc", pid, "statm").read_text(encoding="ascii").split()[1]) * _PAGE for pid in pids)


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    name, state, runs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with atheris.instrument_imports(include=["wsgrad"], exclude=_ELSEWHERE.get(name, [])):
        target = importlib.import_module(f"fuzz.targets.{name}")
    check = target.check
    count, started = 0, time.monotonic()
    early = peak = 0

    def one(data: bytes) -> None:
        nonlocal count, early, peak
        check(data)
        count += 1
        if count % 256 == 0 or count == runs:
            # Growth is what comes behind the first fifth, in which caches fill and the fuzzer finds most of its corpus.
            resident = _resident()
            peak = max(peak, resident)
            if count <= runs // 5:
                early = peak
            told = {"inputs": count, "seconds": time.monotonic() - started, "early": early, "peak": peak}
            part = state.with_suffix(".part")
            part.write_text(json.dumps(told), encoding="ascii")
            os.replace(part, state)

    atheris.Setup([sys.argv[0], f"-runs={runs}", *sys.argv[4:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
