"""Fixtures: one Chromium and one Firefox for all tests, and a server for the pages they open."""

import os
import sys
import time
from pathlib import Path

import chromium as chromium_module
import firefox as firefox_module
import numpy as np
import pytest
from gpu_rig import GpuRig
from page_files import PageFiles

import wsgrad

# Its helpers start real servers. Last in the path: it has a conftest of its own.
sys.path.append(str(Path(__file__).parent.parent / "server"))

BROWSERS_ARE_REQUIRED = os.environ.get("WSGRAD_REQUIRE_BROWSERS") == "1"


def require(found, name, package):
    if not found:
        if BROWSERS_ARE_REQUIRED:
            pytest.fail(f"{name} is missing, and WSGRAD_REQUIRE_BROWSERS=1 asks for it; install {package}")
        pytest.skip(f"{name} is missing: its tests need the package {package}")


@pytest.fixture(scope="session")
def chromium_command():
    """The browser's command, for tests that start it their own way."""
    require(chromium_module.find(), "Chromium", "chromium")
    return chromium_module.find()


@pytest.fixture(scope="session")
def chromium(chromium_command):
    browser = chromium_module.Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def firefox():
    require(firefox_module.find(), "Firefox", "firefox-esr")
    browser = firefox_module.Firefox()
    yield browser
    browser.close()


@pytest.fixture(scope="session", params=["chromium", "firefox"])
def browser(request):
    """Both browsers, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def page_files():
    files = PageFiles()
    yield files
    files.close()


@pytest.fixture(scope="session", params=["chromium-worker", "chromium-page", "chromium-file", "firefox-worker"])
def any_rig(request, page_files):
    """A GPU runtime's rig in each place where one can live."""
    name, place = request.param.split("-")
    rig = GpuRig(request.getfixturevalue(name), page_files, worker=place == "worker", file=place == "file")
    yield rig
    rig.close()


class HiddenTabs:
    """Two tabs that lend their GPU, served and from a file, behind a third one.

    Attributes:
        since: when they were hidden, by the monotonic clock.
        arrays: one on each, of 0 to 3.
    """

    def __init__(self, browser, client, url, page_files):
        from joined import SCRIPTS, JoinedTab

        self.tabs = [
            JoinedTab(browser, url, name="served"),
            JoinedTab(browser, url, name="file", page=page_files.scripts(*SCRIPTS, file=True)),
        ]
        devices = [client.wait_for_device(f"{name}/browser/0", timeout=30) for name in ("served", "file")]
        self.arrays = [device.array(np.arange(4)) for device in devices]
        browser.open().activate()
        for tab in self.tabs:
            tab.tab.wait_for("document.visibilityState === 'hidden'")
        self.since = time.monotonic()


@pytest.fixture(scope="session")
def hidden_tabs(chromium_command, tmp_path_factory, page_files):
    """Tabs that nobody looks at while all other tests run."""
    from joined import serving

    browser = chromium_module.Chromium()
    try:
        with serving(tmp_path_factory.mktemp("hidden")) as server, wsgrad.connect(server.ready["url"]) as client:
            yield HiddenTabs(browser, client, server.ready["url"], page_files)
    finally:
        browser.close()


def pytest_collection_modifyitems(items):
    """The tests of what is hidden for minutes come last: the others take that long anyway."""
    items.sort(key=lambda item: "hidden_tabs" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session", autouse=True)
def hide_early(request):
    """Hide the tabs before the first test of a browser, if there is a test that needs them."""
    if any("hidden_tabs" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("hidden_tabs")


@pytest.fixture
def any_gpu(any_rig):
    """A fresh runtime in each place where one can live."""
    any_rig.open()
    return any_rig


@pytest.fixture(scope="session")
def chromium_rig(chromium, page_files):
    rig = GpuRig(chromium, page_files, worker=True)
    yield rig
    rig.close()


@pytest.fixture
def gpu(chromium_rig):
    """A fresh runtime in a worker of Chromium."""
    chromium_rig.open()
    return chromium_rig
