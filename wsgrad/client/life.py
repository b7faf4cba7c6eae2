"""One life of a device in a session, from its opening to its loss: the ids in use, and what is to be freed.

Buffers and programs hold the life they were made in. When the device's process is lost or reopened, that life is over
for all of them at once, and nothing of it is freed any more: it went with the process.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from wsgrad.errors import LimitExceeded
from wsgrad.transport.commands import Launch

if TYPE_CHECKING:
    from struct import Struct

    from wsgrad.client.handle import Reference
    from wsgrad.client.waits import Failure


class Ids:
    """Small integers from 0 up, each for one thing at a time.

    Attributes:
        freeing: how many are on their way back: freed by a command that is not acknowledged.
    """

    def __init__(self, limit: int, what: str, flag: str) -> None:
        self._limit = limit
        self._what = what
        self._flag = flag
        self._next = 0
        self._free: list[int] = []
        self.freeing = 0

    @property
    def exhausted(self) -> bool:
        """Whether none is left."""
        return not self._free and self._next >= self._limit

    @property
    def short(self) -> bool:
        """Whether none is left, but some are on their way back."""
        return self.exhausted and self.freeing > 0

    def take(self) -> int:
        """An id that nothing else has.

        Raises:
            LimitExceeded: all that the server allows are in use.
        """
        if self._free:
            return self._free.pop()
        if self.exhausted:
            raise LimitExceeded(
                f"this device holds {self._limit} {self._what}, the server's limit; free some, or raise it with "
                f"{self._flag}",
                details={"limit": self._limit},
            )
        self._next += 1
        return self._next - 1

    def give(self, identity: int) -> None:
        """This one may be used again."""
        self.freeing -= 1
        self._free.append(identity)


class Life:
    """The ids of one life.

    Attributes:
        dead: what ended it, or None.
        freed: what handles left behind when their last reference went. Only appended to, by callbacks that may run
            anywhere, in any thread.
        handles: what handles will leave behind, by its key: a weak reference works only while somebody holds it.
        buffers: ids of buffers and views.
        programs: ids of programs.
        words: how the launches of each program that was launched packed are laid out, by its id.
    """

    __slots__ = ("__weakref__", "_freeing", "buffers", "dead", "freed", "handles", "programs", "words")

    def __init__(self, *, max_buffers: int, max_programs: int) -> None:
        self.dead: Failure | None = None
        self.freed: deque[Reference] = deque()
        self.handles: dict[int, Reference] = {}
        self._freeing: deque[tuple[int, int]] = deque()
        self.buffers = Ids(max_buffers, "buffers and views", "--max-buffers")
        self.programs = Ids(max_programs, "programs", "--max-programs")
        self.words: dict[int, Struct] = {}

    def unpacked(self, words: bytes) -> Launch:
        """A packed launch as a command."""
        program = int.from_bytes(words[:4], "little")
        _, grid, *values = self.words[program].unpack(words)
        return Launch(program, [grid] if grid else None, None, values, False)

    def take_freed(self) -> list[int]:
        """The keys of the handles that were given back since the last time."""
        keys = []
        for _ in range(len(self.freed)):
            reference = self.freed.popleft()
            # Freed by hand and then collected, it comes twice.
            if self.handles.get(reference.key) is reference:
                del self.handles[reference.key]
                keys.append(reference.key)
        return keys

    def freeing(self, key: int, number: int) -> None:
        """Command `number` frees what this key stands for. Its id is used again once that was acknowledged."""
        self._freeing.append((number, key))
        (self.buffers if key >= 0 else self.programs).freeing += 1

    def acknowledged(self, number: int) -> None:
        """Commands up to `number` have run."""
        freeing = self._freeing
        while freeing and freeing[0][0] <= number:
            key = freeing.popleft()[1]
            if key >= 0:
                self.buffers.give(key)
            else:
                self.programs.give(~key)
