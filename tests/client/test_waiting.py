"""Waiting in the blocking face: time-outs, threads that share a session, Ctrl-C at any moment, what never waits."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from kernels import ADD, COUNT, SPIN

import wsgrad


@pytest.fixture
def busy(device):
    """Makes the device busy for about half a second."""
    spin = device.program(SPIN, "spin")
    spin.ready()
    per_second = 10_000_000 / max(spin.timed(np.int64(10_000_000)), 1e-4)

    def make_busy(seconds=0.5):
        spin(np.int64(int(per_second * seconds)))

    return make_busy


def test_a_wait_that_takes_too_long_is_withdrawn_and_the_session_lives(device, busy):
    x = device.array(np.arange(4, dtype=np.int32))
    big = device.zeros(3 << 20, np.uint8)
    values, target = np.ones(3 << 20, np.uint8), np.zeros(3 << 20, np.uint8)
    program = device.program(COUNT, "count")
    waits = [
        x.numpy,
        device.synchronize,
        lambda timeout: x.copy_to(np.empty(4, np.int32), timeout=timeout),
        lambda timeout: big.copy_from(values, timeout=timeout),
        lambda timeout: big.copy_to(target, timeout=timeout),
        lambda timeout: device.array(values, timeout=timeout),
        lambda timeout: program.timed(x, timeout=timeout),
    ]
    busy()
    for wait in waits:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"0\.02 s.*the session lives") as caught:
            wait(timeout=0.02)
        assert not isinstance(caught.value, wsgrad.Timeout)
        assert time.monotonic() - start < 0.4
    assert x.numpy().tolist() == [1, 1, 2, 3]
    big.copy_from(values)
    big.copy_to(target)
    assert target.all()


def test_a_time_out_that_does_not_expire_changes_nothing(device):
    assert device.array([1, 2], timeout=10).numpy(timeout=10).tolist() == [1, 2]
    device.synchronize(timeout=10)
    device.flush(timeout=10)
    for long in (1e7, 1e30, float("inf")):
        assert device.array([1, 2], timeout=long).numpy(timeout=long).tolist() == [1, 2]


def test_a_time_out_that_is_no_number_is_refused_before_anything_is_issued(device):
    with pytest.raises(ValueError, match="timeout"):
        device.array([1, 2], timeout=float("nan"))
    device.synchronize()


def test_nothing_but_waiting_waits(device, busy):
    x, program = device.zeros(1000), device.program(ADD, "add", writes=(0,))
    device.synchronize()
    busy(1.0)
    start = time.monotonic()
    y = device.empty_like(x)
    program(y, x, 1.0, 1000)
    y[5:].fill(2)
    y.copy_from(x)
    y.copy_from(np.zeros(1000, np.float32))
    device.program(COUNT, "count")
    y.free()
    device.flush()
    assert time.monotonic() - start < 0.5


def test_commands_run_without_anybody_waiting(device):
    x = device.zeros(1, np.int32)
    device.program(COUNT, "count")(x)
    queue = device._queue
    deadline = time.monotonic() + 5
    while queue.dirty or queue.outbox or queue.pending.acknowledged < queue._next - 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_hundred_launches_and_a_read_take_one_round_trip(url):
    """Counted in how often the caller waits for anything."""
    with wsgrad.connect(url) as server:
        device = server.devices["cpu"]
        x, count = device.zeros(1, np.int32), device.program(COUNT, "count")
        count.ready()
        device.synchronize()
        polls = []
        original = server._driver.unlocked

        def unlocked(function, *arguments):
            if threading.current_thread() is threading.main_thread():
                polls.append(1)
            return original(function, *arguments)

        server._driver.unlocked = unlocked
        for _ in range(100):
            count(x)
        assert not polls
        assert x.numpy()[0] == 100
        assert 1 <= len(polls) <= 3  # its answer may come in pieces


def test_threads_share_a_session(device, rng):
    add = device.program(ADD, "add", writes=(0,))
    counter, count = device.zeros(1, np.int32), device.program(COUNT, "count")
    failures = []

    def work(n):
        try:
            values = np.full(1000 * n * n, n, np.float32)
            for _ in range(10):
                y, x = device.array(values), device.array(values)
                for _ in range(50):
                    add(y, x, 1.0, len(values))
                    count(counter)
                assert (y.numpy() == 51 * n).all()
                y[3:9].fill(0)
                with device.zeros(5) as scratch:
                    assert not scratch.numpy().any()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counter.numpy()[0] == 8 * 10 * 50


def test_an_error_reaches_the_thread_that_waits_and_not_later_ones(device, busy):
    x = device.zeros(8)
    add = device.program(ADD, "add")
    busy(0.3)
    add(x, x, 1.0, 8)
    outcomes = []

    def wait():
        try:
            device.synchronize()
            outcomes.append("fine")
        except wsgrad.LaunchError:
            outcomes.append("error")

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "error" in outcomes
    device.synchronize()


def test_closing_ends_the_waits_of_other_threads(url):
    server = wsgrad.connect(url)
    device = server.devices["cpu"]
    spin = device.program(SPIN, "spin")
    spin.ready()
    spin(np.int64(3 << 30))
    ended = []

    def wait():
        with pytest.raises(wsgrad.ConnectionLost, match="closed"):
            device.synchronize()
        ended.append(time.monotonic())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(device._queue.pending._acks) < 3:
        time.sleep(0.001)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        server.close(timeout=0.05)
    for thread in threads:
        thread.join()
    assert max(ended) - start < 3


def test_bounded_memory_holds_for_what_is_not_sent(device, busy):
    busy(1.5)
    chunk = np.zeros(500_000, np.uint8)
    buffer = device.zeros(500_000, np.uint8)
    for _ in range(60):
        buffer.copy_from(chunk)
        assert device._queue.unsent_bytes < 12 << 20
    device.synchronize()


@pytest.mark.parametrize("seed", [1, 2])
def test_ctrl_c_at_any_moment_leaves_the_session_usable(url, seed):
    program = Path(__file__).with_name("interrupted.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program), url, "150", str(seed)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.stdout == "interrupted 150 times\n"


def test_a_users_own_signal_handler_runs_at_once_and_may_raise(device, busy):
    class Alarm(Exception):
        pass

    seen = []

    def note(number, frame):
        seen.append(time.monotonic())

    def refuse(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGINT, note)
    try:
        busy(0.4)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        start = time.monotonic()
        timer.start()
        device.synchronize()  # a handler that only takes a note ends no wait
        assert seen[0] - start < 0.25
        signal.signal(signal.SIGINT, refuse)
        busy(0.4)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(Alarm):
            device.synchronize()
        assert signal.getsignal(signal.SIGINT) is refuse
    finally:
        signal.signal(signal.SIGINT, before)
    assert device.array([4]).numpy() == 4


def test_a_handler_of_another_signal_that_raises_does_not_end_the_session(device, busy):
    class Alarm(Exception):
        pass

    def refuse(number, frame):
        raise Alarm

    x = device.array(np.arange(5))
    before = signal.signal(signal.SIGALRM, refuse)
    try:
        for n in range(20):
            signal.setitimer(signal.ITIMER_REAL, 0.002 + n * 0.0002)
            with pytest.raises(Alarm):
                read_for_ever(x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert x.numpy().tolist() == [0, 1, 2, 3, 4]


def read_for_ever(buffer):
    while True:
        buffer.numpy()


def test_a_call_from_a_handler_that_interrupts_a_call_is_refused_not_stuck(device):
    said, inside = [], []

    def call(number, frame):
        if inside:
            return
        inside.append(1)
        try:
            device.synchronize()
        except RuntimeError as error:
            said.append(str(error))
        finally:
            inside.clear()

    before = signal.signal(signal.SIGVTALRM, call)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            device.empty(10)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert said
    assert all("interrupted a wsgrad call" in text for text in said)
    device.synchronize()
