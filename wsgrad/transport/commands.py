"""The commands that a queue runs: the items of a `Batch`, as frozen dataclasses.

What a command means is in `docs/protocol.md`; nothing here runs one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias, get_args

from wsgrad.transport.fields import U32, U53, Bool, Data, Digest, OptionalDims, Table, Values


@dataclass(frozen=True, slots=True)
class Alloc:
    """New zeroed memory of `nbytes` bytes (0 is allowed) under a new id."""

    KIND: ClassVar[int] = 1
    buffer: U32
    nbytes: U53


@dataclass(frozen=True, slots=True)
class Free:
    """A buffer or view goes. The memory goes with the last of a buffer and its views. Always runs."""

    KIND: ClassVar[int] = 2
    buffer: U32


@dataclass(frozen=True, slots=True)
class View:
    """A byte range of a buffer (not of a view) under a new id."""

    KIND: ClassVar[int] = 3
    view: U32
    buffer: U32
    offset: U53
    nbytes: U53


@dataclass(frozen=True, slots=True)
class Write:
    """Up to `INLINE_BYTES` bytes to a buffer or view."""

    KIND: ClassVar[int] = 4
    buffer: U32
    offset: U53
    data: Data


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes that follow as chunks; the last command of its batch.

    Only chunks or an abort may follow on the queue until it is whole.
    """

    KIND: ClassVar[int] = 5
    transfer: U32
    buffer: U32
    offset: U53
    nbytes: U53


@dataclass(frozen=True, slots=True)
class Read:
    """Up to `INLINE_BYTES` bytes, answered by `ReadData`."""

    KIND: ClassVar[int] = 6
    buffer: U32
    offset: U53
    nbytes: U53


@dataclass(frozen=True, slots=True)
class Download:
    """Any number of bytes, answered by chunks as credit allows."""

    KIND: ClassVar[int] = 7
    transfer: U32
    buffer: U32
    offset: U53
    nbytes: U53


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes from one buffer or view of the queue to another (or the same; overlap behaves as through a temporary)."""

    KIND: ClassVar[int] = 8
    target: U32
    target_offset: U53
    source: U32
    source_offset: U53
    nbytes: U53


@dataclass(frozen=True, slots=True)
class Fill:
    """A pattern of 1, 2, 4, 8 or 16 bytes repeated over a range whose size is a multiple of it."""

    KIND: ClassVar[int] = 9
    buffer: U32
    offset: U53
    nbytes: U53
    pattern: Data


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that does not travel packed: timed, or with more than a one-dimensional grid.

    A timed one is answered by `Result` in seconds.
    """

    KIND: ClassVar[int] = 10
    program: U32
    grid: OptionalDims
    block: OptionalDims
    arguments: Values
    timed: Bool


@dataclass(frozen=True, slots=True)
class Drop:
    """A program goes. Always runs."""

    KIND: ClassVar[int] = 11
    program: U32


@dataclass(frozen=True, slots=True)
class Clear:
    """The error of command `error` has been raised: the queue runs again from here. Another number: nothing happens."""

    KIND: ClassVar[int] = 12
    error: U53


@dataclass(frozen=True, slots=True)
class Signal:
    """The event has happened once all before it has run; it fails with what made the queue drop this. Not for nodes."""

    KIND: ClassVar[int] = 13
    event: U32


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing behind it runs before the event has happened; fails as the event did. Not for nodes."""

    KIND: ClassVar[int] = 14
    event: U32


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes that go to the `Receive` of the same transfer and route. Not for nodes.

    `transfer` is below 2^31 and unique in the session, `route` a link between servers, or 0 for this server.
    """

    KIND: ClassVar[int] = 15
    transfer: U32
    buffer: U32
    offset: U53
    nbytes: U53
    route: U32


@dataclass(frozen=True, slots=True)
class Receive:
    """Bytes that come from the `Send` of the same transfer; fails as that one does. Not for nodes."""

    KIND: ClassVar[int] = 16
    transfer: U32
    buffer: U32
    offset: U53
    nbytes: U53
    route: U32


@dataclass(frozen=True, slots=True)
class UploadCached:
    """Bytes that the server has, if it is right: its cache is asked for them by their BLAKE3. Not for nodes.

    Other commands may follow at once, but no chunks of another upload before this one is acknowledged. Where the server
    lacks them, `Missing` asks for chunks, and the server remembers what they bring.
    """

    KIND: ClassVar[int] = 17
    transfer: U32
    buffer: U32
    offset: U53
    nbytes: U53
    digest: Digest


Command: TypeAlias = (
    Alloc | Free | View | Write | Upload | Read | Download | Copy | Fill | Launch | Drop | Clear
    | Signal | Wait | Send | Receive | UploadCached
)  # fmt: skip

_TABLE: Table[Command] = Table("command", get_args(Command))


def parse_command(array: list[object]) -> Command:
    """Check one item of `Batch.commands` and return its command.

    Raises:
        ProtocolError: unknown kind, wrong number of fields, or a field of the wrong type or range.
    """
    return _TABLE.parse(array)


def command_array(command: Command) -> list[object]:
    """The array to put into `Batch.commands`: the kind, then the fields in order."""
    return _TABLE.array(command)
