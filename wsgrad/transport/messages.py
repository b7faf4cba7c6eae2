"""The messages of the wsgrad protocol as frozen dataclasses.

`protocol.cddl` beside this file is the schema; `docs/protocol.md` tells what the messages mean. This module does no I/O
and knows nothing of frames, sessions or devices: an array goes in, a checked message comes out, and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias, get_args

from wsgrad.transport.fields import (
    U32,
    U53,
    Arrays,
    Bool,
    Digest,
    Key,
    Map,
    Maps,
    OptionalIndices,
    OptionalKey,
    OptionalText,
    OptionalU53,
    Table,
    Text,
    U32s,
    Value,
    Values,
)
from wsgrad.transport.node_messages import Attach as Attach
from wsgrad.transport.node_messages import Fail as Fail
from wsgrad.transport.node_messages import Graph as Graph
from wsgrad.transport.node_messages import Lend as Lend
from wsgrad.transport.node_messages import Load as Load
from wsgrad.transport.node_messages import Present as Present
from wsgrad.transport.node_messages import Replay as Replay
from wsgrad.transport.node_messages import Slot as Slot
from wsgrad.transport.node_messages import Unrecord as Unrecord
from wsgrad.transport.tracing import Clock as Clock
from wsgrad.transport.tracing import Profile as Profile
from wsgrad.transport.tracing import Spans as Spans
from wsgrad.transport.tracing import Time as Time
from wsgrad.transport.tracing import Trace as Trace
from wsgrad.transport.tracing import Traced as Traced

VERSION = 1
SUBPROTOCOL = "wsgrad.v1"

CHUNK_BYTES = 1 << 20
"""The most bytes that one chunk of a transfer carries."""
SLOTS = 4
"""Chunks per queue and direction that may be on their way: the initial credit of every queue."""
MAX_HEAD = 1 << 16
"""The most bytes of a message's array; all but its bulk."""
INLINE_BYTES = 1 << 15
"""Reads and writes up to this size travel inside a message instead of as chunks."""
MAX_WORDS_BYTES = 1 << 16
"""The most bytes of one packed `Launches` message."""

# -- what opens a connection and keeps it alive: not numbered, never sent again --


@dataclass(frozen=True, slots=True)
class Hello:
    """Client → server, first: open a session (`key` is null) or attach to one."""

    KIND: ClassVar[int] = 0
    version: U32
    agent: Text
    key: OptionalKey
    received: U53
    options: Map


@dataclass(frozen=True, slots=True)
class Welcome:
    """Server → client, first: the session's key, and how many of the client's numbered messages it has."""

    KIND: ClassVar[int] = 1
    version: U32
    key: Key
    received: U53
    info: Map


@dataclass(frozen=True, slots=True)
class Join:
    """Node → server, first: its wanted name, its secret if it has joined before, and its devices.

    A node whose connection broke tells the `stay` of its `Joined.info` and how many numbered messages it has `received`
    since then, to go on where it was.
    """

    KIND: ClassVar[int] = 2
    version: U32
    agent: Text
    name: Text
    secret: OptionalText
    devices: Maps
    received: OptionalU53 = None
    stay: OptionalU53 = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Server → node, first: the name it got, the secret to use from now on, and limits.

    With `received` the node goes on where it was; without, nothing is left of what it had before.
    """

    KIND: ClassVar[int] = 3
    version: U32
    name: Text
    secret: Text
    info: Map
    received: OptionalU53 = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Server → client or node, instead of a welcome; the connection closes after it."""

    KIND: ClassVar[int] = 4
    code: Text
    message: Text


@dataclass(frozen=True, slots=True)
class Ping:
    """A heartbeat after silence, answered by the application with `Pong` of the same token."""

    KIND: ClassVar[int] = 5
    token: U32


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`."""

    KIND: ClassVar[int] = 6
    token: U32


@dataclass(frozen=True, slots=True)
class Seen:
    """How many numbered messages have been received in this session: the peer may forget them."""

    KIND: ClassVar[int] = 7
    count: U53


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender ends the session (client) or leaves (node): everything of it is freed."""

    KIND: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Devices:
    """Server → client: the devices there are now, in order; replaces the list before."""

    KIND: ClassVar[int] = 9
    devices: Maps


# -- work: numbered by the link, sent again after a drop --


@dataclass(frozen=True, slots=True)
class Batch:
    """Commands `first`, `first + 1`, … of a queue. Each is an array that `parse_command` turns into a command."""

    KIND: ClassVar[int] = 16
    queue: U32
    first: U53
    commands: Arrays


@dataclass(frozen=True, slots=True)
class Launches:
    """Bulk: `count` packed launches, commands `first` … of a queue, as little-endian 32-bit words."""

    KIND: ClassVar[int] = 17
    queue: U32
    first: U53
    count: U32


@dataclass(frozen=True, slots=True)
class Program:
    """Bulk: a program's UTF-8 source; command `number` of a queue. `constants` are values for WGSL's `override`s."""

    KIND: ClassVar[int] = 18
    queue: U32
    number: U53
    program: U32
    dialect: Text
    name: Text
    entry: Text
    signature: Text
    writes: OptionalIndices
    alias: Bool
    constants: Map = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bulk: up to `CHUNK_BYTES` bytes of a transfer, in order of offset; either direction."""

    KIND: ClassVar[int] = 19
    queue: U32
    transfer: U32
    offset: U53


@dataclass(frozen=True, slots=True)
class Abort:
    """A transfer ends before its last byte; from the reader it asks the writer to stop."""

    KIND: ClassVar[int] = 20
    queue: U32
    transfer: U32


@dataclass(frozen=True, slots=True)
class Credit:
    """So many more chunks may be sent on this queue."""

    KIND: ClassVar[int] = 21
    queue: U32
    slots: U32


@dataclass(frozen=True, slots=True)
class Open:
    """Client → server: a new queue on a device; answered by `Result` or `Failed` for command 0."""

    KIND: ClassVar[int] = 22
    queue: U32
    device: Text
    options: Map


@dataclass(frozen=True, slots=True)
class Reopen:
    """Client → server: command `number`: give a lost (or living) device a new, empty node."""

    KIND: ClassVar[int] = 23
    queue: U32
    number: U53


@dataclass(frozen=True, slots=True)
class Close:
    """Client → server and server → node: the queue ends and everything on it is freed; no answer."""

    KIND: ClassVar[int] = 24
    queue: U32


@dataclass(frozen=True, slots=True)
class Record:
    """Client → server. Bulk: a server's part of a graph, an array in CBOR, to be run by `Run`.

    `queues` pairs the part's device indices with queues, `bindings` its buffer numbers with buffers of those queues.
    `routes` holds `[server, route there, route from there]` for the servers that it exchanges bytes with; 0 for none.
    """

    KIND: ClassVar[int] = 25
    graph: U32
    queues: Arrays
    bindings: Arrays
    routes: Arrays


@dataclass(frozen=True, slots=True)
class Run:
    """Client → server: run a graph as one command on each of its queues, `numbers` pairing queues and numbers.

    `bindings` holds `[buffer number, buffer, offset]` for what is substituted this time. Bytes to or from another
    server are the transfer whose id is `transfer` plus the number of the sending step.
    """

    KIND: ClassVar[int] = 26
    graph: U32
    numbers: Arrays
    bindings: Arrays
    values: Values
    transfer: U32


@dataclass(frozen=True, slots=True)
class Forget:
    """Client → server: a graph goes, once its last run is over."""

    KIND: ClassVar[int] = 27
    graph: U32


@dataclass(frozen=True, slots=True)
class Release:
    """Client → server: no command will name these events any more."""

    KIND: ClassVar[int] = 28
    events: U32s


@dataclass(frozen=True, slots=True)
class Settle:
    """Client → server: an event of another server has happened, or failed with this error."""

    KIND: ClassVar[int] = 29
    event: U32
    code: OptionalText
    message: Text
    details: Map


@dataclass(frozen=True, slots=True)
class Peer:
    """Client → server: another server will dial in for this session; answered by `Ticket`. `route` will be the link."""

    KIND: ClassVar[int] = 30
    route: U32


@dataclass(frozen=True, slots=True)
class Dial:
    """Client → server: open a link to another server with its ticket; answered by `Dialled`."""

    KIND: ClassVar[int] = 31
    route: U32
    url: Text
    ticket: Key
    sha256: OptionalText


@dataclass(frozen=True, slots=True)
class Ack:
    """All commands of the queue up to `number` have run or were dropped."""

    KIND: ClassVar[int] = 32
    queue: U32
    number: U53


@dataclass(frozen=True, slots=True)
class Result:
    """The value of command `number`: what was opened, or the seconds of a timed launch."""

    KIND: ClassVar[int] = 33
    queue: U32
    number: U53
    value: Value


@dataclass(frozen=True, slots=True)
class ReadData:
    """Bulk: the bytes that the read command `number` asked for, up to `INLINE_BYTES`.

    It acknowledges all commands up to `acked` as an `Ack` would, which then need not come.
    """

    KIND: ClassVar[int] = 34
    queue: U32
    number: U53
    acked: U53


@dataclass(frozen=True, slots=True)
class Failed:
    """Command `number` failed; the queue drops commands until `Clear(number)`, or `Reopen` where the device is lost."""

    KIND: ClassVar[int] = 35
    queue: U32
    number: U53
    code: Text
    message: Text
    details: Map


@dataclass(frozen=True, slots=True)
class Compiled:
    """How compiling a program ended; does not stop the queue. `message` holds errors or warnings."""

    KIND: ClassVar[int] = 36
    queue: U32
    program: U32
    ok: Bool
    message: Text


@dataclass(frozen=True, slots=True)
class Ticket:
    """Server → client: what another server needs to dial in, once and soon."""

    KIND: ClassVar[int] = 37
    route: U32
    ticket: Key


@dataclass(frozen=True, slots=True)
class Dialled:
    """Server → client: the link is open (`code` is null), or why it is not or no longer."""

    KIND: ClassVar[int] = 38
    route: U32
    code: OptionalText
    message: Text


@dataclass(frozen=True, slots=True)
class Missing:
    """Server → client: send the bytes of command `number` from `offset` on.

    They are the chunks of an `UploadCached` that the server's cache could not, or not to its end, bring, or the
    `Source` of a `KnownProgram`.
    """

    KIND: ClassVar[int] = 40
    queue: U32
    number: U53
    offset: U53


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A `Program` whose source the server has probably seen: `nbytes` bytes with this SHA-256. Command `number`."""

    KIND: ClassVar[int] = 41
    queue: U32
    number: U53
    program: U32
    dialect: Text
    name: Text
    entry: Text
    signature: Text
    writes: OptionalIndices
    alias: Bool
    constants: Map
    nbytes: U32
    digest: Digest


@dataclass(frozen=True, slots=True)
class Source:
    """Bulk: the source that `Missing` has asked for, of the `KnownProgram` of that number; no command itself."""

    KIND: ClassVar[int] = 42
    queue: U32
    number: U53


Message: TypeAlias = (
    Hello | Welcome | Join | Joined | Refused | Ping | Pong | Seen | Bye | Devices
    | Batch | Launches | Program | Chunk | Abort | Credit | Open | Reopen | Close
    | Record | Run | Forget | Release | Settle | Peer | Dial
    | Ack | Result | ReadData | Failed | Compiled | Ticket | Dialled
    | Missing | KnownProgram | Source
    | Clock | Time | Trace | Traced | Profile | Spans
    | Attach | Load | Slot | Lend | Fail | Graph | Replay | Unrecord | Present
)  # fmt: skip

BULK_KINDS = frozenset({Launches.KIND, Program.KIND, Chunk.KIND, Record.KIND, ReadData.KIND, Source.KIND})
BULK_KINDS |= {Graph.KIND, Traced.KIND, Spans.KIND}
UNNUMBERED_KINDS = frozenset(range(16))
MESSAGE_NAMES = {message.KIND: message.__name__ for message in get_args(Message)}
"""What messages are called, by kind."""


_TABLE: Table[Message] = Table("message", get_args(Message))


def parse_message(array: list[object]) -> Message:
    """Check a decoded array and return its message.

    Raises:
        ProtocolError: unknown kind, wrong number of fields, or a field of the wrong type or range.
    """
    return _TABLE.parse(array)


def message_array(message: Message) -> list[object]:
    """The array that CBOR encodes: the kind, then the fields in order."""
    return _TABLE.array(message)
