"""Sources of programs that a server has seen lately, by SHA-256, so that they need not travel again; no disk, no node.

All clients of a server are one trust domain, but none learns of a source it does not have: only the whole digest finds
one, and what is found is compiled, never shown.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from typing import Final

MIN_NBYTES: Final = 4 << 10
"""Smaller ones are as quickly sent as asked for, and not kept."""
_MAX_NBYTES: Final = 32 << 20


class Sources:
    """The least recently used leave first."""

    def __init__(self, max_bytes: int = _MAX_NBYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._nbytes = 0

    def find(self, digest: bytes) -> bytes | None:
        """The source with this digest, if it was seen lately."""
        source = self._kept.get(digest)
        if source is not None:
            self._kept.move_to_end(digest)
        return source

    def add(self, source: bytes) -> bytes:
        """A source was seen; returns its digest."""
        digest = sha256(source).digest()
        if digest not in self._kept:
            self._kept[digest] = source
            self._nbytes += len(source)
        self._kept.move_to_end(digest)
        while self._nbytes > self._max_bytes:
            self._nbytes -= len(self._kept.popitem(last=False)[1])
        return digest
