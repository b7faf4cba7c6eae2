"""What a recording accepts, and what it says where it refuses."""

import math

import pytest

from wsgrad.errors import LaunchError
from wsgrad.graph.items import INDEX, Access, Copy, Device, Fill, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.recording import Recording

CPU = Device(0, 0, "cpu")
FAR = Device(1, 0, "far")


@pytest.fixture
def recording():
    made = Recording()
    made.buffer(CPU, 64, memory="x", name="x")
    made.buffer(CPU, 64, memory="t", owned=True)
    made.buffer(FAR, 64, memory="y", name="y")
    return made


WHOLE = Operand(Range(0, 0, 64))


def launch(signature="p", arguments=(WHOLE,), **more):
    return Launch(CPU, 3, signature, arguments, name="k", **more)


def test_a_buffer_met_again_has_its_number_and_owned_ones_are_told_apart(recording):
    assert recording.buffer(CPU, 64, memory="x") == 0
    assert recording.owned == [1]
    assert recording.touched == set()
    with pytest.raises(LaunchError, match="x was recorded with 64 bytes on cpu, now it is given with 32"):
        recording.buffer(CPU, 32, memory="x")


def test_items_are_kept_in_order_with_the_buffers_they_touch(recording):
    items = [
        launch("pxif", (Operand(Range(0, 8, 8)), INDEX, 3, 0.5), grid=(4,)),
        Copy(CPU, Range(1, 0, 8), Range(0, 0, 8)),
        Fill(CPU, Range(1, 0, 8), b"\0"),
        Transfer(Range(2, 0, 8), Range(0, 0, 8)),
    ]
    assert [recording.add(item) for item in items] == [0, 1, 2, 3]
    assert recording.items == items
    assert recording.touched == {0, 1, 2}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (launch(arguments=(Operand(Range(0, 60, 8)),)), "bytes 60 to 68 lie outside x with its 64 bytes"),
        (launch(arguments=(Operand(Range(0, -4, 8)),)), "bytes -4 to 4 lie outside x"),
        (launch(arguments=(Operand(Range(7, 0, 8)),)), "buffer 7 was never declared"),
        (launch(arguments=(Operand(Range(2, 0, 8)),)), "argument 0 of k, y, is on far, not on cpu"),
        (launch("pp"), "k takes 2 arguments, 1 were given"),
        (launch("i"), "argument 0 of k is a range of buffer 0, which is no int32"),
        (launch("p", (1,)), "argument 0 of k is 1, which is no buffer"),
        (launch("i", (1.5,)), "1.5, which is no int32"),
        (launch("i", (1 << 31,)), "2147483648, which is no int32"),
        (launch("I", (-1,)), "-1, which is no uint32"),
        (launch("i", (True,)), "True, which is no int32"),
        (launch("f", (1e39,)), "which is no float32"),
        (launch("i", (Var("n", 0, 1 << 30) * 4,)), r"4\*n \(0 to 4294967296\), which is no int32"),
        (launch(grid=(0,)), "a grid of 0 for k"),
        (launch(grid=(Var("n", 0, 4),)), r"a grid of n \(0 to 4\) for k"),
        (launch(grid=(1, 1, 1, 1)), "a grid of 4 sizes"),
        (launch("i", (Var("n", 4, 1),)), "n from 4 to 1 is no range"),
        (launch("ii", (Var("n", 1, 4), Var("n", 1, 5))), "one range for one name"),
        (
            launch("pp", (Operand(Range(0, 0, 8)), Operand(Range(0, 4, 8), Access.WRITE))),
            "overlapping ranges of x and x",
        ),
        (Copy(CPU, Range(1, 0, 8), Range(0, 0, 4)), "4 bytes of x do not fit 8 bytes of buffer 1"),
        (Copy(CPU, Range(2, 0, 8), Range(0, 0, 8)), "a copy's target, y, is on far"),
        (Fill(CPU, Range(0, 0, 8), b"abc"), "a pattern of 3"),
        (Fill(CPU, Range(0, 0, 6), b"abcd"), "a fill of 6 bytes"),
        (Transfer(Range(1, 0, 8), Range(0, 0, 8)), "x and buffer 1 are both on cpu: use a copy"),
    ],
)
def test_what_can_never_run_is_refused_where_it_is_written_and_leaves_nothing(recording, item, message):
    with pytest.raises(LaunchError, match=message):
        recording.add(item)
    assert (recording.items, recording.touched, recording.variables) == ([], set(), {})


def test_infinities_and_nan_are_values(recording):
    recording.add(launch("fd", (math.inf, math.nan)))


def test_a_range_written_twice_is_allowed_to_a_program_declared_for_it(recording):
    same = Operand(Range(0, 0, 8))
    recording.add(launch("pp", (same, same), alias=True))
    with pytest.raises(LaunchError, match="overlapping"):
        recording.add(launch("pp", (same, Operand(Range(0, 4, 8))), alias=True))


def test_a_program_keeps_its_signature(recording):
    recording.add(launch())
    with pytest.raises(LaunchError, match="k was launched with signature p, now with i"):
        recording.add(launch("i", (1,)))


def test_a_variable_has_one_range_in_all_of_a_graph_and_values_are_held_against_it(recording):
    n, m = Var("n", 1, 8), Var("m", 0, 100)
    recording.add(launch("ii", (m, 128 - 2 * n), grid=(n * 4 + 1,)))
    with pytest.raises(LaunchError, match="n was declared 1 to 8"):
        recording.add(launch("ii", (1, Var("n", 1, 9))))
    assert recording.values({"n": 8, "m": 0}) == [0, 8]
    for given, message in [
        ({"n": 9, "m": 0}, "n=9 is not an integer from 1 to 8"),
        ({"n": 1.0, "m": 0}, "n=1.0 is not"),
        ({"n": 1}, "needs a value for m, 0 to 100"),
        ({"n": 1, "m": 1, "k": 2}, "no variable 'k'; it has m, n"),
    ]:
        with pytest.raises(LaunchError, match=message):
            recording.values(given)


def test_variables_add_subtract_and_multiply():
    n = Var("n", 1, 8)
    made = (128 - 2 * (n + 3)) * 4 - 1
    assert [made.value(value) for value in (1, 8)] == [(128 - 2 * (value + 3)) * 4 - 1 for value in (1, 8)]
    assert made.bounds == (made.value(8), made.value(1))
    assert str(made) == "-8*n+487"
    for wrong in (lambda: n + n, lambda: n * 1.5, lambda: 1.5 - n):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()
