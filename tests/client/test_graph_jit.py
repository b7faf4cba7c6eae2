"""`jit`: recorded at the first call for given shapes and dtypes, replayed after, with whatever buffers are given."""

import gc
import weakref

import numpy as np
import pytest
from graph_servers import ADD, embedded, ints

import wsgrad


@pytest.fixture(scope="module")
def farm():
    with embedded() as server:
        yield server.url


@pytest.fixture
def device(farm):
    with wsgrad.connect(farm) as server:
        yield server.devices[0]


@pytest.fixture
def calls():
    return []


@pytest.fixture
def step(device, calls):
    add = device.program(ADD, "add", writes=[0])

    @wsgrad.jit
    def step(y, x, *, scale=1):
        """Adds twice."""
        calls.append(scale)
        half = device.empty(y.shape, y.dtype)
        add(half, x, x.size, scale)
        add(y, half, y.size, 1)

    return step


def test_each_shape_is_recorded_once_and_runs_on_any_buffers(device, step, calls):
    arrays = [ints(1, 2, 3), ints(10, 20, 30), ints(5, 5), ints(7, 8, 9, 10)]
    for _ in range(3):
        for array in arrays:
            y, x = device.array(array), device.array(array)
            step(y, x)
            step(y, x, scale=3)
            assert (y.numpy() == 5 * array).all()
    assert calls == [1, 3] * 3
    assert (step.__name__, step.__doc__) == ("step", "Adds twice.")
    assert "6 graphs" in repr(step)


def test_views_are_arguments_like_any_other(device, step, calls):
    base, other = device.array(ints(1, 2, 3, 4, 5, 6, 7, 8)), device.array(ints(1, 1, 1, 1))
    expected = base.numpy()
    for at in range(5):
        step(base[at : at + 4], other)
        expected[at : at + 4] += 1
        step(other, base[at : at + 4])
        other.fill(1)
    assert (base.numpy() == expected).all()
    assert calls == [1]
    # Two views of the same memory are recorded by how they lie to each other.
    for _ in range(2):
        step(base[:4], base[4:])
        expected[:4] += expected[4:]
    assert (base.numpy() == expected).all()
    step(base[4:], base[:4])
    expected[4:] += expected[:4]
    assert (base.numpy() == expected).all()
    assert calls == [1, 1, 1]


def test_a_buffer_that_is_used_without_being_given_stays_itself_even_when_it_is_given_too(device):
    add = device.program(ADD, "add", writes=[0])
    weights = device.array(ints(1, 1))

    @wsgrad.jit
    def apply(y):
        add(y, weights, 2, 1)
        add(weights, y, 2, 1)

    y = device.array(ints(10, 20))
    apply(y)
    apply(y)
    expected, w = ints(10, 20), ints(1, 1)
    for _ in range(2):
        expected = expected + w
        w = w + expected
    assert (y.numpy() == expected).all()
    assert (weights.numpy() == w).all()
    # Recorded apart, but given the same memory: that is what the launches say, one after the other.
    apply(weights)
    assert (weights.numpy() == 4 * w).all()
    apply(y)
    assert (y.numpy() == expected + 4 * w).all()


def test_what_a_jitted_function_may_not_do_is_said(device):
    y = device.zeros(2, np.int32)

    @wsgrad.jit
    def reads(y):
        y.numpy()

    @wsgrad.jit
    def returns(y):
        return device.empty(2)

    @wsgrad.jit
    def nothing(n):
        pass

    with pytest.raises(wsgrad.LaunchError, match="can't be recorded"):
        reads(y)
    with pytest.raises(wsgrad.LaunchError, match="write its results into its arguments"):
        returns(y)
    with pytest.raises(wsgrad.LaunchError, match="without a buffer"):
        nothing(3)
    with pytest.raises(TypeError, match="can be compared"):
        nothing([1])


def test_a_jitted_function_called_by_another_or_in_a_recording_becomes_part_of_it(device, step, calls):
    @wsgrad.jit
    def twice(y, x):
        kept.append(y)
        step(y[:2], x)
        step(y[2:], x)

    kept = []
    y, x = device.zeros(4, np.int32), device.array(ints(1, 2))
    for _ in range(3):
        twice(y, x)
    assert calls == [1, 1]
    with wsgrad.record(device) as graph:
        step(y[1:3], x)
        kept[0][:2].fill(8)  # an argument of another recording is a buffer like any other here
    graph.run(wait=True)
    assert (y.numpy() == ints(8, 8, 5, 6)).all()
    with pytest.raises(wsgrad.LaunchError, match="running a graph can't be recorded"), wsgrad.record(device):
        graph.run()


def test_the_memory_of_the_first_call_is_not_kept(device, step):
    y, x = device.array(ints(1, 2)), device.array(ints(1, 2))
    kept = weakref.ref(y._handle._lifetime)
    step(y, x)
    del y
    gc.collect()
    assert kept() is None
    y = device.array(ints(5, 5))
    step(y, x)
    assert (y.numpy() == ints(6, 7)).all()


def test_after_a_reopening_it_is_recorded_anew(device, step, calls):
    step(device.array(ints(1, 2)), device.array(ints(1, 2)))
    device.reopen()
    y = device.array(ints(1, 2))
    step(y, device.array(ints(1, 2)))
    assert (y.numpy() == ints(2, 4)).all()
    assert calls == [1, 1]
