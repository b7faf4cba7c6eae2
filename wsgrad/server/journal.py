"""What becomes certain as a queue's commands are acknowledged: signals, ends of sends, and which error held them up.

A node works in order and says of each failure before it acknowledges the command. So at an acknowledgement it is known
whether a command before it ran or was dropped behind an error. No I/O, and no node is asked.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from wsgrad.server.events import Event
from wsgrad.server.transfers import Flow

if TYPE_CHECKING:
    from wsgrad.server.events import Failure

_Mark: TypeAlias = Event | Flow | int
"""An event to signal, a transfer whose source ends here, or the number of the error that is cleared here."""


class Journal:
    """Of one queue.

    Attributes:
        failure: the error behind which commands are dropped at present, as far as they are acknowledged.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._number = 0
        self._marks: deque[tuple[int, _Mark]] = deque()
        self._own: dict[int, Failure] = {}

    def add(self, number: int, mark: _Mark) -> None:
        """Command `number` is a signal, a send, or clears an error; in order."""
        self._marks.append((number, mark))

    def expect(self, number: int, failure: Failure) -> None:
        """Command `number` is made to fail with an error of another queue."""
        self._own[number] = failure

    def expected(self, number: int) -> Failure | None:
        """What command `number` was made to fail with."""
        return self._own.get(number)

    def failed(self, number: int, failure: Failure) -> None:
        """Command `number` has failed; all before it have run."""
        self.acked(number - 1)
        self.failure, self._number = failure, number

    def acked(self, number: int) -> None:
        """All commands up to `number` have run or were dropped."""
        while self._marks and self._marks[0][0] <= number:
            self._settle(self._marks.popleft()[1])
        if self._own:
            self._own = {own: failure for own, failure in self._own.items() if own > number}

    def drop(self, failure: Failure) -> None:
        """Nothing more will run."""
        self.failure, self._number = failure, -1
        marks, self._marks = self._marks, deque()
        self._own.clear()
        for _, mark in marks:
            self._settle(mark)

    def reset(self) -> None:
        """The device starts anew, without an error."""
        self.failure = None

    def _settle(self, mark: _Mark) -> None:
        failure = self.failure
        if isinstance(mark, int):
            if mark == self._number:
                self.failure = None
        elif isinstance(mark, Event):
            mark.settle(failure)
        elif failure is None:
            mark.source_done()
        else:
            mark.source_failed(failure)
