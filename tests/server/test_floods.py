"""What hostile and broken peers do to a real server all at once: whoever works beside them gets right results."""

import contextlib
import os
import resource
import socket
import threading
import time

import numpy as np
import pytest
from server_process import running_server

import wsgrad
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection

PATIENCE_SECONDS = 60.0
IDLE = 2000
HANDSHAKE_SECONDS = 20
MASK = b"\0\0\0\0"
EMPTY_FRAGMENT = b"\x00\x80" + MASK
EMPTY_PING = b"\x89\x80" + MASK


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = ["--max-connections-per-address", str(IDLE + 500), "--handshake-seconds", str(HANDSHAKE_SECONDS)]
    with running_server(tmp_path_factory.mktemp("floods"), "--device", "cpu", "--cpu-threads", "1", *limits) as process:
        yield process
        assert process.process.poll() is None
        assert "Traceback" not in process.log()


class Bystander:
    """A session that works in a thread of its own; whoever attacks waits until it has done some rounds meanwhile."""

    def __init__(self, url):
        self.rounds = 0
        self.error = None
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self.work()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        assert self.error is None

    def _run(self):
        try:
            with wsgrad.connect(self._url) as server:
                device = server.devices["cpu"]
                add = device.program("void add(int *x, int by, int i) { x[i] += by; }", "add")
                x = device.array(np.arange(100_000, dtype=np.int32))
                while not self._over.is_set():
                    add(x, 1, wsgrad.INDEX, grid=len(x))
                    x.copy_from(x.numpy() + 1)
                    assert (x.numpy() == np.arange(100_000) + 2 * (self.rounds + 1)).all()
                    self.rounds += 1
        except BaseException as error:
            self.error = error
            raise

    def work(self, rounds=5):
        """Wait until it has done so many more rounds."""
        wanted = self.rounds + rounds
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.rounds < wanted:
            assert self.error is None
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(scope="module")
def bystander(server):
    with Bystander(server.ready["url"]) as bystander:
        yield bystander


class Raw:
    """A client that keeps to no rule behind the opening handshake; it reads nothing unless it is told to."""

    def __init__(self, server, *, hello=True):
        host, port = server.ready["url"].removeprefix("ws://").partition("/")[0].split(":")
        token = server.ready["url"].partition("#token=")[2]
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
        self.connection = Connection(client=True, bulk_kinds=m.BULK_KINDS)
        lines = ["GET /v1/client HTTP/1.1", f"Host: {host}:{port}", f"Authorization: Bearer {token}"]
        lines += ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
        lines += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol: wsgrad.v1", "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += self.socket.recv(1)
        assert answer.startswith(b"HTTP/1.1 101")
        if hello:
            self.send(m.Hello(1, "flood", None, 0, {}))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, message, bulk=None):
        for part in self.connection.encode(encode(m.message_array(message)), bulk):
            self.socket.sendall(part)

    def flood(self, data, bystander, rounds=5):
        """Send the same until the bystander has done some rounds, or the server has had enough."""
        wanted = bystander.rounds + rounds
        self.socket.settimeout(0.2)
        with contextlib.suppress(ConnectionError):
            while bystander.rounds < wanted:
                assert bystander.error is None
                with contextlib.suppress(TimeoutError):
                    self.socket.send(data)
        bystander.work(2)

    def wait_closed(self):
        """Read until the server closes."""
        self.socket.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass


def test_a_reader_that_does_not_read_costs_nobody_else_anything(server, bystander):
    with Raw(server) as slow:
        slow.send(m.Open(1, "cpu", {}))
        # The id of the device is the bystander's too.
        with wsgrad.connect(server.ready["url"]) as asked:
            device = asked.devices["cpu"].id
        slow.send(m.Open(2, device, {}))
        slow.send(m.Batch(2, 1, [c.command_array(c.Alloc(1, 32 << 20))]))
        downloads = [c.command_array(c.Download(number, 1, 0, 32 << 20)) for number in range(1, 5)]
        slow.send(m.Batch(2, 2, downloads))
        bystander.work()


@pytest.mark.parametrize("hello", [False, True], ids=["before its hello", "after its hello"])
def test_a_silent_client_costs_nobody_else_anything(server, bystander, hello):
    with Raw(server, hello=hello):
        bystander.work()


FLOODS = {
    "pings of the protocol below": EMPTY_PING * 5000,
    "long pings": (b"\x89\xfd" + MASK + bytes(125)) * 400,
    "fragments without bytes": b"\x02\x80" + MASK + EMPTY_FRAGMENT * 10_000,
    "heartbeats": None,
    "messages of nothing": None,
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_little_frames_costs_nobody_else_anything(server, bystander, kind):
    with Raw(server) as flood:
        data = FLOODS[kind]
        if kind == "heartbeats":
            data = frame(m.Ping(7)) * 2000
        elif kind == "messages of nothing":
            data = frame(m.Seen(0)) * 2000
        flood.flood(data, bystander)


def frame(message):
    payload = encode(m.message_array(message))
    return bytes((0x82, 0x80 | len(payload))) + MASK + payload


def test_wrong_tokens_by_the_dozen_cost_nobody_else_anything(server, bystander):
    host, port = server.ready["url"].removeprefix("ws://").partition("/")[0].split(":")
    head = f"GET /status.json HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer wrong\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            guess = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS))
            guess.sendall(head)
        bystander.work()
        with wsgrad.connect(server.ready["url"]) as right:
            assert right.devices["cpu"].zeros(2).numpy().tolist() == [0, 0]


def test_two_thousand_idle_connections_cost_nobody_else_anything_and_are_cut_off_in_time(server, bystander):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = IDLE + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may hold only {hard} descriptors")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    host, port = server.ready["url"].removeprefix("ws://").partition("/")[0].split(":")
    before = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(IDLE):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS))
            bystander.work()
            with wsgrad.connect(server.ready["url"]) as new:
                assert new.devices["cpu"].zeros(2).numpy().tolist() == [0, 0]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(os.listdir(f"/proc/{server.process.pid}/fd")) > before + 10:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    bystander.work(2)
