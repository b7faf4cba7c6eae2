"""One file of CBOR vectors holds Python and JavaScript to the same wire."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor

TESTS = Path(__file__).parent.parent
VECTORS = json.loads((TESTS / "vectors.json").read_text(encoding="utf-8"))


def value_of(written):
    if isinstance(written, list):
        return [value_of(item) for item in written]
    if not isinstance(written, dict):
        return written
    [(kind, content)] = written.items()
    match kind:
        case "bytes":
            return bytes.fromhex(content)
        case "float":
            return float(content)
        case "integer":
            return int(content)
        case "map":
            return {value_of(key): value_of(item) for key, item in content}
    raise AssertionError(kind)


def same(a, b) -> bool:
    """Equality that tells 1 from 1.0 and from true, 0.0 from -0.0, and takes NaN for NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_python_agrees_with_valid_vector(vector):
    raw, value = bytes.fromhex(vector["hex"]), value_of(vector["value"])
    assert same(cbor.decode(raw), value)
    assert cbor.scan(raw + b"\xff") == len(raw)
    if not vector.get("only_decode"):
        assert cbor.encode(value) == raw


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])
def test_python_refuses_invalid_vector(vector):
    with pytest.raises(ProtocolError):
        cbor.decode(bytes.fromhex(vector["hex"]))


def test_javascript_agrees_with_every_vector():
    node = shutil.which("node")
    if node is None:
        if os.environ.get("CI") == "true" or os.environ.get("WSGRAD_REQUIRE_NODE") == "1":
            pytest.fail("Node is missing, and CI or WSGRAD_REQUIRE_NODE=1 asks for it; install nodejs")
        pytest.skip("Node is missing: browser/cbor.js is not checked; install nodejs")
    done = subprocess.run([node, TESTS / "js" / "vectors.cjs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(VECTORS['valid'])} valid, {len(VECTORS['invalid'])} invalid\n"
