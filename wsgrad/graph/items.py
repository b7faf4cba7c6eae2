"""What a graph is made of: devices, byte ranges, variables and the operations on them; it checks and orders nothing.

Everything is a frozen value that knows no client object. A range is always one of a *base* buffer, named by its number
in the recording: who records resolves views first.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A device by its place: which server of the recording, and which device there."""

    server: int
    index: int
    name: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """What people read: the name, or the place where it has none."""
        return self.name or f"{self.server}/{self.index}"


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `offset` to `end` of a base buffer."""

    buffer: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class _Linear:
    """Arithmetic with integers for a variable and what becomes of it."""

    __slots__ = ()

    def _terms(self) -> tuple[Var, int, int]:
        raise NotImplementedError

    def __add__(self, other: int) -> Affine:
        if not isinstance(other, int):
            return NotImplemented
        var, scale, offset = self._terms()
        return Affine(var, scale, offset + other)

    def __sub__(self, other: int) -> Affine:
        return self + -other if isinstance(other, int) else NotImplemented

    def __rsub__(self, other: int) -> Affine:
        return self * -1 + other if isinstance(other, int) else NotImplemented

    def __mul__(self, other: int) -> Affine:
        if not isinstance(other, int):
            return NotImplemented
        var, scale, offset = self._terms()
        return Affine(var, scale * other, offset * other)

    __radd__ = __add__
    __rmul__ = __mul__


@dataclass(frozen=True, slots=True)
class Var(_Linear):
    """An integer that each replay chooses anew, `low` to `high` inclusive; stands for a scalar or in a grid."""

    name: str
    low: int
    high: int

    def _terms(self) -> tuple[Var, int, int]:
        return self, 1, 0


@dataclass(frozen=True, slots=True)
class Affine(_Linear):
    """`scale * var + offset`, made by adding, subtracting and multiplying integers."""

    var: Var
    scale: int
    offset: int

    def _terms(self) -> tuple[Var, int, int]:
        return self.var, self.scale, self.offset

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value."""
        one, other = self.scale * self.var.low + self.offset, self.scale * self.var.high + self.offset
        return min(one, other), max(one, other)

    def value(self, of_var: int) -> int:
        return self.scale * of_var + self.offset

    def __str__(self) -> str:
        scaled = self.var.name if self.scale == 1 else f"{self.scale}*{self.var.name}"
        return scaled if not self.offset else f"{scaled}{self.offset:+d}"


def affine(size: Var | Affine) -> Affine:
    """The one form in which a variable is planned."""
    return size if isinstance(size, Affine) else Affine(size, 1, 0)


class Index(enum.Enum):
    """The type of `INDEX`, which stands where a `c` program takes the grid's index."""

    INDEX = "index"


INDEX: Final = Index.INDEX


class Access(enum.IntEnum):
    """What a launch does to a range; `&` tells whether it reads or writes (with an `IntFlag` that would be slow)."""

    READ = 1
    WRITE = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer argument. One whose access isn't known counts as both."""

    range: Range
    access: Access = Access.BOTH


Size: TypeAlias = int | Var | Affine
Argument: TypeAlias = Operand | int | float | Var | Affine | Index
Accesses: TypeAlias = tuple[tuple[Range, Access], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        program: its id on the device's queue.
        signature: one letter an argument, as in the message `Program`.
        grid: one to three sizes, None for a single call.
        alias: the program may be given the same written range twice.
        name: what errors and `explain` call it.
    """

    device: Device
    program: int
    signature: str
    arguments: tuple[Argument, ...]
    grid: tuple[Size, ...] | None = None
    block: tuple[int, ...] | None = None
    alias: bool = False
    name: str = field(default="", compare=False)

    @property
    def accesses(self) -> Accesses:
        return tuple((a.range, a.access) for a in self.arguments if isinstance(a, Operand))


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes from one range to another on one device; overlap behaves as through a temporary."""

    device: Device
    target: Range
    source: Range

    @property
    def accesses(self) -> Accesses:
        return (self.source, Access.READ), (self.target, Access.WRITE)


@dataclass(frozen=True, slots=True)
class Fill:
    """A pattern of 1, 2, 4, 8 or 16 bytes repeated over a range."""

    device: Device
    target: Range
    pattern: bytes

    @property
    def accesses(self) -> Accesses:
        return ((self.target, Access.WRITE),)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes from a buffer of one device to a buffer of another, on the same server or not."""

    target: Range
    source: Range

    @property
    def accesses(self) -> Accesses:
        return (self.source, Access.READ), (self.target, Access.WRITE)


Item: TypeAlias = Launch | Copy | Fill | Transfer
