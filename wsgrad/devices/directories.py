"""Where this user's files may lie, by the XDG Base Directory Specification; makes no directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    from collections.abc import Mapping


class NoHome(WsgradError):
    """There is no directory of the user's where something could be kept."""


def user_directory(variable: str, below_home: str, environment: Mapping[str, str]) -> Path:
    """wsgrad's own directory under an XDG base directory, by default in the user's home (XDG Base Directory).

    Raises:
        NoHome: the user has none.
    """
    base = environment.get(variable, "")
    if os.path.isabs(base):
        return Path(base) / "wsgrad"
    try:
        return Path.home() / below_home / "wsgrad"
    except RuntimeError as exc:
        raise NoHome(f"this user has no home directory: set HOME, or {variable} to a directory of its own") from exc
