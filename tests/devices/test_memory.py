"""The allocator: zeroed, aligned, apart, reused, given back."""

from __future__ import annotations

import ctypes
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.devices.memory import ALIGNMENT, Memory
from wsgrad.errors import OutOfMemory

MIB = 1 << 20
# Around every border between ways to allocate.
SIZES = (0, 1, 255, 256, 257, 5000, 65536, 65537, 512 << 10, (512 << 10) + 1, 2 * MIB - 1, 2 * MIB, 5 * MIB)


@pytest.fixture
def memory():
    memory = Memory()
    yield memory
    memory.close()


def mapped_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("nbytes", SIZES)
def test_memory_is_zero_when_new_and_when_used_again(memory, nbytes):
    for _ in range(3):
        address = memory.allocate(nbytes)
        assert address % ALIGNMENT == 0
        assert ctypes.string_at(address, nbytes) == bytes(nbytes)
        ctypes.memset(address, 0xFF, nbytes)
        memory.free(address)
    assert memory.used_bytes == 0


@pytest.mark.parametrize("nbytes", [300, 70_000, MIB, 4 * MIB, 16 * MIB])
def test_a_freed_block_is_used_again(memory, nbytes):
    address = memory.allocate(nbytes)
    memory.free(address)
    assert memory.allocate(nbytes) == address


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(SIZES), st.integers(0, 1 << 30)), max_size=60))
def test_blocks_in_use_never_overlap_and_always_start_zeroed(steps):
    memory = Memory(keep_bytes=8 * MIB)
    live = {}
    for allocate, nbytes, choice in steps:
        if allocate or not live:
            address = memory.allocate(nbytes)
            assert ctypes.string_at(address, nbytes) == bytes(nbytes)
            assert all(address + nbytes <= other or other + size <= address for other, size in live.items())
            ctypes.memset(address, 0xA5, nbytes)
            live[address] = nbytes
        else:
            address = sorted(live)[choice % len(live)]
            nbytes = live.pop(address)
            assert ctypes.string_at(address, nbytes) == b"\xa5" * nbytes
            memory.free(address)
        assert memory.used_bytes == sum(live.values())
    memory.close()


def test_more_buffers_than_a_process_may_have_mappings(memory):
    addresses = [memory.allocate(4) for _ in range(70_000)]
    assert len(set(addresses)) == 70_000
    with open("/proc/self/maps") as maps:
        assert sum(1 for _ in maps) < 5000


def test_over_the_limit_is_refused_with_the_numbers():
    memory = Memory(limit_bytes=1000)
    address = memory.allocate(600)
    with pytest.raises(OutOfMemory, match="401 bytes don't fit: 600 of the device's 1000 bytes are in use"):
        memory.allocate(401)
    memory.free(address)
    memory.allocate(1000)
    memory.close()


def test_what_the_system_has_no_room_for_is_out_of_memory_and_a_memory_error(memory):
    with pytest.raises(MemoryError, match="no room"):
        memory.allocate(1 << 62)
    memory.allocate(10)


def test_kept_memory_stays_below_its_bound(memory):
    memory = Memory(keep_bytes=10 * MIB)
    before = mapped_bytes()
    blocks = [memory.allocate(4 * MIB) for _ in range(10)]
    for block in blocks:
        memory.free(block)
    assert mapped_bytes() - before <= 12 * MIB
    memory.free(memory.allocate(64 * MIB))
    assert mapped_bytes() - before <= 12 * MIB
    memory.close()


def test_kept_small_blocks_give_their_pages_back_above_the_bound():
    memory = Memory(keep_bytes=2 * MIB)
    blocks = [memory.allocate(256 << 10) for _ in range(128)]
    for block in blocks:
        ctypes.memset(block, 1, 256 << 10)
    full = resident_bytes()
    for block in blocks:
        memory.free(block)
    assert full - resident_bytes() > 20 * MIB
    memory.close()


def test_memory_kept_in_other_sizes_is_given_up_when_the_system_has_no_more():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    memory = Memory()
    memory.free(memory.allocate(100 * MIB))
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + 20 * MIB, hard))
    try:
        memory.free(memory.allocate(60 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        memory.close()


def test_closing_gives_everything_back():
    before = mapped_bytes()
    memory = Memory()
    for nbytes in SIZES * 5:
        memory.allocate(nbytes)
    memory.free(memory.allocate(32 * MIB))
    memory.close()
    # Python's own heap may have grown a little.
    assert mapped_bytes() - before < 2 * MIB
