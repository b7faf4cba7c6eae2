"""`wsgrad-serve --join`: sessions kept apart, programs confined and watched, names kept, ends of all kinds."""

import json
import os
import platform
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest
import trio
from heart import ADD, CRASH, SPIN, as_word, eventually, serving
from joined_machine import joined
from test_nodes_admin import TEXT, edge

from wsgrad.devices.webgpu.listing import list_adapters
from wsgrad.errors import DeviceError
from wsgrad.server import startup
from wsgrad.server.config import Config
from wsgrad.server.tls import Certificate, fingerprint_of
from wsgrad.server.tokens import Tokens
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

# It forges an acknowledgement of command 50 on queue 1, over every descriptor that it may have.
FORGE = """void forge(int *p) {
    static const char ack[] = "\\x83\\x18\\x20\\x01\\x18\\x32";
    for (long fd = 0; fd < 256; fd++) {
        register long flags __asm__("r10") = 0x4000, address __asm__("r8") = 0, size __asm__("r9") = 0;
        long result = 44;
        __asm__ volatile("syscall" : "+a"(result)
            : "D"(fd), "S"(ack), "d"(6L), "r"(flags), "r"(address), "r"(size) : "rcx", "r11", "memory");
    }
    for (;;) ;
}"""


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=(), launch_seconds=2.0, node_grace=0.5) as server:
        yield server


@pytest.fixture
async def gate(server):
    async with edge(server, Tokens(*TEXT)) as gate:
        yield gate


@pytest.fixture
def machine(gate, tmp_path):
    def join(name="far", *arguments, **how):
        return joined(gate.number, name, *arguments, **{"token": gate.tokens.node, "state": tmp_path} | how)

    return join


def secrets_of(tmp_path):
    return sorted((tmp_path / "wsgrad" / "joined").glob("*.json"))


async def works(queue):
    """Whether the queue still runs programs."""
    x = np.arange(300_000, dtype=np.float32)
    queue.batch(c.Alloc(1, x.nbytes), c.Alloc(2, x.nbytes))
    await queue.upload(1, x.tobytes())
    queue.program(7, ADD, "add", "ppfi", writes=[0])
    queue.launches([7, 0, 2, 1, as_word(2.0), x.size], 1)
    return await queue.download(2, 0, x.nbytes) == (x + 2).tobytes()


async def test_its_devices_are_described_as_a_server_describes_its_own(server, machine):
    async with machine("The Box", "--device", "cpu*2") as (ready, _):
        assert ready["name"] == "the-box"
        first, second = server.hub.devices
        assert [first["id"], second["id"]] == ["the-box/cpu/0", "the-box/cpu/1"]
        assert (first["kind"], first["dialects"], first["threads"], first["confined"]) == ("cpu", ["c"], 1, True)


@pytest.mark.parametrize(
    ("source", "entry", "code", "said"),
    [
        (CRASH, "crash", "DeviceLost", "program 'crash' ended the device: SIGSEGV"),
        (SPIN, "spin", "Timeout", "program 'spin' ran longer than the limit of 2 s"),
        pytest.param(
            FORGE,
            "forge",
            "DeviceLost",
            "program 'forge' ended the device: its node sent an invalid reply",
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel is written for x86-64"),
        ),
    ],
    ids=["crash", "spin", "forge"],
)
async def test_what_ends_one_session_s_device_is_named_and_spares_the_others(
    server, machine, source, entry, code, said
):
    async with machine() as (ready, _), server.client() as bad, server.client() as good:
        broken, fine = await bad.open(f"{ready['name']}/cpu/0"), await good.open(f"{ready['name']}/cpu/0", 5)
        broken.batch(c.Alloc(1, 4))
        broken.program(0, source, entry, "p")
        number = broken.launches([0, 0, 1], 1)
        failed = await broken.failure()
        assert (failed.code, failed.number, failed.details["program"]) == (code, number, entry)
        assert said in failed.message
        assert await works(fine)
        broken.reopen()
        assert await works(broken)


async def test_a_process_that_ends_while_nothing_runs_loses_its_queue_only(server, machine):
    async with machine() as (ready, process), server.client() as client:
        first, second = await client.open("far/cpu/0", 1), await client.open("far/cpu/0", 2)
        await first.done()
        nodes = await children(process.pid)
        assert len(nodes) >= 2
        os.kill(nodes[0], signal.SIGKILL)
        failed, _ = await client.next(m.Failed)
        assert (failed.code, failed.details["lost"]) == ("DeviceLost", True)
        assert "SIGKILL" in failed.message
        assert await works(second if failed.queue == 1 else first)
    assert ready["name"] == "far"


async def children(pid):
    """The node processes below a server's zygote."""
    zygotes = (await trio.Path(f"/proc/{pid}/task/{pid}/children").read_text()).split()
    found = []
    for zygote in zygotes:
        found += (await trio.Path(f"/proc/{zygote}/task/{zygote}/children").read_text()).split()
    return [int(child) for child in found]


async def test_a_session_that_ends_leaves_no_process_there(server, machine):
    async with machine() as (_, process):
        async with server.client() as client:
            for number in range(1, 4):
                await client.open("far/cpu/0", number)
            assert len(await children(process.pid)) == 3
            client.send(m.Bye())
            await client.wait_closed()
        await eventually(lambda: not server.hub.devices[0]["queues"])
        with trio.fail_after(10):
            while await children(process.pid):  # noqa: ASYNC110  # nothing announces the end of another's processes
                await trio.sleep(0.01)


async def test_nothing_listens_on_the_machine(machine):
    async with machine() as (_, process):
        sockets = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
        listening = set()
        for table in ("tcp", "tcp6"):
            for line in (await trio.Path(f"/proc/{process.pid}/net/{table}").read_text()).splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    listening.add(f"socket:[{fields[9]}]")
        assert not sockets & listening
        assert TEXT[1] not in (await trio.Path(f"/proc/{process.pid}/cmdline").read_text())


async def test_it_comes_back_after_a_drop_and_a_restart_under_its_name(server, gate, machine, tmp_path):
    async with machine("box") as (ready, _), server.client() as client:
        [path] = secrets_of(tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = json.loads(path.read_text())["secret"]
        queue = await client.open("box/cpu/0")
        server.hub.node("box").close("a test")
        assert (await queue.failure()).code == "DeviceLost"
        await eventually(lambda: server.hub.devices)
        assert [device["id"] for device in server.hub.devices] == ["box/cpu/0"]
        queue.reopen()
        assert await works(queue)
    assert ready["name"] == "box"
    await eventually(lambda: not server.hub.devices)
    async with machine("box") as (again, _):
        assert again["name"] == "box"
        assert json.loads(path.read_text())["secret"] == secret
        async with machine("box") as (other, _):  # the secret is in use: who comes second is somebody else
            assert other["name"] == "box-2"
            assert secrets_of(tmp_path) == [path]


async def test_it_comes_back_by_its_secret_when_the_node_token_has_changed(server, gate, machine):
    async with machine() as (_, _):
        assert (await gate.post("/admin/tokens/rotate")).status == 200
        server.hub.node("far").close("a test")
        await eventually(lambda: not server.hub.devices)
        await eventually(lambda: server.hub.devices)


@pytest.mark.parametrize("action", ["kick", "revoke"])
async def test_a_machine_that_is_sent_away_ends(server, gate, machine, tmp_path, action):
    async with machine(stderr=subprocess.PIPE) as (_, process):
        assert (await gate.post(f"/admin/nodes/far/{action}")).status == 200
        with trio.fail_after(10):
            assert await process.wait() == 1
        said = (await process.stderr.receive_some(4096)).decode()
        await process.stderr.aclose()
        assert "has sent this machine away: an administrator" in said
    assert len(secrets_of(tmp_path)) == (1 if action == "kick" else 0)
    assert server.hub.devices == []


async def test_a_pause_holds_what_comes_and_is_remembered(server, gate, machine):
    async with machine() as (_, _), server.client() as client:
        queue = await client.open("far/cpu/0")
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        await gate.post("/admin/nodes/far/rename", {"label": "Lab"})
        await gate.post("/admin/nodes/far/pause")
        number = queue.batch(c.Write(1, 0, b"late"))
        with trio.move_on_after(0.3):
            await queue.done(number)
        assert queue.acked < number
        await gate.post("/admin/nodes/far/resume")
        assert await queue.read(1, 0, 4) == b"late"
        await gate.post("/admin/nodes/far/pause")
        server.hub.node("far").close("a test")
        await eventually(lambda: not server.hub.devices)
        await eventually(lambda: server.hub.devices and server.hub.devices[0].get("paused"))
        assert server.hub.devices[0]["label"] == "Lab"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_and_the_hub_sees_it_leave(server, machine, end):
    async with machine() as (_, process), server.client() as client:
        await client.open("far/cpu/0")
        process.send_signal(end)
        with trio.fail_after(10):
            assert await process.wait() == 0
        await eventually(lambda: not server.hub.devices)


def serve(*arguments, **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WSGRAD_")}
    return subprocess.run(
        [sys.executable, "-m", "wsgrad.server", *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("url", "variables", "status", "said"),
    [
        ("ws://127.0.0.1:1", {}, 2, "its node token is missing"),
        ("http://127.0.0.1", {}, 2, "ws://"),
        ("ws://127.0.0.1*2", {}, 2, "means nothing here"),
    ],
)
def test_wrong_settings_end_it_at_once(tmp_path, url, variables, status, said):
    ended = serve("--join", url, XDG_STATE_HOME=str(tmp_path), **variables)
    assert (ended.returncode, said in ended.stderr) == (status, True), ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_a_wrong_token_ends_it_at_once(gate, tmp_path):
    ended = await trio.to_thread.run_sync(
        lambda: serve(
            "--join", f"ws://127.0.0.1:{gate.number}", WSGRAD_NODE_TOKEN="wrong" * 8, XDG_STATE_HOME=str(tmp_path)
        )
    )
    assert (ended.returncode, "the token is wrong" in ended.stderr) == (1, True), ended.stderr
    assert "wrong" * 8 not in ended.stderr


async def test_a_pinned_certificate_is_checked_before_the_token_goes_out(server, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    await trio.run_process(command, capture_stderr=True)
    pin = fingerprint_of(str(cert))
    async with edge(server, Tokens(*TEXT), tls=Certificate(str(cert), str(key), renewed=True)) as gate:
        url = f"wss://127.0.0.1:{gate.number}#sha256="
        how = {"WSGRAD_NODE_TOKEN": TEXT[1], "XDG_STATE_HOME": str(tmp_path)}
        ended = await trio.to_thread.run_sync(lambda: serve("--join", url + "0" * 64, **how))
        assert (ended.returncode, "fingerprint" in ended.stderr) == (1, True), ended.stderr
        async with joined(0, "far", "--join", url + pin, token=TEXT[1], state=tmp_path), server.client() as client:
            assert await works(await client.open("far/cpu/0"))


def test_cpu_is_not_lent_where_it_can_t_be_confined(monkeypatch):
    monkeypatch.setattr(startup, "probe_node_confinement", lambda: ["Landlock"])
    monkeypatch.setattr(startup, "probe_compiler_confinement", list)
    config, [warning] = startup.settle(Config(join="ws://hub:7667#token=x"))
    assert config.devices == ()
    assert "cpu is not offered" in warning
    config, _ = startup.settle(Config(join="ws://hub:7667#token=x", unconfined=True))
    assert config.devices == ("cpu",)


DOUBLE = """@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(64) fn double(@builtin(global_invocation_id) at: vec3<u32>) {
    if (at.x < arrayLength(&x)) { x[at.x] = 2 * x[at.x]; }
}"""


async def test_its_gpus_are_lent_too(server, machine):
    try:
        list_adapters()
    except DeviceError as exc:
        pytest.skip(str(exc))
    async with machine("gpus", "--device", "webgpu") as (_, _), server.client() as client:
        assert server.hub.devices[0]["id"] == "gpus/webgpu/0"
        queue = await client.open("gpus/webgpu/0")
        x = np.arange(300_000, dtype=np.float32)
        queue.batch(c.Alloc(1, x.nbytes))
        await queue.upload(1, x.tobytes())
        number = queue.next
        queue.next += 1
        message = m.Program(1, number, 0, "wgsl", "double", "double", "p", [0], False, {})
        client.send(message, DOUBLE.encode())
        compiled, _ = await client.next(m.Compiled)
        assert compiled.ok, compiled.message
        queue.batch(c.Launch(0, [-(-x.size // 64)], None, [1], False))
        assert await queue.download(1, 0, x.nbytes) == (2 * x).tobytes()
