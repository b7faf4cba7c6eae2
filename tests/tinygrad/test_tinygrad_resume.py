"""A tinygrad program with `DEV=WS` whose connection is cut while it works: it needs no change and computes the same."""

import sys
from pathlib import Path

from test_tinygrad_device import run

from wsgrad.client.embedded import EmbeddedServer

sys.path.append(str(Path(__file__).parent.parent / "devices"))
from cutting_link import CuttingLink

SCRIPT = """
import numpy as np
from tinygrad import Tensor, TinyJit
rng = np.random.default_rng(0)
# Whole numbers that float32 holds exactly, in whatever order they are added.
weights = rng.integers(-3, 4, (256, 64)).astype(np.float32)
kept = Tensor(weights).realize()
total, expected = Tensor.zeros(64).contiguous().realize(), np.zeros(64, np.float32)

@TinyJit
def step(x):
    total.assign(total + (x @ kept).sum(axis=0)).realize()

for n in range(40):
    x = rng.integers(-2, 3, (256, 256)).astype(np.float32)
    step(Tensor(x).realize())
    expected += (x @ weights).sum(axis=0)
    if n % 4 == 3:
        assert (total.numpy() == expected).all(), n
assert (kept.numpy() == weights).all()
"""


def test_a_program_goes_on_whatever_its_connection_meets():
    server = EmbeddedServer(timeout=60)
    try:
        with CuttingLink(server.url, 3) as link:
            run(SCRIPT, WSGRAD_URL=link.url)
            link.check()
    finally:
        server.stop()
