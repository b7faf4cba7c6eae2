"""The rules a client keeps on one queue: numbers without gaps, uploads whole, chunks with credit, a bounded backlog.

Pure bookkeeping of what came; what the commands mean and where they go is the queue's business.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from wsgrad.errors import LimitExceeded, ProtocolError
from wsgrad.server.graphs import GraphEnd, GraphRun
from wsgrad.server.submission import SLICE, slices
from wsgrad.transport.cost import kept_nbytes
from wsgrad.transport.messages import (
    CHUNK_BYTES,
    SLOTS,
    Abort,
    Batch,
    Chunk,
    Credit,
    KnownProgram,
    Launches,
    Program,
    Reopen,
    Source,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.limits import Limits
    from wsgrad.server.outstanding import Outstanding
    from wsgrad.server.submission import Incoming
    from wsgrad.server.upload_rate import UploadRate
    from wsgrad.server.usage import Usage
    from wsgrad.transport.messages import Message

PATIENCE_NBYTES: Final = 8 << 20
"""What is over a queue's limit is refused command by command; a client that sends so much more does not listen."""

Submitted: TypeAlias = (
    Batch | Launches | Program | KnownProgram | Source | Chunk | Abort | Reopen | GraphRun | GraphEnd
)  # fmt: skip


@dataclass(slots=True)
class Waiting:
    """A message of the client that was not looked into yet; a part of a long batch has no `raw`.

    Attributes:
        refused: why its commands are too much for the queue.
    """

    message: Submitted
    raw: bytes | None
    bulk: memoryview
    nbytes: int
    refused: LimitExceeded | None = None

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

    def __init__(
        self,
        queue: int,
        usage: Usage,
        out: Outstanding,
        limits: Limits,
        rate: UploadRate,
        tell: Callable[[Message], None],
    ) -> None:
        self._queue = queue
        self._usage = usage
        self._out = out
        self._limits = limits
        self._rate = rate
        self._tell = tell
        self._life = 0
        self._last = 0
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
            ProtocolError: a chunk without credit, or far more than a queue may hold.
        """
        self._usage.bytes_in += len(raw) + len(bulk)
        nbytes = 0  # a chunk counts against its credit
        refused = None
        if type(message) is Chunk:
            self.check_chunk(len(bulk))
            self.credit -= 1
        else:
            nbytes = kept_nbytes(len(raw), len(bulk), len(message.commands) if type(message) is Batch else 0)
            refused = self._over_limit(message, nbytes)
            self.held += nbytes
        if type(message) is Batch and len(message.commands) > SLICE:
            parts = slices(message)
            self.waiting.extend(
                Waiting(part, None, bulk, nbytes if part is parts[-1] else 0, refused) for part in parts
            )
            return None
        waiting = Waiting(message, raw, bulk, nbytes, refused)
        # A source was asked for: what holds the others may be waiting for it.
        held = busy or type(message) is Reopen or (type(message) is GraphRun and not message.ready)
        if type(message) is Source or (not self.waiting and not held):
            return waiting
        self.waiting.append(waiting)
        return None

    def _over_limit(self, message: Submitted, nbytes: int) -> LimitExceeded | None:
        """Why the commands of a message are too many; a message that comes alone may have any size.

        Raises:
            ProtocolError: the client goes on although it was told.
        """
        first, count = _numbers(message)
        before = max(self._last, self.next - 1)
        if count:
            self._last = first + count - 1
        limits, held, pending = self._limits, self.held + nbytes, before - self._out.acked
        if not self.held:
            return None
        if held > limits.max_queue_nbytes + PATIENCE_NBYTES:
            raise ProtocolError(
                f"{held} bytes of commands without acknowledgement are far over --max-queue-size "
                f"{limits.max_queue_nbytes} (queue {self._queue})",
                close_code=1008,
            )
        if not count:
            return None
        if held > limits.max_queue_nbytes:
            return LimitExceeded(
                f"{nbytes} bytes of commands behind {self.held} that wait to be run exceed the queue's limit of "
                f"{limits.max_queue_nbytes} bytes; wait for some, or raise it with --max-queue-size",
                details={"nbytes": nbytes, "used": self.held, "limit": limits.max_queue_nbytes},
            )
        if pending + count > limits.max_queue_commands:
            return LimitExceeded(
                f"{count} commands behind {pending} that wait to be run exceed the queue's limit of "
                f"{limits.max_queue_commands}; wait for some, or raise it with --max-queue-commands",
                details={"commands": count, "used": pending, "limit": limits.max_queue_commands},
            )
        return None

    def give_credit(self, slots: int) -> None:
        """Let the client send more chunks, as soon as the session's rate of uploads allows."""
        if slots:
            self._rate.give(partial(self._credit_due, slots, self._life))

    def _credit_due(self, slots: int, life: int) -> None:
        if life == self._life:
            self.credit += slots
            self._tell(Credit(self._queue, slots))

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
        """Credit to give back when a node is gone with the chunks it had: all but that of chunks that wait here.

        It takes the place of credit that was to come later.
        """
        self._life += 1
        return SLOTS - self.credit - sum(type(waiting.message) is Chunk for waiting in self.waiting)

    def forget(self) -> None:
        """The node is gone: nothing is held but what waits here, and late chunks are thrown away."""
        for upload in self.late:
            upload.refused = True
        self.held = sum(waiting.nbytes for waiting in self.waiting)


def _numbers(message: Submitted) -> tuple[int, int]:
    """The number of a message's first command, and how many it holds."""
    match message:
        case Batch():
            return message.first, len(message.commands)
        case Launches():
            return message.first, message.count
        case Program() | KnownProgram() | Reopen() | GraphRun():
            return message.number, 1
        case _:
            return 0, 0
