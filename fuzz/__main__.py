"""Runs targets one after the other, each in a process that may crash, and prints what came of it.

`python -m fuzz TARGET … --runs N`, or `--all`. The table is the one of `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fuzz import targets

HERE = Path(__file__).parent
_SECONDS_FOR_ONE = 60
"""An input that takes longer is a hang; the machine may be busy with other things."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one target."""

    target: str
    inputs: int
    seconds: float
    growth: int
    finding: str

    def row(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0
        growth = f"{self.growth / _MIB:.1f} MiB"
        return f"| {self.target} | {self.inputs:,} | {self.seconds:.0f} s | {rate:,.0f} | {growth} | {self.finding} |"


def names() -> list[str]:
    """All targets, in the order of their names."""
    return sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


def write_corpus(target: str) -> None:
    """Write the target's seeds, one a file, and take away what was there."""
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for seed in importlib.import_module(f"fuzz.targets.{target}").seeds():
        (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)


def run(target: str, runs: int, seed: int, kept: Path) -> Outcome:
    """Give a target so many inputs; what makes it fail is left in `kept`."""
    kept.mkdir(parents=True, exist_ok=True)
    most = importlib.import_module(f"fuzz.targets.{target}").MAX_NBYTES
    with tempfile.TemporaryDirectory() as folder:
        state, log = Path(folder, "state"), kept / f"{target}.log"
        grown = Path(folder, "grown")
        grown.mkdir()
        flags = [
            f"-seed={seed}", f"-timeout={_SECONDS_FOR_ONE}", f"-max_len={most}", "-rss_limit_mb=4096",
            f"-artifact_prefix={kept}/{target}-", "-print_final_stats=1", "-verbosity=1",
        ]  # fmt: skip
        command = [sys.executable, "-m", "fuzz.child", target, str(state), str(runs), *flags]
        command += [str(grown), str(HERE / "corpus" / target)]
        started = time.monotonic()
        with log.open("wb") as file:
            status = subprocess.run(command, cwd=HERE.parent, stdout=file, stderr=file, check=False).returncode
        told = json.loads(state.read_text(encoding="ascii")) if state.exists() else {}
    growth = max(0, told.get("peak", 0) - told.get("early", 0))
    inputs, seconds = told.get("inputs", 0), told.get("seconds", time.monotonic() - started)
    finding = "none" if status == 0 and inputs >= runs else f"status {status}, see {log.name}"
    return Outcome(target, inputs, seconds, growth, finding)


def main() -> int:
    """The command; its status is 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(names()))
    parser.add_argument("--all", action="store_true", help="every target")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs for each target (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer (%(default)s)")
    parser.add_argument("--kept", type=Path, default=Path("fuzz-findings"), help="where findings and logs are left")
    parser.add_argument("--write-corpus", action="store_true", help="write the seeds of the targets instead")
    options = parser.parse_args()
    chosen = names() if options.all else options.targets
    if not chosen or (unknown := set(chosen) - set(names())):
        parser.error(f"no target {', '.join(sorted(unknown))}" if chosen else "name a target, or give --all")
    if options.write_corpus:
        for target in chosen:
            write_corpus(target)
        return 0
    print("| target | inputs | time | executions/s | peak RSS growth | findings |")
    print("|---|---|---|---|---|---|")
    found = False
    for target in chosen:
        outcome = run(target, options.runs, options.seed, options.kept.resolve())
        print(outcome.row(), flush=True)
        found = found or outcome.finding != "none"
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
