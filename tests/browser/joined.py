"""A tab of a real browser as a device of a real server, without our page: only the worker, or the scripts in a page."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

from server_process import running_server

NODE_TOKEN = "node-token-of-the-tests"
CLIENT_TOKEN = "client-token-of-the-tests"
ADMIN_TOKEN = "admin-token-of-the-tests"
WORKER = Path(__file__).parent.parent.parent / "browser" / "worker.js"
SCRIPTS = re.findall(r"'([\w-]+)\.js'", WORKER.read_text())
"""What the worker loads, in order."""


@contextmanager
def serving(directory, *arguments, port="0"):
    """A server process; gives it and its address for clients."""
    variables = {"WSGRAD_NODE_TOKEN": NODE_TOKEN, "WSGRAD_TOKEN": CLIENT_TOKEN, "WSGRAD_ADMIN_TOKEN": ADMIN_TOKEN}
    with running_server(directory, *arguments, variables=variables, port=port) as server:
        yield server


class JoinedTab:
    """A tab that runs the node.

    Args:
        browser: a Chromium or a Firefox.
        url: the server's, as clients are given it.
        worker: whether the node lives in a worker, else in the page.
        page: where the tab is, if not on the server: `PageFiles.scripts(*SCRIPTS)`. The node lives in the page then.
        fields: of the command `start`.
    """

    def __init__(self, browser, url, *, worker=True, page=None, wait=True, **fields):
        self.url = url.partition("#")[0].rstrip("/")
        self.tab = browser.open(page or f"{self.url.replace('ws', 'http', 1)}/icon.svg")
        if page is None:
            self.load(worker=worker)
        else:
            self.tab.evaluate("ready.then(() => { globalThis.events = []; return true; })")
            self.tab.evaluate("(globalThis.command = node.create((event) => events.push(event)).command, true)")
        self.start(**fields)
        if wait:
            self.wait_state("joined")

    def load(self, *, worker=True):
        """Start the node, which then waits for commands; its events are kept in the page."""
        if worker:
            setup = (
                "globalThis.node = new Worker('/worker.js'); node.onmessage = (event) => events.push(event.data);"
                "node.onerror = (event) => events.push({event: 'broken', message: event.message});"
                "globalThis.command = (value) => node.postMessage(value);"
            )
        else:
            setup = f"""
                for (const name of {json.dumps(SCRIPTS)}) await new Promise((resolve, reject) => {{
                    const script = document.createElementNS('http://www.w3.org/1999/xhtml', 'script');
                    Object.assign(script, {{ src: `/${{name}}.js`, onload: resolve, onerror: reject }});
                    document.documentElement.append(script);
                }});
                globalThis.command = node.create((event) => events.push(event)).command;"""
        self.tab.evaluate(f"(async () => {{ globalThis.events = []; {setup} return true; }})()")

    def start(self, **fields):
        command = {"token": NODE_TOKEN, "name": "Tab", "secret": None, "label": "", "memory": 0, "agent": "test"}
        self.command("start", **{"url": self.url, **command, **fields})

    def command(self, do, **fields):
        self.tab.evaluate(f"(command({json.dumps({'do': do, **fields})}), true)")

    def wait_state(self, state, timeout=30):
        """The last event of that state, once it is the present one."""
        last = "events.filter((event) => event.event === 'state' || event.event === 'broken').at(-1)"
        self.tab.wait_for(f"['{state}', undefined].includes({last}?.state ?? '')", timeout)
        return self.tab.evaluate(last)

    def events(self, kind):
        return self.tab.evaluate(f"events.filter((event) => event.event === '{kind}')")

    def close(self):
        self.tab.close()
