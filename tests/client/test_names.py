"""The public names: where they live, when they are loaded, what measuring returns."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import wsgrad
from wsgrad.client import bench

ROOT = Path(__file__).parents[2]


def test_every_public_name_can_be_used_and_is_listed():
    for name in dir(wsgrad):
        assert getattr(wsgrad, name) is not None
    assert {"connect", "open_server", "INDEX", "Server", "AsyncServer", "Buffer", "WsgradError", "InvalidUrl"} <= set(
        dir(wsgrad)
    )
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wsgrad.nonsense


def test_every_public_name_is_told_of_in_the_documentation():
    page = (ROOT / "docs" / "client.md").read_text()
    names = set(dir(wsgrad))
    for owner in (wsgrad.Server, wsgrad.Device, wsgrad.Buffer, wsgrad.Program, wsgrad.Graph):
        names |= {name for name in dir(owner) if not name.startswith("_")}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", page)) == []


def test_the_version_is_the_projects():
    assert wsgrad.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import wsgrad", {"numpy", "trio", "socket", "wsgrad.client"}),
        ("import wsgrad; wsgrad.connect", {"trio", "trio_websocket", "rich", "subprocess.Popen"}),
        ("import wsgrad; wsgrad.open_server", {"rich"}),
    ],
)
def test_only_what_is_used_is_imported(code, absent):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert not absent & set(done.stdout.split())


def test_what_is_measured_is_plausible(url, device):
    assert 1e-6 < bench.measure_round_trip(device, n=20) < 1
    assert 1e4 < bench.measure_upload(device, 1 << 20) < 1e12
    assert 1e4 < bench.measure_download(device, 1 << 20) < 1e12
    assert 1e2 < bench.measure_launches(device, n=2000) < 1e8
    assert 1e-4 < bench.measure_open(url) < 10
