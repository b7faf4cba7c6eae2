"""Adds up a timeline's events: which calls, kernels, copies and waits took the most time; it shows nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    import os


@dataclass(slots=True)
class Row:
    """Events of one name in one place.

    Attributes:
        where: the client, a server, or a device.
        what: the category.
        seconds: all of them together; they may overlap.
    """

    where: str
    what: str
    name: str
    count: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0

    @property
    def mean_seconds(self) -> float:
        """How long one of them took."""
        return self.seconds / self.count


def summarize(path: str | os.PathLike[str], *, items: bool = False) -> list[Row]:
    """The rows of a timeline, the most expensive first.

    Args:
        path: a file that `trace` wrote.
        items: whether the items of graphs are rows of their own, instead of adding up with others of their name.

    Raises:
        WsgradError: it is no such file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        return _rows(events, items=items)
    except OSError as exc:
        raise WsgradError(f"{path!s} can't be read: {exc.strerror or exc}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise WsgradError(f"{path!s} is no timeline of wsgrad: {type(exc).__name__}: {exc}") from exc


def _rows(events: list[dict[str, object]], *, items: bool) -> list[Row]:
    processes = {event["pid"]: str(_arguments(event)["name"]) for event in events if event["name"] == "process_name"}
    rows: dict[tuple[object, str, str], Row] = {}
    open_events: dict[tuple[str, object], float] = {}
    for event in events:
        phase, name, category = event["ph"], str(event["name"]), str(event.get("cat", ""))
        if phase == "b":
            open_events[category, event["id"]] = _number(event["ts"])
            continue
        if phase == "X":
            microseconds = _number(event["dur"])
        elif phase == "e":
            microseconds = _number(event["ts"]) - open_events.pop((category, event["id"]))
        else:
            continue
        if not items:
            name = str(_arguments(event).get("of", name))
        key = (event["pid"], category, name)
        row = rows.get(key)
        if row is None:
            row = rows[key] = Row(processes.get(event["pid"], "?"), category, name)
        row.count += 1
        row.seconds += microseconds / 1e6
        row.longest_seconds = max(row.longest_seconds, microseconds / 1e6)
    return sorted(rows.values(), key=lambda row: -row.seconds)


def _arguments(event: dict[str, object]) -> dict[str, object]:
    arguments = event.get("args", {})
    if not isinstance(arguments, dict):
        raise TypeError(f"args is {arguments!r:.40}")
    return arguments


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"a time is {value!r:.40}")
    return float(value)
