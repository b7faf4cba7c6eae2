"""What a queue has given to its node and what the node may still answer; checks replies like a stranger's, does no I/O.

A node runs foreign code, which can forge whatever the node says. Every reply is held against what was asked: a reply
nobody waits for, of another size, or beyond what was sent raises `InvalidReply`, and the owner ends the node.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from wsgrad.transport.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wsgrad.server.tables import Tables
    from wsgrad.server.transfers import Flow
    from wsgrad.server.usage import Usage

ANSWER_NBYTES: Final = 128
"""What keeping an answer holds beside its data."""
_UNEXPECTED: Final = 32
"""After one that took long, so many of its kind are not waited for."""


class Habit:
    """Whether what is done again and again is usually over at once, so that waiting for it pays."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 0

    def expects(self) -> bool:
        """Whether to wait this time."""
        self._left = max(0, self._left - 1)
        return not self._left

    def broken(self) -> None:
        """It took long this time."""
        self._left = _UNEXPECTED


class InvalidReply(Exception):
    """A node answered what nobody asked; says what."""


@dataclass(slots=True)
class Transfer:
    """A download: what was asked, how far it came, and whether the client wants no more of it.

    `flow` is where its bytes go if that is another queue instead of the client.
    """

    transfer: int
    number: int
    nbytes: int
    flow: Flow | None = None
    offset: int = 0
    aborted: bool = False


@dataclass(slots=True)
class Sent:
    """One message to a node: the commands it covers and the answers they will have.

    Attributes:
        first: its first command's number.
        last: its last command's number.
        nbytes: what it counts against the queue's limit.
        head: the encoded array.
        bulk: its bulk; kept for packed launches, to name the program if one ends the node.
        reads: number and size of each read.
        timed: numbers of timed launches.
        launches: number and program of each launch in a batch.
        drops: programs that go with it.
        packed: whether `bulk` holds packed launches.
        habit: of what it makes the node do, if that has one.
    """

    first: int
    last: int
    nbytes: int
    head: bytes
    bulk: memoryview | None = None
    reads: list[tuple[int, int]] = field(default_factory=list)
    timed: list[int] = field(default_factory=list)
    launches: list[tuple[int, int]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    packed: bool = False
    habit: Habit | None = None

    @property
    def reserved(self) -> int:
        """Bytes that its answers will hold until the client has seen them."""
        answers = len(self.reads) + len(self.timed)
        return answers and answers * ANSWER_NBYTES + sum(nbytes for _, nbytes in self.reads)


class Outstanding:
    """The commands of a queue between their sending to a node and their acknowledgement."""

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self.sent = 0
        self.acked = 0
        self.downloads: dict[int, Transfer] = {}
        """Downloads that were accepted and not acknowledged, also those that still wait to be sent."""
        self._messages: deque[Sent] = deque()
        self._reads: deque[tuple[int, int]] = deque()
        self._timed: deque[int] = deque()
        self._last_failed = -1
        self._idle_acks = 0

    @property
    def expected(self) -> bool:
        """Whether what was sent last is likely answered at once, as a read is."""
        if self._reads:
            return True
        habit = self._messages[-1].habit if self._messages else None
        return habit is not None and habit.expects()

    def awaited(self) -> None:
        """Somebody has waited for what was expected."""
        habit = self._messages[-1].habit if self._messages else None
        if habit is not None:
            habit.broken()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing but what was not submitted yet will be."""
        return self.acked == self.sent and not self.downloads

    def restart(self, number: int) -> int:
        """Forget all that was sent: all up to `number` counts as done. Returns the bytes that answers had reserved."""
        freed = sum(nbytes + ANSWER_NBYTES for _, nbytes in self._reads) + len(self._timed) * ANSWER_NBYTES
        for kept in (self._messages, self._reads, self._timed):
            kept.clear()
        # Later ones were accepted while the device was opening and still wait to be sent.
        self.downloads = {t: download for t, download in self.downloads.items() if download.number > number}
        self.sent = self.acked = number
        self._last_failed = number
        return freed

    def begin(self, number: int) -> None:
        """The node is ready: the first command for it comes behind `number`. Downloads that wait already stay."""
        self.sent = self.acked = self._last_failed = number

    def add(self, message: Sent) -> None:
        """Note that a message goes to the node now."""
        self.sent = message.last
        self._reads.extend(message.reads)
        self._timed.extend(message.timed)
        message.head = b""
        if not message.packed:
            message.bulk = None
        self._messages.append(message)

    def ack(self, number: int) -> tuple[int, int]:
        """The node has worked off everything up to `number`.

        Returns:
            Bytes of messages that are done, and bytes reserved for answers that will not come.
        """
        if not self.acked <= number <= self.sent:
            raise InvalidReply(
                f"an acknowledgement of {number} when {self.sent} were sent and {self.acked} acknowledged"
            )
        if number == self.acked:
            # Harmless, but somebody who only says this keeps the server busy.
            self._idle_acks += 1
            if self._idle_acks > 1000:
                raise InvalidReply("acknowledgements of nothing new")
            return 0, 0
        self._idle_acks = 0
        self.acked = number
        done = freed = 0
        while self._messages and self._messages[0].last <= number:
            done += self._messages.popleft().nbytes
        while self._reads and self._reads[0][0] <= number:
            freed += self._reads.popleft()[1] + ANSWER_NBYTES
        while self._timed and self._timed[0] <= number:
            self._timed.popleft()
            freed += ANSWER_NBYTES
        for transfer in [t for t, download in self.downloads.items() if download.number <= number]:
            del self.downloads[transfer]
        return done, freed

    def read(self, number: int, nbytes: int) -> int:
        """Check the data of a read. Returns bytes reserved for earlier reads, which were dropped and have no answer."""
        if (number, nbytes) not in self._reads:
            raise InvalidReply(f"{nbytes} bytes for command {number}, which did not ask for them")
        freed = 0
        while self._reads[0][0] < number:
            freed += self._reads.popleft()[1] + ANSWER_NBYTES
        self._reads.popleft()
        self._usage.bytes_out += nbytes
        return freed

    def answered(self, number: int, nbytes: int) -> int | None:
        """Take the data of a read that is all that is under way, with its acknowledgement.

        Returns:
            Bytes of its message, or None where it is not that.
        """
        if number != self.sent or len(self._messages) != 1 or self._timed or self.downloads:
            return None
        if len(self._reads) != 1 or self._reads[0] != (number, nbytes):
            return None
        self._reads.clear()
        self._usage.bytes_out += nbytes
        self.acked = number
        self._idle_acks = 0
        return self._messages.pop().nbytes

    def result(self, number: int, value: object) -> int:
        """Check the seconds of a timed launch. Returns bytes reserved for earlier ones without an answer."""
        if type(value) is not float and type(value) is not int:
            raise InvalidReply("a launch's time that is no number")
        if number not in self._timed:
            raise InvalidReply(f"a result for command {number}, which did not ask for one")
        freed = 0
        while self._timed[0] < number:
            self._timed.popleft()
            freed += ANSWER_NBYTES
        self._timed.popleft()
        return freed

    def abort(self, transfer: int) -> Transfer | None:
        """The download that the client wants no more of; None if there is none, or it has said so before.

        Said again it would only fill the way to the node.
        """
        download = self.downloads.get(transfer)
        if download is None or download.aborted:
            return None
        download.aborted = True
        return download

    def chunk(self, transfer: int, offset: int, nbytes: int) -> Transfer:
        """Check a chunk of a download: the next one, and of its full size. Returns the download."""
        download = self.downloads.get(transfer)
        if download is None or download.number > self.sent:
            raise InvalidReply(f"a chunk of transfer {transfer}, which is not under way")
        expected = min(CHUNK_BYTES, download.nbytes - download.offset)
        if offset != download.offset or nbytes != expected or not nbytes:
            raise InvalidReply(
                f"{nbytes} bytes at {offset} of transfer {transfer}, where {expected} at {download.offset} come next"
            )
        download.offset += nbytes
        self._usage.bytes_out += nbytes
        return download

    def failed(self, number: int) -> None:
        """Check that a command may fail: under way, and none after it has failed before."""
        if not self.acked < number <= self.sent or number <= self._last_failed:
            raise InvalidReply(f"a failure of command {number}, which is not under way")
        self._last_failed = number

    def message_of(self, number: int) -> Sent | None:
        """The message that command `number` travelled in, if it is not acknowledged."""
        return next((message for message in self._messages if message.first <= number <= message.last), None)

    def program_of(self, number: int, tables: Tables) -> int | None:
        """The program that command `number` launches, if it is a launch and not acknowledged."""
        message = self.message_of(number)
        if message is None:
            return None
        return next((program for launch, program in launched(message, tables) if launch == number), None)


def launched(message: Sent, tables: Tables) -> Iterator[tuple[int, int]]:
    """Number and program of each launch in a message, as far as packed ones make sense."""
    if not message.packed or message.bulk is None:
        yield from message.launches
        return
    words = message.bulk.cast("I")
    position = 0
    for number in range(message.first, message.last + 1):
        if position >= len(words):
            return
        program = words[position]
        yield number, program
        entry = tables.program(program)
        if entry is None:
            return
        position += entry.words
