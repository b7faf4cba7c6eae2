"""A tab of a real browser as the device of real clients, through a real server."""

from __future__ import annotations

import os
import signal
import threading

import chromium as chromium_module
import numpy as np
import pytest
from joined import SCRIPTS, JoinedTab, serving

import wsgrad

ADD = """
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> k: f32;
@compute @workgroup_size(64) fn add(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < arrayLength(&y)) { y[id.x] += k * x[id.x]; }
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), "--node-grace", "2") as server:
        yield server.ready["url"]


@pytest.fixture(params=["chromium-worker", "chromium-page", "firefox-worker"])
def device(request, url):
    """A device of each place where a node can live, with a client of its own."""
    name, place = request.param.split("-")
    tab = JoinedTab(request.getfixturevalue(name), url, worker=place == "worker")
    with wsgrad.connect(url) as server:
        yield server.devices[name_of(tab)]
    tab.close()


@pytest.fixture
def tab(chromium, url):
    tab = JoinedTab(chromium, url)
    yield tab
    tab.close()


def read_on(array):
    """Read until something fails."""
    for _ in range(10_000):
        array.numpy()


def name_of(tab, state="joined"):
    return tab.wait_state(state)["name"] + "/browser/0"


def test_arrays_programs_and_graphs_work_as_on_any_device(device):
    rng = np.random.default_rng(1)
    x, y = rng.random(1000, np.float32), rng.random(1000, np.float32)
    on_x, on_y = device.array(x), device.array(y)
    add = device.program(ADD, "add")
    add(on_y, on_x, np.float32(2), grid=16)
    np.testing.assert_allclose(on_y.numpy(), y + 2 * x, rtol=1e-6)
    n = wsgrad.Var("n", 1, 16)
    with wsgrad.record(device) as graph:
        for _ in range(5):
            add(on_y, on_x, np.float32(1), grid=n)
    graph.run(n=16)
    graph.run(n=1)
    expected = y + 7 * x
    expected[:64] += 5 * x[:64]
    np.testing.assert_allclose(on_y.numpy(), expected, rtol=1e-5)
    assert add.timed(on_y, on_x, np.float32(0), grid=16) > 0


def test_large_arrays_and_ragged_ranges_arrive_as_they_were_sent(device):
    data = np.random.default_rng(2).integers(0, 256, (5 << 20) + 13, dtype=np.uint8)
    array = device.array(data)
    assert (array.numpy() == data).all()
    assert (array[3 : (1 << 20) + 5].numpy() == data[3 : (1 << 20) + 5]).all()
    array[7:12].copy_from(np.arange(5, dtype=np.uint8))
    assert array[5:14].numpy().tolist() == [*data[5:7], 0, 1, 2, 3, 4, *data[12:14]]


def test_errors_have_names_and_the_queue_goes_on(device):
    y = device.array(np.ones(64, np.float32))
    broken = device.program("@compute @workgroup_size(1) fn add() {\n  let x: i32 = 1.5;\n}", "add")
    broken(grid=1)
    with pytest.raises(wsgrad.CompileError, match="2:"):
        device.synchronize()
    add = device.program(ADD, "add")
    add(y, device.empty_like(y), np.float32(1), grid=1 << 30)
    with pytest.raises(wsgrad.LaunchError, match="maxComputeWorkgroups"):
        device.synchronize()
    large = device.empty(1 << 33, np.uint8)
    with pytest.raises(wsgrad.OutOfMemory):
        device.synchronize()
    del large
    add(y, y, np.float32(1), grid=1)
    assert y.numpy().tolist() == [2.0] * 64


def test_bytes_go_between_a_tab_and_the_machine_it_is_lent_to(tab, url):
    with wsgrad.connect(url) as server:
        gpu, cpu = server.devices[name_of(tab)], server.devices["cpu"]
        data = np.random.default_rng(3).random(700_000)
        here, there = cpu.array(data), gpu.empty(data.shape, data.dtype)
        there.copy_from(here)
        back = cpu.empty_like(here)
        back.copy_from(there)
        assert (back.numpy() == data).all()


def test_clients_share_a_tab_and_see_only_what_is_theirs(tab, url):
    with wsgrad.connect(url) as one, wsgrad.connect(url) as other:
        results = {}

        def work(server, seed):
            device = server.devices[name_of(tab)]
            data = np.random.default_rng(seed).random(100_000, np.float32)
            array, zeros = device.array(data), device.empty(data.shape, data.dtype)
            assert not zeros.numpy().any()
            add = device.program(ADD, "add")
            for _ in range(30):
                add(zeros, array, np.float32(1), grid=1563)
                zeros[:4].numpy()
            results[seed] = np.allclose(zeros.numpy(), data * 30, rtol=1e-4)

        threads = [threading.Thread(target=work, args=pair) for pair in ((one, 1), (other, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {1: True, 2: True}
        tab.tab.wait_for("events.filter((event) => event.event === 'stats').at(-1).launches === 60")
        stats = tab.events("stats")[-1]
        assert len(stats["sessions"]) == 2
        assert stats["bytesIn"] > 800_000
        assert sum(session["memory"] for session in stats["sessions"]) == stats["memory"]
        assert all("wsgrad" in session["client"] for session in stats["sessions"])
    tab.tab.wait_for("events.filter((event) => event.event === 'stats').at(-1).memory === 0")


def test_a_killed_browser_loses_the_device_and_nothing_else(url, chromium_command):
    browser = chromium_module.Chromium()
    try:
        JoinedTab(browser, url, name="doomed")
        with wsgrad.connect(url) as server:
            device = server.devices["doomed/browser/0"]
            array = device.array(np.ones(4, np.float32))
            beside = server.devices["cpu"].array(np.ones(4, np.float32))
            os.killpg(browser.pid, signal.SIGKILL)
            with pytest.raises(wsgrad.DeviceLost, match="left"):
                read_on(array)
            assert beside.numpy().tolist() == [1.0] * 4
    finally:
        browser.close()


def test_a_reloaded_tab_is_the_same_device_without_what_it_held(tab, url):
    joined = tab.wait_state("joined")
    with wsgrad.connect(url) as server:
        device = server.devices[name_of(tab)]
        array = device.array(np.ones(4, np.float32))
        tab.tab.navigate(f"{tab.url.replace('ws', 'http', 1)}/icon.svg")
        tab.load()
        tab.start(name=joined["name"], secret=joined["secret"])
        assert tab.wait_state("joined")["name"] == joined["name"]
        with pytest.raises(wsgrad.DeviceLost):
            read_on(array)
        device.reopen()
        assert device.array(np.full(4, 3, np.float32)).numpy().tolist() == [3.0] * 4


def test_a_paused_tab_refuses_new_work_and_holds_what_it_has(tab, url):
    with wsgrad.connect(url) as server:
        device = server.devices[name_of(tab)]
        array = device.array(np.ones(4, np.float32))
        device.synchronize()
        tab.command("pause")
        tab.wait_state("paused")
        with pytest.raises(TimeoutError):
            array.numpy(timeout=0.3)
        with wsgrad.connect(url) as other, pytest.raises(wsgrad.DeviceError, match="paused by its owner"):
            other.devices[name_of(tab, "paused")].array(np.ones(4, np.float32)).numpy()
        tab.command("resume")
        assert array.numpy().tolist() == [1.0] * 4


def test_a_tab_that_leaves_is_gone_and_may_come_back(tab, url):
    name = name_of(tab)
    tab.command("leave")
    tab.wait_state("left")
    with wsgrad.connect(url) as server:
        assert name not in [device.id for device in server.devices]
        tab.start()
        tab.wait_state("joined")
        assert server.wait_for_device("browser", timeout=10).array(np.ones(2, np.int32)).numpy().tolist() == [1, 1]


def test_a_wrong_token_is_told_apart_from_a_server_that_is_not_there(chromium, url):
    tab = JoinedTab(chromium, url, wait=False, token="wrong")
    refused = tab.wait_state("refused")
    assert "token" in refused["message"]
    tab.start(url="ws://127.0.0.1:9")
    waiting = tab.wait_state("waiting")
    assert waiting["retrySeconds"] > 0
    tab.start(url=url.partition("#")[0].rstrip("/"))
    tab.wait_state("joined")
    tab.close()


def test_a_wrong_token_is_named_on_a_page_from_a_file_too(chromium, url, page_files):
    page = page_files.scripts(*SCRIPTS, file=True)
    tab = JoinedTab(chromium, url, page=page, wait=False, token="wrong")
    last = "events.filter((event) => event.event === 'state').at(-1)"
    tab.tab.wait_for(f"['refused', 'waiting'].includes({last}?.state)")
    ended = tab.tab.evaluate(last)
    assert (ended["state"], "token" in ended["message"]) == ("refused", True)
    tab.close()


def test_a_tab_comes_back_by_itself_when_its_server_does(chromium, tmp_path):
    with serving(tmp_path) as server:
        url = server.ready["url"]
        port = url.partition("#")[0].rstrip("/").rpartition(":")[2]
        tab = JoinedTab(chromium, url, label="Kitchen")
        with wsgrad.connect(url) as client:
            assert client.devices["Kitchen"].properties["software"] is True
    tab.wait_state("waiting")
    (tmp_path / "again").mkdir()
    with serving(tmp_path / "again", port=port) as server:
        tab.wait_state("joined")
        with wsgrad.connect(server.ready["url"]) as client:
            assert client.devices["Kitchen"].array(np.ones(2, np.int32)).numpy().tolist() == [1, 1]
    tab.close()
