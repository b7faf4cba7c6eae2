"""Random commands and graphs on the executor of a tab, under Node with its fake device, and on Python's: the same.

The long form of what `tests/devices/test_tab_executor.py` does with some seeds.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from fuzz.choices import Choices
from fuzz.shared import load_test_module, toolbox
from wsgrad.devices.native import Native, source
from wsgrad.transport import commands as c

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 240
_MOVES = 20
_tests = load_test_module("devices/test_tab_executor")
_rigs = load_test_module("devices/device_rigs")
_toolbox = toolbox()
_binary = _toolbox.build(source())
with _rigs.memfd(_binary) as _fd:
    _loop = Native(_fd, len(_binary))
_tab = load_test_module("devices/tab_rigs").TabServer(_toolbox)
threading.Thread(target=deque, args=(_tab.tab.process.stdout, 0), daemon=True).start()  # what it says is not kept


def seeds() -> Iterator[bytes]:
    """Moves of every kind."""
    for index in range(12):
        yield bytes((index * 37 + k * k * 3 + (k * index) // 2) & 255 for k in range(160))


def check(data: bytes) -> None:
    """First on Python's executor, which says what fails; then on the tab's, without waiting."""
    choices = Choices(data)
    made: list[object] = [("batch", [c.Alloc(buffer, 64) for buffer in range(1, 6)])] if choices.some(3) else []
    while choices.left and len(made) < _MOVES:
        made.append(_tests.move(choices))
    _tests.moves = lambda seed: made
    reference = _rigs.ExecutorRig(_toolbox, _loop)
    expected, failed = _tests.play(reference, 0)
    reference.close()
    rig = _tab.open_queue()
    answers, _ = _tests.play(rig, 0, failed)
    rig.close()
    for kind in ("read", "failed", "chunk", "result"):
        ours, theirs = ([a for a in found if a[0] == kind] for found in (expected, answers))
        assert ours == theirs, (made, ours, theirs)
