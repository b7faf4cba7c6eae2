"""The trio face: every waiting method is a coroutine that checkpoints first and can be cancelled at any moment."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.lowlevel
import trio.testing
from kernels import ADD, COUNT, SPIN
from test_connect import assert_sessions, sessions

import wsgrad
from wsgrad.client.async_driver import AsyncDriver


@pytest.fixture
async def device(url):
    async with wsgrad.open_server(url) as server:
        yield server.devices["cpu"]


async def test_values_go_there_and_back(device, rng):
    for count in (0, 1, 1000, 100_000, 3_000_000):
        array = rng.random(count, np.float32)
        buffer = await device.array(array)
        assert np.array_equal(await buffer.numpy(), array)
        await buffer.copy_from(array * 2)
        target = np.empty_like(array)
        await buffer.copy_to(target)
        assert np.array_equal(target, array * 2)


async def test_programs_run(device):
    y, x = device.zeros(8), await device.array(np.arange(8, dtype=np.float32))
    add = device.program(ADD, "add", writes=(0,))
    await add.ready()
    add(y, x, 2.0, 8)
    add(y[4:], x[:4], 1.0, 4)
    await device.synchronize()
    assert (await y.numpy()).tolist() == [0, 2, 4, 6, 8, 11, 14, 17]
    assert 0 <= await add.timed(y, x, 1.0, 8) < 1


async def test_what_was_issued_runs_without_anybody_waiting(device, url):
    counter = device.zeros(1, np.int32)
    device.program(COUNT, "count")(counter)
    queue = device._queue
    with trio.fail_after(5):
        while queue.pending.acknowledged < queue._next - 1 or queue.dirty:  # noqa: ASYNC110
            await trio.sleep(0.001)


async def test_every_waiting_method_checkpoints_before_it_changes_anything(device):
    buffer = await device.array(np.arange(4, dtype=np.int32))
    program = device.program(COUNT, "count")
    await program.ready()
    await device.synchronize()
    issued = device._queue._next
    calls = [
        buffer.numpy,
        lambda: buffer.copy_to(np.empty(4, np.int32)),
        lambda: buffer.copy_from(np.zeros(4, np.int32)),
        lambda: device.array(np.zeros(4)),
        device.synchronize,
        device.flush,
        device.server.flush,
        device.server.synchronize,
        program.ready,
        lambda: program.timed(buffer),
        device.reopen,
        device.close,
    ]
    for call in calls:
        with trio.CancelScope() as scope:
            scope.cancel()
            await call()
        assert scope.cancelled_caught
        assert device._queue._next == issued
    assert (await buffer.numpy()).tolist() == [0, 1, 2, 3]
    for call in calls:
        with trio.testing.assert_checkpoints():
            await call()


async def test_a_cancelled_wait_is_withdrawn_and_the_session_lives(device, rng):
    array = rng.integers(0, 256, 6 << 20, np.uint8)
    buffer = await device.array(array)
    target = np.empty_like(array)
    for n in range(60):
        with trio.move_on_after(n * 0.0002):
            await (buffer.copy_to(target) if n % 2 else buffer.copy_from(array))
        target[:] = 0
        await trio.lowlevel.checkpoint()
        assert not target.any()
    await buffer.copy_from(array)
    await buffer.copy_to(target)
    assert np.array_equal(target, array)


async def test_tasks_share_a_session(device):
    add = device.program(ADD, "add", writes=(0,))

    async def work(n):
        y = await device.array(np.full(5000 * n, n, np.float32))
        x = await device.array(np.ones(5000 * n, np.float32))
        for _ in range(20):
            add(y, x, 1.0, 5000 * n)
            await trio.lowlevel.checkpoint()
        assert (await y.numpy() == n + 20).all()

    async with trio.open_nursery() as nursery:
        for n in range(1, 9):
            nursery.start_soon(work, n)


async def test_too_much_that_is_unsent_is_refused_by_name_and_flush_helps(device):
    spin = device.program(SPIN, "spin")
    await spin.ready()
    buffer = device.zeros(30_000, np.uint8)
    data = np.ones(30_000, np.uint8)
    spin(np.int64(100_000_000))
    buffer[:1].fill(1)

    def launch_for_ever():
        while True:
            spin(np.int64(0))

    with pytest.raises(wsgrad.LimitExceeded, match=r"await server\.flush\(\)"):
        launch_for_ever()
    await device.server.flush()
    spin(np.int64(0))
    for _ in range(1000):  # what waits makes room by itself
        await buffer.copy_from(data)
    assert (await buffer.numpy() == 1).all()


async def test_errors_come_bare_and_once(url):
    async def fail_twice():
        async with wsgrad.open_server(url) as server:
            device = server.devices["cpu"]
            x = device.zeros(8)
            device.program(ADD, "add")(x, x, 1.0, 8)
            with pytest.raises(wsgrad.LaunchError, match="add"):
                await x.numpy()
            assert (await x.numpy()).tolist() == [0] * 8
            buffers.append(x)
            device.program(ADD, "add")(x, x, 1.0, 8)

    buffers = []
    with pytest.raises(wsgrad.LaunchError, match="add"):
        await fail_twice()
    with pytest.raises(KeyError):
        async with wsgrad.open_server(url):
            raise KeyError("mine")
    with pytest.raises(wsgrad.ConnectionLost, match="closed"):
        await buffers[0].numpy()


async def test_a_cancelled_session_is_closed_on_the_server_too(url):
    for _ in range(10):
        before = await trio.to_thread.run_sync(sessions, url)
        with trio.CancelScope() as scope:
            async with wsgrad.open_server(url) as server:
                server.devices["cpu"].zeros(3)
                scope.cancel()
                await trio.sleep(1)
        assert scope.cancelled_caught
        assert server.closed
        await trio.to_thread.run_sync(assert_sessions, url, before)
    with trio.CancelScope() as scope:
        scope.cancel()
        async with wsgrad.open_server(url):
            pass
    assert scope.cancelled_caught


async def test_a_cancelled_block_may_use_its_session_until_it_has_left(url):
    before = await trio.to_thread.run_sync(sessions, url)
    with trio.CancelScope() as scope:
        async with wsgrad.open_server(url) as server:
            x = await server.devices["cpu"].array([1, 2])
            try:
                scope.cancel()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    assert (await x.numpy()).tolist() == [1, 2]
    await trio.to_thread.run_sync(assert_sessions, url, before)


async def test_a_session_that_is_lost_before_it_is_welcomed_is_not_waited_for(url, monkeypatch):
    async def lose(self, connection, hello):
        self.opened.set()
        await trio.aclose_forcefully(connection._stream)
        return "it broke"

    monkeypatch.setattr(AsyncDriver, "_serve", lose)
    with trio.fail_after(5), pytest.raises(wsgrad.ConnectionLost, match="before it was welcomed"):
        async with wsgrad.open_server(url):
            pass


async def test_an_embedded_server_ends_with_the_session():
    async with wsgrad.open_server() as server:
        assert (await (await server.devices[0].array([1, 2])).numpy()).tolist() == [1, 2]
        process = server._embedded._process
    assert process.returncode is not None


async def test_the_blocking_face_works_inside_a_trio_program(url):
    with wsgrad.connect(url) as server:
        assert server.devices["cpu"].array(np.arange(4)).numpy().sum() == 6


async def test_no_server_and_a_wrong_token_are_said_by_name(url):
    with pytest.raises(wsgrad.ConnectionLost, match="refused"):
        async with wsgrad.open_server("ws://127.0.0.1:1"):
            pass
    with pytest.raises(wsgrad.Unauthorized):
        async with wsgrad.open_server(url, token="wrong"):
            pass


def test_ctrl_c_at_any_moment_reaches_the_program_and_leaves_the_session_usable(url):
    program = Path(__file__).with_name("interrupted_trio.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program), url, "100", "3"], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert done.stdout == "interrupted 100 times\n"


def test_ctrl_c_while_it_connects_ends_the_program():
    program = """
import sys, trio, wsgrad

async def main():
    async with wsgrad.open_server(sys.argv[1]):
        pass

trio.run(main)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", program, url], stderr=subprocess.PIPE, text=True) as process:
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)  # the handshake has begun, and nobody answers it
                process.send_signal(signal.SIGINT)
                try:
                    _, said = process.communicate(timeout=30)
                finally:
                    process.kill()
    assert said.rstrip().endswith("KeyboardInterrupt")
