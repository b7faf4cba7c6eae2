"""The rules a client keeps on one queue: numbers without gaps, uploads whole, chunks with credit, a bounded backlog.

Pure bookkeeping of what came; what the commands mean and where they go is the queue's business.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from wsgrad.errors import ProtocolError
from wsgrad.server.graphs import GraphEnd, GraphRun
from wsgrad.server.submission import SLICE, slices
from wsgrad.transport.messages import (
    CHUNK_BYTES,
    SLOTS,
    Abort,
    Batch,
    Chunk,
    KnownProgram,
    Launches,
    Program,
    Reopen,
    Source,
)

if TYPE_CHECKING:
    from wsgrad.server.submission import Incoming
    from wsgrad.server.usage import Usage

MAX_HELD: Final = 32 << 20
"""Bytes of commands, with what keeping them costs, that a queue holds at most; a client's window is 4 MiB."""
_KEEPING_NBYTES: Final = 32

Submitted: TypeAlias = (
    Batch | Launches | Program | KnownProgram | Source | Chunk | Abort | Reopen | GraphRun | GraphEnd
)  # fmt: skip


@dataclass(slots=True)
class Waiting:
    """A message of the client that was not looked into yet; a part of a long batch has no `raw`."""

    message: Submitted
    raw: bytes | None
    bulk: memoryview
    nbytes: int

    @property
    def cost(self) -> int:
        """How much work it is, in commands."""
        return len(self.message.commands) if type(self.message) is Batch else SLICE // 4


class Intake:
    """What came on one queue.

    Attributes:
        next: the number that the next command must have.
        credit: chunks that the client may still send.
        upload: the upload whose chunks come now.
        late: uploads whose chunks were asked for since the cache lacks them, by number; they come before any others.
        held: bytes of commands that are not acknowledged.
        waiting: messages that wait for their turn, for a moment or for a reopening.
    """

    def __init__(self, queue: int, usage: Usage) -> None:
        self._queue = queue
        self._usage = usage
        self.next = 1
        self.credit = SLOTS
        self.upload: Incoming | None = None
        self.late: list[Incoming] = []
        self.held = 0
        self.waiting: deque[Waiting] = deque()

    def check_chunk(self, nbytes: int) -> None:
        """Check that a chunk may come.

        Raises:
            ProtocolError: there is no credit for it, or it has no right size.
        """
        if nbytes > CHUNK_BYTES or not nbytes:
            raise ProtocolError(f"a chunk of {nbytes} bytes", close_code=1009 if nbytes else 1002)
        if not self.credit:
            raise ProtocolError(f"a chunk for queue {self._queue} without credit")

    def admit(self, message: Submitted, raw: bytes, bulk: memoryview, *, busy: bool) -> Waiting | None:
        """Count a message in. Returns it if it may be worked off now; otherwise, or if `busy`, it waits in order.

        Raises:
            ProtocolError: a chunk without credit, or more than a queue may hold.
        """
        nbytes = len(raw) + _KEEPING_NBYTES
        if type(message) is Chunk:
            self.check_chunk(len(bulk))
            self.credit -= 1
        else:
            nbytes += len(bulk)
        self.held += nbytes
        self._usage.bytes_in += len(raw) + len(bulk)
        if self.held > MAX_HELD:
            raise ProtocolError(
                f"queue {self._queue} holds more than {MAX_HELD} bytes of commands without acknowledgement",
                close_code=1008,
            )
        if type(message) is Batch and len(message.commands) > SLICE:
            parts = slices(message)
            self.waiting.extend(Waiting(part, None, bulk, nbytes if part is parts[-1] else 0) for part in parts)
            return None
        waiting = Waiting(message, raw, bulk, nbytes)
        # A source was asked for: what holds the others may be waiting for it.
        held = busy or type(message) is Reopen or (type(message) is GraphRun and not message.ready)
        if type(message) is Source or (not self.waiting and not held):
            return waiting
        self.waiting.append(waiting)
        return None

    def begin(self, first: int, count: int) -> None:
        """Check that commands come in order, and not inside an upload."""
        if first != self.next:
            raise ProtocolError(f"command {first} of queue {self._queue} where {self.next} comes next")
        if self.upload is not None:
            raise ProtocolError(f"a command of queue {self._queue} inside upload {self.upload.transfer}")
        self.next += count

    def expect(self, upload: Incoming | None) -> None:
        """The chunks of this upload come next, if it has any."""
        if upload is not None and upload.nbytes:
            self.upload = upload

    def ask(self, upload: Incoming) -> None:
        """The client is asked for the chunks of an upload whose command came before."""
        bisect.insort(self.late, upload, key=lambda late: late.number)

    def chunk(self, message: Chunk, nbytes: int) -> Incoming:
        """Check that a chunk is the next one of the upload under way.

        Raises:
            ProtocolError: it is not.
        """
        upload = self.late[0] if self.late else self.upload
        if upload is None:
            raise ProtocolError(f"a chunk of transfer {message.transfer} where none is under way")
        expected = min(CHUNK_BYTES, upload.nbytes - upload.offset)
        if (message.transfer, message.offset, nbytes) != (upload.transfer, upload.offset, expected):
            raise ProtocolError(
                f"{nbytes} bytes at {message.offset} of transfer {message.transfer} where "
                f"{expected} at {upload.offset} of transfer {upload.transfer} come next"
            )
        upload.offset += nbytes
        if upload.offset == upload.nbytes:
            if self.late:
                del self.late[0]
            else:
                self.upload = None
        return upload

    def give_up(self, transfer: int) -> None:
        """The chunks of an upload that the client was asked for will not come."""
        self.late = [upload for upload in self.late if upload.transfer != transfer]

    def owed(self) -> int:
        """Credit to give back when a node is gone with the chunks it had: all but that of chunks that wait here."""
        return SLOTS - self.credit - sum(type(waiting.message) is Chunk for waiting in self.waiting)

    def forget(self) -> None:
        """The node is gone: nothing is held but what waits here, and late chunks are thrown away."""
        for upload in self.late:
            upload.refused = True
        self.held = sum(waiting.nbytes for waiting in self.waiting)
