"""Decides when a node process has run one command for too long; kills nothing and trusts nothing the node writes.

The node shows the number of its command and whether it runs one. A kernel can write anything there, so only a number
that is due and higher than before counts as progress, and a node that says it waits is believed only where it may.
"""

from __future__ import annotations


class Watchdog:
    """Watches one node. `limit` is the longest that one command may run, in seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._acked = -1
        self._number = -1
        self._step = 0
        self._since: float | None = None

    @property
    def interval(self) -> float:
        """How often to look, in seconds."""
        return min(0.5, max(0.01, self.limit / 10))

    def look(
        self, now: float, *, acked: int, sent: int, number: int, running: bool, may_idle: bool, step: int = 0
    ) -> bool:
        """Look at the node once.

        Args:
            now: a monotonic time.
            acked: the last command that is acknowledged.
            sent: the last command that was sent.
            number: what the node says that it runs.
            running: whether it says that it runs something.
            may_idle: whether it may be waiting for the client.
            step: which step of a graph it says that it runs, 0 if that can't be.

        Returns:
            Whether one command has run for longer than the limit.
        """
        if acked == sent or (may_idle and not running):
            self._since = None
            return False
        due = acked < number <= sent
        progress = acked > self._acked or (due and number > self._number)
        progress = progress or (due and number == self._number and step > self._step)
        if progress or self._since is None:
            self._acked = acked
            self._step = step
            self._number = number if due else acked
            self._since = now
            return False
        return now - self._since > self.limit
