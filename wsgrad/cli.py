"""The command `wsgrad`: lists a server's devices, measures the way to one, and examines this machine.

It only shows what the client and `devices.doctor` find out: tables for people, JSON for programs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import wsgrad
from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

_SIZES = (4, 1 << 10, 32 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
_JSON_HELP = "write JSON to FILE ('-': standard output) instead of a table"


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _write_json(value: object, target: str) -> None:
    text = json.dumps(value, indent=1, default=str)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes //= 1024
    return f"{nbytes} {unit}"


def _devices(arguments: argparse.Namespace) -> int:
    with wsgrad.connect(arguments.url) as server:
        rows = [dict(device.properties) for device in server.devices]
    if arguments.json:
        _write_json(rows, arguments.json)
        return 0
    table = _table("devices", "id", "kind", "dialects", "processor", "memory", "compiler", "confined")
    for row in rows:
        memory = row.get("memory")
        table.add_row(
            str(row["id"]),
            str(row["kind"]) + (" (software)" if row.get("software") else ""),
            ", ".join(str(dialect) for dialect in row.get("dialects", ())),
            f"{row.get('cpu') or row.get('arch') or '?'}, {row.get('threads', '?')} threads",
            _size(memory) if isinstance(memory, int) else "?",
            str(row.get("compiler") or "-"),
            {True: "yes", False: "no"}.get(row.get("confined"), "?"),
        )
    _console().print(table)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from rich.progress import Progress

    from wsgrad.client import bench

    figures: list[dict[str, object]] = []
    with Progress(console=_console(stderr=True), transient=True) as progress, wsgrad.connect(arguments.url) as server:
        device = server.devices[arguments.device] if arguments.device else server.devices[0]
        sizes = [size for size in _SIZES if size <= arguments.max_size << 20]
        steps: list[tuple[str, str, int | None, Callable[[], float]]] = [
            ("open a session and a device", "s", None, lambda: bench.measure_open(server.url)),
            ("round trip", "s", 4, lambda: bench.measure_round_trip(device)),
            ("launches", "1/s", None, lambda: bench.measure_launches(device)),
        ]
        for size in sizes:
            steps.append(("upload", "B/s", size, lambda size=size: bench.measure_upload(device, size)))  # type: ignore[misc]
            steps.append(("download", "B/s", size, lambda size=size: bench.measure_download(device, size)))  # type: ignore[misc]
        task = progress.add_task("measuring", total=len(steps))
        for name, unit, size, measure in steps:
            progress.update(task, description=f"{name} {_size(size) if size else ''}".strip())
            figures.append({"name": name, "unit": unit, "nbytes": size, "value": measure()})
            progress.advance(task)
        identity = device.id
    if arguments.json:
        _write_json({"device": identity, "figures": figures}, arguments.json)
        return 0
    table = _table(f"the way to {identity}", "figure", "size", "measured")
    for figure in figures:
        size, value = figure["nbytes"], figure["value"]
        assert isinstance(value, float)
        shown = {"s": f"{value * 1e6:,.0f} µs", "B/s": f"{value / 1e6:,.1f} MB/s", "1/s": f"{value:,.0f} /s"}
        table.add_row(str(figure["name"]), _size(size) if isinstance(size, int) else "", shown[str(figure["unit"])])
    _console().print(table)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from wsgrad.devices.doctor import examine

    if arguments.json:
        findings = list(examine())
        _write_json([asdict(finding) for finding in findings], arguments.json)
    else:
        findings = []
        table = _table("what works on this machine", "", "what", "found", "what to do")
        with _console(stderr=True).status("looking") as status:
            for finding in examine():
                findings.append(finding)
                status.update(f"looking: {finding.subject}")
                mark = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]-[/]"}[finding.ok]
                table.add_row(mark, finding.subject, finding.found, finding.advice)
        _console().print(table)
    return 1 if any(finding.ok is False for finding in findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wsgrad", description="Use accelerators behind a wsgrad server.")
    parser.add_argument("--version", action="version", version=f"wsgrad {wsgrad.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    url_help = "the server, as wsgrad-serve prints it; default: WSGRAD_URL, else a server of this machine's processor"

    devices = commands.add_parser("devices", help="list the devices of a server")
    devices.set_defaults(run=_devices)
    bench = commands.add_parser("bench", help="measure the way to a device: round trip, bulk speed, launches, opening")
    bench.set_defaults(run=_bench)
    bench.add_argument("--device", metavar="NAME", help="id, label or kind; default: the first")
    bench.add_argument("--max-size", type=int, default=256, metavar="MIB", help="largest transfer (default 256)")
    for command in (devices, bench):
        command.add_argument("url", nargs="?", metavar="URL", help=url_help)
    doctor = commands.add_parser("doctor", help="say which runtimes and confinement work here, and what to install")
    doctor.set_defaults(run=_doctor)
    for command in (devices, bench, doctor):
        command.add_argument("--json", metavar="FILE", help=_JSON_HELP)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 for what went wrong, 130 after Ctrl-C."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except WsgradError as error:
        print(f"wsgrad: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
