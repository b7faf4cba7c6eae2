"""Substitutes: what fits, and which shared memory a plan stands."""

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_graphs import Memory, conflicts, over_before, random_recording, run_parts, run_recorded, step_of, travelled

from wsgrad.errors import LaunchError
from wsgrad.graph.items import Access, Copy, Device, Launch, Operand, Range, Transfer
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.graph.substitution import Placement

seeds = st.integers(0, 2**32)


def moved(range_, offsets):
    """Where an access falls if the buffers in `offsets` share memory."""
    if range_.buffer not in offsets:
        return range_
    return Range(-1, range_.offset + offsets[range_.buffer], range_.nbytes)


def stays_right(recording, plan, offsets):
    """Whether every pair of accesses that conflict in shared memory is ordered, found pair by pair."""
    at_start, _ = over_before(plan.schedule)
    accesses = [(at, range_, access) for at, item in enumerate(recording.items) for range_, access in item.accesses]
    for place, (at, range_, access) in enumerate(accesses):
        for earlier, other, first in accesses[:place]:
            if not conflicts((moved(range_, offsets), access), (moved(other, offsets), first)):
                continue
            if earlier == at:
                if isinstance(recording.items[at], Launch) and first & access & Access.WRITE:
                    return False
                continue
            before = step_of(plan.schedule, recording, earlier, other)
            after = step_of(plan.schedule, recording, at, range_)
            if not at_start[after] >> before & 1:
                return False
    return True


@given(seeds, seeds)
@settings(max_examples=250, deadline=None)
def test_shared_memory_is_refused_exactly_where_the_plan_does_not_order_it(seed, order):
    rng = random.Random(seed)
    recording = random_recording(rng)
    plan = Plan(recording)
    device = rng.choice(recording.buffers).device
    homed = [buffer for buffer in recording.buffers if buffer.device == device]
    chosen = rng.sample(homed, rng.randint(min(2, len(homed)), len(homed)))
    one = rng.choice(homed)
    offsets = {buffer.number: 4 * rng.randint(0, 6) for buffer in chosen}
    memory = rng.choice(["new", one.memory])
    new = {buffer.number: Placement(device, buffer.nbytes, memory, offsets[buffer.number]) for buffer in chosen}
    if memory == one.memory and one not in chosen:
        offsets[one.number] = 0
    shared = {number: offset for number, offset in offsets.items() if number in recording.touched}
    right = stays_right(recording, plan, shared)
    event(f"right: {right}, shared by {len(shared)}")
    if not right:
        with pytest.raises(LaunchError, match="share") as caught:
            plan.check_substitutions(new)
        assert sum(recording.buffers[number].label in str(caught.value) for number in shared) >= 2
        return
    plan.check_substitutions(new)
    plan.check_substitutions(new)
    expected, memory = (Memory(recording, offsets, random.Random(seed)) for _ in range(2))
    run_recorded(recording, expected)
    run_parts([travelled(part) for part in plan.parts.values()], recording, memory, random.Random(order))
    assert memory.contents() == expected.contents()


DEVICE = Device(0, 0, "cpu")
OTHER = Device(0, 1)


def plan_with_two_unordered_buffers():
    """A receives into one buffer while a kernel writes another."""
    recording = Recording()
    sent = recording.buffer(OTHER, 16, memory="sent", name="sent")
    got = recording.buffer(DEVICE, 16, memory="got", name="got")
    made = recording.buffer(DEVICE, 16, memory="made", name="made")
    recording.add(Transfer(Range(got, 0, 16), Range(sent, 0, 16)))
    recording.add(Launch(DEVICE, 0, "p", (Operand(Range(made, 0, 16), Access.WRITE),)))
    return Plan(recording), got, made


def test_the_same_new_buffer_for_two_is_refused_by_both_names():
    plan, got, made = plan_with_two_unordered_buffers()
    with pytest.raises(LaunchError, match="got and made would share memory"):
        plan.check_substitutions({number: Placement(DEVICE, 16, "new") for number in (got, made)})


def test_a_new_buffer_that_the_graph_uses_as_another_is_refused_unless_that_one_is_replaced_too():
    plan, got, made = plan_with_two_unordered_buffers()
    with pytest.raises(LaunchError, match="got and made would share memory"):
        plan.check_substitutions({got: Placement(DEVICE, 16, "made")})
    plan.check_substitutions({got: Placement(DEVICE, 16, "made"), made: Placement(DEVICE, 16, "got")})


def test_neighbouring_ranges_of_one_new_buffer_are_free():
    plan, got, made = plan_with_two_unordered_buffers()
    plan.check_substitutions({got: Placement(DEVICE, 16, "new", 0), made: Placement(DEVICE, 16, "new", 16)})
    with pytest.raises(LaunchError):
        plan.check_substitutions({got: Placement(DEVICE, 16, "new", 0), made: Placement(DEVICE, 16, "new", 15)})
    plan.check_substitutions({got: Placement(DEVICE, 16, "new", 16), made: Placement(DEVICE, 16, "new", 0)})


def test_what_one_queue_orders_anyway_may_share_memory():
    recording = Recording()
    one, other = (recording.buffer(DEVICE, 16, memory=name, name=name) for name in ("one", "other"))
    recording.add(Copy(DEVICE, Range(other, 0, 16), Range(one, 0, 16)))
    recording.add(Launch(DEVICE, 0, "p", (Operand(Range(other, 0, 16)),)))
    Plan(recording).check_substitutions({one: Placement(DEVICE, 16, "other")})


def test_a_launch_may_not_come_to_write_the_same_bytes_twice():
    recording = Recording()
    one, other = (recording.buffer(DEVICE, 16, memory=name, name=name) for name in ("one", "other"))
    operands = Operand(Range(one, 0, 16)), Operand(Range(other, 0, 16))
    recording.add(Launch(DEVICE, 0, "pp", operands, name="swap"))
    with pytest.raises(LaunchError, match="swap would write overlapping ranges of one and other"):
        Plan(recording).check_substitutions({one: Placement(DEVICE, 16, "other")})
    recording = Recording()
    one, other = (recording.buffer(DEVICE, 16, memory=name, name=name) for name in ("one", "other"))
    recording.add(Launch(DEVICE, 0, "pp", operands, name="swap", alias=True))
    Plan(recording).check_substitutions({one: Placement(DEVICE, 16, "other")})


def test_a_substitute_of_another_size_or_device_is_refused():
    plan, got, _ = plan_with_two_unordered_buffers()
    with pytest.raises(LaunchError, match="x with 20 bytes can't stand for got with 16"):
        plan.check_substitutions({got: Placement(DEVICE, 20, "new", name="x")})
    with pytest.raises(LaunchError, match="x on 0/1 can't stand for got, recorded on cpu"):
        plan.check_substitutions({got: Placement(OTHER, 16, "new", name="x")})
    with pytest.raises(LaunchError, match="no buffer 7"):
        plan.check_substitutions({7: Placement(DEVICE, 16, "new")})
