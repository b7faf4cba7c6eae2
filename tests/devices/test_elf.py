"""The program loader: what it maps, and that a hostile file makes it raise and nothing worse."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

import pytest
from device_rigs import memfd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsgrad.devices import elf, mathlib
from wsgrad.errors import CompileError

SOURCE = """
#include <math.h>
static int numbers[3] = {1, 2, 3};
static int zeros[5000];
static int *volatile pointer = &numbers[1];
static float (*volatile function)(float) = &sinf;
static const char *const names[] = {"a", "bc", "def"};
void entry(float *out) {
    out[0] = *pointer;
    out[1] = zeros[4999]++;
    out[2] = function(0.5f);
    out[3] = names[2][1];
    out[4] = cosf(0.5f);
}
"""


@pytest.fixture(scope="module")
def program(toolbox):
    return toolbox.program(SOURCE, "entry", "p")


def call(image):
    out = (ctypes.c_float * 5)()
    slots = ctypes.c_uint64(ctypes.addressof(out))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(image.symbols["wsgrad_call"])(ctypes.addressof(slots))
    return list(out)


def test_data_pointers_zeros_and_outside_functions_are_where_code_expects_them(program):
    image = elf.load_bytes(program, mathlib.addresses())
    assert call(image) == pytest.approx([2, 0, 0.4794255, ord("e"), 0.8775826])
    assert call(image)[1] == 1
    elf.unload(image)


def test_two_copies_of_a_program_share_no_data(program):
    images = [elf.load_bytes(program, mathlib.addresses()) for _ in range(2)]
    assert [call(image)[1] for image in (images[0], images[0], images[1])] == [0, 1, 0]
    for image in images:
        elf.unload(image)


def test_unloading_gives_all_memory_back(program):
    def mappings():
        with open("/proc/self/maps") as maps:
            return sum("wsgrad-program" in line for line in maps)

    before = mappings()
    image = elf.load_bytes(program, mathlib.addresses())
    assert mappings() > before
    elf.unload(image)
    assert mappings() == before


def test_a_symbol_that_nothing_provides_is_named(program):
    with pytest.raises(CompileError, match="the program uses sinf, which nothing defines"):
        elf.load_bytes(program, {name: 1 for name in mathlib.addresses() if name != "sinf"})


def test_every_allowed_function_exists_in_this_c_library():
    # `roundeven` came with glibc 2.25; nothing in the list is newer.
    assert set(mathlib.addresses()) == mathlib.ALLOWED


def test_a_program_can_not_be_changed_behind_its_mapping(program):
    with memfd(program) as fd:
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


def test_no_page_is_both_writable_and_executable(program):
    image = elf.load_bytes(program, mathlib.addresses())
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    for span, access, *_ in lines:
        low, high = (int(part, 16) for part in span.split("-"))
        if low < image.base + image.span and high > image.base:
            assert not ("w" in access and "x" in access)
    elf.unload(image)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: b"", "not a 64-bit"),
        (lambda d: d[:63], "not a 64-bit"),
        (lambda d: b"MZ" + d[2:], "not a 64-bit"),
        (lambda d: d[:16] + struct.pack("<H", 2) + d[18:], "type 2"),
        (lambda d: d[:18] + struct.pack("<H", 40) + d[20:], "machine 40"),
        (lambda d: d[:32] + struct.pack("<Q", 1 << 63) + d[40:], "outside the file"),
        (lambda d: d[:56] + struct.pack("<H", 65535) + d[58:], "outside the file"),
        (lambda d: d[:56] + struct.pack("<H", 0) + d[58:], "outside the file"),
        (lambda d: d[:600], "outside"),
    ],
)
def test_a_wrong_header_is_named(program, change, words):
    with pytest.raises(CompileError, match=words):
        elf.parse(change(program))


def headers(program):
    offset, count = struct.unpack_from("<Q", program, 32)[0], struct.unpack_from("<H", program, 56)[0]
    return [(offset + 56 * i, struct.unpack_from("<IIQQQQQQ", program, offset + 56 * i)) for i in range(count)]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (1, 7, "both writable and executable"),
        (2, 1 << 62, "outside the file"),
        (2, 1, "not aligned|outside the file"),
        (3, 1 << 62, "static memory"),
        (5, 1 << 62, "outside the file"),
        (6, 1 << 62, "static memory"),
    ],
)
def test_a_wrong_part_is_named(program, field, value, words):
    widths = "IIQQQQQQ"
    at, _ = [entry for entry in headers(program) if entry[1][0] == 1 and entry[1][1] & 2][-1]
    place = at + struct.calcsize("<" + widths[:field])
    changed = bytearray(program)
    struct.pack_into("<" + widths[field], changed, place, value)
    with pytest.raises(CompileError, match=words):
        elf.parse(bytes(changed))


def test_a_relocation_for_a_symbol_without_a_name_is_refused(program):
    offset = program.index(struct.pack("<QQ", 7, 1 << 32 | 7)[8:])
    changed = bytearray(program)
    struct.pack_into("<Q", changed, offset, 7)
    with pytest.raises(CompileError, match="symbol without a name"):
        elf.parse(bytes(changed))


def try_to_load(data):
    """Load or refuse; nothing else may happen. It is not called, since its code may be anything."""
    with contextlib.suppress(CompileError, OSError):
        elf.unload(elf.load_bytes(data, mathlib.addresses()))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_is_loaded_or_refused(program, data):
    changed = bytearray(program)
    interesting = st.sampled_from([0, 1, 7, 8, 0xFF, 0xFFFF, 0xFFFFFFFF, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1])
    for _ in range(data.draw(st.integers(1, 4))):
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        # Most fields that are believed lie in the headers and tables at the front.
        limit = data.draw(st.sampled_from([0x400, len(changed)])) - width
        place = data.draw(st.integers(0, limit))
        value = data.draw(interesting | st.integers(0, (1 << 64) - 1)) & ((1 << 8 * width) - 1)
        changed[place : place + width] = value.to_bytes(width, "little")
    try_to_load(bytes(changed))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(end=st.integers(0, 1 << 14), tail=st.binary(max_size=64))
def test_a_cut_file_is_loaded_or_refused(program, end, tail):
    try_to_load(program[:end] + tail)


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=400))
def test_any_bytes_behind_an_elf_header_are_loaded_or_refused(body):
    try_to_load(b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 3) + body)
