"""Holds a session to a rate of uploads: chunks are always taken, but credit for more comes late; it loses nothing."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable


class UploadRate:
    """The bucket of one session, shared by its queues. It holds what may be uploaded within a second.

    Args:
        rate: bytes a second; 0 for no limit.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._left = float(rate)
        self._counted_at: float | None = None
        self._owed: deque[Callable[[], None]] = deque()
        self._more = trio.Event()

    def take(self, nbytes: int) -> None:
        """A chunk has come."""
        if self._rate:
            self._refill()
            self._left -= nbytes

    def give(self, credit: Callable[[], None]) -> None:
        """Give credit for chunks, now or when those that came so far are paid for."""
        if not self._rate or (not self._owed and self._refill() > -1):
            credit()
        else:
            self._owed.append(credit)
            self._more.set()

    async def run(self) -> None:
        """Give what is owed, in order; runs as long as the session."""
        while self._rate:
            if not self._owed:
                self._more = trio.Event()
                await self._more.wait()
            if (missing := -self._refill()) >= 1:
                await trio.sleep(missing / self._rate)
            elif self._owed:
                self._owed.popleft()()
                await trio.lowlevel.checkpoint()

    def _refill(self) -> float:
        """What is left of the bucket now; less than nothing where more came."""
        now = trio.current_time()
        if self._counted_at is not None:
            self._left = min(float(self._rate), self._left + (now - self._counted_at) * self._rate)
        self._counted_at = now
        return self._left
