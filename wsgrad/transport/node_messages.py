"""The messages that travel only between a server and its nodes, as frozen dataclasses; `messages` parses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# At run time: the table of messages reads the annotations.
from wsgrad.transport.fields import U32, U53, Arrays, Bool, Map, OptionalIndices, Text, Values  # noqa: TC001


@dataclass(frozen=True, slots=True)
class Present:
    """Node ↔ server: how a node shows itself from now on: its label, and whether it takes work.

    `memory` is how many bytes its sessions may take together, or 0 for as many as there are. A paused node takes no new
    queues, and holds the work of those it has. From the server it says what an administrator has set.
    """

    KIND: ClassVar[int] = 12
    label: Text
    paused: Bool
    memory: U53


@dataclass(frozen=True, slots=True)
class Attach:
    """Server → node: a new queue for a session on the node's device of that index.

    Answered by `Result` or `Failed` for command 0.
    """

    KIND: ClassVar[int] = 48
    queue: U32
    session: U32
    device: U32
    options: Map


@dataclass(frozen=True, slots=True)
class Load:
    """Server → local node: a compiled program in a memfd beside it; command `number`, or 0 behind its place."""

    KIND: ClassVar[int] = 49
    queue: U32
    number: U53
    program: U32
    name: Text
    entry: Text
    signature: Text
    writes: OptionalIndices
    alias: Bool
    nbytes: U53


@dataclass(frozen=True, slots=True)
class Slot:
    """A chunk whose bytes lie in a slot of the ring shared with a local node; either direction."""

    KIND: ClassVar[int] = 50
    queue: U32
    transfer: U32
    offset: U53
    slot: U32
    nbytes: U32


@dataclass(frozen=True, slots=True)
class Lend:
    """Server → local node: the ring of another local node of its session, to be read, is beside the message.

    A `Slot` of it counts its slots from `8 * ring` on; `ring` is above 0. Without a descriptor the ring goes.
    """

    KIND: ClassVar[int] = 57
    queue: U32
    ring: U32


@dataclass(frozen=True, slots=True)
class Fail:
    """Server → node: take the place of command `number`, which the server refused, and fail with this error."""

    KIND: ClassVar[int] = 51
    queue: U32
    number: U53
    code: Text
    message: Text
    details: Map


@dataclass(frozen=True, slots=True)
class Graph:
    """Server → node. Bulk: a piece, from `offset` of `total` bytes, of a device's part of a graph in CBOR."""

    KIND: ClassVar[int] = 52
    queue: U32
    graph: U32
    offset: U53
    total: U53


@dataclass(frozen=True, slots=True)
class Replay:
    """Server → node: run a graph as command `number`; `bindings` holds `[buffer number, buffer, offset]`.

    The first of its sends and receives on this device is transfer `transfer`, the others are numbered on from there.
    """

    KIND: ClassVar[int] = 53
    queue: U32
    number: U53
    graph: U32
    transfer: U32
    bindings: Arrays
    values: Values


@dataclass(frozen=True, slots=True)
class Unrecord:
    """Server → node: a graph goes."""

    KIND: ClassVar[int] = 54
    queue: U32
    graph: U32
