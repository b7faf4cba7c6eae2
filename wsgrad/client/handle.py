"""Ids that free themselves: the last reference to a handle puts its id among those that the next flush frees.

Not by `weakref.finalize`: that runs Python code, and a Ctrl-C that lands in it would be swallowed and leave the id in
use. The callback here is a deque's own `append`, which nothing can interrupt. What it watches is a `Lifetime`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from wsgrad.client.life import Life

Lifetime: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


def new_lifetime() -> Lifetime:
    """What an object holds so that others hear when it is gone, and not before.

    A weak reference to the object itself may end too early: where it belongs to a cycle, the collector calls back
    first, and then a `__del__` in the same cycle may put it where it lives on. The collector does not track arrays:
    theirs end only with their memory.
    """
    return np.empty(0, np.bool_)


class Reference(weakref.ref[Lifetime]):
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

    __slots__ = ("_lifetime", "_reference", "freed", "id", "life", "nbytes")

    def __init__(self, identity: int, life: Life, *, program: bool = False, nbytes: int = 0) -> None:
        self.id = identity
        self.nbytes = nbytes
        self.life = life
        self.freed = False
        self._lifetime = new_lifetime()
        self._reference = Reference(self._lifetime, life.freed.append)
        self._reference.key = ~identity if program else identity
        life.handles[self._reference.key] = self._reference

    def free(self) -> None:
        """Give the id back now. Idempotent."""
        if not self.freed:
            self.freed = True
            self.life.freed.append(self._reference)
