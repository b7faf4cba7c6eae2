"""What one queue has to send, in its order: lets out as much as window and credit allow; it numbers no command.

Commands wait here while 4 MiB of earlier ones are not acknowledged, and an upload holds what comes after it until its
last chunk has credit. One that the server's cache may bring holds only other uploads, until it is acknowledged.
The numbered messages of all queues then travel through the session's one link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsgrad.client.blobs import new_statistics
from wsgrad.errors import ProtocolError
from wsgrad.transport.cbor import encode
from wsgrad.transport.cost import kept_nbytes
from wsgrad.transport.messages import CHUNK_BYTES, SLOTS, Abort, Chunk, message_array

if TYPE_CHECKING:
    from wsgrad.client.arrays import Source
    from wsgrad.transport.link import Link

WINDOW = 4 << 20
"""The most that commands count (`transport.cost`) that are sent before the device acknowledges some."""
MAX_UNSENT = 8 << 20
"""The most bytes of commands that are kept here until the window opens."""


@dataclass(slots=True, eq=False)
class Stream:
    """An upload whose chunks are still to be sent; `held` counts the bytes it keeps in memory that nobody waits for.

    Of one that the server's cache may bring none are sent until it is `missing`.
    """

    number: int
    transfer: int
    source: Source
    nbytes: int
    held: int = 0
    position: int = 0
    aborted: bool = False
    missing: bool = False


class Joint:
    """A message about several queues of one link, which leaves once it has come to the front of each one's outbox."""

    def __init__(self) -> None:
        self.sent = False
        self._members: list[Outbox] = []
        self._awaited: list[Outbox] = []

    def add(self, outbox: Outbox) -> None:
        """It has a place in this one too."""
        self._members.append(outbox)
        self._awaited.append(outbox)

    def arrived(self, outbox: Outbox) -> bool:
        """It has come to the front there, or need not any more. Returns whether it may leave."""
        if outbox in self._awaited:
            self._awaited.remove(outbox)
        return not self._awaited

    def others(self, outbox: Outbox) -> list[Outbox]:
        """Where else it had a place."""
        return [member for member in self._members if member is not outbox]


@dataclass(slots=True, eq=False)
class _Item:
    head: bytes
    bulk: bytes | None
    last: int
    nbytes: int
    cost: int
    joint: Joint | None = None


class Outbox:
    """Owned by a queue.

    Attributes:
        unsent_bytes: bytes of commands that wait here; the owner's caller stops at `MAX_UNSENT`.
        acked: all commands up to this number have run or were dropped.
        pushed: all commands up to this number have been given to the link.
        statistics: counters; the session puts one table in place of those of its queues.

    Args:
        max_cost: what the server lets commands count that it has not acknowledged.
        max_commands: how many there may be of them.
    """

    def __init__(self, link: Link, queue: int, *, max_cost: int = WINDOW, max_commands: int = 1 << 32) -> None:
        self.unsent_bytes = 0
        self.pushed = 0
        self.statistics = new_statistics()
        self._link = link
        self._queue = queue
        self._credit = SLOTS
        self.acked = -1
        self._items: deque[_Item | Stream] = deque()
        self._cached: deque[Stream] = deque()
        self._sent: deque[tuple[int, int]] = deque()
        self._unacked_cost = 0
        self._window = min(max_cost, WINDOW)
        self._max_commands = max_commands
        self._last = 0

    def __bool__(self) -> bool:
        """Whether something waits for the device: window, credit, or what its server's cache has."""
        return bool(self._items) or bool(self._cached)

    def put(self, head: bytes, bulk: bytes | None, last: int) -> None:
        """Add a message that brings the commands up to number `last`; it goes to the link at once if it may."""
        nbytes = len(head) if bulk is None else len(head) + len(bulk)
        # Without a bulk it is a batch of all the commands since the last message.
        commands = last - self._last if last and bulk is None else 0
        cost = kept_nbytes(len(head), nbytes - len(head), commands)
        self._last = max(self._last, last)
        if not self._items and self._may_send(last, cost):
            self._push(head, bulk, last, cost)
        else:
            self.unsent_bytes += nbytes
            self._items.append(_Item(head, bulk, last, nbytes, cost))

    def put_joint(self, joint: Joint, head: bytes, last: int) -> None:
        """Add a message's place in this queue; number `last` is 0 where it is no command."""
        joint.add(self)
        self.unsent_bytes += len(head)
        self._last = max(self._last, last)
        self._items.append(_Item(head, None, last, len(head), kept_nbytes(len(head), 0, 0), joint))

    def leave(self) -> None:
        """The queue is closed: nothing of other queues waits for it any more.

        What is left goes to the server all the same, without its uploads: other queues may depend on it.
        """
        items, self._items = self._items, deque()
        for item in items:
            if isinstance(item, Stream):
                if item.position < item.nbytes:
                    self._link.push(encode(message_array(Abort(self._queue, item.transfer))))
                continue
            if item.joint is None:
                self._link.push(item.head, item.bulk)
                self.pushed = max(self.pushed, item.last)
            elif item.joint.arrived(self):
                for other in item.joint.others(self):
                    other.pump()

    def put_stream(self, stream: Stream) -> None:
        """Add the chunks of an upload, behind its command."""
        self.unsent_bytes += stream.held
        self._items.append(stream)

    def put_cached(self, stream: Stream) -> None:
        """Add an upload that the server's cache may bring, once its command was put."""
        self._cached.append(stream)

    def missing(self, number: int, offset: int) -> None:
        """The server asks for the chunks of a cached upload from this offset on.

        Raises:
            ProtocolError: there can't be a chunk at that offset.
        """
        for stream in self._cached:
            if stream.number == number and not stream.missing:
                if offset % CHUNK_BYTES or offset >= stream.nbytes:
                    raise ProtocolError(f"the server asks for an upload of {stream.nbytes} bytes from {offset} on")
                stream.missing = True
                self.statistics["cache_misses"] += 1
                while stream.position < offset:
                    stream.position += len(stream.source.take(CHUNK_BYTES))

    def answer(self, head: bytes, bulk: bytes) -> None:
        """Send what the server has asked for, at once: its queue may be waiting for it."""
        self._link.push(head, bulk)

    def abort(self, transfer: int, number: int) -> None:
        """Ask the device to stop the download of command `number`, in order behind that command, not behind others."""
        head = encode(message_array(Abort(self._queue, transfer)))
        if number <= self.pushed:
            self._link.push(head)
        else:
            self.put(head, None, 0)

    def abort_from(self, number: int) -> None:
        """The device drops commands from `number` on: send no more of their uploads."""
        for item in (*self._items, *self._cached):
            if isinstance(item, Stream) and item.number >= number:
                item.aborted = True

    def pump(self) -> None:
        """Give the link what window and credit allow."""
        self._pump_items()
        if self._cached and self._pump_cached():
            self._pump_items()

    def _pump_items(self) -> None:
        items = self._items
        while items:
            item = items[0]
            if isinstance(item, Stream):
                # The server may still ask for the chunks of an earlier one, which need the same credit.
                if self._cached and self._cached[0].number < item.number:
                    return
                if not self._pump_stream(item):
                    return
                self.unsent_bytes -= item.held
            else:
                if not self._may_send(item.last, item.cost):
                    return
                joint = item.joint
                if joint is not None and not joint.arrived(self):
                    return
                self.unsent_bytes -= item.nbytes
                self._push(item.head, item.bulk, item.last, item.cost, link=joint is None or not joint.sent)
                if joint is not None and not joint.sent:
                    joint.sent = True
                    items.popleft()
                    for other in joint.others(self):
                        other.pump()
                    continue
            items.popleft()

    def _pump_cached(self) -> bool:
        """Send the chunks that were asked for. Returns whether an upload has ended."""
        cached = self._cached
        before = len(cached)
        self._abort_cached()
        while cached:
            stream = cached[0]
            if stream.missing:
                if not self._pump_stream(stream):
                    break
            elif stream.number > self.acked:
                break
            else:
                self.statistics["cache_hits"] += 1
            cached.popleft()
        return len(cached) < before

    def _abort_cached(self) -> None:
        for stream in [stream for stream in self._cached if stream.aborted and stream.number <= self.pushed]:
            self._link.push(encode(message_array(Abort(self._queue, stream.transfer))))
            self._cached.remove(stream)

    def _may_send(self, last: int, cost: int) -> bool:
        """Whether commands up to `last` may go beside those that are not acknowledged; alone they may always."""
        if not self._unacked_cost:
            return True
        return self._unacked_cost + cost <= self._window and last - max(self.acked, 0) <= self._max_commands

    def _push(self, head: bytes, bulk: bytes | None, last: int, cost: int, *, link: bool = True) -> None:
        if link:
            self._link.push(head, bulk)
        if last:
            self.pushed = last
            self._unacked_cost += cost
            self._sent.append((last, cost))
            if self._cached:
                # Before what comes next: a reopening waits for all uploads to end.
                self._abort_cached()

    def _pump_stream(self, stream: Stream) -> bool:
        """Whether nothing more of it is to come."""
        while stream.position < stream.nbytes:
            if stream.aborted:
                self._link.push(encode(message_array(Abort(self._queue, stream.transfer))))
                return True
            if not self._credit:
                return False
            self._credit -= 1
            chunk = stream.source.take(min(CHUNK_BYTES, stream.nbytes - stream.position))
            head = encode(message_array(Chunk(self._queue, stream.transfer, stream.position)))
            stream.position += len(chunk)
            self._link.push(head, chunk)
        return True

    def acknowledged(self, number: int) -> None:
        """The device has worked off all commands up to `number`."""
        self.acked = number
        while self._sent and self._sent[0][0] <= number:
            self._unacked_cost -= self._sent.popleft()[1]

    def credit(self, slots: int) -> None:
        """The device has room for more chunks."""
        self._credit += slots
