"""What a queue needs of its node, be it a local process (`local`) or one that dialled in (`remote`); knows neither.

A port belongs to one queue and one life of its device: it ends with the node and is never used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wsgrad.errors import DeviceLost, Timeout
from wsgrad.server.outstanding import InvalidReply
from wsgrad.transport import cbor
from wsgrad.transport.messages import SLOTS, Attach, Close, Credit, message_array

if TYPE_CHECKING:
    from wsgrad.errors import WsgradError
    from wsgrad.server.programs import Job
    from wsgrad.transport.messages import Message, Program, Slot


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a queue's node is gone.

    Attributes:
        cause: what happened, in words.
        number: the command that was running, as far as the node can be believed.
        timed_out: it ran over its limit and was ended by us.
    """

    cause: str
    number: int | None = None
    timed_out: bool = False

    def error(self, device: str, program: str | None) -> WsgradError:
        """What the client is told, who knows which program was running, if any."""
        if self.timed_out:
            who = "a command" if program is None else f"program {program!r}"
            return Timeout(f"{who} {self.cause}; device.reopen() starts the device anew")
        what = f"device {device!r} is lost" if program is None else f"program {program!r} ended the device"
        return DeviceLost(f"{what}: {self.cause}; device.reopen() starts it anew")


class Owner(Protocol):
    """What a port tells its queue."""

    @property
    def number(self) -> int: ...

    @property
    def opening(self) -> bool:
        """Whether the node has not said yet that it is ready."""

    def lost(self, port: Port, loss: Loss) -> None: ...

    def reply(self, port: Port, array: list[object], raw: bytes, bulk: memoryview | None) -> None: ...

    def hold_back(self) -> None:
        """Let what is owed to the client gather until `let_go`, so that it goes out in one piece."""

    def let_go(self) -> None: ...

    def later(self) -> None:
        """Ask for a turn of the queue soon: the port takes more now."""

    def span(self) -> tuple[int, int]:
        """The last command that is acknowledged, and the last that was sent."""

    def may_idle(self) -> bool:
        """Whether the node has a reason to wait for the client although it has commands."""


class Port(ABC):
    """A queue's way to its node. Sending never waits; while the port is full, its queue holds what can wait.

    Attributes:
        number: the queue's number on the way to the node.
        chunks: upload chunks that occupy a slot, whether already sent or still held by the queue.
    """

    def __init__(self, owner: Owner, number: int) -> None:
        self.owner = owner
        self.number = number
        self.closed = False
        self.chunks = 0
        self._chunks_sent = 0
        self._downloads = 0

    @property
    @abstractmethod
    def full(self) -> bool:
        """Whether more than the node has taken so far waits to be sent."""

    @abstractmethod
    def _send(self, head: bytes, bulk: memoryview | None) -> None:
        """Send one message whose queue number is already the node's."""

    @abstractmethod
    def _end(self) -> None:
        """Free everything of the node that is this port's."""

    @abstractmethod
    def next_slot(self) -> memoryview | None:
        """Where the next upload chunk should be received; None for memory of its own."""

    @abstractmethod
    def _send_slot(self, transfer: int, offset: int, slot: int, bulk: memoryview) -> None: ...

    @abstractmethod
    def send_program(self, message: Program, source: memoryview, job: Job | None) -> None:
        """Send a program, compiled by `job` where the node can't compile it itself."""

    @property
    @abstractmethod
    def compiles(self) -> bool:
        """Whether the node compiles programs itself."""

    @abstractmethod
    def _take(self, bulk: memoryview, *, in_place: bool) -> int:
        """Keep a chunk until it is sent; returns the slot it occupies."""

    def send(self, head: bytes, bulk: memoryview | None = None) -> None:
        """Send a message that carries the client's queue number."""
        if not self.closed:
            self._send(head if self.number == self.owner.number else renumber(head, self.number), bulk)

    def expect_answer(self) -> None:  # noqa: B027  # most ways to a node take longer than it pays to wait
        """An idle node has been asked for something small: take its answer at once if it comes at once."""

    def send_message(self, message: Message) -> None:
        """Send a message made here, with this port's number in it."""
        if not self.closed:
            self._send(cbor.encode(message_array(message)), None)

    def attach(self, session: int, device: int, options: dict[str, object]) -> None:
        self.send_message(Attach(self.number, session, device, options))

    def take_chunk(self, bulk: memoryview, *, in_place: bool) -> int:
        """A chunk of an upload has come: it occupies a slot from now on. Returns the slot.

        Args:
            in_place: it was received into the memory that `next_slot` gave.
        """
        assert self.chunks < SLOTS  # the queue has checked the client's credit
        slot = self._take(bulk, in_place=in_place)
        self.chunks += 1
        return slot

    def send_chunk(self, transfer: int, offset: int, slot: int, bulk: memoryview) -> None:
        if not self.closed:
            self._chunks_sent += 1
            self._send_slot(transfer, offset, slot, bulk)

    def credit(self, slots: int) -> None:
        """Check the node's credit for upload chunks that it has worked off."""
        if not 1 <= slots <= self._chunks_sent:
            raise InvalidReply(f"credit for {slots} chunks when {self._chunks_sent} are with it")
        self._chunks_sent -= slots
        self.chunks -= slots

    def take_download(self) -> None:
        """Check that the node had credit for one more chunk of a download."""
        if self._downloads >= SLOTS:
            raise InvalidReply(f"more than {SLOTS} chunks without credit")
        self._downloads += 1

    def download_seen(self) -> None:
        """The client has a chunk: the node may send another."""
        self._downloads -= 1
        self.send_message(Credit(self.number, 1))

    def download_slot(self, message: Slot) -> memoryview:
        """The bytes of a chunk that lies in a shared ring."""
        raise InvalidReply("a slot from a node without a ring")

    def close(self) -> None:
        """End the queue on its node, without a word to the queue. Idempotent."""
        if not self.closed:
            self.send_message(Close(self.number))
            self.closed = True
            self._end()


def renumber(head: bytes, number: int) -> bytes:
    """An encoded message `[kind, queue, …]` with another queue number, the rest as it was."""
    info = head[0] & 0x1F
    after_kind = cbor.scan(head, 1 if info < 24 else 1 + (1 << (info - 24)))
    after_queue = cbor.scan(head, after_kind)
    return head[:after_kind] + cbor.encode(number) + head[after_queue:]
