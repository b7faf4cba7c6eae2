"""Sessions whose connections are cut under work, for every kind of device, both faces, and over two servers."""

import numpy as np
import pytest
import trio
from contract_kinds import KINDS, PATIENCE_SECONDS
from cut_work import LARGE, MOST_STEPS, SMALL, Model, work
from cutting_link import CuttingLink

import wsgrad
from benchmarks.random_work import run_blocking, run_trio

pytestmark = pytest.mark.parametrize("kind", ["webgpu", "chromium", "tinygrad-cpu"], indirect=True)


@pytest.fixture(scope="module")
def beside():
    """Another server, with a CPU."""
    with KINDS["cpu"]() as offer:
        yield offer


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
