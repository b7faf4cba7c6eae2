"""The bytes of a tab's GPU memory are what NumPy says, at every offset and size."""

import numpy as np
import pytest
from gpu_rig import GpuRefused, b64

RANDOM = np.random.default_rng(4)


def random_bytes(nbytes):
    return RANDOM.integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [1, 3, 4, 5, 255, 4096, 4097, 70_001])
def test_what_is_written_is_read(any_gpu, nbytes):
    data = random_bytes(nbytes)
    buffer = any_gpu.array(data)
    assert np.array_equal(any_gpu.read(buffer), data)


def test_new_memory_is_zero(any_gpu):
    first = any_gpu.array(random_bytes(1 << 20))
    any_gpu.js(f"rig.runtime.release(rig.memories.get({first}))")
    for nbytes in (0, 1, 7, 1 << 20):
        assert not any_gpu.read(any_gpu.empty(nbytes)).any()


def test_writes_and_reads_at_any_place(any_gpu):
    expected = random_bytes(10_007)
    buffer = any_gpu.array(expected)
    for _ in range(25):
        nbytes = int(RANDOM.choice([1, 2, 3, 4, 5, 8, 100, 1023, 1024, 1025, 5000]))
        offset = int(RANDOM.integers(0, len(expected) - nbytes + 1))
        data = random_bytes(nbytes)
        expected[offset : offset + nbytes] = data
        any_gpu.js(f"rig.runtime.write(rig.memories.get({buffer}), {offset}, rig.bytes({b64(data)}))")
        view = any_gpu.view(buffer, offset, nbytes)
        assert np.array_equal(any_gpu.read(view), data)
    assert np.array_equal(any_gpu.read(buffer), expected)


def test_copies_at_any_place(any_gpu):
    arrays = [random_bytes(9_001), random_bytes(9_003)]
    buffers = [any_gpu.array(data) for data in arrays]
    for _ in range(25):
        target, source = RANDOM.integers(0, 2, 2)
        nbytes = int(RANDOM.choice([1, 2, 3, 4, 7, 64, 1001, 4096, 8999]))
        to, at = (int(RANDOM.integers(0, len(arrays[k]) - nbytes + 1)) for k in (target, source))
        arrays[target][to : to + nbytes] = arrays[source][at : at + nbytes].copy()
        any_gpu.js(
            f"rig.runtime.copy(rig.memories.get({buffers[target]}), {to}, "
            f"rig.memories.get({buffers[source]}), {at}, {nbytes})"
        )
    for buffer, data in zip(buffers, arrays, strict=True):
        assert np.array_equal(any_gpu.read(buffer), data)


@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
def test_fills_at_any_place(any_gpu, length):
    expected = random_bytes(5_000)
    buffer = any_gpu.array(expected)
    for offset, count in [(0, 3), (1, 1), (5, 7), (1003, 100), (4, 16), (5_000 - length, 1)]:
        pattern = random_bytes(length)
        expected[offset : offset + count * length] = np.tile(pattern, count)
        any_gpu.js(
            f"rig.runtime.fill(rig.memories.get({buffer}), {offset}, {count * length}, rig.bytes({b64(pattern)}))"
        )
    assert np.array_equal(any_gpu.read(buffer), expected)


@pytest.mark.parametrize("offset", [0, 3, 256])
def test_large_fills(gpu, offset):
    nbytes = 3 * (2 << 20) - 512
    block = random_bytes(4093)
    expected = np.resize(block, offset + nbytes + 5)
    buffer = gpu.tiled(block, len(expected))
    pattern = random_bytes(8)
    expected[offset : offset + nbytes] = np.tile(pattern, nbytes // 8)
    gpu.js(f"rig.runtime.fill(rig.memories.get({buffer}), {offset}, {nbytes}, rig.bytes({b64(pattern)}))")
    assert gpu.same(buffer, expected)


def test_zero_fills_and_overlapping_copies_of_large_memory(gpu):
    block = random_bytes(4093)
    expected = np.resize(block, (4 << 20) + 8)
    buffer = gpu.tiled(block, len(expected))
    memory = f"rig.memories.get({buffer})"
    for to, at in ((8, 0), (0, 8)):
        expected[to : to + (4 << 20)] = expected[at : at + (4 << 20)].copy()
        gpu.js(f"rig.runtime.copy({memory}, {to}, {memory}, {at}, {4 << 20})")
    expected[4096:8192] = 0
    gpu.js(f"rig.runtime.fill({memory}, 4096, 4096, new Uint8Array(4))")
    assert gpu.same(buffer, expected)


@pytest.mark.parametrize("offset", [0, 1])
def test_downloads_come_in_order_from_the_mapped_range(any_gpu, offset):
    block = random_bytes(4093)
    data = np.resize(block, (3 << 20) + 5)
    view = any_gpu.view(any_gpu.tiled(block, len(data)), offset, len(data) - offset)
    assert any_gpu.same(view, data[offset:])


def test_a_read_is_of_its_moment(gpu):
    buffer = gpu.array(np.zeros(2, np.uint32))
    got = gpu.js(
        f"""(async () => {{
          const memory = rig.memories.get({buffer});
          const reads = [];
          for (let i = 0; i < 50; i++) {{
            rig.runtime.write(memory, 4 * (i % 2), new Uint8Array(Uint32Array.of(i).buffer));
            reads.push(rig.runtime.read(memory, 0, 8));
          }}
          return (await Promise.all(reads)).map((bytes) => [...new Uint32Array(bytes.slice().buffer)]);
        }})()"""
    )
    assert got == [[i - i % 2, i - 1 + i % 2 if i else 0] for i in range(50)]


def test_many_small_reads_share_submissions(gpu):
    buffer = gpu.array(np.arange(1000, dtype=np.uint32))
    submits, values = gpu.js(
        f"""(async () => {{
          const {{ queue }} = rig.runtime.queue.device;
          let submits = 0;
          const submit = queue.submit.bind(queue);
          queue.submit = (list) => {{ submits += 1; submit(list); }};
          const memory = rig.memories.get({buffer});
          const reads = Array.from({{ length: 1000 }}, (_, i) => rig.runtime.read(memory, 4 * i, 4));
          const values = (await Promise.all(reads)).map((bytes) => new Uint32Array(bytes.slice().buffer)[0]);
          return [submits, values];
        }})()"""
    )
    assert values == list(range(1000))
    assert submits == 1


def test_memory_over_the_cap_is_refused_by_name(gpu):
    gpu.open(memory=1 << 20)
    kept = gpu.empty(1 << 19)
    with pytest.raises(GpuRefused, match="524289 bytes don't fit: 524288 of the device's 1048576 bytes") as caught:
        gpu.empty((1 << 19) + 1)
    assert caught.value.code == "OutOfMemory"
    assert caught.value.details == {"nbytes": (1 << 19) + 1, "used": 1 << 19, "limit": 1 << 20}
    gpu.js(f"rig.runtime.release(rig.memories.get({kept}))")
    assert gpu.js("rig.runtime.memoryUsed") == 0
    gpu.empty(1 << 20)


def test_a_buffer_larger_than_the_gpu_allows_is_refused_by_name(gpu):
    limit = gpu.js("rig.runtime.queue.device.limits.maxBufferSize")
    with pytest.raises(GpuRefused, match=f"can have: {limit}") as caught:
        gpu.empty(limit + 4)
    assert caught.value.code == "OutOfMemory"
    assert not gpu.read(gpu.empty(64)).any()


def test_memory_can_be_released_while_work_still_uses_it(gpu):
    source = gpu.array(np.arange(64, dtype=np.uint32))
    target = gpu.empty(256)
    gpu.js(
        f"""(async () => {{
          const [to, from] = [rig.memories.get({target}), rig.memories.get({source})];
          rig.runtime.copy(to, 0, from, 0, 256);
          rig.runtime.release(from);
          await rig.runtime.settled();
        }})()"""
    )
    assert np.array_equal(gpu.read(target, np.uint32), np.arange(64))
