"""Checks what a client submits to a queue and turns it into messages for a node; pure, it keeps and sends nothing.

A batch goes on as it came where all of it passes. A refused command is replaced by a `Fail` in its place, so that it
fails in the queue's order; a batch that asks for much data is cut, so that its reads can wait for room. It is cut at
what concerns other queues too: a signal becomes a command that does nothing and ends its piece, so that it is
acknowledged at once; a wait or one end of a transfer is handed back to the queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from wsgrad.errors import ProtocolError, WsgradError, error_code
from wsgrad.server.outstanding import ANSWER_NBYTES, Sent, Transfer
from wsgrad.server.transfers import ROUTED
from wsgrad.transport import cbor
from wsgrad.transport.commands import (
    Clear,
    Download,
    Drop,
    Free,
    Launch,
    Read,
    Receive,
    Send,
    Signal,
    Upload,
    UploadCached,
    Wait,
    command_array,
    parse_command,
)
from wsgrad.transport.messages import MAX_WORDS_BYTES, Batch, Fail, Launches, message_array

if TYPE_CHECKING:
    from wsgrad.server.events import Event
    from wsgrad.server.tables import Tables
    from wsgrad.server.transfers import Flow
    from wsgrad.transport.commands import Command

SLICE: Final = 64
"""Commands that are checked before others get a turn."""
MAX_RESERVED: Final = 1 << 20
"""Bytes of answers that one message to a node may ask for, unless a single read asks for more."""
NOTHING: Final = command_array(Clear(0))
"""For a node: no command has number 0, so nothing is cleared."""
_LEAST_LAUNCH_NBYTES: Final = 8
_CACHED: Final = ("transfer", "buffer", "offset", "nbytes", "digest")


@dataclass(slots=True, eq=False)
class Incoming:
    """An upload whose chunks follow. The chunks of a refused one are thrown away. `number` is that of a cached one."""

    transfer: int
    nbytes: int
    refused: bool
    offset: int = 0
    number: int = 0


@dataclass(slots=True, eq=False)
class CachedUpload:
    """An upload that the cache is asked for, in its place among what goes to the node; `sent` is without a head."""

    sent: Sent
    transfer: int
    buffer: int
    offset: int
    nbytes: int
    digest: bytes

    @property
    def number(self) -> int:
        """Its command's."""
        return self.sent.first


@dataclass(slots=True)
class Joint:
    """A command that concerns another queue too: the queue carries it out itself.

    Attributes:
        error: why it was refused, if it was.
        event: what it waits for; set by the queue.
        flow: the transfer that it is an end of; set by the queue.
    """

    number: int
    command: Wait | Send | Receive
    error: WsgradError | None = None
    nbytes: int = 0
    event: Event | None = None
    flow: Flow | None = None


@dataclass(slots=True)
class Checked:
    """What a batch became.

    Attributes:
        sends: what goes to the node, in order, with what the queue does itself in between.
        marks: signals, cleared errors and sends, by their numbers.
    """

    sends: list[Sent | CachedUpload | Joint] = field(default_factory=list)
    marks: list[tuple[int, Signal | Clear | Send]] = field(default_factory=list)
    downloads: list[Transfer] = field(default_factory=list)
    upload: Incoming | None = None
    refused: int = 0
    launches: int = 0


def slices(batch: Batch) -> list[Batch]:
    """Cut a long batch into batches that are quick to check."""
    commands = batch.commands
    return [Batch(batch.queue, batch.first + i, commands[i : i + SLICE]) for i in range(0, len(commands), SLICE)]


def check_batch(
    batch: Batch, raw: bytes | None, nbytes: int, tables: Tables, over: WsgradError | None = None
) -> Checked:
    """Check a batch against the tables, which note what it changes.

    Args:
        batch: at most `SLICE` commands.
        raw: the batch as it came, or None where it was cut.
        nbytes: what the batch counts against the queue's limit, until its last command is acknowledged.
        tables: the queue's.
        over: why the batch is too much for the queue; then all of it is refused but what frees or tells others.

    Raises:
        ProtocolError: a command is malformed, or an upload is not the last one.
    """
    checked = Checked()
    sends = checked.sends
    piece = Sent(batch.first, 0, 0, b"")
    reserved = 0

    def cut(after: int) -> None:
        """End the piece behind that command and begin another one."""
        nonlocal piece, reserved
        if after >= piece.first:
            sends.append(_finish(piece, after, batch, raw if (piece.first, after) == (batch.first, last) else None))
        piece = Sent(after + 1, 0, 0, b"")
        reserved = 0

    last = batch.first + len(batch.commands) - 1
    for number, array in enumerate(batch.commands, batch.first):
        command = parse_command(array)
        error = _refused(command, tables, checked, over)
        if type(command) is Upload:
            if number != last:
                raise ProtocolError("an upload is not the last command of its batch")
            checked.upload = Incoming(command.transfer, command.nbytes, error is not None)
        if isinstance(command, Wait | Send | Receive) or error is not None:
            cut(number - 1)
            piece.first = number + 1
            if isinstance(command, Wait | Send | Receive):
                sends.append(Joint(number, command, error))
                if isinstance(command, Send):
                    checked.marks.append((number, command))
            elif error is not None:
                sends.append(refusal(batch.queue, number, error, command, tables))
            continue
        match command:
            case UploadCached():
                cut(number - 1)
                piece.first = number + 1
                sent = Sent(number, number, 0, b"")
                sends.append(CachedUpload(sent, *(getattr(command, name) for name in _CACHED)))
            case Read():
                piece.reads.append((number, command.nbytes))
                reserved += command.nbytes + ANSWER_NBYTES
            case Launch():
                piece.launches.append((number, command.program))
                checked.launches += 1
                if command.timed:
                    piece.timed.append(number)
                    reserved += ANSWER_NBYTES
            case Download():
                checked.downloads.append(Transfer(command.transfer, number, command.nbytes))
            case Drop():
                piece.drops.append(command.program)
            case Clear():
                checked.marks.append((number, command))
            case Signal():
                checked.marks.append((number, command))
                batch.commands[number - batch.first] = NOTHING
                raw = None
        if reserved >= MAX_RESERVED or type(command) is Signal:
            cut(number)
    cut(last)
    if not sends:
        raise ProtocolError("a batch without commands")
    end = sends[-1]
    (end.sent if isinstance(end, CachedUpload) else end).nbytes = nbytes
    return checked


def _refused(command: Command, tables: Tables, checked: Checked, over: WsgradError | None) -> WsgradError | None:
    """Why a command is refused, if it is; else the tables have noted it."""
    try:
        if over is not None and not isinstance(command, Free | Drop | Clear | Signal):
            raise over
        tables.check(command)
    except ProtocolError:
        raise
    except WsgradError as error:
        checked.refused += 1
        return error
    if isinstance(command, Upload | UploadCached | Download) and command.transfer >= ROUTED:
        raise ProtocolError(f"transfer {command.transfer}; ids of transfers are below {ROUTED}")
    if type(command) is Download and any(d.transfer == command.transfer for d in checked.downloads):
        raise ProtocolError(f"transfer {command.transfer} is in use")
    return None


def check_launches(
    message: Launches, raw: bytes, words: memoryview, nbytes: int, over: WsgradError | None = None
) -> list[Sent]:
    """Check what can be known of packed launches without their words; the node checks those.

    Raises:
        ProtocolError: the size does not fit the count.
    """
    size = len(words)
    if size % 4 or size > MAX_WORDS_BYTES or not 0 < message.count * _LEAST_LAUNCH_NBYTES <= size:
        raise ProtocolError(f"{message.count} packed launches in {size} bytes")
    first, last = message.first, message.first + message.count - 1
    if over is None:
        return [Sent(first, last, nbytes, raw, words, packed=True)]
    sends = [refusal(message.queue, first, over)]
    if first < last:
        rest = Batch(message.queue, first + 1, [NOTHING] * (last - first))
        sends.append(Sent(first + 1, last, 0, cbor.encode(message_array(rest))))
    sends[-1].nbytes = nbytes
    return sends


def check_lost(batch: Batch) -> tuple[list[Signal | Send | Receive], Incoming | None]:
    """What of a batch for a lost device concerns others, and the upload it ends with, whose chunks will come.

    Raises:
        ProtocolError: a command is malformed, or an upload is not the last one.
    """
    joint: list[Signal | Send | Receive] = []
    upload = None
    for number, array in enumerate(batch.commands, batch.first):
        command = parse_command(array)
        match command:
            case Upload():
                if number != batch.first + len(batch.commands) - 1:
                    raise ProtocolError("an upload is not the last command of its batch")
                upload = Incoming(command.transfer, command.nbytes, refused=True)
            case Signal() | Send() | Receive():
                joint.append(command)
    return joint, upload


def refusal(
    queue: int, number: int, error: WsgradError, command: Command | None = None, tables: Tables | None = None
) -> Sent:
    """The message that lets a refused command fail in its place."""
    details: dict[str, object] = {"operation": "program" if command is None else type(command).__name__.lower()}
    if type(command) is Launch and tables is not None and (entry := tables.program(command.program)) is not None:
        details["program"] = entry.name
    fail = Fail(queue, number, error_code(error), str(error), details | error.details)
    return Sent(number, number, 0, cbor.encode(message_array(fail)))


def _finish(piece: Sent, last: int, batch: Batch, raw: bytes | None) -> Sent:
    piece.last = last
    if raw is None:
        first = piece.first - batch.first
        commands = batch.commands[first : first + last - piece.first + 1]
        raw = cbor.encode(message_array(Batch(batch.queue, piece.first, commands)))
    piece.head = raw
    return piece
