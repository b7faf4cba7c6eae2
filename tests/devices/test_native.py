"""The native loop in this process: what it runs, what it refuses, and grids over threads."""

from __future__ import annotations

import ctypes
import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsgrad.devices.native import MAX_BUFFERS, Stop, argument_words

ADD = "void entry(int *a, int n) { a[0] += n; }"
COUNT = "void entry(int *a, int i) { __atomic_add_fetch(&a[i], 1, 5); }"


@pytest.fixture
def numbers(loop):
    """Buffer 0: a thousand 32-bit integers."""
    array = (ctypes.c_int * 100_000)()
    loop.table.set_buffer(0, ctypes.addressof(array), ctypes.sizeof(array))
    return array


def run(loop, words, start=0, number=1):
    packed = ctypes.create_string_buffer(struct.pack(f"<{len(words)}I", *words), 4 * len(words) or 1)
    return loop.table.run(ctypes.addressof(packed), len(words), start, number)


def test_launches_run_in_order_and_are_counted(loop, mapped, numbers):
    loop.set_program(3, mapped(ADD, "pi"), "pi", None, alias=False)
    ran = run(loop, [3, 0, 0, 5, 3, 0, 0, 7])
    assert (ran.stop, ran.at, ran.launches) == (Stop.DONE, 8, 2)
    assert numbers[0] == 12


def test_a_run_can_start_in_the_middle(loop, mapped, numbers):
    loop.set_program(0, mapped(ADD, "pi"), "pi", None, alias=False)
    assert run(loop, [0, 0, 0, 5, 0, 0, 0, 7], start=4).launches == 1
    assert numbers[0] == 7


def test_the_progress_is_the_number_of_the_launch(loop, mapped):
    progress = ctypes.c_uint64()
    loop.table.report_to(ctypes.addressof(progress))
    seen = (ctypes.c_uint64 * 3)()
    loop.table.set_buffer(0, ctypes.addressof(seen), 24)
    loop.table.set_buffer(1, ctypes.addressof(progress), 8)
    source = "void entry(unsigned long *seen, const unsigned long *progress, int k) { seen[k] = *progress; }"
    loop.set_program(0, mapped(source, "ppi"), "ppi", [0], alias=False)
    run(loop, [0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 2], number=41)
    assert list(seen) == [41, 42, 43]


@pytest.mark.parametrize(
    ("words", "stop", "word"),
    [
        ([0], Stop.TRUNCATED, 0),
        ([0, 0, 0], Stop.TRUNCATED, 0),
        ([7, 0, 0, 1], Stop.BAD_PROGRAM, 0),
        ([0xFFFFFFFF, 0, 0, 1], Stop.BAD_PROGRAM, 0),
        ([1, 0, 0, 1], Stop.PROGRAM_FAILED, 0),
        ([0, 0, 9, 1], Stop.BAD_BUFFER, 2),
        ([0, 0, MAX_BUFFERS + 5, 1], Stop.BAD_BUFFER, 2),
        ([0, 0, 0xFFFFFFFF, 1], Stop.BAD_BUFFER, 2),
        ([0, 0, 0, 1, 0, 0, 5, 1], Stop.BAD_BUFFER, 6),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_called(loop, mapped, numbers, words, stop, word):
    loop.set_program(0, mapped(ADD, "pi"), "pi", None, alias=False)
    loop.set_program(1, 0, "pi", None, alias=False)
    ran = run(loop, words)
    assert (ran.stop, ran.word) == (stop, word)
    assert ran.launches == numbers[0] == (1 if word > 4 else 0)


def test_ids_that_were_taken_out_are_refused(loop, mapped, numbers):
    loop.set_program(0, mapped(ADD, "pi"), "pi", None, alias=False)
    loop.table.set_buffer(0, 0, 0)
    assert run(loop, [0, 0, 0, 1]).stop is Stop.BAD_BUFFER
    loop.drop_program(0)
    assert run(loop, [0, 0, 0, 1]).stop is Stop.BAD_PROGRAM


def test_words_of_arguments_are_counted_by_their_size():
    assert [argument_words(letter) for letter in "piIfqQdx"] == [1, 1, 1, 1, 2, 2, 2, 0]


# The model in plain words: the loop must stop exactly where two arguments share a byte and one of them is written,
# unless both are written, are the same range, and the program was declared for it.
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=3, max_size=3),
    writes=st.none() | st.lists(st.integers(0, 2), max_size=3),
    alias=st.booleans(),
)
def test_overlaps_are_found_exactly(loop, mapped, numbers, ranges, writes, alias):
    loop.set_program(0, mapped("void entry(char *a, char *b, char *c) { }", "ppp"), "ppp", writes, alias=alias)
    base = ctypes.addressof(numbers)
    for index, (offset, nbytes) in enumerate(ranges):
        loop.table.set_buffer(index + 1, base + offset, nbytes)
    written = {0, 1, 2} if writes is None else set(writes)
    expected = False
    for a in range(3):
        for b in range(a):
            share = set(range(ranges[a][0], sum(ranges[a]))) & set(range(ranges[b][0], sum(ranges[b])))
            same = ranges[a] == ranges[b] and {a, b} <= written and alias
            if share and written & {a, b} and not same:
                expected = True
    assert run(loop, [0, 0, 1, 2, 3]).stop is (Stop.OVERLAP if expected else Stop.DONE)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_index_of_a_grid_is_called_once(loop, mapped, numbers, threads):
    loop.set_program(0, mapped(COUNT, "px"), "px", None, alias=False)
    if threads > 1:
        loop.start_threads(threads)
    sizes = random.Random(threads).choices([1, 2, 3, threads, 7, 64, 999, 1000, 50_000, 100_000], k=60)
    for size in sizes:
        assert run(loop, [0, size, 0]).stop is Stop.DONE
    expected = [0] * len(numbers)
    for size in sizes:
        expected = [value + 1 for value in expected[:size]] + expected[size:]
    assert list(numbers) == expected


def test_thousands_of_small_grids_lose_and_repeat_nothing(loop, mapped, numbers):
    # Late workers of one grid must not claim indices of the next, whose size differs.
    loop.set_program(0, mapped(COUNT, "px"), "px", None, alias=False)
    loop.start_threads(4)
    sizes = [random.Random(1).randint(2, 9) for _ in range(3)] * 3000
    words = [word for size in sizes for word in (0, size, 0)]
    assert run(loop, words).launches == len(sizes)
    assert list(numbers[:10]) == [sum(size > index for size in sizes) for index in range(10)]


def test_unequal_work_is_waited_for(loop, mapped, numbers):
    source = """void entry(int *a, int i, int n) {
        volatile int k = i == n - 1 ? 3000000 : 10;
        while (k > 0) k--;
        a[i] = i + 1;
    }"""
    loop.set_program(0, mapped(source, "pxi"), "pxi", None, alias=False)
    loop.start_threads(3)
    for _ in range(5):
        ctypes.memset(numbers, 0, ctypes.sizeof(numbers))
        run(loop, [0, 12, 0, 12])
        assert list(numbers[:12]) == list(range(1, 13))


def test_threads_can_be_stopped_and_started_again(loop, mapped, numbers):
    loop.set_program(0, mapped(COUNT, "px"), "px", None, alias=False)
    for _ in range(3):
        loop.start_threads(3)
        run(loop, [0, 100, 0])
        loop.stop_threads()
    assert list(numbers[:100]) == [3] * 100
