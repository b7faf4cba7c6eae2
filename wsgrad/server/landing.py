"""Where the chunks of one queue's uploads are received: straight into the node's ring where that is safe.

A place is asked for as soon as a chunk's beginning is there. What was received together with that beginning was not
worked off yet, perhaps not even the upload that the chunk belongs to, so nothing about it can be checked then. Only one
slot is given away at a time, and only to the chunk that will be submitted next: slots are taken in that order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from wsgrad.server.port import Port

_NOTHING: Final = memoryview(b"")


class Landing:
    """Which chunk of a queue is being received into which memory."""

    def __init__(self) -> None:
        self._announced = 0
        self._given = _NOTHING

    @property
    def announced(self) -> int:
        """Chunks whose beginning has come and that were not submitted yet."""
        return self._announced

    def place(self, port: Port | None, nbytes: int) -> memoryview | None:
        """Where an announced chunk should go; None for memory of its own.

        Args:
            port: the way to the node whose ring it may go to, if it may.
            nbytes: its size.
        """
        self._announced += 1
        slot = port.next_slot() if port is not None and self._announced == 1 else None
        if slot is None:
            return None
        self._given = slot[:nbytes]
        return self._given

    def submitted(self) -> None:
        """An announced chunk is here."""
        # A chunk that came with the message that opened its queue was not announced.
        self._announced = max(0, self._announced - 1)

    def take(self, bulk: memoryview) -> bool:
        """Whether a chunk that is worked off now was received into the slot that was given."""
        if self._given is not bulk:
            return False
        self._given = _NOTHING
        return True

    def forget(self) -> None:
        """The slots belong to nobody any more: what was received into one must be copied."""
        self._given = _NOTHING

    def stop(self) -> bool:
        """The connection is over, no announced chunk will come. Returns whether one was on its way into a slot."""
        receiving = self._announced > 0 and len(self._given) > 0
        self._announced = 0
        self._given = _NOTHING
        return receiving
