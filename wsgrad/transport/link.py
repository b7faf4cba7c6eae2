"""A session's numbered messages over one connection after another: what to send, what to keep, what to send again.

Pure bookkeeping, without sockets, frames or CBOR. Both ends number the messages of kinds 16 and above by counting them.
The receiver reports its count in `Seen`; the sender keeps what has not been seen and, after a new connection has told
the peer's count, sends just that again. So each message arrives once and in order, however often the connection drops.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from wsgrad.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

SEEN_MESSAGES = 64
SEEN_BYTES = 1 << 19


class Outgoing:
    """An encoded message on its way: its array, its bulk, and what to call when the peer has seen it.

    `nbytes` is what keeping it holds. One is made for every message, and a dataclass would take three times as long.
    """

    __slots__ = ("bulk", "head", "nbytes", "numbered", "on_seen")

    def __init__(
        self,
        head: bytes,
        bulk: memoryview | bytes | None,
        numbered: bool,
        on_seen: Callable[[], None] | None = None,
    ) -> None:
        self.head = head
        self.bulk = bulk
        self.numbered = numbered
        self.on_seen = on_seen
        self.nbytes = len(head) if bulk is None else len(head) + len(bulk)


class Link:
    """The two counters of a session and its messages that were not yet sent or not yet seen.

    Owned by the session, not by a connection. Nothing here is bounded: the owner stops adding when `unsent_bytes` or
    `unseen_bytes` is over its limit.
    """

    def __init__(self) -> None:
        self.received = 0
        """Numbered messages received so far: told to the peer in `Seen`, `Hello` and `Welcome`."""
        self.unsent_bytes = 0
        self.unseen_bytes = 0
        self.observer: Callable[[Outgoing | None], None] | None = None
        """Told of each message that is given out to be sent, and when there is none; None costs nothing."""
        self._seen = 0
        self._outbox: deque[Outgoing] = deque()
        self._unseen: deque[Outgoing] = deque()
        self._messages_since = 0
        self._bytes_since = 0

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outbox)

    def push(
        self,
        head: bytes,
        bulk: memoryview | bytes | None = None,
        *,
        numbered: bool = True,
        on_seen: Callable[[], None] | None = None,
    ) -> None:
        """Put a message at the end of what is to be sent. `bulk` is kept by reference and may not change until seen."""
        outgoing = Outgoing(head, bulk, numbered, on_seen)
        self.unsent_bytes += outgoing.nbytes
        self._outbox.append(outgoing)

    def pop(self) -> Outgoing | None:
        """The next message to write to the connection, or None. A numbered one is kept until the peer has seen it."""
        outgoing = self._outbox.popleft() if self._outbox else None
        if self.observer is not None:
            self.observer(outgoing)
        if outgoing is None:
            return None
        self.unsent_bytes -= outgoing.nbytes
        if outgoing.numbered:
            self._unseen.append(outgoing)
            self.unseen_bytes += outgoing.nbytes
        return outgoing

    def seen(self, count: int) -> None:
        """The peer has received `count` numbered messages: forget them.

        Raises:
            ProtocolError: it claims more than was sent, or fewer than it claimed before.
        """
        if not self._seen <= count <= self._seen + len(self._unseen):
            raise ProtocolError(
                f"the peer has seen {count} messages, but {self._seen + len(self._unseen)} were sent "
                f"and it had seen {self._seen}"
            )
        while self._seen < count:
            self._seen += 1
            outgoing = self._unseen.popleft()
            self.unseen_bytes -= outgoing.nbytes
            if outgoing.on_seen is not None:
                outgoing.on_seen()

    def resume(self, count: int) -> None:
        """A new connection is there and the peer has `count` messages: send the others again, before anything else.

        Messages without a number belonged to the old connection and are dropped.

        Raises:
            ProtocolError: as `seen`.
        """
        self.seen(count)
        waiting = [outgoing for outgoing in self._outbox if outgoing.numbered]
        self._outbox = deque(self._unseen)
        self._outbox.extend(waiting)
        self._unseen.clear()
        self.unseen_bytes = 0
        self.unsent_bytes = sum(outgoing.nbytes for outgoing in self._outbox)
        self._messages_since = self._bytes_since = 0

    def note_received(self, nbytes: int) -> bool:
        """Count one numbered message of the peer. True when it is time to tell the peer with `Seen`."""
        self.received += 1
        self._messages_since += 1
        self._bytes_since += nbytes
        if self._messages_since >= SEEN_MESSAGES or self._bytes_since >= SEEN_BYTES:
            self._messages_since = self._bytes_since = 0
            return True
        return False

    @property
    def untold(self) -> bool:
        """Whether messages were received that no `Seen` has told of; the owner tells them when it has a moment."""
        return self._messages_since > 0

    def told(self) -> None:
        """The owner has sent `Seen` by itself."""
        self._messages_since = self._bytes_since = 0
