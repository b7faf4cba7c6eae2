"""How a real server process stops while a device works: results are delivered, endless work is not waited for."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from heart import SPIN, Client
from server_process import environment, running_server

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.frames import Closed
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.trio_driver import TrioConnection

SLOW = "void slow(int *p, long n) { for (volatile long i = 0; i < n; i++) ; *p = 7; }"
ROUNDS = 400_000_000  # about half a second


@asynccontextmanager
async def opened(ready):
    """A session with one queue on the server's device."""
    stream = await trio.open_tcp_stream("127.0.0.1", ready["port"])
    leftover = await open_websocket(
        stream,
        host=f"127.0.0.1:{ready['port']}",
        path="/v1/client",
        headers=[("Authorization", f"Bearer {ready['token']}")],
        subprotocols=["wsgrad.v1"],
    )
    client = Client(TrioConnection.from_stream(stream, client=True, max_bulk=1 << 20, leftover=leftover))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            client.connection.send(encode(m.message_array(m.Hello(1, "test", None, 0, {}))))
            client.welcome, _ = await client.next(m.Welcome)
            client.connection.link = client.link
            yield client, await client.open(client.welcome.info["devices"][0]["id"])
            nursery.cancel_scope.cancel()


async def until_it_stops_accepting(port):
    while True:
        try:
            (await trio.open_tcp_stream("127.0.0.1", port)).socket.close()
        except OSError:
            return


async def exit_status(server):
    return await trio.to_thread.run_sync(server.process.wait, 20)


async def test_a_running_command_ends_and_its_result_arrives_before_the_server_stops(tmp_path):
    with running_server(tmp_path) as server:
        async with opened(server.ready) as (client, queue):
            queue.batch(c.Alloc(1, 4))
            queue.program(1, SLOW, "slow", "pq")
            await queue.done()
            queue.batch(c.Launch(1, None, None, [1, ROUNDS], False))
            read = queue.batch(c.Read(1, 0, 4))
            await client.open(client.welcome.info["devices"][0]["id"], number=2)  # once it answers, it has the launch
            server.process.send_signal(signal.SIGTERM)
            message, data = await client.next(m.ReadData)
            assert (message.number, data) == (read, (7).to_bytes(4, "little"))
            assert await client.wait_closed() == Closed(1001, "the server is stopping")
            assert await exit_status(server) == 0


@pytest.mark.parametrize("signals", [1, 2])
async def test_endless_work_is_not_waited_for_beyond_five_seconds_or_a_second_signal(signals, tmp_path):
    with running_server(tmp_path) as server:
        async with opened(server.ready) as (_, queue):
            queue.batch(c.Alloc(1, 4))
            queue.program(1, SPIN, "spin", "p")
            await queue.done()
            queue.batch(c.Launch(1, None, None, [1], False))
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            await until_it_stops_accepting(server.ready["port"])
            if signals == 2:
                server.process.send_signal(signal.SIGTERM)
            assert await exit_status(server) == 0
            assert time.monotonic() - start < (3.0 if signals == 2 else 9.0)
        with socket.create_server(("127.0.0.1", server.ready["port"])):
            pass


def test_a_signal_that_comes_while_the_server_stops_by_itself_does_not_change_its_exit_status(tmp_path):
    for attempt in range(3):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with running_server(directory) as server:
            server.reader.close()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0


def zygote_of(pid):
    """The process id of a server's zygote, as soon as there is one."""
    while True:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                if b"wsgrad.devices.zygote" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        time.sleep(0.001)


def test_a_signal_to_the_whole_group_while_the_server_starts_leaves_the_zygote_to_it(tmp_path):
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0, env=environment())
    try:
        zygote = zygote_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(20)
    finally:
        process.kill()
        process.wait()
    assert b"starting another" not in (tmp_path / "log").read_bytes()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{zygote}").exists():  # it follows the server; whoever inherits it collects it in their own time
        assert time.monotonic() < deadline
        time.sleep(0.01)
