"""Ids that free themselves: the last reference to a handle puts its id among those that the next flush frees.

Not by `weakref.finalize`: that runs Python code, and a Ctrl-C that lands in it would be swallowed and leave the id in
use. The callback here is a deque's own `append`, which nothing can interrupt.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgrad.client.life import Life


class Reference(weakref.ref["Handle"]):
    """What is left of a handle: `key` is a buffer's id, or the complement of a program's."""

    __slots__ = ("key",)

    key: int


class Handle:
    """Holds the id of a buffer, view or program while something refers to it.

    Attributes:
        id: the id in `life`.
        life: the life of the device in which it means something.
        freed: whether it was given back by `free`.
        nbytes: of a buffer's memory; 0 for views and programs.
    """

    __slots__ = ("__weakref__", "_reference", "freed", "id", "life", "nbytes")

    def __init__(self, identity: int, life: Life, *, program: bool = False, nbytes: int = 0) -> None:
        self.id = identity
        self.nbytes = nbytes
        self.life = life
        self.freed = False
        self._reference = Reference(self, life.freed.append)
        self._reference.key = ~identity if program else identity
        life.handles[self._reference.key] = self._reference

    def free(self) -> None:
        """Give the id back now. Idempotent."""
        if not self.freed:
            self.freed = True
            self.life.freed.append(self._reference)
