"""Native WebGPU's processes: what is offered and refused, how they are confined, and what their end costs."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from contract_kinds import KINDS

import wsgrad
from wsgrad.devices import linux
from wsgrad.devices.webgpu.listing import list_adapters
from wsgrad.errors import DeviceError
from wsgrad.server.options import BadValue, device

SERVER = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--log-level", "error"]


@pytest.fixture(scope="module")
def adapters():
    try:
        return list_adapters()
    except DeviceError as error:
        if os.environ.get("WSGRAD_REQUIRE_WEBGPU") == "1":
            pytest.fail(f"{error}, and WSGRAD_REQUIRE_WEBGPU=1 asks for it", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def webgpu(adapters):
    with KINDS["webgpu"]() as offer, offer.connected() as opened:
        yield opened


def refused(*arguments, **variables):
    """What a server says that ends at its start."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")} | variables
    result = subprocess.run([*SERVER, *arguments], env=environment, capture_output=True, text=True, timeout=90)
    assert result.returncode == 1, result.stderr
    return result.stderr


def node_processes():
    """The node processes of this user's servers that drive WebGPU, by process id."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"wsgrad.devices.webgpu.node" in command:
                found.append(int(entry.name))
    return set(found)


@pytest.mark.parametrize(
    ("text", "meaning"), [("webgpu", ("webgpu", 1)), ("webgpu:0", ("webgpu:0", 1)), (" webgpu:12 ", ("webgpu:12", 1))]
)
def test_adapters_are_named_by_their_place(text, meaning):
    assert device(text) == meaning


@pytest.mark.parametrize("text", ["webgpu:", "webgpu:-1", "webgpu:01", "webgpu:100", "webgpu*2", "webgpu:x", "Webgpu"])
def test_other_names_are_refused(text):
    with pytest.raises(BadValue, match="webgpu"):
        device(text)


def test_an_adapter_is_listed_once_with_its_limits_and_whether_it_is_software(adapters):
    names = [adapter["adapter"] for adapter in adapters]
    assert len(names) == len(set(names))
    for adapter in adapters:
        assert adapter["software"] is ("llvmpipe" in adapter["adapter"])
        assert adapter["limits"]["maxComputeWorkgroupsPerDimension"] >= 65535
        assert adapter["arch"] in ("vulkan", "metal", "d3d12")


def test_an_adapter_that_is_not_there_is_refused_and_those_that_are_are_named(adapters):
    words = refused("--device", "webgpu:99")
    assert "webgpu:99" in words
    assert adapters[0]["adapter"] in words


def test_a_missing_driver_is_refused_by_name(adapters):
    words = refused("--device", "webgpu", VK_ICD_FILENAMES="/nowhere.json", VK_DRIVER_FILES="/nowhere.json")
    assert "no driver for Vulkan" in words
    assert "mesa-vulkan-drivers" in words


def test_a_missing_package_is_refused_by_name(tmp_path):
    (tmp_path / "wgpu.py").write_text("raise ImportError('not here')")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert "pip install 'wsgrad[webgpu]'" in refused("--device", "webgpu", PYTHONPATH=paths)


def test_a_driver_that_crashes_while_it_is_asked_costs_only_the_offer(tmp_path):
    (tmp_path / "wgpu.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert "SIGSEGV" in refused("--device", "webgpu", PYTHONPATH=paths)


def test_a_server_without_cpu_needs_no_compiler(adapters):
    reader, writer = os.pipe()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")}
    environment["WSGRAD_CC"] = "/nowhere"
    command = [*SERVER, "--device", "webgpu:0", "--ready-fd", str(writer)]
    process = subprocess.Popen(command, pass_fds=(writer,), env=environment, stdin=subprocess.DEVNULL)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            url = json.loads(lines.readline())["url"]
            with wsgrad.connect(url) as server:
                assert [one.kind for one in server.devices] == ["webgpu"]
                assert server.devices[0].zeros(4).numpy().tolist() == [0] * 4
    finally:
        process.kill()
        process.wait()


def test_a_process_that_dies_costs_its_session_the_device_until_it_is_reopened(adapters):
    with KINDS["webgpu"]() as offer, offer.connected() as opened, offer.connected() as other:
        before = node_processes()
        x = opened.array(np.arange(8, dtype=np.float32))
        x.numpy()
        [mine] = node_processes() - before
        kept = other.array(np.arange(3, dtype=np.float32))
        os.kill(mine, signal.SIGSEGV)
        with pytest.raises(wsgrad.DeviceLost, match="SIGSEGV"):
            x.numpy()
        assert kept.numpy().tolist() == [0, 1, 2]
        opened.reopen()
        assert opened.array(np.arange(3, dtype=np.float32)).numpy().tolist() == [0, 1, 2]


def test_the_process_ends_with_its_session(adapters):
    before = node_processes()
    with KINDS["webgpu"]() as offer:
        with offer.connected() as opened:
            opened.zeros(4).numpy()
            assert len(node_processes() - before) == 1
        deadline = time.monotonic() + 20
        while node_processes() - before and time.monotonic() < deadline:
            time.sleep(0.05)  # its end has no event here: it is the server's child
        assert not node_processes() - before


@pytest.mark.skipif(linux.landlock_version() == 0, reason="this kernel has no Landlock")
def test_a_confined_driver_process_reads_only_what_drivers_need_and_starts_and_writes_nothing(tmp_path):
    (tmp_path / "secret").write_text("secret")
    script = f"""
    import os, socket, subprocess, threading
    from wsgrad.devices.confine import confine_driver
    confine_driver(keep=(1, 2))
    def refused(action):
        try:
            action()
        except OSError as error:
            return True
        return False
    def attempts():
        print(refused(lambda: open({str(tmp_path / "secret")!r})), flush=True)
        print(refused(lambda: open({str(tmp_path / "new")!r}, "w")), flush=True)
        print(refused(lambda: subprocess.run(["/bin/true"])), flush=True)
        print(refused(lambda: os.mkdir("/dev/shm/wsgrad-new")), flush=True)
        print(not refused(lambda: open("/etc/passwd").close()), flush=True)
    thread = threading.Thread(target=attempts)  # drivers have threads
    thread.start()
    thread.join()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert result.stdout.split() == ["True"] * 5, result.stderr


def test_a_timeline_shows_each_launch_alone_and_in_graphs(webgpu, tmp_path):
    source = """
    @group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @compute @workgroup_size(1) fn count() { x[0] += 1u; }"""
    count = webgpu.program(source, "count")
    x = webgpu.zeros(4, np.uint32)
    count(x, grid=1)
    with wsgrad.record(webgpu) as graph:
        for _ in range(3):
            count(x, grid=1)
    graph.run(wait=True)
    path = tmp_path / "timeline.json"
    with webgpu.server.trace(path):
        for _ in range(5):
            count(x, grid=1)
        graph.run(wait=True)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert sorted(names) == ["count"] * 5 + ["count #0", "count #1", "count #2"]
    assert x.numpy()[0] == 12
