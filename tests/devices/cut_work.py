"""Random work on one device, which NumPy does beside it, until every link below it has been cut."""

import random

import numpy as np

import wsgrad

SMALL = 1000
LARGE = 300_000  # int32: two chunks
LEAST_STEPS, MOST_STEPS = 30, 300


class Model:
    """A device's buffers and programs, and what the buffers should hold."""

    def __init__(self, device, dialect):
        self.device = device
        self.dialect = dialect
        self.add, self.shift = dialect.program(device, "add"), dialect.program(device, "shift")
        self.x, self.y = device.zeros(SMALL, np.int32), device.zeros(SMALL, np.int32)
        self.large = device.zeros(LARGE, np.int32)
        self.on_x, self.on_y = np.zeros(SMALL, np.int32), np.zeros(SMALL, np.int32)
        self.on_large = np.zeros(LARGE, np.int32)
        with wsgrad.record(device) as self.graph:
            for by in (1, 2, 3):
                dialect.launch(self.add, self.x, by, n=SMALL)
            dialect.launch(self.shift, self.y, self.x, n=SMALL)

    def step(self, rng):
        """One random step, here and in NumPy."""
        match rng.choice(["upload", "download", "launches", "shift", "fill", "write", "graph"]):
            case "upload":
                self.on_large[:] = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 1 << 30, LARGE)
                yield self.large.copy_from(self.on_large)
            case "download":
                assert np.array_equal((yield self.large.numpy()), self.on_large)
            case "launches":
                for by in range(rng.randrange(1, 60)):
                    self.dialect.launch(self.add, self.x, by, n=SMALL)
                    self.on_x += by
            case "shift":
                self.dialect.launch(self.shift, self.y, self.x, n=SMALL)
                self.on_y[:] = self.on_x
            case "fill":
                start, value = rng.randrange(SMALL - 100), rng.randrange(100)
                self.x[start : start + 100].fill(value)
                self.on_x[start : start + 100] = value
            case "write":
                start, values = rng.randrange(SMALL - 10), np.arange(10, dtype=np.int32)
                self.on_x[start : start + 10] = values
                yield self.x[start : start + 10].copy_from(values)
            case "graph":
                self.graph.run()
                self.on_x += 6
                self.on_y[:] = self.on_x

    def check(self):
        for array, expected in ((self.x, self.on_x), (self.y, self.on_y), (self.large, self.on_large)):
            assert np.array_equal((yield array.numpy()), expected)


def work(model, links, seed):
    """Steps until every link has been cut as often as it will be; then everything is compared."""
    rng = random.Random(seed)
    for done in range(MOST_STEPS):
        if done >= LEAST_STEPS and all(link.done for link in links):
            break
        yield from model.step(rng)
    yield from model.check()
    for link in links:
        link.check()
