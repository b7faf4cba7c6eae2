"""Checks what a client submits to a queue and turns it into messages for a node; pure, it keeps and sends nothing.

A batch goes on as it came where all of it passes. A refused command is replaced by a `Fail` in its place, so that it
fails in the queue's order; a batch that asks for much data is cut, so that its reads can wait for room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from wsgrad.errors import ProtocolError, WsgradError, error_code
from wsgrad.server.outstanding import ANSWER_NBYTES, Sent, Transfer
from wsgrad.transport import cbor
from wsgrad.transport.commands import Download, Launch, Read, Upload, parse_command
from wsgrad.transport.messages import MAX_WORDS_BYTES, Batch, Fail, Launches, message_array

if TYPE_CHECKING:
    from wsgrad.server.programs import Job
    from wsgrad.server.tables import Tables
    from wsgrad.transport.commands import Command
    from wsgrad.transport.messages import Program

SLICE: Final = 64
"""Commands that are checked before others get a turn."""
MAX_RESERVED: Final = 1 << 20
"""Bytes of answers that one message to a node may ask for, unless a single read asks for more."""
_LEAST_LAUNCH_NBYTES: Final = 8


@dataclass(slots=True)
class Incoming:
    """An upload whose chunks follow. The chunks of a refused one are thrown away."""

    transfer: int
    nbytes: int
    refused: bool
    offset: int = 0


@dataclass(slots=True)
class Checked:
    """What a batch became."""

    sends: list[Sent] = field(default_factory=list)
    downloads: list[Transfer] = field(default_factory=list)
    upload: Incoming | None = None
    refused: int = 0


@dataclass(slots=True)
class Load:
    """A program on its way to the node; `job` compiles it where the node can't."""

    message: Program
    source: memoryview
    job: Job | None
    nbytes: int


@dataclass(slots=True)
class Piece:
    """A chunk of an upload, in a slot, on its way to the node."""

    transfer: int
    offset: int
    slot: int
    bulk: memoryview


def slices(batch: Batch) -> list[Batch]:
    """Cut a long batch into batches that are quick to check."""
    commands = batch.commands
    return [Batch(batch.queue, batch.first + i, commands[i : i + SLICE]) for i in range(0, len(commands), SLICE)]


def check_batch(batch: Batch, raw: bytes | None, nbytes: int, tables: Tables) -> Checked:
    """Check a batch against the tables, which note what it changes.

    Args:
        batch: at most `SLICE` commands.
        raw: the batch as it came, or None where it was cut.
        nbytes: what the batch counts against the queue's limit, until its last command is acknowledged.
        tables: the queue's.

    Raises:
        ProtocolError: a command is malformed, or an upload is not the last one.
    """
    checked = Checked()
    sends = checked.sends
    piece = Sent(batch.first, 0, 0, b"")
    reserved = 0
    for number, array in enumerate(batch.commands, batch.first):
        command = parse_command(array)
        refused = False
        try:
            tables.check(command)
            if type(command) is Download and any(d.transfer == command.transfer for d in checked.downloads):
                raise ProtocolError(f"transfer {command.transfer} is in use")
        except ProtocolError:
            raise
        except WsgradError as error:
            refused = True
            checked.refused += 1
            if number > piece.first:
                sends.append(_finish(piece, number - 1, batch, None))
            sends.append(refusal(batch.queue, number, error, command, tables))
            piece = Sent(number + 1, 0, 0, b"")
            reserved = 0
        if type(command) is Upload:
            if number - batch.first != len(batch.commands) - 1:
                raise ProtocolError("an upload is not the last command of its batch")
            checked.upload = Incoming(command.transfer, command.nbytes, refused)
        if refused:
            continue
        match command:
            case Read():
                piece.reads.append((number, command.nbytes))
                reserved += command.nbytes + ANSWER_NBYTES
            case Launch():
                piece.launches.append((number, command.program))
                if command.timed:
                    piece.timed.append(number)
                    reserved += ANSWER_NBYTES
            case Download():
                checked.downloads.append(Transfer(command.transfer, number, command.nbytes))
        if reserved >= MAX_RESERVED:
            sends.append(_finish(piece, number, batch, None))
            piece = Sent(number + 1, 0, 0, b"")
            reserved = 0
    last = batch.first + len(batch.commands) - 1
    if piece.first <= last:
        sends.append(_finish(piece, last, batch, raw if piece.first == batch.first else None))
    if not sends:
        raise ProtocolError("a batch without commands")
    sends[-1].nbytes = nbytes
    return checked


def check_launches(message: Launches, raw: bytes, words: memoryview, nbytes: int) -> Sent:
    """Check what can be known of packed launches without their words; the node checks those.

    Raises:
        ProtocolError: the size does not fit the count.
    """
    size = len(words)
    if size % 4 or size > MAX_WORDS_BYTES or not 0 < message.count * _LEAST_LAUNCH_NBYTES <= size:
        raise ProtocolError(f"{message.count} packed launches in {size} bytes")
    last = message.first + message.count - 1
    return Sent(message.first, last, nbytes, raw, words, packed=True)


def lost_upload(batch: Batch) -> Incoming | None:
    """The upload that a batch for a lost device ends with; its chunks will come all the same."""
    for index, array in enumerate(batch.commands):
        command = parse_command(array)
        if type(command) is Upload:
            if index != len(batch.commands) - 1:
                raise ProtocolError("an upload is not the last command of its batch")
            return Incoming(command.transfer, command.nbytes, refused=True)
    return None


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
