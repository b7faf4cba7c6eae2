"""The page's CBOR against another implementation in the same language."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
REQUIRED = os.environ.get("CI") == "true" or os.environ.get("WSGRAD_REQUIRE_NODE") == "1"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_pages_cbor_reads_and_writes_what_cbor_x_does(seed):
    if not shutil.which("node") or not (ROOT / "node_modules" / "cbor-x").is_dir():
        if REQUIRED:
            pytest.fail(
                "Node or cbor-x is missing, and CI or WSGRAD_REQUIRE_NODE=1 asks for it; install nodejs and npm"
            )
        pytest.skip("cbor-x is missing: scripts/test installs it with npm where Node, npm and a network are")
    command = ["node", ROOT / "tests" / "js" / "cbor_fuzz.cjs", str(seed), "5000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["accepted"] > 5000
    assert counts["refused"] > 5000
