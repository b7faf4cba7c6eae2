"""Short forms of `benchmarks.soak sessions` and `kills`: nothing is left, and who survives is told, however fast."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def soak(*arguments):
    """The figures of a run in a process of its own, which has one thread to fork from."""
    command = [sys.executable, "-m", "benchmarks.soak", *arguments, "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}


def test_200_sessions_that_end_in_all_ways_leave_nothing():
    figures = soak("sessions", "--count", "200", "--every", "100", "--seed", "1")
    assert figures["descriptors, mapped memfds and processes left"]["value"] == 0
    kinds = figures["sessions a second"]["detail"]
    assert all(way in kinds for way in ("bye", "crash", "node killed", "client killed", "upload cut", "reset"))


def test_who_survives_a_kill_is_told_and_the_next_client_is_served():
    figures = soak("kills", "--rounds", "4", "--victims", "server,node,zygote,client")
    assert sum("until the last survivor has its error" in name for name in figures) == 3
    assert sum("the slowest next client" in name for name in figures) == 4
