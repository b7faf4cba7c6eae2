"""Finds the line of the user's program that issued a command, for `WSGRAD_DEBUG=1`; knows nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

_passed: tuple[str, ...] = (str(Path(__file__).parent.parent) + "/",)


def pass_over(directory: Path) -> None:
    """Count what is in this directory as ours: a library that issues commands for its user."""
    global _passed
    _passed += (f"{directory}/",)


def caller_line() -> str:
    """`file:line` of the innermost frame outside this package, and others that were named."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_passed):
        back = frame.f_back
        if back is None:
            break
        frame = back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
