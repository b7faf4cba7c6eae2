"""Parts from a peer: what a plan made passes unchanged, and anything bent is refused by name."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_recording

from wsgrad.errors import LaunchError, ProtocolError
from wsgrad.graph.items import INDEX, Access, Copy, Device, Fill, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.parse import check_values, parse_part
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.transport import cbor


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_part_comes_back_from_cbor_as_it_was(seed):
    for part in Plan(random_recording(random.Random(seed))).parts.values():
        assert parse_part(cbor.decode(cbor.encode(part_array(part)))) == part


def sample():
    recording = Recording()
    near, far = Device(0, 0), Device(0, 1)
    x = recording.buffer(near, 64, memory="x")
    y = recording.buffer(far, 64, memory="y")
    n = Var("n", 1, 100)
    arguments = (Operand(Range(x, 0, 64), Access.WRITE), INDEX, n * 2, 0.5)
    recording.add(Launch(near, 7, "pxif", arguments, grid=(n,)))
    recording.add(Copy(near, Range(x, 0, 8), Range(x, 8, 8)))
    recording.add(Fill(near, Range(x, 16, 8), b"abcd"))
    recording.add(Transfer(Range(y, 0, 64), Range(x, 0, 64)))
    return part_array(Plan(recording).parts[0])


def first_device(array):
    return array[1][0]


def compute(array):
    return first_device(array)[3][0]


BENT = {
    "too few fields": lambda a: a.pop(),
    "a device that is none": lambda a: a[1].append(5),
    "a device twice": lambda a: a[1].append([0, [], [], [[], [], []]]),
    "a slot outside its buffer": lambda a: first_device(a)[2][0].__setitem__(2, 65),
    "a slot of another device's buffer": lambda a: first_device(a)[2][0].__setitem__(0, 1),
    "a negative offset": lambda a: first_device(a)[2][0].__setitem__(1, -8),
    "a slot that is not there": lambda a: compute(a)[1][1].__setitem__(1, 99),
    "a slot of a negative number": lambda a: compute(a)[1][1].__setitem__(1, -1),
    "a slot that is true": lambda a: compute(a)[1][1].__setitem__(1, True),
    "a program that is not listed": lambda a: compute(a)[0][1].__setitem__(1, 8),
    "a signature of unknown letters": lambda a: first_device(a)[1][0].__setitem__(1, "pz"),
    "a missing argument": lambda a: compute(a)[0][1][4].pop(),
    "a text for a scalar": lambda a: compute(a)[0][1][4].__setitem__(1, "1"),
    "a scalar that does not fit": lambda a: compute(a)[0][1][4].__setitem__(1, 1 << 40),
    "a float for an integer": lambda a: compute(a)[0][1][4].__setitem__(1, 1.0),
    "a variable that is not there": lambda a: compute(a)[0][1][4].__setitem__(1, [1, 1, 0]),
    "a variable that could grow too large": lambda a: compute(a)[0][1][4].__setitem__(1, [0, 1 << 40, 0]),
    "a variable for a buffer": lambda a: compute(a)[0][1][4].__setitem__(0, [0, 0, 0]),
    "a grid of nothing": lambda a: compute(a)[0][1].__setitem__(2, [0]),
    "a grid that can be nothing": lambda a: compute(a)[0][1].__setitem__(2, [[0, 1, -1]]),
    "a grid of four sizes": lambda a: compute(a)[0][1].__setitem__(2, [1, 1, 1, 1]),
    "a variable without a range": lambda a: a[3][0].__setitem__(1, 101),
    "a copy of different sizes": lambda a: compute(a)[1][1].__setitem__(1, 0),
    "a pattern that does not divide": lambda a: compute(a)[2][1].__setitem__(2, b"0123456789abcdef"),
    "a pattern of three": lambda a: compute(a)[2][1].__setitem__(2, b"abc"),
    "an unknown step": lambda a: compute(a)[1].__setitem__(1, [9, 0]),
    "a step in the wrong queue": lambda a: first_device(a)[3][1].append(compute(a).pop()),
    "a queue out of order": lambda a: compute(a).reverse(),
    "a step twice": lambda a: compute(a)[1].__setitem__(0, compute(a)[0][0]),
    "a wait for itself": lambda a: compute(a)[1].__setitem__(2, [compute(a)[1][0]]),
    "a wait for what comes later": lambda a: compute(a)[0].__setitem__(2, [2]),
    "a wait for a step of another device": lambda a: a[1][1][3][2][0].__setitem__(2, [1]),
    "a send without its receive": lambda a: a[1].pop(),
    "a receive of another size": lambda a: a[1][1][2][0].__setitem__(2, 32),
    "a receive from another device": lambda a: a[1][1][3][2][0][1].__setitem__(3, 1),
}


@pytest.mark.parametrize("name", BENT)
def test_a_bent_part_is_refused(name):
    array = sample()
    assert part_array(parse_part(copy.deepcopy(array))) == array
    BENT[name](array)
    with pytest.raises(ProtocolError):
        parse_part(array)


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=200, deadline=None)
def test_a_part_with_any_field_replaced_is_refused_by_name_or_still_a_part(seed, data):
    rng = random.Random(seed)
    array = sample()
    place = array
    for _ in range(rng.randint(0, 6)):
        inner = [value for value in place if isinstance(value, list) and value]
        if not inner:
            break
        place = rng.choice(inner)
    numbers = st.one_of(st.integers(-1, 200), st.sampled_from([1 << 32, 1 << 53, 1 << 63, -(1 << 63)]))
    values = st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=3), st.binary(max_size=3))
    place[rng.randrange(len(place))] = data.draw(st.recursive(values, lambda inner: st.lists(inner, max_size=3)))
    try:
        part = parse_part(array)
    except ProtocolError:
        return
    assert parse_part(part_array(part)) == part


def test_values_of_a_replay_are_held_against_the_parts_variables():
    part = parse_part(sample())
    assert check_values(part, [100]) == (100,)
    for values, message in [([], "was given 0"), ([0], "n=0"), ([101], "n=101"), ([True], "n=True"), (["1"], "n='1'")]:
        with pytest.raises(LaunchError, match=message):
            check_values(part, values)
