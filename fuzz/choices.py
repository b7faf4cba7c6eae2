"""Turns a fuzzer's bytes into decisions: a `random.Random` whose bits are the input's, and zeros behind its end."""

from __future__ import annotations

import random


class Choices(random.Random):
    """Structured input: what `random.Random` does with the bytes, so that a changed byte changes one decision."""

    def __new__(cls, data: bytes) -> Choices:
        return super().__new__(cls)

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """How many bytes were not used yet."""
        return max(0, len(self._data) - self._at)

    def getrandbits(self, k: int) -> int:
        nbytes = (k + 7) // 8
        value = int.from_bytes(self._data[self._at : self._at + nbytes].ljust(nbytes, b"\0"), "little")
        self._at += nbytes
        return value & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / 65536

    def _randbelow(self, n: int) -> int:
        # Not the inherited one, which asks again for bits above the range: the zeros behind the end have none below.
        return self.getrandbits(max(8, n.bit_length())) % n if n > 1 else 0

    def randbytes(self, n: int) -> bytes:
        return self.getrandbits(8 * n).to_bytes(n, "little") if n else b""

    def some(self, most: int) -> int:
        """A small count, at most `most`."""
        return self._randbelow(most + 1)

    def integer(self) -> int:
        """A number that is likely to be one where something changes."""
        size = self.choice((0, 1, 2, 4, 7, 8, 15, 16, 20, 24, 31, 32, 52, 53, 62, 63, 64))
        return max(0, (1 << size) + self.choice((-2, -1, 0, 1))) * self.choice((1, 1, 1, -1))

    def value(self, depth: int = 3) -> object:
        """Anything that CBOR can hold."""
        kind = self._randbelow(11 if depth else 8)
        if kind < 3:
            return self.integer() if kind else self._randbelow(256)
        if kind == 3:
            return self.choice((None, True, False))
        if kind == 4:
            return self.randbytes(self.choice((0, 1, 4, 16, 32)))
        if kind < 7:
            return "".join(chr(self.choice((97, 98, 47, 0, 233, 0x2028, 0x1F600))) for _ in range(self.some(6)))
        if kind == 7:
            return self.choice((0.0, -0.0, 1.5, 1e300, float("inf"), float("-inf"), float("nan")))
        if kind == 8:
            keys = ("", "a", "b", "kind", "memory", 0, -1, 1 << 40)
            return {self.choice(keys): self.value(depth - 1) for _ in range(self.some(4))}
        return [self.value(depth - 1) for _ in range(self.some(5))]
