"""What a server's cache calls arrays by: the BLAKE3 of their bytes in C order. Used only where caching is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from wsgrad.client.arrays import bytes_of, source_of
from wsgrad.errors import WsgradError
from wsgrad.transport.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from wsgrad.client.arrays import Array

MIN_CACHED: Final = 1 << 20
"""Smaller uploads are always sent: asking for them would take about as long."""
MIN_KNOWN_SOURCE: Final = 4 << 10
"""From this size on the source of a program that was sent before in the session is only named."""
MIN_ASKED_SOURCE: Final = 64 << 10
"""With caching, sources from this size on are asked for before they are ever sent: on a slow link that pays."""


class Hasher:
    """Makes digests. Its existence means that caching is on."""

    def __init__(self) -> None:
        """Load the package.

        Raises:
            WsgradError: it is not installed.
        """
        try:
            from blake3 import blake3
        except ImportError as exc:
            raise WsgradError("cache=True needs the package blake3: pip install 'wsgrad[cache]'") from exc
        self._new = blake3

    def digest(self, array: Array) -> bytes:
        """The digest of an array's bytes; with gaps in its memory it is the same as that of a contiguous copy."""
        hasher = self._new(max_threads=self._new.AUTO)
        if array.flags.c_contiguous:
            hasher.update(bytes_of(array))
        else:
            source = source_of(array)
            for offset in range(0, array.nbytes, CHUNK_BYTES):
                hasher.update(source.take(min(CHUNK_BYTES, array.nbytes - offset)))
        return hasher.digest()
