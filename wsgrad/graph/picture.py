"""Draws a plan as SVG: a lane for each queue, a box for each step, an arrow for each wait; no library, no script."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from wsgrad.graph.explain import what
from wsgrad.graph.schedule import Receive

if TYPE_CHECKING:
    from wsgrad.graph.recording import Recording
    from wsgrad.graph.schedule import Schedule

_LEFT: Final = 180
_COLUMN: Final = 110
_LANE: Final = 56
_BOX: Final = (90, 36)
_COLOURS: Final = ("#cfe3ff", "#ffe2c4", "#d3f3d6")
_HEAD: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>'
)


def drawn(recording: Recording, planned: Schedule) -> str:
    """The picture; what a box does is its title, shown when the mouse rests on it."""
    columns = _columns(planned)
    width = _LEFT + _COLUMN * (max(columns, default=0) + 1)
    parts = [_HEAD.format(width=width, height=_LANE * len(planned.queues) or 1)]
    for at, queue in enumerate(planned.queues):
        middle = _LANE * at + _LANE // 2
        parts.append(f'<text x="8" y="{middle + 4}">{_text(queue.label)}</text>')
        parts.append(f'<line x1="{_LEFT - 10}" y1="{middle}" x2="{width}" y2="{middle}" stroke="#ddd"/>')
    corners = [
        (_LEFT + _COLUMN * column, _LANE * step.queue + (_LANE - _BOX[1]) // 2)
        for step, column in zip(planned.steps, columns, strict=True)
    ]
    for step, (x, y) in zip(planned.steps, corners, strict=True):
        links = [(wait.step, "") for wait in step.waits]
        if isinstance(step.action, Receive):
            links.append((step.number - 1, ' stroke-dasharray="4 3"'))
        for before, style in links:
            from_x, from_y = corners[before - 1]
            line = f'x1="{from_x + _BOX[0]}" y1="{from_y + _BOX[1] // 2}" x2="{x}" y2="{y + _BOX[1] // 2}"'
            parts.append(f'<line {line} stroke="#555" marker-end="url(#tip)"{style}/>')
    for step, (x, y) in zip(planned.steps, corners, strict=True):
        items = " ".join(f"#{item}" for item in step.items)
        colour = _COLOURS[planned.queues[step.queue].lane]
        parts.append(
            f"<g><title>step {step.number}, {items}: {_text(what(recording, step))}</title>"
            f'<rect x="{x}" y="{y}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4" fill="{colour}" stroke="#888"/>'
            f'<text x="{x + 6}" y="{y + 15}">{step.number}: {items if len(items) < 12 else items[:10] + "…"}</text>'
            f'<text x="{x + 6}" y="{y + 29}">{_text(what(recording, step)[:14])}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _columns(planned: Schedule) -> list[int]:
    """For each step the column: behind what it follows in its queue and what it waits for."""
    columns: list[int] = []
    ends = [0] * len(planned.queues)
    for step in planned.steps:
        column = max([ends[step.queue], *(columns[wait.step - 1] + 1 for wait in step.waits)])
        if isinstance(step.action, Receive):
            column = max(column, columns[step.number - 2] + 1)
        columns.append(column)
        ends[step.queue] = column + 1
    return columns


def _text(text: str) -> str:
    """For XML, which can't hold most control characters at all."""
    return html.escape("".join(char if char.isprintable() else "?" for char in text))
