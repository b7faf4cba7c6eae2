"""Whose compile comes next: sessions take turns, so do the queues of one; pure, it starts and stops nothing.

Within a queue the order is that of coming, but for what a launch waits for already.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable


class Turn(Protocol):
    """Something that waits for its turn.

    Attributes:
        session: whose it is; one of them can't take everything.
        queue: of the session.
        over: whether it needs no turn any more.
    """

    @property
    def session(self) -> Hashable: ...
    @property
    def queue(self) -> Hashable: ...
    @property
    def over(self) -> bool: ...


T = TypeVar("T", bound=Turn)


class Turns(Generic[T]):
    """What waits.

    Args:
        share: how many of one session may be under way.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._waiting: OrderedDict[Hashable, OrderedDict[Hashable, OrderedDict[T, None]]] = OrderedDict()
        self._under_way: dict[Hashable, int] = {}

    def add(self, turn: T) -> None:
        """The last of its queue."""
        queues = self._waiting.setdefault(turn.session, OrderedDict())
        queues.setdefault(turn.queue, OrderedDict())[turn] = None

    def hurry(self, turn: T) -> None:
        """The first of its session from now on, if it waits."""
        queues = self._waiting.get(turn.session, OrderedDict())
        turns = queues.get(turn.queue)
        if turns is not None and turn in turns:
            turns.move_to_end(turn, last=False)
            queues.move_to_end(turn.queue, last=False)

    def discard(self, turn: T) -> None:
        """It waits no more, if it did."""
        queues = self._waiting.get(turn.session, OrderedDict())
        turns = queues.get(turn.queue)
        if turns is not None and turn in turns:
            del turns[turn]
            self._tidy(turn.session, turn.queue)

    def take(self) -> T | None:
        """What comes next, if anything may; it is under way until `done`."""
        for session in list(self._waiting):
            if self._under_way.get(session, 0) >= self._share:
                continue
            while queues := self._waiting.get(session):
                queue, turns = next(iter(queues.items()))
                turn, _ = turns.popitem(last=False)
                queues.move_to_end(queue)
                self._waiting.move_to_end(session)
                self._tidy(session, queue)
                if not turn.over:
                    self._under_way[session] = self._under_way.get(session, 0) + 1
                    return turn
        return None

    def done(self, turn: T) -> None:
        """What was taken is under way no more."""
        left = self._under_way.pop(turn.session) - 1
        if left:
            self._under_way[turn.session] = left

    def _tidy(self, session: Hashable, queue: Hashable) -> None:
        queues = self._waiting[session]
        if not queues[queue]:
            del queues[queue]
        if not queues:
            del self._waiting[session]
