"""Tabs that nobody looks at: hidden for long, or frozen by their browser."""

from __future__ import annotations

import os
import time

import chromium as chromium_module
import numpy as np
import pytest
from joined import SCRIPTS, JoinedTab, serving

import wsgrad

# After five minutes Chromium lets the timers of a hidden page run once a minute.
HIDDEN_SECONDS = 360 if os.environ.get("WSGRAD_REQUIRE_BROWSERS") == "1" else 25
"""Longer than a connection may be silent; six minutes where browsers have to be tested."""


@pytest.fixture
def browser(chromium_command):
    browser = chromium_module.Chromium()
    yield browser
    browser.close()


def states(tab):
    return [event["state"] for event in tab.events("state")]


def test_hidden_tabs_stay_devices_in_a_worker_and_from_a_file(hidden_tabs):
    """They were hidden before the first test of a browser, and this one comes last of all."""
    time.sleep(max(0.0, hidden_tabs.since + HIDDEN_SECONDS - time.monotonic()))
    for array in hidden_tabs.arrays:
        assert array.numpy().tolist() == [0, 1, 2, 3]
    for tab in hidden_tabs.tabs:
        assert states(tab) == ["connecting", "joined"]
        assert tab.tab.evaluate("document.visibilityState") == "hidden"


def test_a_frozen_tab_is_lost_and_comes_back_when_it_wakes(browser, tmp_path, page_files):
    with serving(tmp_path, "--node-grace", "1") as server:
        url = server.ready["url"]
        tab = JoinedTab(browser, url, name="sleeper", page=page_files.scripts(*SCRIPTS, file=True))
        with wsgrad.connect(url) as client:
            device = client.devices["sleeper/browser/0"]
            array = device.array(np.arange(4))
            array.numpy()
            tab.tab.call("Page.setWebLifecycleState", state="frozen")
            with pytest.raises(wsgrad.DeviceLost):
                array.numpy(timeout=40)
            tab.tab.call("Page.setWebLifecycleState", state="active")
            tab.tab.wait_for("events.filter((event) => event.state === 'joined').length === 2", 60)
            assert client.wait_for_device("browser", timeout=30).id == "sleeper/browser/0"
            device.reopen()
            assert device.array(np.arange(3)).numpy().tolist() == [0, 1, 2]
