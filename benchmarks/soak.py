"""Long runs that must stay right and flat: `python -m benchmarks.soak COMMAND --json -`; each has a module of its own.

Knows only the command line: which commands there are, and where their figures go.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from benchmarks import soak_chaos, soak_kills, soak_load, soak_sessions
from benchmarks.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.soak_command import SoakCommand

COMMANDS: Final[tuple[SoakCommand, ...]] = (
    soak_sessions.COMMAND,
    soak_kills.COMMAND,
    soak_chaos.COMMAND,
    soak_load.LOAD,
    soak_load.LATENCY,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.about, description=command.about)
        own.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON; - for standard output")
        command.add_arguments(own)
        own.set_defaults(command=command)
    options = parser.parse_args(arguments)
    report = Report(f"soak: {options.command.name}")
    options.command.measure(report, options)
    report.show(options.json)


if __name__ == "__main__":
    main()
