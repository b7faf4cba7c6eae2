"""Finding a server: addresses, tokens, certificates, an embedded one, waiting for one; and how sessions end."""

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import trustme
from kernels import COUNT

import wsgrad
from wsgrad.client.embedded import EmbeddedServer


def test_the_address_and_the_token_may_come_from_variables(url, monkeypatch):
    address, _, token = url.partition("#token=")
    monkeypatch.setenv("WSGRAD_URL", address)
    monkeypatch.setenv("WSGRAD_TOKEN", token)
    with wsgrad.connect() as server:
        assert server.devices["cpu"].array([3]).numpy() == 3
        assert server.url.endswith(token)
        assert token not in repr(server)
    with wsgrad.connect(address.removeprefix("ws://").rstrip("/")) as server:
        assert server.devices[0].kind == "cpu"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda url: url.split("#")[0], wsgrad.Unauthorized, "client token is needed: write #token=… .*WSGRAD_TOKEN"),
        (lambda url: url.split("#")[0] + "#token=wrong", wsgrad.Unauthorized, "token"),
        (lambda url: f"{url},{url}", wsgrad.WsgradError, "one server"),
        (lambda url: "http://localhost", wsgrad.WsgradError, "ws://"),
        (lambda url: "ws://127.0.0.1:1", wsgrad.ConnectionLost, "refused.*wsgrad-serve.*wait="),
        (lambda url: "ws://no-such-host.invalid", wsgrad.ConnectionLost, "no-such-host"),
    ],
    ids=["no token", "wrong token", "two", "scheme", "nobody there", "no such host"],
)
def test_what_can_not_be_connected_to_is_said_by_name(url, change, error, text):
    with pytest.raises(error, match=text):
        wsgrad.connect(change(url))


def test_somebody_who_never_answers_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            wsgrad.connect(f"ws://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
        assert time.monotonic() - start < 3


def test_somebody_who_is_no_server_of_ours_is_said_by_name():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nnothing\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(wsgrad.ConnectionLost, match="404"):
            wsgrad.connect(f"ws://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_wait_waits_for_a_server_that_is_just_starting(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "WSGRAD_TOKEN": "abcdefgh"}
    connected = []
    thread = threading.Thread(
        target=lambda: connected.append(wsgrad.connect(f"ws://127.0.0.1:{port}#token=abcdefgh", wait=30))
    )
    thread.start()
    with subprocess.Popen(
        [sys.executable, "-m", "wsgrad.server", "--port", str(port), "--log-level", "error"],
        env=environment,
        stdout=subprocess.DEVNULL,
    ) as process:
        thread.join()
        assert connected[0].devices[0].array([5]).numpy() == 5
        connected[0].close()
        process.terminate()


def start_with_tls(tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    der = ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--ready-fd", str(writer), "--log-level", "error"]
    command += ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    process = subprocess.Popen(command, pass_fds=(writer,), stdout=subprocess.DEVNULL)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        yield process, json.loads(pipe.readline()), der, str(tmp_path / "ca.pem")
    process.wait()


def test_certificates_are_checked_by_fingerprint_or_authority(tmp_path, rng):
    import hashlib

    import trio

    for _, ready, der, cafile in start_with_tls(tmp_path):
        fingerprint = hashlib.sha256(der).hexdigest()
        base = f"wss://localhost:{ready['port']}#token={ready['token']}"
        array = rng.integers(0, 256, 5 << 20, np.uint8)

        async def trio_face(array=array, base=base, fingerprint=fingerprint, cafile=cafile):
            async with wsgrad.open_server(f"{base}&sha256={fingerprint}") as server:
                assert np.array_equal(await (await server.devices[0].array(array)).numpy(), array)
            for kwargs, text in (({}, "not trusted"), ({"url": f"{base}&sha256={'0' * 64}"}, "fingerprint")):
                with pytest.raises(wsgrad.Unauthorized, match=text):
                    async with wsgrad.open_server(**{"url": base, **kwargs}):
                        pass

        trio.run(trio_face)
        for kwargs in ({"url": f"{base}&sha256={fingerprint}"}, {"url": base, "cafile": cafile}):
            with wsgrad.connect(**kwargs) as server:
                assert np.array_equal(server.devices[0].array(array).numpy(), array)
        with pytest.raises(wsgrad.Unauthorized, match="not trusted"):
            wsgrad.connect(base)
        with pytest.raises(wsgrad.Unauthorized, match="fingerprint"):
            wsgrad.connect(f"{base}&sha256={'0' * 64}")


def test_devices_are_found_by_index_id_label_and_kind(server):
    device = server.devices[0]
    assert server.devices[-1] in list(server.devices)
    assert server.devices[device.id] is device
    assert server.devices[device.label] is device
    assert server.devices["cpu"].kind == "cpu"
    assert len(server.devices) == len(list(server.devices)) == len(server.devices[:])
    assert device.dialects == ("c",)
    assert device.properties["id"] == device.id
    with pytest.raises(wsgrad.DeviceError, match=f"no device 'gpu'.*offers {device.id}"):
        server.devices["gpu"]
    with pytest.raises(IndexError, match="device 99"):
        server.devices[99]


def test_the_first_devices_of_a_server_can_be_asked_for(url):
    with wsgrad.connect(url + "*1") as server:
        assert len(server.devices) == 1


def test_a_device_that_is_not_there_is_an_error_and_the_session_lives(server):
    ghost = server._device("ghost/cpu/0")
    ghost.empty(3)
    with pytest.raises(wsgrad.DeviceError, match="ghost"):
        ghost.synchronize()
    ghost.empty(3)
    with pytest.raises(wsgrad.DeviceError, match="ghost"):
        ghost.reopen()
    assert server.devices[0].array([1]).numpy() == 1


def test_an_embedded_server_ends_with_the_session():
    server = wsgrad.connect()
    process = server._embedded._process
    assert server.devices["cpu"].array(np.arange(3)).numpy().sum() == 3
    assert repr(server).startswith("<Server ws://127.0.0.1:")
    server.close()
    assert process.returncode is not None
    server.close()


def run_and_watch(code, *, kill=False):
    """Run a program that prints its embedded server's process id, end it, and wait for the server's end."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        pid = int(child.stdout.readline())
        fd = os.pidfd_open(pid)
        if kill:
            child.kill()
        _, errors = child.communicate(timeout=20)
    import select

    try:
        assert select.select([fd], [], [], 10)[0], "the server outlived its parent"
    finally:
        os.close(fd)
    return errors


PROGRAM = """
import wsgrad, sys, time
server = wsgrad.connect()
x = server.devices["cpu"].zeros(1000)
x.numpy()
print(server._embedded.pid, flush=True)
"""


@pytest.mark.parametrize(
    ("rest", "kill"),
    [
        ("", False),
        ("sys.exit(3)", False),
        ("time.sleep(60)", True),
        ("del server, x", False),
        ("server.close()", False),
    ],
    ids=["forgotten", "exit", "killed", "dropped", "closed"],
)
def test_an_embedded_server_never_outlives_its_parent(rest, kill):
    assert run_and_watch(PROGRAM + rest, kill=kill) == ""


def test_a_program_that_forgets_to_close_leaves_no_session(url, real_server):
    code = f"import wsgrad\nserver = wsgrad.connect({url!r})\nx = server.devices['cpu'].zeros(4)\nx.fill(1)"
    before = sessions(url)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert_sessions(url, before)


def sessions(url):
    """How many sessions the server says there are."""
    import urllib.request

    address, _, token = url.partition("#token=")
    request = urllib.request.Request(
        address.replace("ws://", "http://").rstrip("/") + "/status.json", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as response:
        status = json.load(response)
    return len(status["sessions"]) if isinstance(status["sessions"], list) else status["sessions"]


def assert_sessions(url, count):
    deadline = time.monotonic() + 5
    while (there := sessions(url)) != count:
        assert time.monotonic() < deadline, f"{there} sessions, not {count}"
        time.sleep(0.01)


def test_a_server_object_that_is_dropped_ends_its_session(url):
    server = wsgrad.connect(url)
    server.devices["cpu"].zeros(4).numpy()
    before = sessions(url)
    del server
    import gc

    gc.collect()
    assert_sessions(url, before - 1)


def test_an_embedded_server_starts_beside_more_descriptors_than_select_knows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.dup(2) for _ in range(1030)]
    try:
        with wsgrad.connect() as server:
            assert server.devices["cpu"].array([1]).numpy() == 1
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_embedded_server_that_can_not_start_says_why(monkeypatch):
    monkeypatch.setenv("WSGRAD_DEVICE", "toaster*2")
    with pytest.raises(wsgrad.ConnectionLost, match="toaster"):
        wsgrad.connect()


def test_a_forked_child_is_told_to_connect_for_itself(url):
    code = f"""
import os, sys
import wsgrad
server = wsgrad.connect({url!r})
x = server.devices["cpu"].array([1, 2, 3])
count = server.devices["cpu"].program({COUNT!r}, "count")
x.numpy()
pid = os.fork()
if pid == 0:
    said = []
    for call in (x.numpy, lambda: count(x), lambda: server.devices[0].zeros(3), server.flush):
        try:
            call()
        except wsgrad.WsgradError as error:
            said.append("belongs to process" in str(error))
    server.close()
    with wsgrad.connect({url!r}) as own:
        said.append(own.devices[0].array([7]).numpy()[0] == 7)
    os._exit(0 if said == [True] * 5 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert x.numpy().tolist() == [1, 2, 3]
server.close()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=30)


def test_a_server_that_is_killed_raises_in_every_pending_call_within_a_second():
    embedded = EmbeddedServer(timeout=60)
    server = wsgrad.connect(embedded.url)
    device = server.devices["cpu"]
    spin = device.program("void spin(long n) { for (volatile long i = 0; i < n; i++); }", "spin")
    spin.ready()
    spin(np.int64(3 << 30))
    raised = []

    def wait():
        with pytest.raises(wsgrad.ConnectionLost):
            device.synchronize()
        raised.append(time.monotonic())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(device._queue.pending._acks) < 3:
        time.sleep(0.001)
    start = time.monotonic()
    os.kill(embedded.pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(raised) == 3
    assert max(raised) - start < 1
    server.close()
    embedded.stop()
