"""What needn't be sent twice: digests of arrays, where caching is on, and of programs; it issues nothing."""

from __future__ import annotations

from hashlib import sha256
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


def new_statistics() -> dict[str, int]:
    """Counters: uploads that the server's cache has brought; those that it could not bring, or not to their end.

    And `relayed`: copies to other servers that went through this client.
    """
    return {"cache_hits": 0, "cache_misses": 0, "relayed": 0}


class Sources:
    """Sources of programs that a session has sent, by digest.

    A source travels once for each new signature, device and reopening, so what was sent before is worth naming: the
    server has it, unless it forgot. Any other it would know only by chance, and asking holds the program back by a
    round trip.

    Attributes:
        ask_first: whether large ones are named although they were never sent.
    """

    def __init__(self) -> None:
        self.ask_first = False
        self._sent: set[bytes] = set()

    def known(self, source: bytes) -> bytes | None:
        """The SHA-256 to send instead of a source; None if the source itself is to be sent."""
        if len(source) < MIN_KNOWN_SOURCE:
            return None
        digest = sha256(source).digest()
        if digest in self._sent:
            return digest
        self._sent.add(digest)
        return digest if self.ask_first and len(source) >= MIN_ASKED_SOURCE else None


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
