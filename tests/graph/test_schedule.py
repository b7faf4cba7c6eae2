"""Schedules: every hazard is ordered, no wait is too many, and any order that they allow gives the same bytes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import (
    Memory,
    conflicts,
    over_before,
    previous_in_queue,
    random_recording,
    run_parts,
    run_recorded,
    step_of,
    travelled,
)

from wsgrad.graph.items import Access, Device, Launch, Operand, Range, Transfer
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.graph.schedule import Lane, Receive, Send, schedule

seeds = st.integers(0, 2**32)


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_every_pair_of_conflicting_accesses_is_ordered_by_queues_and_waits(seed):
    recording = random_recording(random.Random(seed))
    planned = schedule(recording)
    at_start, _ = over_before(planned)
    accesses = [(at, access) for at, item in enumerate(recording.items) for access in item.accesses]
    for place, (at, access) in enumerate(accesses):
        for earlier, other in accesses[:place]:
            if earlier != at and conflicts(access, other):
                before, after = (step_of(planned, recording, i, a[0]) for i, a in ((earlier, other), (at, access)))
                assert at_start[after] >> before & 1, (earlier, at)


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_no_wait_follows_from_the_others_and_each_names_its_reason(seed):
    recording = random_recording(random.Random(seed))
    planned = schedule(recording)
    at_start, at_end = over_before(planned)
    previous = previous_in_queue(planned)
    for step in planned.steps:
        for wait in step.waits:
            bits = at_start[step.number - 1] if isinstance(step.action, Receive) else 0
            for other in previous[step.number] | {w.step for w in step.waits if w is not wait}:
                bits |= at_end[other] | 1 << other
            assert not bits >> wait.step & 1, (step, wait)
            assert wait.step < step.number
            assert wait.item in step.items
            assert wait.hazard.before in planned.step(wait.step).items
            own = [a for a in recording.items[wait.item].accesses if a[0] == wait.hazard.range]
            others = recording.items[wait.hazard.before].accesses
            assert any(conflicts(one, other) for one in own for other in others)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_clocks_tell_exactly_what_is_over_when_a_step_starts(seed):
    planned = schedule(random_recording(random.Random(seed)))
    at_start, _ = over_before(planned)
    for before in planned.steps:
        for after in planned.steps:
            assert planned.precedes(before, after) == bool(at_start[after.number] >> before.number & 1)


@given(seeds, seeds)
@settings(max_examples=200, deadline=None)
def test_parts_run_in_any_allowed_order_give_the_bytes_of_the_items_run_in_turn(seed, order):
    recording = random_recording(random.Random(seed))
    parts = [travelled(part) for part in Plan(recording).parts.values()]
    expected, memory = (Memory(recording, {}, random.Random(seed)) for _ in range(2))
    run_recorded(recording, expected)
    run_parts(parts, recording, memory, random.Random(order))
    assert memory.contents() == expected.contents()


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_every_item_is_in_one_step_or_in_both_halves_of_a_transfer(seed):
    recording = random_recording(random.Random(seed))
    planned = schedule(recording)
    for index, item in enumerate(recording.items):
        steps = [step for step in planned.steps if index in step.items]
        if isinstance(item, Transfer):
            assert [type(step.action) for step in steps] == [Send, Receive]
            assert steps[0].number + 1 == steps[1].number
        else:
            assert [step.action for step in steps] == [item]


class Two:
    """A recording over two devices with a buffer each, and short ways to add to it."""

    def __init__(self, nbytes=64, *, servers=(0, 0)):
        self.recording = Recording()
        self.one, self.other = (Device(server, index) for index, server in enumerate(servers))
        self.source = self.recording.buffer(self.one, nbytes, memory="source", name="source")
        self.target = self.recording.buffer(self.other, nbytes, memory="target", name="target")

    def transfer(self, offset, nbytes, *, to=None):
        target = Range(self.target, offset if to is None else to, nbytes)
        return self.recording.add(Transfer(target, Range(self.source, offset, nbytes)))

    def launch(self, buffer, offset, nbytes, access=Access.READ):
        device = self.recording.buffers[buffer].device
        operand = Operand(Range(buffer, offset, nbytes), access)
        return self.recording.add(Launch(device, 0, "p", (operand,)))

    def sends(self):
        self.planned = schedule(self.recording)
        return [step.items for step in self.planned.steps if isinstance(step.action, Send)]


def test_adjacent_transfers_between_the_same_ends_become_one_forwards_and_backwards():
    two = Two()
    for offset in (16, 32, 0, 48):
        two.transfer(offset, 16)
    assert two.sends() == [(0, 1, 2, 3)]
    [send, receive] = two.planned.steps
    assert (send.action.source, receive.action.target) == (Range(0, 0, 64), Range(1, 0, 64))


def test_transfers_that_do_not_continue_each_other_on_both_sides_stay_apart():
    two = Two()
    two.transfer(0, 16)
    two.transfer(16, 16, to=32)
    two.transfer(48, 16)
    assert two.sends() == [(0,), (1,), (2,)]


def test_transfers_stay_apart_where_one_overwrites_what_is_still_read():
    two = Two()
    two.transfer(0, 16)
    two.launch(two.target, 16, 16)
    two.transfer(16, 16)
    assert two.sends() == [(0,), (2,)]


def test_transfers_stay_apart_where_the_later_bytes_are_made_after_the_first():
    two = Two()
    two.transfer(0, 16)
    two.launch(two.source, 16, 16, Access.WRITE)
    two.transfer(16, 16)
    assert two.sends() == [(0,), (2,)]


def test_a_transfer_joins_one_further_back_over_others_that_do_not_touch_it():
    two = Two()
    extra = two.recording.buffer(two.one, 64, memory="extra")
    two.transfer(0, 16)
    two.recording.add(Transfer(Range(two.target, 48, 16), Range(extra, 0, 16)))
    two.transfer(16, 16)
    assert two.sends() == [(0, 2), (1,)]


def test_large_transfers_that_are_used_one_by_one_keep_their_overlap():
    big = 2 << 20
    two = Two(2 * big)
    two.transfer(0, big)
    two.launch(two.target, 0, big)
    two.transfer(big, big)
    two.launch(two.target, big, big)
    assert two.sends() == [(0,), (2,)]
    two = Two(2 * big)
    two.launch(two.source, 0, 2 * big, Access.WRITE)
    two.transfer(0, big)
    two.transfer(big, big)
    two.launch(two.target, 0, 2 * big)
    assert two.sends() == [(1, 2)]


def test_large_transfers_whose_bytes_come_from_different_queues_do_not_wait_for_each_other():
    for nbytes, expected in ((2 << 20, [(0,), (2,), (3,)]), (16, [(0,), (2, 3)])):
        two = Two(2 * nbytes)
        third = two.recording.buffer(Device(0, 2), nbytes, memory="third")
        two.recording.add(Transfer(Range(two.source, nbytes, nbytes), Range(third, 0, nbytes)))
        two.launch(two.source, 0, nbytes, Access.WRITE)
        two.transfer(0, nbytes)
        two.transfer(nbytes, nbytes)
        assert two.sends() == expected


def test_a_device_sends_receives_and_computes_at_once():
    recording = Recording()
    devices = [Device(server, 0) for server in range(3)]
    buffers = [recording.buffer(d, 32, memory=d) for d in devices]
    for at in range(3):
        recording.add(Transfer(Range(buffers[(at + 1) % 3], 16, 16), Range(buffers[at], 0, 16)))
    planned = schedule(recording)
    assert [queue.lane for queue in planned.queues] == [Lane.SEND, Lane.RECEIVE] * 3
    assert all(not step.waits for step in planned.steps)


def test_one_signal_serves_all_who_wait_for_the_same_step_and_what_follows_it():
    two = Two()
    two.launch(two.source, 0, 32, Access.WRITE)
    two.launch(two.source, 32, 32, Access.WRITE)
    two.transfer(0, 8)
    two.transfer(40, 8)
    planned = schedule(two.recording)
    # The second launch follows the first, and the second send follows the first one.
    assert [[wait.step for wait in step.waits] for step in planned.steps] == [[], [], [1], [], [2], []]
    assert planned.signals == [1, 2]


def test_each_server_is_told_only_its_own_devices_buffers_and_steps():
    recording = Recording()
    near, far, third = Device(0, 1), Device(1, 3), Device(1, 5)
    a, b, c = (recording.buffer(device, 16, memory=device) for device in (near, far, third))
    recording.buffer(far, 16, memory="not used")
    for source, target in ((a, b), (b, c), (c, a)):
        recording.add(Transfer(Range(target, 0, 16), Range(source, 0, 16)))
        home = recording.buffers[target].device
        recording.add(Launch(home, 9, "p", (Operand(Range(target, 0, 16), Access.BOTH),)))
    parts = Plan(recording).parts
    assert {server: part.buffers for server, part in parts.items()} == {0: {a: (1, 16)}, 1: {b: (3, 16), c: (5, 16)}}
    assert [device.index for device in parts[1].devices] == [3, 5]
    numbers = {server: [s.number for d in part.devices for s in d.by_number] for server, part in parts.items()}
    assert numbers == {0: [1, 8, 9], 1: [2, 3, 4, 5, 6, 7]}
    assert [travelled(part) == part for part in parts.values()] == [True, True]


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_only_queues_of_one_device_wait_for_each_other(seed):
    planned = schedule(random_recording(random.Random(seed)))
    for step in planned.steps:
        for wait in step.waits:
            assert planned.queues[planned.step(wait.step).queue].device == planned.queues[step.queue].device
