"""The server's end of browser/node.js, which runs under Node with the fake device of tests/js/fake_gpu.cjs."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from device_rigs import PATIENCE_SECONDS, DialInServer, DialledRig

from wsgrad.transport import messages as m
from wsgrad.transport.connection import Connection

SCRIPT = Path(__file__).parent.parent / "js" / "fake_tab.cjs"

KERNELS = {
    # What the C programs of the tests do, for the fake device.
    "void entry(float *restrict y, const float *restrict x, int n) { for (int i = 0; i < n; i++) y[i] = 2 * x[i]; }": (
        "(y, x, n) => { for (let i = 0; i < n; i++) y.setFloat32(4 * i, 2 * x.getFloat32(4 * i, true), true) }"
    ),
    "void entry(int *a, int n) { for (int i = 0; i < n; i++) a[i] += 1; }": (
        "(a, n) => { for (let i = 0; i < n; i++) a.setInt32(4 * i, a.getInt32(4 * i, true) + 1, true) }"
    ),
    "void entry(int *y, const int *x, int n, int k) { for (int i = 0; i < n; i++) y[i] = y[i] * 3 + x[i] + k; }": (
        "(y, x, n, k) => { for (let i = 0; i < n; i++) y.setInt32(4 * i, "
        "Math.imul(y.getInt32(4 * i, true), 3) + x.getInt32(4 * i, true) + k, true) }"
    ),
    "void entry(long i, int *y, double d, long q, float f) { y[i] += (int)d + (int)q + (int)f; }": (
        "(i, y, d, q, f) => y.setInt32(4 * i, "
        "y.getInt32(4 * i, true) + Math.trunc(d) + Number(BigInt.asIntN(32, q)) + Math.trunc(f), true)"
    ),
    "void entry(int *a) { *a = 41; }": "(a) => a.setInt32(0, 41, true)",
    "void entry(int *a { }": "broken",
}


def require_node():
    """Skip where there is no Node, or one without WebSocket; fail where it is asked for."""
    node = shutil.which("node")
    probe = ["node", "--experimental-websocket", "-e", "process.exit(typeof WebSocket === 'function' ? 0 : 1)"]
    if node and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return
    if os.environ.get("WSGRAD_REQUIRE_NODE") == "1" or os.environ.get("CI") == "true":
        pytest.fail("Node 20 or newer is missing, and CI or WSGRAD_REQUIRE_NODE=1 asks for it")
    pytest.skip("Node is missing: the node of a tab is not run; install nodejs 20 or newer")


class FakeTab:
    """A process that runs browser/node.js with the fake device."""

    def __init__(self, url=None, *, name="Tab", token="node-token"):
        command = ["node", "--experimental-websocket", "--no-warnings", str(SCRIPT)]
        if url is not None:
            command += [url, name]
        environment = dict(os.environ, WSGRAD_NODE_TOKEN=token)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.events = []

    def command(self, do, **fields):
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def start(self, url, **fields):
        defaults = {"token": "node-token", "name": "Tab", "secret": None, "label": "", "memory": 0, "agent": "fake"}
        self.command("start", url=url, **(defaults | fields))

    def wait_for(self, where):
        """The next event for which that holds; blocks until it comes or the process ends."""
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            if where(event):
                return event
        raise AssertionError(f"the tab has ended; it said {self.events}")

    def wait_state(self, state):
        return self.wait_for(lambda event: event["event"] == "state" and event["state"] == state)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class TabServer(DialInServer):
    """A port where a tab joins; what it says goes to the rig of its queue."""

    def __init__(self, toolbox):
        self._toolbox = toolbox
        self._lock = threading.RLock()
        self._received = 0
        self._queues = {}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.tab = FakeTab(f"ws://127.0.0.1:{listener.getsockname()[1]}")
            self.process = self.tab.process
            listener.settimeout(PATIENCE_SECONDS)
            self.socket, _ = listener.accept()
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(client=False, bulk_kinds=m.BULK_KINDS)
        self.request = self._shake_hands()
        self._events = []
        message, _ = self.next()
        assert isinstance(message, m.Join), message
        self.join = message
        self.send(m.Joined(m.VERSION, "test", "secret", {}))

    def open_queue(self, **options):
        return TabRig(self._toolbox, self, options)

    def close(self):
        self.socket.close()
        self.tab.close()


class TabRig(DialledRig):
    """A queue on a tab."""

    _queues = itertools.count(1)

    def program(self, program, source, signature, *, entry="entry", name=None, writes=None, alias=False):
        self.number += 1
        name = name or entry
        message = m.Program(self.queue, self.number, program, "wgsl", name, entry, signature, writes, alias)
        self.send(message, KERNELS.get(source, source).encode())
        return self.number
