"""What parameters of kernels are read from their sources."""

import pytest

from wsgrad.graph.kernel import parse_parameters


def read(source, entry="k"):
    found = parse_parameters(source, entry)
    return None if found is None else [None if one is None else (one.letter, one.nbytes) for one in found]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("__kernel void k(__global int *x, const int by, unsigned long q, float f, half h, uchar c) {}",
         [("p", 8), ("i", 4), ("Q", 8), ("f", 4), ("f", 2), ("I", 1)]),
        ('__global__ void __launch_bounds__(9) k(int* __restrict__ x, unsigned by, long long q, double d) {}',
         [("p", 8), ("I", 4), ("q", 8), ("d", 8)]),
        ("kernel void k(device float* x [[buffer(0)]], constant int& n [[buffer(1)]], uint3 g "
         "[[threadgroup_position_in_grid]], uint3 l [[thread_position_in_threadgroup]]) {}",
         [("p", 8), ("i", 4)]),
        ("__kernel void k(void) {}", []),
        ("__kernel void k(image2d_t image, float4 v) {}", [None, None]),
        ("/* void k(int a) {} */ // void k(int a) {}\n__kernel void k(short /* , */ s) {}", [("i", 2)]),
        ("void k(int a); __kernel void k(float a) { k(1); }", [("f", 4)]),
    ],
)  # fmt: skip
def test_parameters_are_read_in_each_language(source, expected):
    assert read(source) == expected


def test_a_function_that_is_not_defined_has_none():
    assert read("__kernel void other(int k) {} void k(int);") is None
