"""Starts headless Chromium with a software WebGPU adapter and drives its tabs by raw CDP.

The Network domain stays off: it makes WebSockets several times slower.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from remote import Remote, RemoteError, as_json, end, polled, wait_for_file

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-domain-reliability",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
]
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")


def find() -> str | None:
    """The browser's command, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One tab.

    Attributes:
        console: what the page wrote to its console and the exceptions nobody caught, as text.
    """

    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self.console: list[str] = []
        self._browser = browser
        self._target = target
        self._session = session

    def call(self, method: str, timeout: float = 30, **params: object) -> dict[str, Any]:
        """One CDP call in this tab."""
        return self._browser.remote.call({"method": method, "params": params, "sessionId": self._session}, timeout)

    def evaluate(self, expression: str, timeout: float = 60) -> Any:
        """The value of an expression, awaited, by way of JSON; raises `RemoteError` with what the script threw."""
        answer = self.call(
            "Runtime.evaluate", timeout, expression=as_json(expression), awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            thrown = details.get("exception", {})
            raise RemoteError(thrown.get("description") or str(thrown.get("value") or details["text"]))
        return json.loads(answer["result"]["value"])

    def wait_for(self, expression: str, timeout: float = 30) -> Any:
        """Wait until an expression is true."""
        return self.evaluate(polled(expression), timeout)

    def navigate(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise RemoteError(f"{url}: {answer['errorText']}")
        self.wait_for("document.readyState === 'complete'")

    def activate(self) -> None:
        """Show this tab; the one shown before becomes hidden."""
        self._browser.remote.call({"method": "Target.activateTarget", "params": {"targetId": self._target}}, 10)

    def screenshot(self, path: Path, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """A PNG of the page as a window of this size would show it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        """Close the tab, as a person would."""
        self._browser.remote.call({"method": "Target.closeTarget", "params": {"targetId": self._target}}, 10)


class Chromium:
    """One browser with a profile of its own.

    Args:
        flags: more flags for its command line.
        webgpu: whether there is an adapter.

    Attributes:
        pid: its main process.
    """

    name = "chromium"

    def __init__(self, *flags: str, webgpu: bool = True) -> None:
        command = find()
        assert command is not None, "Chromium is missing"
        self._profile = Path(tempfile.mkdtemp(prefix="wsgrad-chromium-"))
        arguments = [*FLAGS, *(WEBGPU if webgpu else ()), *flags, f"--user-data-dir={self._profile}"]
        self._process = subprocess.Popen(
            [command, *arguments, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._tabs: dict[str, Tab] = {}
        try:
            port, path = wait_for_file(self._profile / "DevToolsActivePort", self._process).split()
            self.remote = Remote(f"ws://127.0.0.1:{port}{path}", self._event)
        except BaseException:
            self._end()
            raise

    def open(self, url: str = "about:blank") -> Tab:
        """A new tab that has loaded a page."""
        target = self.remote.call({"method": "Target.createTarget", "params": {"url": "about:blank"}}, 30)["targetId"]
        attached = self.remote.call(
            {"method": "Target.attachToTarget", "params": {"targetId": target, "flatten": True}}, 30
        )
        tab = self._tabs[attached["sessionId"]] = Tab(self, target, attached["sessionId"])
        tab.call("Page.enable")
        tab.call("Runtime.enable")
        if url != "about:blank":
            tab.navigate(url)
        return tab

    def crash_gpu(self) -> None:
        """End the process that drives the GPU, as a driver's fault would."""
        processes = self.remote.call({"method": "SystemInfo.getProcessInfo", "params": {}}, 30)["processInfo"]
        [gpu] = [process["id"] for process in processes if process["type"] == "GPU"]
        os.kill(gpu, signal.SIGKILL)

    def kill_tabs(self) -> None:
        """End the processes of all tabs, as a system that is short of memory would."""
        processes = self.remote.call({"method": "SystemInfo.getProcessInfo", "params": {}}, 30)["processInfo"]
        for process in processes:
            if process["type"] == "renderer":
                os.kill(process["id"], signal.SIGKILL)

    def close(self) -> None:
        """End it and remove its profile."""
        self.remote.close()
        self._end()

    def _end(self) -> None:
        end(self._process)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _event(self, message: dict[str, Any]) -> None:
        tab = self._tabs.get(message.get("sessionId", ""))
        if tab is None:
            return
        params = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled":
            tab.console.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            tab.console.append(details.get("exception", {}).get("description") or details["text"])
