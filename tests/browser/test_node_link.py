"""Nodes that dialled in over links that are cut under work: a machine, and a tab of a real browser."""

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from joined import CLIENT_TOKEN, NODE_TOKEN, JoinedTab, serving

import wsgrad
from benchmarks.random_work import run_blocking

sys.path.append(str(Path(__file__).parent.parent / "devices"))

from contract_kinds import PATIENCE_SECONDS, C, Wgsl
from cut_work import Model, work
from cutting_link import CUTS, CuttingLink


@contextmanager
def machine(url, tmp_path):
    """Another machine, as it were, that lends its CPU."""
    home = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "wsgrad.server", "--join", url, "--name", "far", "--cpu-threads", "1"]
    environment = os.environ | home | {"WSGRAD_NODE_TOKEN": NODE_TOKEN}
    with subprocess.Popen([*command, "--log-level", "error"], env=environment) as process:
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def tab(url, browser, **how):
    """A tab of the browser that lends its GPU."""
    joined = JoinedTab(browser, url, name="tab", **how)
    try:
        yield joined
    finally:
        joined.close()


def statistics(url):
    """What the server has counted."""
    address = url.partition("#")[0].replace("ws://", "http://").rstrip("/")
    asked = urllib.request.Request(f"{address}/status.json", headers={"Authorization": f"Bearer {CLIENT_TOKEN}"})
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["statistics"]


def through_cuts(url, link, device_id, dialect, seed):
    """Work that goes on over all the cuts."""
    with wsgrad.connect(url) as client:
        device = client.wait_for_device(device_id, timeout=PATIENCE_SECONDS)
        run_blocking(work(Model(device, dialect), [link], seed))
        assert statistics(url)["node_resumes"] >= CUTS


@pytest.mark.parametrize("seed", [1, 2])
def test_a_machine_comes_back_to_what_it_had(tmp_path, seed):
    with serving(tmp_path, "--device", "none", "--node-grace", "60") as server:
        url = server.ready["url"]
        with CuttingLink(url, seed) as link, machine(link.url.partition("#")[0], tmp_path):
            through_cuts(url, link, "far/cpu/0", C(), seed)


def test_a_tab_comes_back_to_what_it_had(tmp_path, chromium):
    with serving(tmp_path, "--device", "none", "--node-grace", "60") as server:
        url = server.ready["url"]
        with CuttingLink(url, 3) as link, tab(link.url, chromium):
            through_cuts(url, link, "tab/browser/0", Wgsl(), 3)


def test_a_tab_that_does_not_come_back_in_time_loses_what_it_had(tmp_path, chromium):
    with serving(tmp_path, "--device", "none", "--node-grace", "0.2") as server:
        url = server.ready["url"]
        with CuttingLink(url, 4) as link, tab(link.url, chromium), wsgrad.connect(url) as client:
            device = client.wait_for_device("tab/browser/0", timeout=PATIENCE_SECONDS)
            array = device.array(np.arange(4))
            array.numpy()
            link.cut()
            with pytest.raises(wsgrad.DeviceLost, match="left"):
                array.numpy(timeout=PATIENCE_SECONDS)
            client.wait_for_device("tab/browser/0", timeout=PATIENCE_SECONDS)
