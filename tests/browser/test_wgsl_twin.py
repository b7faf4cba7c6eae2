"""One file of WGSL vectors holds Python's reader and the browser's to the same answers."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


def test_the_browser_reads_wgsl_as_python_does():
    node = shutil.which("node")
    if node is None:
        if os.environ.get("CI") == "true" or os.environ.get("WSGRAD_REQUIRE_NODE") == "1":
            pytest.fail("Node is missing, and CI or WSGRAD_REQUIRE_NODE=1 asks for it; install nodejs")
        pytest.skip("Node is missing: browser/wgsl.js is not checked; install nodejs")
    vectors = json.loads((TESTS / "wgsl_vectors.json").read_text(encoding="utf-8"))
    done = subprocess.run([node, TESTS / "js" / "wgsl.cjs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(vectors)} vectors\n"
