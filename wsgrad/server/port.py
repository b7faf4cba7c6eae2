"""What a queue needs of its node, be it a local process (`local`) or one that dialled in (`remote`); knows neither.

A port belongs to one queue and one life of its device: it ends with the node and is never used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wsgrad.errors import ProtocolError
from wsgrad.server.outstanding import InvalidReply
from wsgrad.transport import cbor
from wsgrad.transport.messages import SLOTS, Attach, Close, Credit, message_array, parse_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.transfers import FlowChunk
    from wsgrad.transport.express import Answer
    from wsgrad.transport.messages import Message, Program, Slot


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a queue's node is gone.

    Attributes:
        cause: what happened, in words.
        number: the command that was running, as far as the node can be believed.
        step: how far it says to have come in a graph.
        timed_out: it ran over its limit and was ended by us.
    """

    cause: str
    number: int | None = None
    step: int = 0
    timed_out: bool = False


class DownloadChunk:
    """A chunk of a download in its node's slot; calling it says that its bytes are no longer needed there.

    `slot` is which one of the port's shared ring, if it has one.
    """

    __slots__ = ("_changed", "done", "port", "slot")

    def __init__(self, port: Port, changed: Callable[[], None]) -> None:
        self.port = port
        self.slot: int | None = None
        self.done = False
        self._changed = changed

    def __call__(self) -> None:
        self.done = True
        self._changed()


class Owner(Protocol):
    """What a port tells its queue."""

    @property
    def number(self) -> int: ...

    @property
    def opening(self) -> bool:
        """Whether the node has not said yet that it is ready."""

    def lost(self, port: Port, loss: Loss) -> None: ...

    def reply(self, port: Port, array: list[object], raw: bytes, bulk: memoryview | None) -> None: ...

    def answered(self, port: Port, answer: Answer) -> bool:
        """The answer to the only read that is under way; returns whether it is that, else `reply` decides."""

    def hold_back(self) -> None:
        """Let what is owed to the client gather until `let_go`, so that it goes out in one piece."""

    def let_go(self) -> None: ...

    def later(self) -> None:
        """Ask for a turn of the queue soon: the port takes more now."""

    def span(self) -> tuple[int, int]:
        """The last command that is acknowledged, and the last that was sent."""

    def steps(self, number: int) -> int:
        """How many steps command `number` may show as its progress; none if it is no replay."""

    def may_idle(self) -> bool:
        """Whether the node has a reason to wait for the client although it has commands."""


class Port(ABC):
    """A queue's way to its node. Sending never waits; while the port is full, its queue holds what can wait.

    Attributes:
        number: the queue's number on the way to the node.
        traces: the timelines that the node was asked to measure for and has not sent its last of.
    """

    def __init__(self, owner: Owner, number: int) -> None:
        self.owner = owner
        self.number = number
        self.closed = False
        self.traces: set[int] = set()
        self._free = deque(range(SLOTS))
        self._with_node: deque[tuple[int, bool, DownloadChunk | None]] = deque()
        self._downloads: deque[DownloadChunk] = deque()

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

    @property
    def has_room(self) -> bool:
        """Whether a slot is free for another chunk to the node."""
        return bool(self._free)

    @abstractmethod
    def next_slot(self) -> memoryview | None:
        """Where the next upload chunk should be received; None for memory of its own."""

    @abstractmethod
    def _send_slot(self, transfer: int, offset: int, slot: int, bulk: memoryview) -> None: ...

    @property
    @abstractmethod
    def compiles(self) -> bool:
        """Whether the node compiles programs itself: it gets them by `send_program`, else by `send_binary`."""

    def send_program(self, message: Program, source: memoryview) -> None:
        """Send a program's source."""
        raise NotImplementedError

    def send_binary(self, message: Program, binary: bytes | None) -> None:
        """Send a program that was compiled, or could not be; number 0 if its place has gone before."""
        raise NotImplementedError

    @abstractmethod
    def _keep(self, slot: int, bulk: memoryview, *, owned: bool) -> memoryview:
        """Keep a chunk until it is sent; returns what to send, in memory that nobody else changes."""

    def send(self, head: bytes, bulk: memoryview | None = None) -> None:
        """Send a message that carries the client's queue number."""
        if not self.closed:
            self._send(head if self.number == self.owner.number else renumber(head, self.number), bulk)

    def parse(self, array: list[object]) -> Message:
        """Check that a decoded array is a message for this port's queue.

        Raises:
            InvalidReply: it is not.
        """
        try:
            message = parse_message(array)
        except ProtocolError as exc:
            raise InvalidReply(str(exc)) from exc
        if len(array) < 2 or array[1] != self.number:
            raise InvalidReply(f"a message of kind {array[0]} that is not for its queue")
        return message

    def expect_answer(self) -> None:  # noqa: B027  # most ways to a node take longer than it pays to wait
        """An idle node has been asked for something small: take its answer at once if it comes at once."""

    def send_message(self, message: Message) -> None:
        """Send a message made here, with this port's number in it."""
        if not self.closed:
            self._send(cbor.encode(message_array(message)), None)

    @property
    def clock(self) -> tuple[int | None, int]:
        """By how many nanoseconds the node's clock is ahead of ours, None if unknown, and how wrong that may be."""
        return 0, 0

    def align(self) -> None:  # noqa: B027  (there is nothing to do where both have one clock)
        """Compare the node's clock with ours."""

    def attach(self, session: int, device: int, options: dict[str, object]) -> None:
        self.send_message(Attach(self.number, session, device, options))

    def take_chunk(self, bulk: memoryview, *, in_place: bool = False, owned: bool = True) -> tuple[int, memoryview]:
        """A chunk for the node has come: it occupies a slot from now on. There is room for it.

        Args:
            in_place: it was received into the memory that `next_slot` gave.
            owned: its memory is nobody else's.

        Returns:
            The slot, and what `send_chunk` is to be given.
        """
        slot = self._free.popleft()
        return slot, bulk if in_place else self._keep(slot, bulk, owned=owned)

    def send_chunk(self, transfer: int, offset: int, slot: int, bulk: memoryview, *, client: bool) -> None:
        """Send a chunk that `take_chunk` took; `client` if its credit is the client's."""
        if not self.closed:
            self._with_node.append((slot, client, None))
            self._send_slot(transfer, offset, slot, bulk)

    def pass_on(self, transfer: int, offset: int, chunk: FlowChunk) -> None:
        """Send another queue's chunk; there is room for it."""
        slot, kept = self.take_chunk(chunk.bulk, owned=chunk.owned)
        self.send_chunk(transfer, offset, slot, kept, client=False)
        chunk.taken()

    def credit(self, slots: int) -> int:
        """Check the node's credit for chunks that it has worked off. Returns how many of them were the client's."""
        if not 1 <= slots <= len(self._with_node):
            raise InvalidReply(f"credit for {slots} chunks when {len(self._with_node)} are with it")
        clients = 0
        for _ in range(slots):
            slot, client, lent = self._with_node.popleft()
            self._free.append(slot)
            clients += client
            if lent is not None:
                lent()
        return clients

    @property
    def downloading(self) -> int:
        """Chunks of downloads whose credit the node does not have back."""
        return len(self._downloads)

    def take_download(self) -> DownloadChunk:
        """The node sends a chunk of a download; checks that it had credit for one more."""
        if len(self._downloads) >= SLOTS:
            raise InvalidReply(f"more than {SLOTS} chunks without credit")
        chunk = DownloadChunk(self, self._download_done)
        self._downloads.append(chunk)
        return chunk

    def _download_done(self) -> None:
        # The node uses its slots in turn, so it may have one back only after those before it.
        slots = 0
        while self._downloads and self._downloads[0].done:
            self._downloads.popleft()
            slots += 1
        if slots:
            self.send_message(Credit(self.number, slots))

    def download_slot(self, message: Slot, chunk: DownloadChunk) -> memoryview:
        """The bytes of a chunk that lies in a shared ring; notes its slot."""
        raise InvalidReply("a slot from a node without a ring")

    def close(self) -> None:
        """End the queue on its node, without a word to the queue. Idempotent."""
        if not self.closed:
            self.send_message(Close(self.number))
            self.closed = True
            self._downloads.clear()  # each refers to this port, which holds a mapping
            with_node, self._with_node = self._with_node, deque()
            for _, _, lent in with_node:
                if lent is not None:
                    lent()
            self._end()


def renumber(head: bytes, number: int) -> bytes:
    """An encoded message `[kind, queue, …]` with another queue number, the rest as it was."""
    info = head[0] & 0x1F
    after_kind = cbor.scan(head, 1 if info < 24 else 1 + (1 << (info - 24)))
    after_queue = cbor.scan(head, after_kind)
    return head[:after_kind] + cbor.encode(number) + head[after_queue:]
