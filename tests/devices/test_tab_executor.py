"""What a queue does with commands in a tab: the tests of the other executors, and what only a late device does."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from device_rigs import ExecutorRig
from tab_rigs import TabServer, require_node
from test_executor import (  # noqa: F401
    ADD_ONE,
    failures,
    test_a_download_without_credit_holds_the_queue_and_an_abort_ends_it,
    test_a_dropped_program_is_gone_and_its_id_can_be_used_again,
    test_a_failing_packed_launch_names_its_number_and_program_and_the_ones_before_have_run,
    test_a_program_computes_what_it_should,
    test_a_program_that_did_not_compile_fails_only_where_it_is_launched,
    test_an_aborted_upload_counts_as_done,
    test_an_error_stops_the_queue_until_it_is_cleared,
    test_arrays_survive_upload_and_download,
    test_buffers_of_no_bytes_work,
    test_chunks_of_a_failed_upload_are_thrown_away,
    test_chunks_of_an_upload_behind_an_error_are_thrown_away_and_their_credit_returns,
    test_malformed_packed_launches_are_refused,
    test_more_memory_than_allowed_is_refused_and_the_rest_stays_usable,
    test_new_memory_is_zeroed_even_where_it_was_used_before,
    test_views_share_bytes_and_keep_their_buffer_alive,
    test_what_the_server_refused_fails_in_its_place,
    test_writes_fills_and_copies_reach_the_right_bytes,
)
from test_replay import (  # noqa: F401
    test_a_freed_buffer_is_missed_by_the_next_replay_even_if_its_memory_is_there_again,
    test_a_replay_launches_copies_and_fills_with_its_own_values_and_buffers,
    test_a_replay_whose_sender_failed_fails_with_the_cause,
    test_a_replay_with_values_or_buffers_that_do_not_fit_fails_without_running,
    test_a_step_that_fails_is_named_and_what_follows_is_dropped,
    test_chunks_of_a_replay_that_fails_or_is_dropped_give_their_credit_back,
    test_transfers_stop_a_replay_for_credit_and_for_bytes_and_chunks_may_come_early,
)

from wsgrad.devices.ring import SLOT_BYTES
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m


@pytest.fixture(scope="module")
def tab(toolbox):
    require_node()
    server = TabServer(toolbox)
    yield server
    server.close()


@pytest.fixture
def rig(tab):
    rig = tab.open_queue()
    yield rig
    rig.close()


def test_a_failure_that_the_device_finds_late_stops_the_queue_and_takes_back_what_followed(rig):
    rig.program(1, ADD_ONE, "pi", name="fails late")
    rig.run(c.Alloc(1, 4))
    bad = rig.launches([1, 0, 1, 1])
    rig.batch(c.Read(1, 0, 4))
    rig.batch(c.Read(99, 0, 4))
    messages = rig.settle()
    [failed] = failures(messages)
    assert (failed.number, failed.code) == (bad, "DeviceError")
    assert "number" not in failed.details
    rig.run(c.Clear(bad))
    assert rig.read(1, 4) == struct.pack("<i", 1)


def test_a_timed_launch_says_how_long_it_took(rig):
    rig.program(1, ADD_ONE, "pi")
    rig.run(c.Alloc(1, 4))
    messages = rig.run(c.Launch(1, None, None, [1, 1], True))
    [result] = [message for message in messages if isinstance(message, m.Result)]
    assert (result.number, result.value) == (rig.number, 0.001)


def test_warnings_of_a_compiler_are_told(rig):
    rig.program(1, "(a) => 'warning'", "p")
    [compiled] = [message for message in rig.settle() if isinstance(message, m.Compiled)]
    assert (compiled.ok, compiled.message) == (True, "1:1: a warning")


def test_buffers_asked_for_together_fail_one_by_one(rig):
    messages = rig.run(c.Alloc(1, 8), c.Alloc(2, 1 << 31), c.Alloc(3, 8), c.Alloc(1, 8), c.Write(3, 0, b"x"))
    [failed] = failures(messages)
    assert (failed.number, failed.code) == (2, "OutOfMemory")
    rig.run(c.Clear(failed.number), c.Write(3, 0, b"12345678"))
    assert rig.read(3, 8) == b"12345678"


def test_a_lost_device_fails_the_command_that_ran_and_the_queue_is_over(tab):
    rig = tab.open_queue()
    rig.program(1, ADD_ONE, "pi", name="loses the device")
    rig.run(c.Alloc(1, 4))
    bad = rig.launches([1, 0, 1, 1])
    rig.batch(c.Read(1, 0, 4))
    failed = rig.wait_for(m.Failed)
    assert (failed.number, failed.code) == (bad, "Timeout")
    assert failed.details == {"program": "loses the device"}
    rig.close()
    other = tab.open_queue()
    assert not failures(other.run(c.Alloc(1, 4)))
    other.close()


def test_a_device_that_does_not_open_says_so(tab):
    with pytest.raises(AssertionError, match="does not open"):
        _open_failing(tab)


def _open_failing(tab):
    queue = 1 << 20
    tab.send(m.Attach(queue, 1, 0, {"memory": 666}))
    message, _ = tab.receive(queue)
    assert not isinstance(message, m.Failed), message.message


def test_a_paused_tab_holds_work_and_answers_heartbeats(tab):
    rig = tab.open_queue()
    rig.run(c.Alloc(1, 4), c.Write(1, 0, b"abcd"))
    tab.tab.command("pause")
    tab.tab.wait_state("paused")
    message, _ = tab.next()
    assert message == m.Present("", True, 0)
    rig.batch(c.Read(1, 0, 4))
    tab.send(m.Ping(77))
    message, _ = tab.next()
    assert message == m.Pong(77)
    assert rig.silent()
    tab.tab.command("resume")
    message, _ = tab.next()
    assert message == m.Present("", False, 0)
    assert bytes(rig.wait_for(m.ReadData)[1]) == b"abcd"
    rig.close()


def test_spans_of_a_queue_are_measured_while_it_is_asked_for(tab):
    rig = tab.open_queue()
    rig.program(1, ADD_ONE, "pi")
    rig.send(m.Profile(rig.queue, 5, True))
    rig.run(c.Alloc(1, 4), c.Write(1, 0, bytes(4)))
    rig.launches([1, 0, 1, 1])
    rig.read(1, 4)
    rig.send(m.Profile(rig.queue, 5, False))
    rig.wait_for(m.Spans, lambda message: message.last)
    records = b"".join(bytes(bulk) for message, bulk in rig.received if isinstance(message, m.Spans))
    spans = [struct.unpack_from("<HHIIIIIQqqQ", records, at) for at in range(0, len(records), 56)]
    kinds = {span[0]: span for span in spans}
    assert set(kinds) == {1, 7, 8, 9}
    assert kinds[7][7] == rig.number
    assert all(span[8] <= span[9] for span in spans)
    tab.send(m.Clock(9))
    message, _ = tab.next()
    assert isinstance(message, m.Time)
    assert kinds[7][9] <= message.nanoseconds
    rig.close()


def test_memory_that_the_owner_lends_is_shared_by_all_sessions(tab):
    one, other = tab.open_queue(), tab.open_queue()
    tab.tab.command("memory", bytes=1000)
    message, _ = tab.next()
    assert message == m.Present("", False, 1000)
    one.run(c.Alloc(1, 600))
    [failed] = failures(other.run(c.Alloc(1, 600)))
    assert failed.code == "OutOfMemory"
    assert failed.details["cap"] == 1000
    other.run(c.Clear(failed.number))
    one.close()
    assert not failures(other.run(c.Alloc(2, 600)))
    tab.tab.command("memory", bytes=0)
    tab.next()
    other.close()


def moves(seed):
    """Random commands on a few buffers, some of them wrong; where one fails, what clears it follows later."""
    rng = random.Random(seed)
    return [move(rng) for _ in range(rng.randrange(5, 60))]


def move(rng):
    ids = range(1, 6)
    offset, nbytes = rng.choice([0, 0, 1, 7, 64]), rng.choice([0, 1, 4, 16, 33, 64])
    buffer, other = rng.choice(ids), rng.choice(ids)
    match rng.choice("aAfvwrcplLudxk"):
        case "a":
            return "batch", [c.Alloc(buffer, rng.choice([0, 16, 64, 100]))]
        case "A":
            return "batch", [c.Alloc(i, 64) for i in ids]
        case "f":
            return "batch", [c.Free(buffer)]
        case "v":
            return "batch", [c.View(other, buffer, offset, nbytes)]
        case "w":
            return "batch", [c.Write(buffer, offset, rng.randbytes(nbytes)), c.Read(buffer, 0, 16)]
        case "r":
            return "batch", [c.Read(buffer, offset, nbytes)]
        case "c":
            return "batch", [c.Copy(buffer, offset, other, 0, nbytes), c.Read(buffer, offset, nbytes)]
        case "p":
            return "batch", [c.Fill(buffer, offset, nbytes, rng.choice([b"a", b"bc", b"defg", b"bad"]))]
        case "l":
            return "batch", [c.Launch(rng.choice([1, 2, 3]), None, None, [buffer, 2], rng.random() < 0.3)]
        case "L":
            return "launches", [[rng.choice([1, 1, 1, 2, 3]), 0, buffer, rng.choice([1, 4])]] * 3
        case "u":
            return "upload", buffer, rng.randbytes(nbytes), offset
        case "d":
            return "download", buffer, nbytes, offset
        case "x":
            return ("fail",)
    return ("clear",)


def play(rig, seed, known=None):
    """Do the moves; the answers that any two executors must agree on. `known` are the failures of another one."""
    rig.program(1, ADD_ONE, "pi", name="one")
    rig.program(2, "void entry(int *a { }", "pi", name="two")
    seen = []
    transfer = 10
    for index, move in enumerate(moves(seed)):
        transfer += 1
        match move:
            case ("batch", commands):
                rig.batch(*commands)
            case ("launches", words):
                rig.launches(*words)
            case ("upload", buffer, data, offset):
                rig.batch(c.Upload(transfer, buffer, offset, len(data)))
                if data:
                    rig.send_chunk(transfer, 0, data)
            case ("download", buffer, nbytes, offset):
                rig.batch(c.Download(transfer, buffer, offset, nbytes))
            case ("fail",):
                rig.number += 1
                rig.send(m.Fail(rig.queue, rig.number, "LimitExceeded", "no", {}))
            case ("clear",):
                if known is None:
                    rig.settle()
                    number = next((a.number for a, _ in reversed(rig.received) if isinstance(a, m.Failed)), 0)
                    seen.append(number)
                else:
                    number = known.pop(0)
                rig.batch(c.Clear(number))
        while rig.upload_credit < 1:
            rig.wait_for(m.Credit)
        assert index < 1000
    rig.run(c.Clear(0))
    while rig.upload_credit < m.SLOTS:
        rig.wait_for(m.Credit)
    for message, _ in list(rig.received):
        if isinstance(message, m.Chunk):
            rig.send(m.Credit(rig.queue, 1))
    answers = []
    for message, bulk in rig.received:
        match message:
            case m.ReadData():
                answers.append(("read", message.number, bytes(bulk)))
            case m.Failed():
                details = {key: message.details[key] for key in ("operation", "program") if key in message.details}
                # Of what is wrong with a launch each device may look at something else first.
                code = None if details.get("operation") == "launch" else message.code
                answers.append(("failed", message.number, code, details))
            case m.Chunk():
                answers.append(("chunk", message.transfer, message.offset, bytes(bulk)))
            case m.Result() if message.number:
                answers.append(("result", message.number))
    return answers, seen


@pytest.mark.parametrize("seed", range(40))
def test_any_commands_have_the_answers_of_the_python_executor(tab, toolbox, loop, seed):
    reference = ExecutorRig(toolbox, loop)
    expected, failed = play(reference, seed)
    reference.close()
    # Without waiting: what the device does late must not change what is answered.
    rig = tab.open_queue()
    answers, _ = play(rig, seed, failed)
    rig.close()
    by_kind = {kind: [a for a in expected if a[0] == kind] for kind in ("read", "failed", "chunk", "result")}
    assert {kind: [a for a in answers if a[0] == kind] for kind in by_kind} == by_kind


def test_many_large_transfers_keep_their_order(rig):
    rng = np.random.default_rng(3)
    data = rng.bytes(7 * SLOT_BYTES + 5)
    rig.run(c.Alloc(1, len(data)), c.Alloc(2, len(data)))
    rig.upload(1, data)
    rig.batch(c.Copy(2, 0, 1, 0, len(data)))
    assert rig.download(2, len(data)) == data
    assert rig.read(1, 100, offset=3 * SLOT_BYTES) == data[3 * SLOT_BYTES : 3 * SLOT_BYTES + 100]
