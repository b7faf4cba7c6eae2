"""The command `wsgrad`: devices of a server, its nodes and tokens, the way to it, this machine, timelines.

It only shows what the client and `devices.doctor` find out: tables for people, JSON for programs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import wsgrad
from wsgrad.errors import DeviceError, WsgradError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

_SIZES = (4, 1 << 10, 32 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
_ADMIN_HELP = "The administrator's token stands in WSGRAD_ADMIN_TOKEN or behind the URL as #token=…"
_JSON_HELP = "write JSON to FILE (standard output if left out, or '-') instead of a table"


@dataclass(frozen=True, slots=True)
class _Figure:
    """One measured value: seconds, bytes a second, or launches a second, by `unit`."""

    name: str
    unit: str
    nbytes: int | None
    value: float


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    # Names come from servers and nodes: whatever they hold is shown as it is.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def _write_json(value: object, target: str) -> None:
    text = json.dumps(value, indent=1, default=str)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


def _devices(arguments: argparse.Namespace) -> int:
    from wsgrad.client.buffer import size_in_words

    table = _table("devices", "id and label", "kind", "dialects", "processor", "memory", "compiler", "confined")
    rows = []
    with wsgrad.connect(arguments.url) as server:
        for device in server.devices:
            row = dict(device.properties)
            rows.append(row)
            memory = row.get("memory")
            table.add_row(
                device.id if device.label == device.id else f"{device.id}\n{device.label}",
                device.kind + (" (software)" if row.get("software") else ""),
                ", ".join(device.dialects),
                _processor(row),
                size_in_words(memory) if isinstance(memory, int) else "?",
                str(row.get("compiler") or "-"),
                "yes" if row.get("confined") else "no" if "confined" in row else "-",
            )
    if arguments.json:
        _write_json(rows, arguments.json)
    else:
        _console().print(table)
    return 0


def _processor(properties: Mapping[str, object]) -> str:
    name = str(properties.get("adapter") or properties.get("cpu") or properties.get("arch") or "?")
    return f"{name}, {properties['threads']} threads" if "threads" in properties else name


def _mebibytes(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= _SIZES[-1] >> 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of MiB from 1 to {_SIZES[-1] >> 20}")
    return int(text)


def _bench(arguments: argparse.Namespace) -> int:
    from rich.progress import Progress

    from wsgrad.client import bench
    from wsgrad.client.buffer import size_in_words

    figures: list[_Figure] = []
    console = _console(stderr=True)
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        wsgrad.connect(arguments.url) as server,
    ):
        if not server.devices:
            raise DeviceError(f"{server!r} offers nothing to measure")
        device = server.devices[arguments.device or 0]
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
        for name, unit, nbytes, measure in steps:
            progress.update(task, description=f"{name} {size_in_words(nbytes) if nbytes else ''}".strip())
            figures.append(_Figure(name, unit, nbytes, measure()))
            progress.advance(task)
        identity = device.id
    if arguments.json:
        _write_json({"device": identity, "figures": [asdict(figure) for figure in figures]}, arguments.json)
        return 0
    table = _table(f"the way to {identity}", "figure", "size", "measured")
    for figure in figures:
        value = figure.value
        shown = {"s": f"{value * 1e6:,.0f} µs", "B/s": f"{value / 1e6:,.4g} MB/s", "1/s": f"{value:,.0f} /s"}
        words = "" if figure.nbytes is None else size_in_words(figure.nbytes)
        table.add_row(figure.name, words, shown[figure.unit])
    _console().print(table)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.text import Text

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
                mark = {True: ("ok", "green"), False: ("no", "red"), None: ("-", "yellow")}[finding.ok]
                table.add_row(Text(*mark), finding.subject, finding.found, finding.advice)
        _console().print(table)
    return 1 if any(finding.ok is False for finding in findings) else 0


def _trace(arguments: argparse.Namespace) -> int:
    from wsgrad.client.trace_summary import summarize

    rows = summarize(arguments.file, items=arguments.items)[: arguments.top]
    if arguments.json:
        _write_json([asdict(row) | {"mean_seconds": row.mean_seconds} for row in rows], arguments.json)
        return 0
    table = _table(
        f"what took the most time in {arguments.file}", "where", "what", "name", "count", "total", "mean", "most"
    )
    for row in rows:
        times = (row.seconds, row.mean_seconds, row.longest_seconds)
        table.add_row(
            row.where, row.what, row.name, f"{row.count:,}", *(f"{seconds * 1e3:,.3f} ms" for seconds in times)
        )
    _console().print(table)
    return 0


def _nodes(arguments: argparse.Namespace) -> int:
    from wsgrad.client.admin import administration_of

    administration = administration_of(arguments.url)
    if arguments.action != "list":
        asked = {"label": arguments.label} if arguments.action == "rename" else None
        answer = administration.act(arguments.name, arguments.action, asked)
        if arguments.json:
            _write_json(answer, arguments.json)
        else:
            print(_DONE[arguments.action].format(**{"label": "", "node": ""} | answer))
        return 0
    nodes = administration.nodes()
    if arguments.json:
        _write_json(nodes, arguments.json)
        return 0
    table = _table("nodes that dialled in", "name", "label", "state", "devices", "queues", "from", "agent")
    for node in nodes:
        devices = node.get("devices")
        table.add_row(
            str(node.get("name")),
            str(node.get("label")),
            "paused" if node.get("paused") else "at work",
            "\n".join(map(str, devices)) if isinstance(devices, list) else "",
            str(node.get("queues", "")),
            str(node.get("peer", "")),
            str(node.get("agent", "")),
        )
    _console().print(table)
    return 0


_DONE = {
    "rename": "{name} is called {label!r}",
    "pause": "{name} is paused: it takes no new work, and what runs there waits",
    "resume": "{name} takes work again",
    "kick": "{name} is sent away until its owner lets it join again",
    "revoke": "{name} is sent away for good. Nodes that have joined stay; new ones need this token:\n{node}",
}


def _tokens(arguments: argparse.Namespace) -> int:
    from wsgrad.client.admin import administration_of

    answer = administration_of(arguments.url).rotate_tokens(admin=arguments.admin)
    if arguments.json:
        _write_json(answer, arguments.json)
    else:
        print("the tokens from now on; who is connected stays, and nodes that have joined before can come back")
        for role, token in answer.items():
            print(f"{role}: {token}")
    return 0


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
    bench.add_argument("--max-size", type=_mebibytes, default=256, metavar="MIB", help="largest transfer (default 256)")
    for command in (devices, bench):
        command.add_argument("url", nargs="?", metavar="URL", help=url_help)
    nodes = commands.add_parser("nodes", help="list, rename, pause, resume, kick or revoke nodes that dialled in")
    nodes.set_defaults(run=_nodes, action="list", url=None, json=None)
    actions = nodes.add_subparsers(metavar="ACTION")
    helps = {
        "list": "what there is",
        "rename": "give it another label",
        "pause": "let it take no more work, and hold what it has",
        "resume": "let it work again",
        "kick": "send it away until its owner lets it join again",
        "revoke": "send it away for good and make a new node token",
    }
    tokens = commands.add_parser("tokens", help="give a running server new tokens")
    changes = tokens.add_subparsers(dest="action", metavar="ACTION", required=True)
    rotate = changes.add_parser("rotate", help="make new tokens for clients and nodes and show them; the old ones end")
    rotate.set_defaults(run=_tokens)
    rotate.add_argument("--admin", action="store_true", help="make a new one for administrators too")
    administrative = [rotate]
    for action, text in helps.items():
        command = actions.add_parser(action, help=text)
        command.set_defaults(action=action)
        if action != "list":
            command.add_argument("name", metavar="NODE", help="its name, as `wsgrad nodes list` shows it")
        if action == "rename":
            command.add_argument("label", metavar="LABEL", help='what it is called from now on; "" for its name')
        administrative.append(command)
    for command in administrative:
        command.add_argument("url", nargs="?", metavar="URL", help="the server; default: WSGRAD_URL. " + _ADMIN_HELP)
    doctor = commands.add_parser("doctor", help="say which runtimes and confinement work here, and what to install")
    doctor.set_defaults(run=_doctor)
    trace = commands.add_parser("trace", help="show what took the most time in a timeline that server.trace() wrote")
    trace.set_defaults(run=_trace)
    trace.add_argument("file", metavar="FILE", help="the timeline")
    trace.add_argument("--top", type=int, default=20, metavar="N", help="how many rows (default 20)")
    trace.add_argument("--items", action="store_true", help="a row for each item of a graph")
    for command in (devices, bench, doctor, trace, *administrative):
        command.add_argument("--json", metavar="FILE", nargs="?", const="-", help=_JSON_HELP)
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
    except OSError as error:  # a file that can't be written, a server that does not answer in time
        print(f"wsgrad: {error}", file=sys.stderr)
        return 1
