"""What one queue has to send, in its order: lets out as much as window and credit allow; it numbers no command.

Commands wait here while 4 MiB of earlier ones are not acknowledged, and an upload holds what comes after it until its
last chunk has credit. The numbered messages of all queues then travel through the session's one link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from wsgrad.transport.cbor import encode
from wsgrad.transport.messages import CHUNK_BYTES, SLOTS, Abort, Chunk, message_array

if TYPE_CHECKING:
    from wsgrad.client.arrays import Source
    from wsgrad.transport.link import Link

WINDOW = 4 << 20
"""The most bytes of commands that are sent before the device acknowledges some."""
MAX_UNSENT = 8 << 20
"""The most bytes of commands that are kept here until the window opens."""


@dataclass(slots=True, eq=False)
class Stream:
    """An upload whose chunks are still to be sent; `held` counts the bytes it keeps in memory that nobody waits for."""

    number: int
    transfer: int
    source: Source
    nbytes: int
    held: int = 0
    position: int = 0
    aborted: bool = False


_Item: TypeAlias = tuple[bytes, bytes | None, int, int]


class Outbox:
    """Owned by a queue.

    Attributes:
        unsent_bytes: bytes of commands that wait here; the owner's caller stops at `MAX_UNSENT`.
        pushed: all commands up to this number have been given to the link.
    """

    def __init__(self, link: Link, queue: int) -> None:
        self.unsent_bytes = 0
        self.pushed = 0
        self._link = link
        self._queue = queue
        self._credit = SLOTS
        self._items: deque[_Item | Stream] = deque()
        self._sent: deque[tuple[int, int]] = deque()
        self._unacked_bytes = 0

    def __bool__(self) -> bool:
        """Whether something waits for the device: window or credit."""
        return bool(self._items)

    def put(self, head: bytes, bulk: bytes | None, last: int) -> None:
        """Add a message that brings the commands up to number `last`; it goes to the link at once if it may."""
        nbytes = len(head) if bulk is None else len(head) + len(bulk)
        if not self._items and (not self._unacked_bytes or self._unacked_bytes + nbytes <= WINDOW):
            self._push(head, bulk, last, nbytes)
        else:
            self.unsent_bytes += nbytes
            self._items.append((head, bulk, last, nbytes))

    def put_stream(self, stream: Stream) -> None:
        """Add the chunks of an upload, behind its command."""
        self.unsent_bytes += stream.held
        self._items.append(stream)

    def abort(self, transfer: int, number: int) -> None:
        """Ask the device to stop the download of command `number`, in order behind that command, not behind others."""
        head = encode(message_array(Abort(self._queue, transfer)))
        if number <= self.pushed:
            self._link.push(head)
        else:
            self.put(head, None, 0)

    def abort_from(self, number: int) -> None:
        """The device drops commands from `number` on: send no more of their uploads."""
        for item in self._items:
            if isinstance(item, Stream) and item.number >= number:
                item.aborted = True

    def pump(self) -> None:
        """Give the link what window and credit allow."""
        items = self._items
        while items:
            item = items[0]
            if isinstance(item, Stream):
                if not self._pump_stream(item):
                    return
                self.unsent_bytes -= item.held
            else:
                head, bulk, last, nbytes = item
                if self._unacked_bytes and self._unacked_bytes + nbytes > WINDOW:
                    return
                self.unsent_bytes -= nbytes
                self._push(head, bulk, last, nbytes)
            items.popleft()

    def _push(self, head: bytes, bulk: bytes | None, last: int, nbytes: int) -> None:
        self._link.push(head, bulk)
        if last:
            self.pushed = last
            self._unacked_bytes += nbytes
            self._sent.append((last, nbytes))

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
        while self._sent and self._sent[0][0] <= number:
            self._unacked_bytes -= self._sent.popleft()[1]

    def credit(self, slots: int) -> None:
        """The device has room for more chunks."""
        self._credit += slots
