"""Asks the browser's code, which runs in a process of Node, what it makes of an input."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import IO, Any

_SCRIPT = Path(__file__).with_name("browser_side.cjs")


@cache
def _pipes() -> tuple[IO[str], IO[str]]:
    # Ends with this process: its input does.
    node = subprocess.Popen(["node", str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert node.stdin is not None
    assert node.stdout is not None
    return node.stdin, node.stdout


def ask(what: str, value: str) -> Any:  # noqa: ANN401  (what JSON holds)
    """What it reads, or None where it refuses by name; anything else is a finding. The error's words come beside it."""
    to_node, from_node = _pipes()
    to_node.write(json.dumps([what, value]) + "\n")
    to_node.flush()
    answer = json.loads(from_node.readline())
    assert "fault" not in answer, f"{value!r}: {answer['fault']}"
    return answer.get("read"), answer.get("refused")


def value_of(told: Any) -> object:  # noqa: ANN401
    """The value that an answer holds; numbers that are whole are integers, as JavaScript knows no difference."""
    if isinstance(told, list):
        return list(map(value_of, told))
    if not isinstance(told, dict):
        return told
    if "bytes" in told:
        return bytes.fromhex(told["bytes"])
    if "map" in told:
        return {value_of(key): value_of(item) for key, item in told["map"]}
    if "integer" in told:
        return int(told["integer"])
    number = float(told["number"].replace("Infinity", "inf"))
    return int(number) if number.is_integer() else number


def alike(ours: object, theirs: object) -> bool:
    """Equal where a whole float and an integer are, as in JavaScript."""
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return ours == theirs or (ours != ours and theirs != theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, list):
        assert isinstance(theirs, list)
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(ours, dict):
        assert isinstance(theirs, dict)
        pairs = zip(ours.items(), theirs.items(), strict=True)
        return len(ours) == len(theirs) and all(alike(a, b) and alike(x, y) for (a, x), (b, y) in pairs)
    return ours == theirs
