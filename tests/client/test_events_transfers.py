"""Copies between devices and events, as users see them: on one server and on several, in both faces, with errors."""

import gc
import random
import threading
import time

import numpy as np
import pytest
import trio
from graph_servers import ADD, CRASH, SPIN, embedded, ints
from real_servers import running

import wsgrad
from wsgrad.client.events import Known
from wsgrad.client.pending import Pending

N = 700_000  # int32: 2.8 MB, three chunks


@pytest.fixture(scope="module")
def urls():
    """Two servers that may dial each other, and one that may dial nobody."""
    devices = ("--device", "cpu*3")
    with (
        running(*devices, "--name", "first") as first,
        running(*devices, "--name", "second") as second,
        running(*devices, "--name", "alone", "--allow-peer", "elsewhere:1") as alone,
    ):
        yield first, second, alone


@pytest.fixture
def server(urls):
    with wsgrad.connect(urls[0]) as server:
        yield server


def test_a_copy_between_devices_takes_what_was_there_when_it_was_issued(server):
    a, b, _ = server.devices
    data = np.arange(N, dtype=np.int32)
    x, y = a.array(data), b.empty(N, np.int32)
    assert y.copy_from(x) is None
    x.fill(7)
    np.testing.assert_array_equal(y.numpy(), data)
    np.testing.assert_array_equal(x.numpy(), np.full(N, 7, np.int32))
    # Views, of one element and of none.
    y[3:4].copy_from(x[:1])
    y[5:5].copy_from(x[:0])
    np.testing.assert_array_equal(y[:6].numpy(), ints(0, 1, 2, 7, 4, 5))


def test_a_copy_never_waits_for_the_devices(server):
    a, b, _ = server.devices
    spin = a.program(SPIN, "spin")
    x, y = a.empty(1, np.int32), b.empty(1, np.int32)
    spin(x, np.int64(1))
    a.synchronize()
    spin(x, np.int64(400_000_000))
    start = time.monotonic()
    y.copy_from(x)
    a.signal()
    assert time.monotonic() - start < 0.1
    np.testing.assert_array_equal(y.numpy(), ints(2))


def test_copies_in_both_directions_by_two_threads_do_not_hold_each_other_up(server):
    a, b, _ = server.devices
    x, y = a.array(np.ones(2 * N, np.int32)), b.array(np.ones(2 * N, np.int32))

    def run(target, source):
        for _ in range(25):
            target.copy_from(source)

    threads = [threading.Thread(target=run, args=pair) for pair in ((x, y), (y, x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.synchronize(timeout=60)


def test_an_event_orders_two_devices_and_may_be_waited_for_by_the_program(server):
    a, b, c = server.devices
    spin = a.program(SPIN, "spin")
    x = a.empty(1, np.int32)
    spin(x, np.int64(200_000_000))
    event = a.signal()
    assert not event.done
    assert "pending" in repr(event)
    for device in (a, b, c):
        device.wait(event)
        device.wait(event)
    y = b.empty(1, np.int32)
    y.fill(3)
    np.testing.assert_array_equal(y.numpy(), ints(3))
    assert event.done
    event.wait()
    b.synchronize()


def test_a_wait_for_an_event_can_be_given_up(server):
    a = server.devices[0]
    spin = a.program(SPIN, "spin")
    x = a.empty(1, np.int32)
    spin(x, np.int64(300_000_000))
    event = a.signal()
    with pytest.raises(TimeoutError):
        event.wait(timeout=0.01)
    event.wait()
    assert event.done


def test_events_are_given_back_once_nobody_needs_them(server):
    a, b, _ = server.devices
    x = b.empty(1, np.int32)
    for _ in range(1000):
        b.wait(a.signal())
        x.fill(1)
    gc.collect()
    server.synchronize()
    server.flush()
    assert not server._session.events._going
    assert not server._session.events.dropped


@pytest.mark.parametrize("how", ["compile", "launch", "crash", "spin"])
def test_an_error_is_raised_on_every_device_that_waits_for_it(urls, how):
    source, entry = {"crash": (CRASH, "crash"), "compile": ("void broken(", "broken"), "launch": (ADD, "add")}.get(
        how, (SPIN, "spin")
    )
    with embedded(device="cpu*3", launch_seconds="0.3") as own, wsgrad.connect(own.url) as server:
        a, b, c = server.devices
        x, y, z = a.empty(4, np.int32), b.empty(4, np.int32), c.empty(4, np.int32)
        bad = a.program(source, entry, name="bad")
        if how == "launch":
            bad(x, x, 1, 1)
        elif how == "spin":
            bad(x, np.int64(1 << 60))
        else:
            bad(x)
        event = a.signal()
        b.wait(event)
        through = b.signal()
        z.copy_from(x)
        errors = []
        for call in (event.wait, b.synchronize, through.wait, z.numpy):
            with pytest.raises(wsgrad.DeviceError) as raised:
                call()
            errors.append(raised.value)
        expected = {"compile": wsgrad.CompileError, "launch": wsgrad.LaunchError, "spin": wsgrad.Timeout}
        for error in errors:
            assert type(error) is expected.get(how, wsgrad.DeviceLost)
            assert str(error) == str(errors[0])
        for error in errors[1:]:
            assert error.details["cause"] == a.id
        # Only the device that failed is lost, if any.
        y.fill(1)
        z.fill(2)
        np.testing.assert_array_equal(y.numpy() + z.numpy(), ints(3, 3, 3, 3))
        if how in ("crash", "spin"):
            with pytest.raises(wsgrad.DeviceLost):
                a.signal()
            a.reopen()
            x = a.empty(4, np.int32)
        z.copy_from(x)
        b.wait(a.signal())
        b.synchronize()
        np.testing.assert_array_equal(z.numpy(), ints(0, 0, 0, 0))


def test_a_device_that_is_closed_leaves_nobody_waiting(server):
    a, b, c = server.devices
    spin = a.program(SPIN, "spin")
    x, y = a.empty(4 * N, np.int32), b.empty(4 * N, np.int32)
    spin(x, np.int64(100_000_000))
    y.copy_from(x)
    event = a.signal()
    c.wait(event)
    a.close()
    for device in (b, c):
        with pytest.raises(wsgrad.DeviceError, match="closed"):
            device.synchronize()
    with pytest.raises(wsgrad.DeviceError, match="closed"):
        event.wait()
    np.testing.assert_array_equal(y[:2].numpy(), ints(0, 0))


def test_a_freed_or_foreign_buffer_is_refused_before_anything_is_issued(server):
    a, b, _ = server.devices
    x, y = a.empty(4, np.int32), b.empty(4, np.int32)
    x.free()
    with pytest.raises(wsgrad.DeviceError):
        y.copy_from(x)
    with pytest.raises(TypeError):
        y.copy_from(a.empty(4, np.float32))
    y.fill(1)
    np.testing.assert_array_equal(y.numpy(), ints(1, 1, 1, 1))


# -- several servers


def test_copies_and_events_between_two_servers(urls):
    with wsgrad.connect(urls[0]) as first, wsgrad.connect(urls[1]) as second:
        a, b = first.devices[0], second.devices[1]
        data = np.arange(N, dtype=np.int32)
        x, y, z = a.array(data), b.empty(N, np.int32), a.empty(N, np.int32)
        for _ in range(3):
            y.copy_from(x)
            z.copy_from(y)
        x.fill(1)
        np.testing.assert_array_equal(z.numpy(), data)
        event = a.signal()
        b.wait(event)
        b.wait(event)
        a.wait(b.signal())
        b.synchronize()
        a.synchronize()
        assert first.statistics["relayed"] == second.statistics["relayed"] == 0
        assert not first.relay_reasons


def test_without_a_link_copies_go_through_the_client_and_are_counted_with_the_reason(urls):
    with wsgrad.connect(urls[2]) as alone, wsgrad.connect(urls[0]) as first:
        a, b = alone.devices[0], first.devices[0]
        data = np.arange(4 * N, dtype=np.int32)
        x, y = a.array(data), b.empty(4 * N, np.int32)
        y.copy_from(x)
        y.copy_from(x)
        np.testing.assert_array_equal(y.numpy(), data)
        assert alone.statistics["relayed"] == 2
        [(address, reason)] = alone.relay_reasons.items()
        assert address == first._address
        assert "--allow-peer" in reason
        y.fill(1)
        x.copy_from(y)  # the other way there is a link
        np.testing.assert_array_equal(x[:3].numpy(), ints(1, 1, 1))
        assert first.statistics["relayed"] == 0


@pytest.mark.parametrize("pair", [(0, 1), (2, 0)])
def test_errors_cross_servers(urls, pair):
    with wsgrad.connect(urls[pair[0]]) as first, wsgrad.connect(urls[pair[1]]) as second:
        a, b, c = first.devices[0], second.devices[0], second.devices[1]
        x, y, z = a.empty(4, np.int32), b.empty(4, np.int32), c.empty(4, np.int32)
        y.copy_from(x)
        b.synchronize()
        crash = a.program(CRASH, "crash", name="bad")
        crash(x)
        c.wait(a.signal())
        y.copy_from(x)
        for device in (b, c):
            with pytest.raises(wsgrad.DeviceLost, match="bad") as raised:
                device.synchronize()
            assert raised.value.details["cause"] == a.id
        with pytest.raises(wsgrad.DeviceLost):
            a.synchronize()
        y.fill(1)
        z.copy_from(y)
        np.testing.assert_array_equal(z.numpy(), ints(1, 1, 1, 1))


@pytest.mark.parametrize("pair", [(0, 1), (2, 0)])
def test_a_session_that_ends_fails_what_others_expect_of_it(urls, pair):
    first, second = wsgrad.connect(urls[pair[0]]), wsgrad.connect(urls[pair[1]])
    with second:
        a, b, c = first.devices[0], second.devices[0], second.devices[1]
        spin = a.program(SPIN, "spin")
        x, y = a.empty(8 * N, np.int32), b.empty(8 * N, np.int32)
        y.copy_from(x)
        b.synchronize()
        spin(x, np.int64(1 << 60))
        y.copy_from(x)
        c.wait(a.signal())
        first.flush()
        first._end()
        for device in (b, c):
            with pytest.raises(wsgrad.ConnectionLost):
                device.synchronize(timeout=30)
        y.fill(1)
        np.testing.assert_array_equal(y[:2].numpy(), ints(1, 1))


def test_a_ring_over_two_servers_goes_round_without_a_call_that_waits(urls):
    with wsgrad.connect(urls[0]) as first, wsgrad.connect(urls[1]) as second:
        devices = [first.devices[0], second.devices[0], first.devices[1], second.devices[1]]
        programs = [device.program(ADD, "add", writes=[0]) for device in devices]
        ones = [device.array(ints(1)) for device in devices]
        places = [device.empty(1, np.int32) for device in devices]
        rounds = 100
        for _ in range(rounds):
            for index, device in enumerate(devices):
                programs[index](places[index], ones[index], 1, 1)
                after = (index + 1) % len(devices)
                devices[after].wait(device.signal())
                places[after].copy_from(places[index])
        np.testing.assert_array_equal(places[0].numpy(timeout=60), ints(4 * rounds))


def test_random_programs_over_three_devices_of_two_servers_do_what_numpy_does(urls):
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    with wsgrad.connect(urls[0]) as first, wsgrad.connect(urls[1]) as second:
        devices = [first.devices[0], first.devices[1], second.devices[0]]
        size = 300_000
        add = [device.program(ADD, "add", writes=[0]) for device in devices]
        buffers = [[device.empty(size, np.int32) for _ in range(2)] for device in devices]
        model = [[np.zeros(size, np.int32) for _ in range(2)] for _ in devices]
        for _ in range(150):
            at, to = rng.sample(range(3), 2)
            i, j = rng.randrange(2), rng.randrange(2)
            start = rng.randrange(size)
            stop = rng.randrange(start, size + 1)
            match rng.randrange(5):
                case 0:
                    k = rng.randrange(9)
                    add[at](buffers[at][0], buffers[at][1], size, k)
                    model[at][0] += k * model[at][1]
                case 1:
                    value = rng.randrange(100)
                    buffers[at][i][start:stop].fill(value)
                    model[at][i][start:stop] = value
                case 2:
                    devices[to].wait(devices[at].signal())
                case _:
                    buffers[to][j][start:stop].copy_from(buffers[at][i][start:stop])
                    model[to][j][start:stop] = model[at][i][start:stop]
        for mine, theirs in zip(buffers, model, strict=True):
            for buffer, array in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(buffer.numpy(), array, err_msg=str(seed))


# -- trio


async def test_the_trio_face_does_the_same(urls):
    async with wsgrad.open_server(urls[0]) as first, wsgrad.open_server(urls[2]) as alone:
        a, b, c = first.devices[0], first.devices[1], alone.devices[0]
        data = np.arange(N, dtype=np.int32)
        x, y, z = await a.array(data), b.empty(N, np.int32), c.empty(N, np.int32)
        await y.copy_from(x)
        await z.copy_from(y)
        event = c.signal()
        a.wait(event)
        x.fill(2)
        await event
        assert event.done
        await a.synchronize()
        np.testing.assert_array_equal(await z.numpy(), data)
        await x.copy_from(z)
        np.testing.assert_array_equal(await x.numpy(), data)
        assert alone.statistics["relayed"] == 1
        spin = a.program(SPIN, "spin")
        spin(x, np.int64(200_000_000))
        event = a.signal()
        with trio.move_on_after(0.01) as scope:
            await event.wait()
        assert scope.cancelled_caught
        await event.wait()


# -- the bookkeeping alone


def test_an_event_is_not_given_back_before_the_server_has_met_who_waits_for_it():
    class Queue:
        gone = False
        pending = Pending()

    event, queue = Known(1), Queue()
    event.settled = True
    event.named(queue, 5)
    assert not event.may_go
    queue.pending.acknowledged = 5
    assert event.may_go
    queue.pending.acknowledged = 0
    queue.gone = True
    assert event.may_go
