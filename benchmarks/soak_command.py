"""What a sub-command of `benchmarks.soak` is: a name, its arguments, and what it does to a report. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.report import Report


@dataclass(frozen=True, slots=True)
class SoakCommand:
    """One sub-command.

    Attributes:
        name: as given on the command line.
        about: one line for `--help`.
        add_arguments: gives the parser what this command alone takes.
        measure: runs it, adds its figures to the report, and raises where something is wrong, not only slow.
    """

    name: str
    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[Report, argparse.Namespace], None]
