"""Buffers of a real device: values there and back in every shape, order and dtype; views; what is refused and when."""

import gc

import ml_dtypes
import numpy as np
import pytest

import wsgrad

SCALARS = [*"?bBhHiIlLqQefdgFDG", "S3", "U2", "V5", "M8[us]", "m8[D]", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
STRUCTURED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "u2", (3,))])


def random_bytes(rng, shape, dtype):
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = rng.integers(0, 2 if dtype.kind == "b" else 128, count, np.uint8)
    return raw.view(dtype).reshape(shape) if count else np.empty(shape, dtype)


@pytest.mark.parametrize("dtype", [*SCALARS, STRUCTURED], ids=str)
def test_every_dtype_of_fixed_size_comes_back(device, rng, dtype):
    array = random_bytes(rng, (5, 3), dtype)
    buffer = device.array(array)
    assert buffer.dtype == array.dtype
    back = buffer.numpy()
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    other = device.empty_like(array)
    assert other.numpy().tobytes() == bytes(array.nbytes)
    other.copy_from(array)
    assert other.numpy().tobytes() == array.tobytes()


def test_an_element_that_is_an_array_gives_the_buffer_dimensions_as_in_numpy(device):
    dtype = np.dtype(("<f4", (2, 3)))
    for buffer in (device.empty(4, dtype), device.zeros((4,), dtype), device.array(np.zeros(4, dtype))):
        assert (buffer.shape, buffer.dtype, buffer.nbytes) == ((4, 2, 3), np.float32, 96)
        assert buffer.numpy().shape == (4, 2, 3)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7, 1, 5)])
@pytest.mark.parametrize("dtype", [np.float32, STRUCTURED], ids=str)
def test_every_shape_comes_back(device, rng, shape, dtype):
    array = random_bytes(rng, shape, dtype)
    buffer = device.array(array)
    assert (buffer.shape, buffer.ndim, buffer.size, buffer.nbytes) == (shape, array.ndim, array.size, array.nbytes)
    back = buffer.numpy()
    assert back.shape == shape
    assert back.tobytes() == array.tobytes()
    target = np.empty_like(array)
    buffer.copy_to(target)
    assert target.tobytes() == array.tobytes()


# Around each border: inline, one chunk, several chunks, the copied ones.
@pytest.mark.parametrize("nbytes", [4, 32767, 32768, 32769, 1048575, 1048576, 1048577, 5 << 20, (9 << 20) + 3])
def test_every_size_comes_back(device, rng, nbytes):
    array = rng.integers(0, 256, nbytes, np.uint8)
    buffer = device.array(array)
    assert np.array_equal(buffer.numpy(), array)
    array ^= 255
    buffer.copy_from(array)
    target = np.zeros_like(array)
    buffer.copy_to(target)
    assert np.array_equal(target, array)


@pytest.mark.parametrize(
    "cut",
    [
        lambda a: a.T,
        lambda a: a[::2],
        lambda a: a[:, ::-3],
        lambda a: a[5:900, 3:700],
        lambda a: a.reshape(40, 25, -1).T,
    ],
    ids=["transposed", "every other row", "backwards", "a window", "three axes"],
)
@pytest.mark.parametrize("size", [1000, 3000])
def test_arrays_with_gaps_are_sent_and_received(device, rng, cut, size):
    whole = rng.integers(0, 1 << 30, (1000, size), np.int32)
    array = cut(whole)
    assert not array.flags.c_contiguous
    buffer = device.array(array)
    assert np.array_equal(buffer.numpy(), array)
    target = cut(np.zeros_like(whole))
    buffer.copy_to(target)
    assert np.array_equal(target, array)


def test_what_numpy_makes_an_array_of_can_be_given(device):
    assert device.array([[1, 2], [3, 4]]).numpy().tolist() == [[1, 2], [3, 4]]
    assert device.array(2.5, np.float32).numpy() == np.float32(2.5)
    buffer = device.array([1, 2, 3], "u1")
    buffer.copy_from([4, 5, 6])
    assert buffer.numpy().tolist() == [4, 5, 6]


def test_a_small_array_may_be_changed_at_once(device):
    array = np.ones(200_000, np.float32)
    buffer = device.array(array)
    buffer.copy_from(array)
    array[:] = 2
    assert (buffer.numpy() == 1).all()


def test_new_memory_is_zero_even_where_old_memory_was_freed(device):
    for _ in range(3):
        buffer = device.empty(300_000, np.int32)
        assert not buffer.numpy().any()
        buffer.fill(-1)
        buffer.free()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("f4", 1.5), ("?", True), ("i8", -2), ("c16", 1 + 2j), ("u1", 7), ("S3", b"ab"), ("U5", "héllo"), ("V16", b"x"),
        (STRUCTURED, (1, 2.5, (3, 4, 5))), ("M8[s]", np.datetime64(5, "s")), (ml_dtypes.bfloat16, 2.5), ("f4", 0),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("count", [0, 1, 7, 30_000])
def test_fill_does_what_numpy_does(device, dtype, value, count):
    buffer = device.empty(count, dtype)
    expected = np.empty(count, dtype)
    expected[...] = value
    buffer.fill(value)
    assert buffer.numpy().tobytes() == expected.tobytes()


def test_views_are_the_same_memory(device):
    array = np.arange(60, dtype=np.int32).reshape(5, 4, 3)
    buffer = device.array(array)
    assert len(buffer) == 5
    for cut in (slice(1, 3), slice(-2, None), slice(4, 2), slice(None), 2, -1, np.int64(3)):
        view = buffer[cut]
        assert view.shape == array[cut].shape
        assert np.array_equal(view.numpy(), array[cut])
    assert np.array_equal(buffer[1:4][1][2:].numpy(), array[1:4][1][2:])
    assert buffer[1][2][0].numpy() == array[1, 2, 0]
    assert [row.numpy().sum() for row in buffer] == [row.sum() for row in array]
    buffer[1:3].fill(9)
    buffer[4][0].copy_from(np.array([7, 7, 7], np.int32))
    array[1:3], array[4, 0] = 9, 7
    assert np.array_equal(buffer.numpy(), array)


def test_a_view_can_be_used_after_the_buffer_went(device):
    buffer = device.array(np.arange(10, dtype=np.int32))
    view = buffer[4:]
    del buffer
    gc.collect()
    device.flush()
    assert view[1:3].numpy().tolist() == [5, 6]
    other = device.array(np.arange(10, dtype=np.int32))
    part = other[2:4]
    other.free()
    assert part.numpy().tolist() == [2, 3]
    with pytest.raises(wsgrad.DeviceError, match=r"can't be cut.*freed"):
        part[0]


def test_reshape_is_a_view_in_another_shape(device):
    buffer = device.array(np.arange(12, dtype=np.int16))
    assert buffer.reshape(3, 4).numpy().tolist() == np.arange(12).reshape(3, 4).tolist()
    assert buffer.reshape((2, -1)).shape == (2, 6)
    assert buffer[4:].reshape(2, 2, 2)[1].numpy().tolist() == [[8, 9], [10, 11]]
    assert device.empty((0, 3)).reshape(3, 0).shape == (3, 0)
    for shape in [(5, 2), (-1, 5), (-1, -1), (-3, -4)]:
        with pytest.raises(ValueError, match="can't be seen as"):
            buffer.reshape(*shape)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (3, IndexError), (-4, IndexError), (slice(None, None, 2), ValueError), ((0, 0), TypeError),
        (None, TypeError), (..., TypeError), ([0], TypeError), ("a", TypeError), (1.0, TypeError),
    ],
    ids=str,
)  # fmt: skip
def test_cuts_that_are_no_range_of_memory_are_refused(device, key, error):
    with pytest.raises(error):
        device.empty((3, 2))[key]


def test_a_buffer_is_copied_from_another_on_its_device(device):
    a, b = device.array(np.arange(6.0)), device.zeros(6, np.float64)
    b.copy_from(a)
    a[3:].copy_from(a[:3])
    assert b.numpy().tolist() == [0, 1, 2, 3, 4, 5]
    assert a.numpy().tolist() == [0, 1, 2, 0, 1, 2]
    a.copy_from(b)
    a[1:].copy_from(a[:-1])
    assert a.numpy().tolist() == [0, 0, 1, 2, 3, 4]


def test_what_does_not_fit_is_refused_at_once(device):
    buffer = device.empty((2, 3), np.float32)
    read_only = np.zeros((2, 3), np.float32)
    read_only.flags.writeable = False
    for call, error, text in [
        (lambda: buffer.copy_from(np.zeros((2, 3))), TypeError, "dtype float64; convert"),
        (lambda: buffer.copy_from(np.zeros((3, 2), np.float32)), ValueError, r"shape \(3, 2\)"),
        (lambda: buffer.copy_from(device.empty(6, np.float32)), ValueError, "shape"),
        (lambda: buffer.copy_to(np.zeros((2, 3), np.int32)), TypeError, "dtype int32"),
        (lambda: buffer.copy_to(np.zeros(6, np.float32)), ValueError, "shape"),
        (lambda: buffer.copy_to([0.0] * 6), TypeError, "not into list"),
        (lambda: buffer.copy_to(read_only), ValueError, "read-only"),
        (lambda: device.array(np.zeros(3, ">f4")), TypeError, ">f4 is big-endian"),
        (lambda: device.array(np.array([None])), TypeError, "Python objects"),
        (lambda: device.empty(-1), ValueError, "negative"),
        (lambda: device.empty(3, object), TypeError, "Python objects"),
        (lambda: device.empty(1 << 60), MemoryError, "more than any device has"),
        (lambda: np.asarray(buffer), TypeError, r"use \.numpy\(\)"),
        (lambda: bool(buffer), TypeError, r"use \.numpy\(\)"),
        (lambda: len(buffer[0][0]), TypeError, "no length"),
        (lambda: buffer[0][0][0], IndexError, "can't be cut"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert not buffer.numpy().any()


def test_a_freed_buffer_is_refused_by_name(device):
    buffer = device.zeros((2, 3))
    with buffer:
        assert not buffer.freed
    buffer.free()
    assert "freed" in repr(buffer)
    for call in (
        buffer.numpy,
        lambda: buffer[0],
        lambda: buffer.fill(1),
        lambda: device.zeros((2, 3)).copy_from(buffer),
    ):
        with pytest.raises(wsgrad.DeviceError, match="freed"):
            call()


def test_a_buffer_of_another_session_is_copied_from_its_device(url, device):
    with wsgrad.connect(url) as other:
        foreign = other.devices["cpu"].array(np.arange(4, dtype=np.float32))
        buffer = device.zeros(4)
        buffer.copy_from(foreign)
        assert buffer.numpy().tolist() == [0, 1, 2, 3]


def test_memory_that_was_given_back_serves_what_is_issued_next(device):
    room = device.properties["memory"] * 2 // 3
    for _ in range(3):
        device.empty(room, np.uint8)
    device.synchronize()


def test_dropped_buffers_free_their_memory_on_the_device(url):
    with wsgrad.connect(url) as server:
        device = server.devices["cpu"]
        for _ in range(200):  # far more than a session may have at once
            device.empty(64 << 20, np.uint8)
            device.flush()
        device.synchronize()


def test_an_allocation_over_the_limit_is_out_of_memory_and_ends_nothing(device):
    buffer = device.array(np.arange(3))
    device.empty(1 << 50, np.uint8)
    with pytest.raises(wsgrad.OutOfMemory) as caught:
        device.synchronize()
    assert isinstance(caught.value, MemoryError)
    assert buffer.numpy().tolist() == [0, 1, 2]


def test_things_made_while_an_error_was_on_its_way_can_be_used_after_it(device):
    device.empty(1 << 50, np.uint8)
    buffer = device.zeros(3, np.int32)
    view = buffer[1:]
    count = device.program("void count(int *n) { n[0]++; }", "count")
    with pytest.raises(wsgrad.OutOfMemory):
        device.synchronize()
    count(view)
    assert buffer.numpy().tolist() == [0, 1, 0]


def test_buffers_say_what_they_are(device):
    buffer = device.empty((1024, 3))
    assert repr(buffer) == f"<Buffer float32 (1024, 3) on '{device.id}', 12.0 KiB>"
    assert repr(buffer[1:2]) == f"<Buffer float32 (1, 3) on '{device.id}', 12 B, view>"
