"""Collects a graph's items in the order in which they were written and checks each one; it orders and runs nothing."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from wsgrad.errors import LaunchError
from wsgrad.graph.items import (
    INDEX,
    Access,
    Affine,
    Copy,
    Device,
    Fill,
    Item,
    Launch,
    Operand,
    Range,
    Transfer,
    Var,
    affine,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from wsgrad.graph.items import Argument, Size

INTEGERS: Final = {
    "i": (-(1 << 31), (1 << 31) - 1),
    "I": (0, (1 << 32) - 1),
    "q": (-(1 << 63), (1 << 63) - 1),
    "Q": (0, (1 << 64) - 1),
}
MAX_GRID: Final = (1 << 32) - 1
MAX_INTEGER: Final = 1 << 62
PATTERNS: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A base buffer that a recording knows.

    Attributes:
        number: its place in `Recording.buffers`.
        memory: what tells its memory from any other on all devices, for as long as the graph lives.
        owned: allocated for the graph, which frees it.
    """

    number: int
    device: Device
    nbytes: int
    memory: Hashable
    name: str
    owned: bool

    @property
    def label(self) -> str:
        return self.name or f"buffer {self.number}"


class Recording:
    """The items of one graph, and the buffers and variables that they use.

    Attributes:
        buffers: the declared ones, by number.
        items: what was recorded, in order.
        variables: the variables met so far, by name, in the order in which they were met.
        touched: the numbers of the buffers that items use.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.items: list[Item] = []
        self.variables: dict[str, Var] = {}
        self.touched: set[int] = set()
        self._by_memory: dict[Hashable, Buffer] = {}
        self._signatures: dict[tuple[Device, int], str] = {}

    @property
    def owned(self) -> list[int]:
        """The numbers of the buffers that go with the graph."""
        return [buffer.number for buffer in self.buffers if buffer.owned]

    def buffer(self, device: Device, nbytes: int, *, memory: Hashable, name: str = "", owned: bool = False) -> int:
        """The number of a base buffer: the one it has if its memory was met before, else a new one."""
        known = self._by_memory.get(memory)
        if known is not None:
            if (known.device, known.nbytes) != (device, nbytes):
                raise LaunchError(
                    f"{known.label} was recorded with {known.nbytes} bytes on {known.device.label}, now it is given "
                    f"with {nbytes} bytes on {device.label}: each buffer needs a key of its own"
                )
            return known.number
        if nbytes < 0:
            raise LaunchError(f"a buffer of {nbytes} bytes can't be recorded")
        made = Buffer(len(self.buffers), device, nbytes, memory, name, owned)
        self._by_memory[memory] = made
        self.buffers.append(made)
        return made.number

    def find(self, memory: Hashable) -> Buffer | None:
        """The buffer that was declared with this memory."""
        return self._by_memory.get(memory)

    def add(self, item: Item) -> int:
        """Check an item and append it.

        Returns:
            Its index.

        Raises:
            LaunchError: it can't be run, whatever a replay brings; nothing was recorded.
        """
        for range_, _ in item.accesses:
            self._check_range(range_)
        variables: list[Var] = []
        match item:
            case Launch():
                self._check_launch(item, variables)
            case Copy():
                self._check_home(item.source, item.device, "a copy's source")
                self._check_home(item.target, item.device, "a copy's target")
                self._check_sizes(item)
            case Fill():
                self._check_home(item.target, item.device, "a fill's target")
                if len(item.pattern) not in PATTERNS or item.target.nbytes % len(item.pattern):
                    raise LaunchError(
                        f"a fill of {item.target.nbytes} bytes with a pattern of {len(item.pattern)}: the pattern has "
                        f"1, 2, 4, 8 or 16 bytes and divides the range"
                    )
            case Transfer():
                self._check_sizes(item)
                source, target = self.buffers[item.source.buffer], self.buffers[item.target.buffer]
                if source.device == target.device:
                    raise LaunchError(
                        f"{source.label} and {target.label} are both on {source.device.label}: use a copy"
                    )
            case _:
                assert_never(item)
        if isinstance(item, Launch):
            self._signatures[item.device, item.program] = item.signature
        for var in variables:
            self.variables.setdefault(var.name, var)
        self.touched.update(range_.buffer for range_, _ in item.accesses)
        self.items.append(item)
        return len(self.items) - 1

    def values(self, given: Mapping[str, int]) -> list[int]:
        """A replay's values of the variables, in the order of `variables`.

        Raises:
            LaunchError: one is missing, unknown, no integer, or outside its range.
        """
        for name in given:
            if name not in self.variables:
                raise LaunchError(f"the graph has no variable {name!r}; it has {', '.join(self.variables) or 'none'}")
        values = []
        for name, var in self.variables.items():
            if name not in given:
                raise LaunchError(f"the graph needs a value for {name}, {var.low} to {var.high}")
            value = given[name]
            if type(value) is not int or not var.low <= value <= var.high:
                raise LaunchError(f"{name}={value!r} is not an integer from {var.low} to {var.high}")
            values.append(value)
        return values

    def _check_range(self, range_: Range) -> None:
        if not 0 <= range_.buffer < len(self.buffers):
            raise LaunchError(f"buffer {range_.buffer} was never declared to this recording")
        buffer = self.buffers[range_.buffer]
        if range_.offset < 0 or range_.nbytes < 0 or range_.end > buffer.nbytes:
            raise LaunchError(
                f"bytes {range_.offset} to {range_.end} lie outside {buffer.label} with its {buffer.nbytes} bytes"
            )

    def _check_home(self, range_: Range, device: Device, what: str) -> None:
        buffer = self.buffers[range_.buffer]
        if buffer.device != device:
            raise LaunchError(f"{what}, {buffer.label}, is on {buffer.device.label}, not on {device.label}")

    def _check_sizes(self, item: Copy | Transfer) -> None:
        if item.source.nbytes != item.target.nbytes:
            raise LaunchError(
                f"{item.source.nbytes} bytes of {self.buffers[item.source.buffer].label} do not fit "
                f"{item.target.nbytes} bytes of {self.buffers[item.target.buffer].label}"
            )

    def _check_launch(self, item: Launch, variables: list[Var]) -> None:
        name = item.name or f"program {item.program}"
        if len(item.signature) != len(item.arguments):
            raise LaunchError(f"{name} takes {len(item.signature)} arguments, {len(item.arguments)} were given")
        signature = self._signatures.get((item.device, item.program), item.signature)
        if signature != item.signature:
            raise LaunchError(f"{name} was launched with signature {signature}, now with {item.signature}")
        written: list[Operand] = []
        for place, (letter, argument) in enumerate(zip(item.signature, item.arguments, strict=True)):
            if isinstance(argument, Operand):
                self._check_home(argument.range, item.device, f"argument {place} of {name}")
                if argument.access & Access.WRITE:
                    written.append(argument)
            if not _fits(letter, argument):
                raise LaunchError(f"argument {place} of {name} is {_show(argument)}, which is no {_LETTERS[letter]}")
            if isinstance(argument, Var | Affine):
                self._check_variable(affine(argument), variables)
        for size in item.grid or ():
            low, high = _bounds(size)
            if not 1 <= low <= high <= MAX_GRID:
                raise LaunchError(f"a grid of {_show(size)} for {name}: a size is 1 to {MAX_GRID}")
            if isinstance(size, Var | Affine):
                self._check_variable(affine(size), variables)
        if item.grid is not None and not 1 <= len(item.grid) <= 3:
            raise LaunchError(f"a grid of {len(item.grid)} sizes for {name}: it has 1 to 3")
        clash = written_twice(written, alias=item.alias)
        if clash is not None:
            one, other = (self.buffers[written[place].range.buffer].label for place in clash)
            raise LaunchError(f"{name} would write overlapping ranges of {one} and {other}; give it ranges apart")

    def _check_variable(self, size: Affine, variables: list[Var]) -> None:
        var = size.var
        known = self.variables.get(var.name, var)
        if known != var or any(other.name == var.name and other != var for other in variables):
            raise LaunchError(f"{var.name} was declared {known.low} to {known.high}: one range for one name")
        if not -MAX_INTEGER <= var.low <= var.high <= MAX_INTEGER:
            raise LaunchError(f"{var.name} from {var.low} to {var.high} is no range of integers")
        if max(abs(size.scale), abs(size.offset)) > MAX_INTEGER:
            raise LaunchError(f"{size} has a number beyond {MAX_INTEGER}")
        variables.append(var)


_LETTERS: Final = {
    "p": "buffer",
    "x": "INDEX",
    "i": "int32",
    "I": "uint32",
    "q": "int64",
    "Q": "uint64",
    "f": "float32",
    "d": "float64",
}


def written_twice(written: list[Operand], *, alias: bool) -> tuple[int, int] | None:
    """The places of two written arguments that overlap in a way no launch allows."""
    for place, one in enumerate(written):
        for at, other in enumerate(written[:place]):
            a, b = one.range, other.range
            shared = a.nbytes and b.nbytes and a.offset < b.end and b.offset < a.end
            if a.buffer == b.buffer and shared and not (alias and a == b):
                return at, place
    return None


def _bounds(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else affine(size).bounds


def _fits(letter: str, argument: Argument) -> bool:
    if letter not in _LETTERS:
        raise LaunchError(f"a signature has no letter {letter!r}")
    if isinstance(argument, Operand) or argument is INDEX:
        return letter == ("x" if argument is INDEX else "p")
    if isinstance(argument, bool):
        return False
    if isinstance(argument, float):
        return letter == "d" or (letter == "f" and _is_float32(argument))
    if isinstance(argument, int | Var | Affine):
        low, high = _bounds(argument)
        if letter in INTEGERS:
            return INTEGERS[letter][0] <= low and high <= INTEGERS[letter][1]
        return letter in ("f", "d") and max(abs(low), abs(high)) <= MAX_INTEGER
    return False


def _is_float32(value: float) -> bool:
    if not math.isfinite(value):
        return True
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return True


def _show(value: object) -> str:
    match value:
        case Var():
            return f"{value.name} ({value.low} to {value.high})"
        case Affine():
            return "{} ({} to {})".format(value, *value.bounds)
        case Operand():
            return f"a range of buffer {value.range.buffer}"
        case _:
            return repr(value)
