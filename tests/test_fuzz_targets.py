"""The fuzzers' targets in short, each in a process: inputs that nobody thought of, where no other test has them.

A session's messages and a node's answers against a whole hub, a machine that joins it, words for the native loop,
sources of programs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("target", "more"),
    [("sessions", 30), ("replies", 30), ("joining", 30), ("launches", 500), ("sources", 300), ("link", 50)],
)
def test_the_seeds_of_a_target_and_some_changes_of_them_hold(target, more):
    command = [sys.executable, "-m", "fuzz.replay", target, "--random", str(more)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inputs held" in done.stdout
