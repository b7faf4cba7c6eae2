"""Figures with their targets: collected by the benchmarks, printed as a table for people or as JSON for programs.

It measures nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and what it is held against; `better` says which side of the target is good."""

    name: str
    value: float
    unit: str
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"
    detail: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


@dataclass(slots=True)
class Report:
    """The figures of one run."""

    title: str
    figures: list[Figure] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        """Keep a figure and say it at once, so that a long run shows where it is."""
        self.figures.append(figure)
        print(f"{figure.name}: {figure.value:.4g} {figure.unit} {figure.detail}", file=sys.stderr, flush=True)

    def show(self, target: str | None) -> None:
        """Write JSON to `target`, or print the table where there is none."""
        if target:
            self.write_json(target)
        else:
            self.print_table()

    def write_json(self, target: str) -> None:
        """Write all figures to a file, or to standard output for `-`."""
        rows = [{**asdict(figure), "reached": figure.reached} for figure in self.figures]
        text = json.dumps({"title": self.title, "figures": rows}, indent=1)
        if target == "-":
            print(text)
        else:
            Path(target).write_text(text + "\n")

    def print_table(self) -> None:
        """Show the figures with their targets."""
        table = Table(title=self.title)
        for column in ("figure", "value", "target", "", "detail"):
            table.add_column(column, justify="right" if column in ("value", "target") else "left")
        for figure in self.figures:
            sign = "≥" if figure.better == "higher" else "≤"
            target = "" if figure.target is None else f"{sign} {figure.target:,g}"
            mark = {None: "", True: "ok", False: "MISSED"}[figure.reached]
            table.add_row(figure.name, f"{figure.value:,.4g} {figure.unit}".strip(), target, mark, figure.detail)
        Console().print(table)
