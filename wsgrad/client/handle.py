"""Ids that free themselves: the last reference to a handle puts its id among those that the next flush frees."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgrad.client.life import Life


class Handle:
    """Holds the id of a buffer, view or program while something refers to it.

    Attributes:
        id: the id in `life`.
        life: the life of the device in which it means something.
        nbytes: of a buffer's memory; 0 for views and programs.
    """

    __slots__ = ("__weakref__", "_free", "id", "life", "nbytes")

    def __init__(self, identity: int, life: Life, *, program: bool = False, nbytes: int = 0) -> None:
        self.id = identity
        self.nbytes = nbytes
        self.life = life
        # A finalizer may run in any thread and between any two steps, so it only appends.
        self._free = weakref.finalize(self, life.freed.append, ~identity if program else identity)
        self._free.atexit = False

    @property
    def freed(self) -> bool:
        """Whether the id was given back."""
        return not self._free.alive

    def free(self) -> None:
        """Give the id back now. Idempotent."""
        self._free()
