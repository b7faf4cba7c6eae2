"""What goes wrong on a tab's GPU: who is told, and what goes on."""

from __future__ import annotations

import time

import chromium as chromium_module
import numpy as np
import pytest
from joined import NODE_TOKEN, JoinedTab, serving

import wsgrad

SPIN = """
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(1) var<uniform> rounds: u32;
@compute @workgroup_size(1) fn spin() {
  for (var i = 0u; i < rounds; i++) {
    for (var j = 0u; j < 1000000u; j++) { y[0] = y[0] * 1664525u + j; }
  }
}"""


@pytest.fixture
def browser(chromium_command):
    browser = chromium_module.Chromium()
    yield browser
    browser.close()


def test_a_launch_that_takes_too_long_ends_its_device_with_its_name(browser, tmp_path):
    with serving(tmp_path, "--launch-seconds", "2") as server:
        url = server.ready["url"]
        tab = JoinedTab(browser, url)
        with wsgrad.connect(url) as client:
            device = client.devices["browser"]
            y = device.empty(4, np.uint32)
            spin = device.program(SPIN, "spin", name="spinning")
            spin(y, np.uint32(1), grid=1)
            y.numpy()
            spin(y, np.uint32(5_000), grid=1)
            with pytest.raises(wsgrad.Timeout, match="spinning"):
                y.numpy(timeout=60)
            assert client.devices["cpu"].array(np.arange(4)).numpy().tolist() == [0, 1, 2, 3]
            assert tab.events("error")[0]["code"] == "Timeout"


def test_a_tab_that_is_killed_loses_its_device_by_name_and_another_tab_serves(browser, tmp_path):
    with serving(tmp_path, "--node-grace", "1") as server:
        url = server.ready["url"]
        JoinedTab(browser, url)
        with wsgrad.connect(url) as client:
            array = client.devices["browser"].array(np.arange(4))
            assert array.numpy().tolist() == [0, 1, 2, 3]
            browser.kill_tabs()
            with pytest.raises(wsgrad.DeviceLost):
                read_for_ever(array)
            assert client.devices["cpu"].array(np.arange(4)).numpy().tolist() == [0, 1, 2, 3]
        JoinedTab(browser, url)
        with wsgrad.connect(url) as client:
            device = client.wait_for_device("browser", timeout=60)
            assert device.array(np.arange(4)).numpy(timeout=60).tolist() == [0, 1, 2, 3]


def test_a_lost_gpu_process_loses_the_device_and_the_tab_gives_another(browser, tmp_path):
    with serving(tmp_path, "--node-grace", "1") as server:
        url = server.ready["url"]
        tab = JoinedTab(browser, url)
        with wsgrad.connect(url) as client:
            device = client.devices["browser"]
            array = device.array(np.arange(4))
            assert array.numpy().tolist() == [0, 1, 2, 3]
            tab.tab.call("Browser.crashGpuProcess")
            with pytest.raises(wsgrad.DeviceLost):
                _read_on(array)
            _read_at_last(device)
            assert tab.wait_state("joined")


def test_an_idle_device_that_is_lost_is_missed_when_it_is_used(browser, tmp_path):
    with serving(tmp_path, "--node-grace", "1") as server:
        url = server.ready["url"]
        tab = JoinedTab(browser, url)
        with wsgrad.connect(url) as client:
            array = client.devices["browser"].array(np.arange(4))
            array.numpy()
            tab.tab.call("Browser.crashGpuProcess")
            tab.tab.wait_for("events.some((event) => event.event === 'error' && event.code === 'DeviceLost')")
            with pytest.raises(wsgrad.DeviceLost):
                array.numpy(timeout=60)


def _read_on(array):
    """Read until something fails."""
    for _ in range(10_000):
        array.numpy(timeout=60)


def _read_at_last(device):
    """Use a device again, which may be lost a few times more until its GPU is there."""
    for _ in range(20):
        try:
            device.reopen()
            assert device.array(np.arange(4)).numpy(timeout=60).tolist() == [0, 1, 2, 3]
        except wsgrad.DeviceError:
            time.sleep(1)
        else:
            return
    raise AssertionError("the device did not come back")


def read_for_ever(array):
    while True:
        array.numpy()


def test_our_page_lends_the_gpu_once_a_person_allows_it(browser, tmp_path):
    with serving(tmp_path, "--node-grace", "1") as server:
        url = server.ready["url"]
        page = url.partition("#")[0].rstrip("/").replace("ws", "http", 1)
        tab = browser.open(f"{page}/#token={NODE_TOKEN}")
        with wsgrad.connect(url) as client:
            tab.wait_for("document.body.dataset.state === 'consent'")
            assert not [device for device in client.devices if device.kind == "browser"]
            tab.evaluate("(document.getElementById('consent').requestSubmit(), true)")
            device = client.wait_for_device("browser", timeout=30)
            array = device.array(np.arange(4))
            assert array.numpy().tolist() == [0, 1, 2, 3]
            name = device.id
            tab.call("Page.reload")
            with pytest.raises(wsgrad.DeviceLost):
                read_for_ever(array)
            again = client.wait_for_device("browser", timeout=30)
            assert again.id == name
        assert not [line for line in tab.console if "rror" in line]
