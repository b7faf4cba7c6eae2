"""Hazards on byte ranges, held against every pair of accesses."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import conflicts, random_recording

from wsgrad.graph.hazards import Kind, Tracker
from wsgrad.graph.items import Access, Range

READ, WRITE, BOTH = Access.READ, Access.WRITE, Access.BOTH


def hazards(*accesses):
    """The hazards of the last of some accesses, each by an item of its own."""
    tracker = Tracker()
    for item, access in enumerate(accesses):
        found = tracker.add(item, [access])
    return {(hazard.before, hazard.kind) for hazard in found}


def test_a_read_comes_after_each_write_that_it_overlaps():
    writes = [(Range(0, 0, 8), WRITE), (Range(0, 8, 8), WRITE), (Range(0, 16, 8), WRITE)]
    assert hazards(*writes, (Range(0, 4, 8), READ)) == {(0, Kind.RAW), (1, Kind.RAW)}


def test_a_write_comes_after_the_readers_of_what_it_overwrites_and_only_those():
    reads = [(Range(0, 0, 8), READ), (Range(0, 8, 8), READ), (Range(0, 12, 8), READ)]
    assert hazards(*reads, (Range(0, 6, 3), WRITE)) == {(0, Kind.WAR), (1, Kind.WAR)}


def test_a_write_comes_after_a_write_that_nobody_read_in_between():
    assert hazards((Range(0, 0, 8), WRITE), (Range(0, 4, 8), WRITE)) == {(0, Kind.WAW)}
    read_between = hazards((Range(0, 0, 8), WRITE), (Range(0, 0, 8), READ), (Range(0, 0, 8), WRITE))
    assert read_between == {(1, Kind.WAR)}


def test_a_part_that_was_overwritten_hides_only_itself():
    accesses = [(Range(0, 0, 12), WRITE), (Range(0, 4, 4), WRITE)]
    assert hazards(*accesses, (Range(0, 4, 4), READ)) == {(1, Kind.RAW)}
    assert hazards(*accesses, (Range(0, 0, 12), READ)) == {(0, Kind.RAW), (1, Kind.RAW)}


def test_reads_of_the_same_bytes_other_buffers_and_no_bytes_are_free():
    assert hazards((Range(0, 0, 8), READ), (Range(0, 0, 8), READ)) == set()
    assert hazards((Range(0, 0, 8), WRITE), (Range(1, 0, 8), BOTH)) == set()
    assert hazards((Range(0, 0, 8), WRITE), (Range(0, 4, 0), BOTH)) == set()
    assert hazards((Range(0, 0, 8), WRITE), (Range(0, 8, 8), BOTH)) == set()


def test_an_item_has_no_hazard_with_itself():
    tracker = Tracker()
    assert tracker.add(0, [(Range(0, 0, 8), BOTH), (Range(0, 0, 8), WRITE), (Range(0, 4, 4), READ)]) == []
    assert [(h.before, h.kind) for h in tracker.add(1, [(Range(0, 0, 8), READ)])] == [(0, Kind.RAW)]


def test_a_lane_keeps_only_its_latest_reader():
    tracker = Tracker()
    for item in range(1000):
        tracker.add(item, [(Range(0, 0, 8), READ)], lane=item % 2)
    found = tracker.add(1000, [(Range(0, 0, 8), WRITE)], lane=2)
    assert {hazard.before for hazard in found} == {998, 999}


def test_a_forgotten_buffer_starts_anew():
    tracker = Tracker()
    tracker.add(0, [(Range(0, 0, 8), WRITE)])
    tracker.forget(0)
    assert tracker.add(1, [(Range(0, 0, 8), BOTH)]) == []


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_every_conflicting_pair_is_ordered_by_hazards_and_every_hazard_is_a_conflict(seed):
    items = random_recording(random.Random(seed), most_items=30).items
    tracker = Tracker()
    reached: list[int] = []
    for index, item in enumerate(items):
        bits = 0
        for hazard in tracker.add(index, item.accesses):
            bits |= reached[hazard.before] | 1 << hazard.before
            own = [access for access in item.accesses if access[0] == hazard.range]
            assert any(conflicts(one, other) for one in items[hazard.before].accesses for other in own)
        for earlier in range(index):
            if any(conflicts(one, other) for one in items[earlier].accesses for other in item.accesses):
                assert bits >> earlier & 1, (earlier, index)
        reached.append(bits)
