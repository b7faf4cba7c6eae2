"""Server processes for the tests of graphs, with settings of their own, and the programs that the tests launch."""

import contextlib
import os

import numpy as np

from wsgrad.client.embedded import EmbeddedServer

ADD = "void add(int *y, const int *x, int n, int k) { for (int i = 0; i < n; i++) y[i] += k * x[i]; }"
SET = "void set(long i, int *y, int k) { y[i] = 10 * (int)i + k; }"
SPIN = "void spin(int *y, long n) { for (volatile long i = 0; i < n; i++); y[0]++; }"
CRASH = "void crash(int *y) { *(volatile int *)0 = y[0]; }"
TWICE = "void twice(int *y, int *x) { y[0] += 1; x[0] += 1; }"


@contextlib.contextmanager
def embedded(**settings):
    """A server process, started with settings as its environment variables name them."""
    names = {f"WSGRAD_{name.upper()}": str(value) for name, value in settings.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        started = EmbeddedServer(timeout=60)
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
    try:
        yield started
    finally:
        started.stop()


def ints(*values):
    return np.array(values, np.int32)
