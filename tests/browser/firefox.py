"""Starts headless Firefox with WebGPU on the system's Vulkan and drives its tabs by WebDriver BiDi."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from remote import Remote, RemoteError, as_json, end, polled, wait_for_file

PREFERENCES: dict[str, object] = {
    "dom.webgpu.enabled": True,
    "dom.webgpu.workers.enabled": True,
    "gfx.webgpu.ignore-blocklist": True,
    "gfx.webrender.all": True,
    "layers.acceleration.force-enabled": True,
    "dom.webgpu.wgpu-backend": "vulkan",
    # Nothing but the pages under test: no updates, no telemetry, no probes for a captive portal.
    "app.update.auto": False,
    "app.update.disabledForTesting": True,
    "app.normandy.enabled": False,
    "browser.safebrowsing.malware.enabled": False,
    "browser.safebrowsing.phishing.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "extensions.update.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,#remote-settings-dummy/v1",
    "toolkit.telemetry.server": "data:,",
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}


def find() -> str | None:
    """The browser's command, if there is one."""
    return shutil.which("firefox-esr") or shutil.which("firefox")


class FirefoxTab:
    """One tab; the part of `chromium.Tab` that both have.

    Attributes:
        console: what the page wrote to its console, as text.
    """

    def __init__(self, browser: Firefox, context: str) -> None:
        self.console: list[str] = []
        self._browser = browser
        self._context = context

    def evaluate(self, expression: str, timeout: float = 60) -> Any:
        """The value of an expression, awaited, by way of JSON; raises `RemoteError` with what the script threw."""
        answer = self._browser.call(
            "script.evaluate",
            timeout,
            expression=as_json(expression),
            target={"context": self._context},
            awaitPromise=True,
        )
        if answer["type"] == "exception":
            raise RemoteError(answer["exceptionDetails"]["text"])
        return json.loads(answer["result"]["value"])

    def wait_for(self, expression: str, timeout: float = 30) -> Any:
        """Wait until an expression is true."""
        return self.evaluate(polled(expression), timeout)

    def navigate(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self._browser.call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("browsingContext.close", context=self._context)


class Firefox:
    """One browser with a profile of its own.

    Attributes:
        pid: its main process.
    """

    name = "firefox"

    def __init__(self) -> None:
        command = find()
        assert command is not None, "Firefox is missing"
        self._profile = Path(tempfile.mkdtemp(prefix="wsgrad-firefox-"))
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in PREFERENCES.items()]
        (self._profile / "user.js").write_text("\n".join(lines))
        self._process = subprocess.Popen(
            [command, "--headless", "--no-remote", "--profile", str(self._profile), "--remote-debugging-port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._tabs: dict[str, FirefoxTab] = {}
        try:
            text = wait_for_file(self._profile / "WebDriverBiDiServer.json", self._process)
            address = json.loads(text)
            self._remote = Remote(f"ws://{address['ws_host']}:{address['ws_port']}/session", self._event)
            self.call("session.new", 30, capabilities={})
            self.call("session.subscribe", events=["log.entryAdded"])
        except BaseException:
            self._end()
            raise

    def call(self, method: str, timeout: float = 30, **params: object) -> dict[str, Any]:
        """One BiDi call."""
        return self._remote.call({"method": method, "params": params}, timeout)

    def open(self, url: str = "about:blank") -> FirefoxTab:
        """A new tab that has loaded a page."""
        context = self.call("browsingContext.create", type="tab")["context"]
        tab = self._tabs[context] = FirefoxTab(self, context)
        if url != "about:blank":
            tab.navigate(url)
        return tab

    def close(self) -> None:
        """End it and remove its profile."""
        self._remote.close()
        self._end()

    def _end(self) -> None:
        end(self._process)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _event(self, message: dict[str, Any]) -> None:
        if message.get("method") == "log.entryAdded":
            tab = self._tabs.get(message["params"]["source"].get("context", ""))
            if tab is not None:
                tab.console.append(str(message["params"]["text"]))
