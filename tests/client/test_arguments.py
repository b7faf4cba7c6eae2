"""What WGSL's bindings make of a launch's arguments; the launches themselves are in the contract suite."""

import numpy as np
import pytest

from wsgrad import INDEX
from wsgrad.client.arguments import arguments_of

SOURCE = """
struct Scale { factor: f32, shift: f32, count: u32 }
override TILE: u32 = 16;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<uniform> n: u32;
@group(0) @binding(3) var<uniform> factor: f32;
@group(0) @binding(4) var<uniform> scale: Scale;
@group(0) @binding(5) var<uniform> half: f16;
@compute @workgroup_size(TILE) fn main() { out[0] = a[0]; }
"""


@pytest.fixture(name="arguments")
def fixture_arguments():
    return arguments_of("wgsl", SOURCE, "main")


def test_the_source_tells_signature_writes_and_dimensions(arguments):
    assert arguments.guess() == "ppIfpp"
    assert arguments.writes == [0]
    assert arguments.dimensions == 3


def test_nothing_is_guessed_where_an_override_needs_a_value():
    source = SOURCE.replace("TILE: u32 = 16", "TILE: u32")
    assert arguments_of("wgsl", source, "main").guess() is None


def test_more_bindings_than_a_launch_has_arguments_are_left_to_the_compiler():
    bindings = [f"@group(0) @binding({i}) var<storage, read_write> b{i}: array<u32>;" for i in range(65)]
    source = "\n".join([*bindings, "@compute @workgroup_size(1) fn main() {}"])
    assert arguments_of("wgsl", source, "main").writes is None


def test_a_source_that_cannot_be_read_is_left_to_its_compiler():
    arguments = arguments_of("wgsl", "@group(1) @binding(0) var<storage> a: array<f32>;", "f")
    assert arguments.guess() is None
    assert arguments.writes is None
    assert arguments.letter(0, 1) == "i"


@pytest.mark.parametrize(
    ("position", "value", "letter"),
    [
        (2, 3, "I"),
        (2, np.int64(3), "I"),
        (2, True, "I"),
        (3, 3, "f"),
        (3, 0.5, "f"),
        (3, np.float64(0.5), "f"),
    ],
)
def test_a_number_takes_the_type_that_the_source_declares(arguments, position, value, letter):
    assert arguments.letter(position, value) == letter


@pytest.mark.parametrize(
    ("position", "value", "text"),
    [
        (2, 0.5, r"0\.5, but @binding\(2\) is a u32"),
        (0, 1, r"@binding\(0\) is a storage buffer"),
        (4, 1.0, r"@binding\(4\) is a Scale: pass a NumPy scalar of a structured dtype"),
        (6, 1, r"the source has no @binding\(6\)"),
        (2, INDEX, "global_invocation_id"),
        (2, "3", "is a str, not a buffer or number"),
        (1, np.zeros(3), r"ndarray, not a buffer or number; copy it with device\.array"),
    ],
)
def test_what_does_not_fit_a_binding_is_refused(arguments, position, value, text):
    with pytest.raises(ValueError, match=text):
        arguments.letter(position, value)


def test_structured_scalars_and_halves_become_bytes(arguments):
    dtype = np.dtype([("factor", "<f4"), ("shift", "<f4"), ("count", "<u4")])
    scale = np.array((2.0, 1.0, 7), dtype)[()]
    seen = []

    def struct(data):
        seen.append(data)
        return f"buffer {len(seen)}"

    given = ("out", "a", 3, 0.5, scale, 1.5)
    assert arguments.dressed(given, struct) == ("out", "a", 3, 0.5, "buffer 1", "buffer 2")
    assert seen == [scale.tobytes(), np.float16(1.5).tobytes()]
    plain = (1, 2)
    assert arguments.dressed(plain, struct) is plain


def test_a_half_that_is_no_number_is_named(arguments):
    with pytest.raises(ValueError, match="argument 5 is a str, not a number"):
        arguments.dressed((0, 0, 0, 0, 0, "x"), lambda data: data)
