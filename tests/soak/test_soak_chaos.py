"""A short form of `benchmarks.soak chaos`: random programs over links that fail, compared with NumPy bit for bit."""

import pytest

from benchmarks.faulty import COMMON, faults_of
from benchmarks.soak_chaos import soak


def test_nothing_is_wrong_lost_or_run_twice_over_links_that_fail():
    tally, faults = soak(faults=50, seed=6, steps=40)
    assert tally.said == []
    assert tally.right
    assert tally.commands > 500
    assert tally.checks > 10
    assert faults.total() >= 50
    assert len(faults) >= 4


@pytest.mark.parametrize("failing", ["node", "both"])
def test_nothing_is_wrong_lost_or_run_twice_where_the_link_of_a_joined_machine_fails(failing):
    tally, faults = soak(faults=15, seed=2, steps=30, failing=failing)
    assert tally.said == []
    assert tally.right
    assert tally.commands > 100
    assert faults.total() >= 15


def test_faults_follow_from_the_seed_alone():
    def first(seed, number, up):
        faults = faults_of(seed, number, to_server=up)
        return [next(faults) for _ in range(20)]

    assert first(1, 1, True) == first(1, 1, True)
    assert len({tuple(first(*which)) for which in [(1, 1, True), (2, 1, True), (1, 2, True), (1, 1, False)]}) == 4
    assert {fault.kind for number in range(9) for fault in first(3, number, True)} == set(COMMON)
