"""Fixtures: one Chromium and one Firefox for all tests, and a server for the pages they open."""

import os

import chromium as chromium_module
import firefox as firefox_module
import pytest
from page_files import PageFiles

BROWSERS_ARE_REQUIRED = os.environ.get("WSGRAD_REQUIRE_BROWSERS") == "1"


def require(found, name, package):
    if not found:
        if BROWSERS_ARE_REQUIRED:
            pytest.fail(f"{name} is missing, and WSGRAD_REQUIRE_BROWSERS=1 asks for it; install {package}")
        pytest.skip(f"{name} is missing: its tests need the package {package}")


@pytest.fixture(scope="session")
def chromium():
    require(chromium_module.find(), "Chromium", "chromium")
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
