"""Drives the two pages as a person would, by Playwright in Chromium; its slowness is no matter here."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import chromium as chromium_module
from page_files import PAGES
from playwright.sync_api import Error, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext, Page

PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 900}
FOREIGN_HOST = "box.test"
"""A name of this machine that browsers take for another's."""
_FLAGS = [f"--host-resolver-rules=MAP {FOREIGN_HOST} 127.0.0.1"] + [
    flag for flag in chromium_module.FLAGS if not flag.startswith("--remote-debugging")
]


@contextmanager
def driven_chromium(command: str, *, webgpu: bool = True) -> Iterator[Browser]:
    """A headless Chromium, with a software adapter unless told otherwise."""
    flags = _FLAGS + list(chromium_module.WEBGPU if webgpu else ())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, args=flags)
        try:
            yield browser
        finally:
            browser.close()


class FakeNode:
    """The page's view of `pages/fake_worker.js`, which stands in for the real worker: a script of reports, no GPU."""

    def __init__(self, page: Page) -> None:
        self._page = page
        page.add_init_script(
            "window.commands = []; const fakeChannel = new BroadcastChannel('fake node');"
            "fakeChannel.onmessage = ({data}) => data.command && window.commands.push(data.command);"
            "window.reported = (report) => fakeChannel.postMessage({report});"
        )
        page.route("**/worker.js", lambda route: route.fulfill(path=PAGES / "fake_worker.js"))

    def report(self, **event: object) -> None:
        """Say what a node would say."""
        self._page.evaluate(f"window.reported({json.dumps(event)})")

    def state(self, state: str, **values: object) -> None:
        self.report(event="state", state=state, **values)

    def stats(self, seconds: float, **values: Any) -> None:
        zero = {"launches": 0, "bytesIn": 0, "bytesOut": 0, "memory": 0, "cap": 1 << 30, "sessions": []}
        self.report(event="stats", seconds=seconds, **(zero | values))

    def commands(self, kind: str) -> list[dict[str, Any]]:
        """What the page has commanded, of one kind; waits for the first."""
        until(self._page, f"window.commands.some((command) => command.do === {kind!r})")
        return [command for command in self._page.evaluate("window.commands") if command["do"] == kind]


def until(page: Page, condition: str, seconds: float = 15) -> None:
    """Wait for a JavaScript expression to be true. Playwright's own `wait_for_function` needs `eval` in the page."""
    end = time.monotonic() + seconds
    while True:
        try:
            if page.evaluate(condition):
                return
        except Error as error:
            if "context was destroyed" not in str(error):  # the page is being loaded again
                raise
        if time.monotonic() > end:
            raise AssertionError(f"after {seconds} s this is not so: {condition}")
        page.wait_for_timeout(20)


def watched(page: Page) -> list[str]:
    """A list that gets the page's errors and what breaks its content security policy."""
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    return problems


def new_page(context: BrowserContext) -> Page:
    page = context.new_page()
    page.set_default_timeout(15_000)
    return page
