"""`cache=True` as users see it: both faces against a real server process, cut connections, full disks, and off."""

import resource
import subprocess
import sys
import warnings

import numpy as np
import pytest
import trio
from heart import eventually
from server_process import environment, running_server
from test_resume import Proxy

import wsgrad
from wsgrad.errors import DeviceError, WsgradError

MIB = 1 << 20
LARGE = "void double_it(float *y, int n) { for (int i = 0; i < n; i++) y[i] *= 2; }\n//" + "x" * 5000
HUGE = LARGE + "y" * 70_000


def values(nbytes, seed=1):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def blobs(tmp_path):
    return tmp_path / "blobs"


@pytest.fixture
def process(tmp_path, blobs):
    with running_server(tmp_path, "--cache-dir", str(blobs), "--name", "box", "--cpu-threads", "1") as process:
        yield process


def files(blobs):
    return {path.name for path in blobs.iterdir() if len(path.name) == 64} if blobs.exists() else set()


def wait_for(condition):
    trio.run(eventually, condition)


def test_a_second_session_sends_nothing(process, blobs):
    x, small = values(9 * MIB + 5), values(MIB - 1)
    for expected in ({"cache_hits": 0, "cache_misses": 1}, {"cache_hits": 1, "cache_misses": 0}):
        with wsgrad.connect(process.ready["url"], cache=True) as server:
            device = server.devices[0]
            assert (device.array(x, timeout=30).numpy() == x).all()
            assert (device.array(small).numpy() == small).all()
            assert dict(server.statistics).items() >= expected.items()
        wait_for(lambda: len(files(blobs)) == 1)


def test_what_lies_scattered_is_found_too(process, blobs):
    x = values(16 * MIB).reshape(4096, 4096)
    scattered = np.asfortranarray(x)[:, ::2]
    with wsgrad.connect(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        assert (device.array(scattered).numpy() == scattered).all()
        wait_for(lambda: len(files(blobs)) == 1)
        buffer = device.zeros(scattered.shape, np.uint8)
        buffer.copy_from(np.ascontiguousarray(scattered))
        assert (buffer.numpy() == scattered).all()
        assert server.statistics["cache_hits"] == 1


def test_many_arrays_go_in_one_call_whatever_is_cached(process, blobs):
    arrays = [values(nbytes, seed) for seed, nbytes in enumerate((3 * MIB, 0, 7, 40_000, MIB, 900_000, 2 * MIB))]
    with wsgrad.connect(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        device.array(arrays[4])
        wait_for(lambda: len(files(blobs)) == 1)
        buffers = device.arrays(arrays, timeout=30)
        assert dict(server.statistics).items() >= {"cache_hits": 1, "cache_misses": 3}.items()
        wait_for(lambda: len(files(blobs)) == 3)
        buffers += device.arrays(arrays[::-1], timeout=30)
        assert server.statistics["cache_hits"] == 4
        for buffer, array in zip(buffers, arrays + arrays[::-1], strict=True):
            assert (buffer.numpy() == array).all()
        with pytest.raises(TypeError):
            device.arrays([arrays[0], object()])
        assert device.arrays([]) == []


def test_arrays_need_no_cache(process):
    arrays = [values(3 * MIB), np.arange(5.0), values(100_000, 3)]
    with wsgrad.connect(process.ready["url"]) as server:
        for buffer, array in zip(server.devices[0].arrays(arrays), arrays, strict=True):
            assert (buffer.numpy() == array).all()


def test_an_error_of_a_cached_upload_is_raised_and_the_next_one_works(tmp_path, blobs):
    x = values(6 * MIB)
    limits = ("--max-session-memory", "8MiB", "--cache-dir", str(blobs))
    with running_server(tmp_path, *limits) as process, wsgrad.connect(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        kept = device.array(x)
        with pytest.raises(MemoryError):
            device.array(values(6 * MIB, 2))
        with pytest.raises(MemoryError):
            device.arrays([values(MIB, 3), values(6 * MIB, 4), values(MIB, 5)])
        kept.copy_from(x[::-1].copy())
        assert (kept.numpy() == x[::-1]).all()


def test_programs_travel_once_and_come_back_after_a_reopening(process):
    with wsgrad.connect(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        for source in (LARGE, HUGE):
            double = device.program(source, "double_it")
            x = device.array(np.arange(4, dtype=np.float32))
            double(x, 4)
            double(x, np.int64(4))  # another signature
            assert x.numpy().tolist() == [0, 4, 8, 12]
            device.reopen()
            x = device.array(np.arange(4, dtype=np.float32))
            double(x, 4)
            assert x.numpy().tolist() == [0, 2, 4, 6]


def test_a_reopening_gives_up_what_is_on_its_way(process):
    x = values(64 * MIB)
    with wsgrad.connect(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        with pytest.raises(TimeoutError):
            device.array(x, timeout=0.001)
        device.reopen(timeout=30)
        assert (device.array(x[: 2 * MIB], timeout=30).numpy() == x[: 2 * MIB]).all()


def test_a_full_disk_costs_only_the_cache(process, blobs):
    x = values(5 * MIB)
    with wsgrad.connect(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        device.synchronize()
        # What a full disk does to a file, to all files of the server: they can't grow beyond this.
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (2 * MIB, resource.RLIM_INFINITY))
        assert (device.array(x).numpy() == x).all()
        wait_for(lambda: "can't be cached" in process.log())
        assert list(blobs.iterdir()) == []
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        device.array(x)
        wait_for(lambda: len(files(blobs)) == 1)
        assert (device.array(x).numpy() == x).all()
        assert server.statistics["cache_hits"] == 1


async def test_the_trio_face_asks_as_well(process, blobs):
    x = values(4 * MIB)
    async with wsgrad.open_server(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        await device.array(x)
        await eventually(lambda: len(files(blobs)) == 1)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(device.array, x)
        [first, second] = await device.arrays([x, x[::-1]])
        await first.copy_from(x)
        assert (await second.numpy() == x[::-1]).all()
        assert dict(server.statistics).items() >= {"cache_hits": 5, "cache_misses": 2}.items()


async def test_a_cancelled_cached_upload_leaves_the_queue_usable(process, blobs):
    x = values(48 * MIB)
    async with wsgrad.open_server(process.ready["url"], cache=True) as server:
        device = server.devices[0]
        await device.array(x)
        await eventually(lambda: len(files(blobs)) == 1)
        buffer = device.zeros(x.shape, np.uint8)
        y = values(48 * MIB, 2)
        for seconds in (0.02, 0.06, 0.1, 0.15, 0.2):
            for source in (x, y):
                with trio.move_on_after(seconds):
                    await buffer.copy_from(source)
        await buffer.copy_from(x)
        assert (await buffer.numpy() == x).all()


@pytest.mark.parametrize("cuts", [[1 << 20, 3 << 20], [100_000, 4_500_000], [4000, 2500]])
async def test_a_cut_in_the_middle_sends_every_byte_once(process, blobs, cuts):
    x, y = values(5 * MIB), values(4 * MIB + 3, 2)
    port = int(process.ready["url"].partition("#")[0].rstrip("/").rpartition(":")[2])
    async with trio.open_nursery() as nursery:
        proxy = Proxy(port, cuts)
        listeners = await nursery.start(trio.serve_tcp, proxy.handle, 0)
        through = process.ready["url"].replace(str(port), str(listeners[0].socket.getsockname()[1]))
        async with wsgrad.open_server(through, cache=True) as server:
            device = server.devices[0]
            first = await device.array(x)
            second = await device.array(y)
            await eventually(lambda: len(files(blobs)) == 2)
            again = await device.arrays([x, y, x])
            for buffer, array in zip([first, second, *again], [x, y, x, y, x], strict=True):
                assert (await buffer.numpy() == array).all()
            assert dict(server.statistics).items() >= {"cache_hits": 3, "cache_misses": 2}.items()
            assert proxy.connections == len(cuts) + 1
        nursery.cancel_scope.cancel()


def test_nothing_is_hashed_or_even_loaded_when_off(process, blobs):
    script = f"""if True:
        import sys, numpy, wsgrad
        with wsgrad.connect({process.ready["url"]!r}) as server:
            server.devices[0].array(numpy.ones(5 << 20, numpy.uint8)).numpy()
        print("blake3" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout == "False\n", done.stderr

    def loaded():
        with open(f"/proc/{process.process.pid}/maps") as maps:
            return "blake3" in maps.read()

    assert not loaded()
    assert not blobs.exists()
    with wsgrad.connect(process.ready["url"], cache=True) as server:
        server.devices[0].array(values(MIB))
    assert loaded()


def test_a_server_without_a_cache_is_named(tmp_path):
    with running_server(tmp_path, "--cache-size", "0") as process:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with wsgrad.connect(process.ready["url"], cache=True) as server:
                assert (server.devices[0].array(values(2 * MIB)).numpy() == values(2 * MIB)).all()
                assert server.info["cache"] is False
                assert server.statistics["cache_misses"] == 0
        assert ["cache=True has no effect" in str(warning.message) for warning in caught] == [True]
        assert caught[0].filename == __file__


def test_a_missing_package_is_named(process, monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(WsgradError, match=r"pip install 'wsgrad\[cache\]'") as caught:
        wsgrad.connect(process.ready["url"], cache=True)
    assert not isinstance(caught.value, DeviceError)
