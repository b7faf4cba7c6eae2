"""A link that ends its first connections, each after enough bytes to have opened; then it holds."""

import random

from benchmarks.faulty import Fault, FaultyLink

CUTS = 3


class CuttingLink(FaultyLink):
    """Cuts connections of clients at bytes that follow from the seed; a link between servers holds."""

    def __init__(self, url, seed):
        super().__init__(url, seed=seed, most=CUTS)

    def faults_of(self, number, *, to_server):
        rng = random.Random(f"{self._seed}/{number}/{to_server}")
        while True:
            yield Fault(rng.randrange(20_000, 1_500_000), rng.choice(["close", "reset"]))

    @property
    def done(self):
        return self.faults.total() == CUTS

    def check(self):
        """That all the cuts came, and each was followed by another connection."""
        assert self.done, self.faults
        assert self.connections > CUTS
