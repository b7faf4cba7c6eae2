"""Turns a device's launches into the words that the native loop runs, with a table of what a replay patches into them.

The words are those of packed launches: program, grid, arguments. They are made once; a replay's buffers and values go
in without touching them: buffers through the table of slots, values through the patch table, in C. It touches no memory
of a device.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wsgrad.graph.part import LaunchOp, Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.graph.part import Argument, DevicePart, PartStep, Size

PATCH: Final = struct.Struct("<IIIIqq")
"""One patch: word, kind, source, 0, scale, offset: `struct { u32 word, kind, source, zero; i64 scale, offset; }`."""
_MASK: Final = (1 << 32) - 1


class PatchKind(enum.IntEnum):
    """What a patch writes at its word; `v` is `scale * values[source] + offset` modulo 2**64, as a signed number.

    `WORD`: the low half of v. `DOUBLE`: v in two words, low first. `FLOAT32`: `(float)(double)v`. `FLOAT64`:
    `(double)v` in two words.
    """

    WORD = 0
    DOUBLE = 1
    FLOAT32 = 2
    FLOAT64 = 3


PATCHES: Final = {
    "i": PatchKind.WORD,
    "I": PatchKind.WORD,
    "q": PatchKind.DOUBLE,
    "Q": PatchKind.DOUBLE,
    "f": PatchKind.FLOAT32,
    "d": PatchKind.FLOAT64,
}


@dataclass(frozen=True, slots=True)
class Run:
    """Launches in a row that the loop runs in one call: words `first` to `end`.

    Attributes:
        steps: the steps, one a launch. Only the first has waits, only the last is signalled, and no transfer of the
            device has a number between theirs.
    """

    first: int
    end: int
    steps: tuple[PartStep, ...]


@dataclass(frozen=True, slots=True)
class NativeWords:
    """A compute queue for the native loop.

    Attributes:
        words: little-endian; slots stand where the ids of buffers go, 0 where variables do.
        patches: records of `PATCH`, in the order of their words; one for every use of a variable.
        queue: what to do in order: calls of the loop, and between them the steps that it can't run.
    """

    words: bytes
    patches: bytes
    queue: tuple[Run | PartStep, ...]


def native_words(part: DevicePart) -> NativeWords:
    """Pack the compute queue of a device, as checked by `parse_part`."""
    words: list[int] = []
    patches: list[bytes] = []
    queue: list[Run | PartStep] = []
    for entry in launch_runs(part, lambda op: op.block is None and len(op.grid or ()) <= 1):
        if isinstance(entry, tuple):
            first = len(words)
            for step in entry:
                assert isinstance(step.op, LaunchOp)
                _pack(step.op, part.programs[step.op.program], words, patches)
            queue.append(Run(first, len(words), entry))
        else:
            queue.append(entry)
    return NativeWords(struct.pack(f"<{len(words)}I", *words), b"".join(patches), tuple(queue))


def launch_runs(part: DevicePart, fits: Callable[[LaunchOp], bool]) -> list[tuple[PartStep, ...] | PartStep]:
    """The steps of the compute queue: tuples of launches in a row that fit, as in `Run.steps`, and the others."""
    queue: list[tuple[PartStep, ...] | PartStep] = []
    steps: list[PartStep] = []
    transfers = sorted(step.number for lane in part.lanes[1:] for step in lane)
    passed = 0

    def end_run() -> None:
        if steps:
            queue.append(tuple(steps))
            steps.clear()

    for step in part.lanes[0]:
        before = passed
        while passed < len(transfers) and transfers[passed] < step.number:
            passed += 1
        if step.waits or passed > before:
            end_run()
        if isinstance(step.op, LaunchOp) and fits(step.op):
            steps.append(step)
        else:
            end_run()
            queue.append(step)
        if step.number in part.signalled:
            end_run()
    end_run()
    return queue


def _pack(op: LaunchOp, signature: str, words: list[int], patches: list[bytes]) -> None:
    words.append(op.program)
    _add(PatchKind.WORD, op.grid[0] if op.grid else 0, words, patches)
    values = iter(op.arguments)
    for letter in signature:
        if letter == "x":
            continue
        value = next(values)
        if letter == "p":
            assert isinstance(value, int)
            words.append(value)
        else:
            _add(PATCHES[letter], value, words, patches)


def _add(kind: PatchKind, value: Argument | Size, words: list[int], patches: list[bytes]) -> None:
    if isinstance(value, Linear):
        patches.append(PATCH.pack(len(words), kind, value.var, 0, value.scale, value.offset))
        value = 0
    words += value_words(kind, value)


def value_words(kind: PatchKind, value: float) -> tuple[int, ...]:
    """The words of a number; one too large for a 32-bit float becomes an infinity, as a C cast would make it."""
    match kind:
        case PatchKind.FLOAT32:
            try:
                return struct.unpack("<I", struct.pack("<f", value))
            except OverflowError:
                return struct.unpack("<I", struct.pack("<f", math.copysign(math.inf, value)))
        case PatchKind.FLOAT64:
            return struct.unpack("<II", struct.pack("<d", value))
    whole = int(value)
    return (whole & _MASK, whole >> 32 & _MASK) if kind is PatchKind.DOUBLE else (whole & _MASK,)
