"""Sessions whose connections are cut under work, for every kind of device, both faces, and over two servers."""

import random

import numpy as np
import pytest
import trio
from contract_kinds import KINDS, PATIENCE_SECONDS
from cutting_link import CuttingLink

import wsgrad
from benchmarks.random_work import run_blocking, run_trio

SMALL = 1000
LARGE = 300_000  # int32: two chunks
LEAST_STEPS, MOST_STEPS = 30, 300


pytestmark = pytest.mark.parametrize("kind", ["webgpu", "chromium", "tinygrad-cpu"], indirect=True)


@pytest.fixture(scope="module")
def beside():
    """Another server, with a CPU."""
    with KINDS["cpu"]() as offer:
        yield offer


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


def test_every_command_runs_once_on_every_kind_whatever_is_cut(kind):
    with CuttingLink(kind.url, 1) as link, wsgrad.connect(link.url) as server:
        device = server.wait_for_device(kind.device, timeout=PATIENCE_SECONDS)
        run_blocking(work(Model(device, kind.dialect), [link], 1))


async def test_the_trio_face_resumes_on_every_kind(kind):
    with CuttingLink(kind.url, 7) as link:
        async with wsgrad.open_server(link.url) as server:
            with trio.fail_after(PATIENCE_SECONDS):
                device = await server.wait_for_device(kind.device)
            await run_trio(work(Model(device, kind.dialect), [link], 7))


def test_a_graph_over_two_servers_goes_on_when_both_are_cut(kind, beside):
    with (
        CuttingLink(kind.url, 11) as one,
        CuttingLink(beside.url, 12) as other,
        wsgrad.connect_all([one.url, other.url]) as servers,
    ):
        servers.servers[0].wait_for_device(kind.device, timeout=PATIENCE_SECONDS)
        here, there = servers.devices[kind.device], servers.devices["cpu"]
        run_blocking(across(here, there, kind.dialect, beside.dialect, [one, other]))


def across(here, there, dialect, other_dialect, links):
    add_here, add_there = dialect.program(here, "add"), other_dialect.program(there, "add")
    x, y = here.zeros(LARGE, np.int32), there.zeros(LARGE, np.int32)
    with wsgrad.record(here, there) as graph:
        dialect.launch(add_here, x, 1, n=SMALL)
        y.copy_from(x)
        other_dialect.launch(add_there, y, 2, n=SMALL)
        x.copy_from(y)
    expected = np.zeros(LARGE, np.int32)
    for _ in range(MOST_STEPS):
        if all(link.done for link in links):
            break
        graph.run()
        expected[:SMALL] += 3
        for array in (x, y):
            assert np.array_equal((yield array.numpy()), expected)
    for link in links:
        link.check()
