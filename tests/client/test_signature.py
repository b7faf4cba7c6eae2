"""Letters of arguments, words of launches, and what C source suggests."""

import struct

import ml_dtypes
import numpy as np
import pytest

from wsgrad.client.life import Life
from wsgrad.client.signature import INDEX, guess_c_signature, letter_of, make_packer, plain_scalar


class FakeBuffer:
    def __init__(self, life, identity):
        self._life, self._id = life, identity


LETTERS = [
    (1, "i"), (True, "i"), (1.5, "f"), (INDEX, "x"),
    (np.int8(1), "i"), (np.int16(1), "i"), (np.int32(1), "i"), (np.int64(1), "q"), (np.bool_(True), "i"),
    (np.uint8(1), "I"), (np.uint16(1), "I"), (np.uint32(1), "I"), (np.uint64(1), "Q"),
    (np.longlong(1), "q"), (np.ulonglong(1), "Q"),
    (np.float16(1), "f"), (np.float32(1), "f"), (np.float64(1), "d"),
    (ml_dtypes.bfloat16(1), "f"), (ml_dtypes.float8_e5m2(1), "f"),
    ("1", None), (None, None), (1j, None), (np.zeros(()), None), (np.complex64(1), None), (np.datetime64(1, "s"), None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "letter"), LETTERS, ids=lambda value: f"{type(value).__name__}-{value}")
def test_scalars_have_letters_by_their_type(value, letter):
    assert letter_of(value) == letter


@pytest.mark.parametrize(
    ("letter", "value", "fits"),
    [
        ("i", 2**31 - 1, True), ("i", 2**31, False), ("i", -(2**31) - 1, False), ("I", -1, False),
        ("q", 2**63, False), ("Q", 2**64 - 1, True), ("f", 3e38, True), ("f", 1e39, False),
        ("f", float("inf"), True), ("f", float("nan"), True), ("d", 1e300, True),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(letter, value, fits):
    if fits:
        assert plain_scalar(letter, value) == pytest.approx(value, nan_ok=True)
    else:
        with pytest.raises(ValueError, match="does not fit"):
            plain_scalar(letter, value)


def test_a_launch_is_packed_into_little_endian_words():
    life = Life(max_buffers=9, max_programs=9)
    arguments = (FakeBuffer(life, 3), -1, np.uint32(7), np.int64(-2), np.uint64(9), 0.5, np.float64(0.25), INDEX)
    pack = make_packer("piIqQfdx", 5, life, tuple(map(type, arguments)))
    assert pack(16, *arguments) == struct.pack("<IIIiIqQfd", 5, 16, 3, -1, 7, -2, 9, 0.5, 0.25)


@pytest.mark.parametrize("value", [np.bool_(True), np.float16(1), ml_dtypes.bfloat16(1)], ids=str)
def test_scalars_that_are_no_numbers_to_struct_are_packed_too(value):
    letter = letter_of(value)
    pack = make_packer(letter, 0, Life(max_buffers=1, max_programs=1), (type(value),))
    assert pack(0, value) == struct.pack("<II" + letter, 0, 0, int(value))


def test_packing_refuses_what_must_not_be_sent():
    life, other = Life(max_buffers=9, max_programs=9), Life(max_buffers=9, max_programs=9)
    pack = make_packer("px", 5, life, (FakeBuffer, type(INDEX)))
    assert pack(1, FakeBuffer(life, 0), INDEX)
    for grid, buffer in ((1, FakeBuffer(other, 0)), (1, FakeBuffer(life, None)), (0, FakeBuffer(life, 0))):
        with pytest.raises((ValueError, struct.error)):
            pack(grid, buffer, INDEX)
    life.dead = object()
    with pytest.raises(ValueError):  # noqa: PT011
        pack(1, FakeBuffer(life, 0), INDEX)


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("void f(float *restrict y, const float *x, float a, int n) {}", "ppfi"),
        ("void f(void) {}", ""),
        ("void f() {}", ""),
        ("static inline void f(double d, unsigned long n, const int *restrict a, short i)\n{\n}", "fipx"),
        ("void g(int x) { f(x); }\nvoid f(float a[4], size_t n) {}", "pi"),
        ("// void f(int a) {}\nvoid f(/* int, */ float *x) {}", "p"),
        ('const char *s = "void f(int) {";\nvoid f(int *n) {}', "p"),
        ("void f(int *n);\nvoid f(int *n) { n[0] = 1; }", "p"),
        ("void f(float *x, int row)\n{", "px"),
        ("typedef float real;\nvoid f(real x) {}", None),
        ("void f(void (*callback)(int)) {}", None),
        ("#define F f\nvoid F(int n) {}", None),
        ("void f(int n", None),
        ("", None),
    ],
)
def test_source_suggests_a_signature(source, signature):
    assert guess_c_signature(source, "f") == signature
