"""The client's session against a scripted server end, without I/O: order, flow, errors, resuming."""

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import Wire

from wsgrad.client.arrays import MemorySource, sink_of
from wsgrad.client.handle import Handle
from wsgrad.client.outbox import WINDOW
from wsgrad.client.signature import words_of
from wsgrad.errors import (
    CompileError,
    ConnectionLost,
    DeviceError,
    DeviceLost,
    LaunchError,
    LimitExceeded,
    ProtocolError,
)
from wsgrad.transport.commands import Alloc, Clear, Copy, Download, Free, Launch, Read, Upload, parse_command
from wsgrad.transport.messages import (
    CHUNK_BYTES,
    Abort,
    Ack,
    Batch,
    Chunk,
    Close,
    Compiled,
    Credit,
    Devices,
    Failed,
    Launches,
    Open,
    Program,
    ReadData,
    Refused,
    Reopen,
    Result,
    Seen,
)


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def queue(wire):
    queue = wire.session.open_queue("n/cpu/0")
    assert wire.pump() == [(Open(0, "n/cpu/0", {}), None)]
    queue.life.words[0] = words_of("")
    return queue


def commands(messages):
    """Number and command of everything in the batches among these messages."""
    return [
        (message.first + index, parse_command(command))
        for message, _ in messages
        if isinstance(message, Batch)
        for index, command in enumerate(message.commands)
    ]


def read(queue, count=4):
    target = np.zeros(count, np.uint8)
    return target, queue.read(7, count, sink_of(target), lambda _: target)


PLAIN = words_of("").pack(0, 0)
"""A packed launch of program 0, without arguments."""


def test_commands_and_launches_are_numbered_in_the_order_they_were_issued(wire, queue):
    queue.command(Alloc(0, 64))
    queue.launches.extend([PLAIN] * 3)
    queue.command(Alloc(1, 64))
    said = wire.flush()
    assert [type(message) for message, _ in said] == [Batch, Launches, Batch]
    assert commands(said) == [(1, Alloc(0, 64)), (5, Alloc(1, 64))]
    assert said[1] == (Launches(0, 2, 3), PLAIN * 3)


def test_a_launch_or_two_travel_with_the_commands_around_them(wire, queue):
    queue.life.words[3] = words_of("pfqxQd")
    values = [5, 0.5, -(1 << 40), 1 << 63, float("inf")]
    launch = Launch(3, [7], None, values, False)
    words = queue.life.words[3].pack(3, 7, *values)
    queue.launches.append(words)
    read(queue)
    queue.launches.append(PLAIN)
    queue.launches.append(PLAIN)
    [(message, _)] = said = wire.flush()
    assert isinstance(message, Batch)
    assert commands(said) == [
        (1, launch),
        (2, Read(7, 0, 4)),
        (3, Launch(0, None, None, [], False)),
        (4, Launch(0, None, None, [], False)),
    ]
    queue.launches.append(words)
    assert wire.flush() == [(Launches(0, 5, 1), words)]


def test_many_large_launches_travel_in_messages_of_at_most_64_kib(wire, queue):
    launches = [bytes([n % 256]) * 400 for n in range(500)]
    queue.launches.extend(launches)
    said = wire.flush()
    assert all(len(bulk) <= 1 << 16 for _, bulk in said)
    assert b"".join(bulk for _, bulk in said) == b"".join(launches)
    assert [(message.first, message.count) for message, _ in said] == [(1, 163), (164, 163), (327, 163), (490, 11)]


def test_a_free_follows_the_launches_that_were_issued_before_it(wire, queue):
    handle = Handle(queue.life.buffers.take(), queue.life)
    queue.launches.extend([PLAIN] * 3)
    del handle
    said = wire.flush()
    assert [type(message) for message, _ in said] == [Launches, Batch]
    assert commands(said) == [(4, Free(0))]


def test_an_allocation_follows_the_frees_of_what_was_given_back_before_it(wire, queue):
    for size in (64, 32):
        buffer = queue.life.buffers.take()
        handle = Handle(buffer, queue.life)
        queue.alloc(buffer, size)
        queue.launches.extend([PLAIN] * 3)
        del handle
    assert commands(wire.flush()) == [(1, Alloc(0, 64)), (5, Free(0)), (6, Alloc(1, 32)), (10, Free(1))]


def test_an_id_is_used_again_only_after_its_free_was_acknowledged(wire, queue):
    ids = queue.life.buffers
    handle = Handle(ids.take(), queue.life)
    handle.free()
    handle.free()
    assert commands(wire.flush()) == [(1, Free(0))]
    assert ids.take() == 1
    wire.say(Ack(0, 1))
    assert ids.take() == 0


def test_what_a_finalizer_saves_from_the_collector_keeps_its_id(wire, queue):
    saved = []

    class Cached:
        """In a cycle with itself; what it holds outlives it, as in a cache of buffers."""

        def __init__(self, handle):
            self.itself, self.handle = self, handle

        def __del__(self):
            saved.append(self.handle)

    Cached(Handle(queue.life.buffers.take(), queue.life))
    gc.collect()
    assert len(saved) == 1
    assert wire.flush() == []
    saved.clear()
    assert commands(wire.flush()) == [(1, Free(0))]


def test_ids_over_the_servers_limit_are_refused_by_name():
    wire = Wire(limits={"max_buffers": 2, "max_programs": 1})
    queue = wire.session.open_queue("n/cpu/0")
    queue.life.buffers.take()
    queue.life.buffers.take()
    with pytest.raises(LimitExceeded, match=r"2 buffers and views.*--max-buffers"):
        queue.life.buffers.take()


def test_a_small_read_is_received_into_its_target(wire, queue):
    target, wait = read(queue)
    assert commands(wire.flush()) == [(1, Read(7, 0, 4))]
    wire.say(ReadData(0, 1, 0), b"abcd")
    assert wait.done
    assert wait.result() is target
    assert bytes(target) == b"abcd"


@pytest.mark.parametrize("data", [b"abc", b"abcde"])
def test_an_answer_of_another_size_breaks_the_protocol(wire, queue, data):
    read(queue)
    wire.flush()
    with pytest.raises(ProtocolError, match="read of 4 bytes was answered with"):
        wire.say(ReadData(0, 1, 0), data)


def test_at_most_4_mib_of_commands_are_sent_ahead_of_their_acknowledgements(wire, queue):
    message = b"\0" * (1 << 15)
    for _ in range(300):
        queue.launches.append(message)
    sent = sum(len(bulk) for _, bulk in wire.flush())
    assert WINDOW - (1 << 18) <= sent <= WINDOW
    assert queue.unsent_bytes >= 300 * len(message) - sent
    wire.say(Ack(0, 20))
    again = sum(len(bulk) for _, bulk in wire.pump())
    assert again == 20 * len(message)
    while wire.session.blocked:
        wire.say(Ack(0, heard_counts(wire)))
        assert wire.pump()
    assert queue.unsent_bytes == 0
    assert heard_counts(wire) == 300


def test_an_upload_sends_four_chunks_and_then_one_for_each_credit(wire, queue):
    data = bytes(range(256)) * (6 << 12) + b"rest"
    wait = queue.upload(3, len(data), MemorySource(memoryview(data)), lambda _: "done")
    queue.command(Copy(0, 0, 1, 0, 4))
    said = wire.flush()
    assert commands(said) == [(1, Upload(1, 3, 0, len(data)))]
    assert [message.offset for message, _ in said[1:]] == [n * CHUNK_BYTES for n in range(4)]
    wire.say(Credit(0, 2))
    more = wire.pump()
    assert [message.offset for message, _ in more] == [4 * CHUNK_BYTES, 5 * CHUNK_BYTES]
    wire.say(Credit(0, 1))
    last = wire.pump()
    assert last[0] == (Chunk(0, 1, 6 * CHUNK_BYTES), b"rest")
    assert commands(last) == [(2, Copy(0, 0, 1, 0, 4))]
    assert b"".join(bulk for message, bulk in wire.heard if isinstance(message, Chunk)) == data
    assert not wait.done
    wire.say(Ack(0, 1))
    assert wait.result() == "done"


def test_a_withdrawn_upload_is_aborted_and_what_follows_goes_on(wire, queue):
    wait = queue.upload(3, 8 << 20, MemorySource(memoryview(bytes(8 << 20))), lambda _: None)
    queue.command(Alloc(0, 4))
    wire.flush()
    wait.withdraw()
    said = wire.pump()
    assert said[0] == (Abort(0, 1), None)
    assert commands(said) == [(2, Alloc(0, 4))]


def test_a_download_is_received_straight_into_its_target(wire, queue):
    target = np.zeros(CHUNK_BYTES + 5, np.uint8)
    wait = queue.read(7, len(target), sink_of(target), lambda _: target)
    assert commands(wire.flush()) == [(1, Download(1, 7, 0, len(target)))]
    first = bytes(range(256)) * (CHUNK_BYTES // 256)
    wire.say(Chunk(0, 1, 0), first)
    assert bytes(target[:CHUNK_BYTES]) == first
    assert not wait.done
    wire.say(Chunk(0, 1, CHUNK_BYTES), b"after")
    assert wait.done
    assert bytes(target[CHUNK_BYTES:]) == b"after"


@pytest.mark.parametrize(("offset", "nbytes"), [(1, CHUNK_BYTES), (0, CHUNK_BYTES - 1), (CHUNK_BYTES, 5)])
def test_a_chunk_that_is_not_due_breaks_the_protocol(wire, queue, offset, nbytes):
    target = np.zeros(CHUNK_BYTES + 5, np.uint8)
    queue.read(7, len(target), sink_of(target), lambda _: target)
    wire.flush()
    with pytest.raises(ProtocolError, match="were due"):
        wire.say(Chunk(0, 1, offset), bytes(nbytes))


def test_a_withdrawn_download_is_aborted_and_its_chunks_go_nowhere(wire, queue):
    target = np.zeros(3 * CHUNK_BYTES, np.uint8)
    wait = queue.read(7, len(target), sink_of(target), lambda _: target)
    wire.flush()
    wire.say(Chunk(0, 1, 0), b"\1" * CHUNK_BYTES)
    wait.withdraw()
    assert wire.pump() == [(Abort(0, 1), None)]
    wire.say(Chunk(0, 1, CHUNK_BYTES), b"\2" * CHUNK_BYTES)
    assert not target[CHUNK_BYTES:].any()
    wire.say(Ack(0, 1))


def test_withdrawing_diverts_a_chunk_that_is_half_received(wire, queue):
    target = np.zeros(CHUNK_BYTES, np.uint8)
    wait = queue.read(7, CHUNK_BYTES, sink_of(target), lambda _: target)
    wire.flush()
    frame = b"".join(wire.server.encode(b"\x84\x13\x00\x01\x00", b"\1" * CHUNK_BYTES))
    assert wire.client.feed(frame[:1000]) == []
    assert target.any()
    wait.withdraw()
    target[:] = 0
    (event,) = wire.client.feed(frame[1000:])
    wire.session.handle(event)
    assert not target.any()


def test_an_abort_follows_a_download_that_was_not_sent_yet(wire, queue):
    queue.launches.extend([bytes(1 << 15)] * 300)
    target = np.zeros(1 << 20, np.uint8)
    wait = queue.read(7, len(target), sink_of(target), lambda _: target)
    wire.flush()
    wait.withdraw()
    assert not any(isinstance(message, Abort) for message, _ in wire.heard)
    wire.say(Ack(0, 148))
    wire.pump()
    wire.say(Ack(0, 296))
    wire.pump()
    assert isinstance(wire.heard[-1][0], Abort)
    assert commands(wire.heard)[-1] == (301, Download(1, 7, 0, 1 << 20))


def test_an_error_is_raised_by_the_call_that_waits_and_cleared_in_the_queues_order(wire, queue):
    _, before = read(queue)
    queue.launches.append(b"\0" * 8)
    _, after = read(queue)
    queue.command(Alloc(0, 4))
    wire.flush()
    wire.say(ReadData(0, 1, 0), b"good")
    wire.say(Failed(0, 2, "LaunchError", "argument 1 is bad", {"operation": "launch", "program": "p"}))
    assert before.done
    before.result()
    with pytest.raises(LaunchError, match="argument 1 is bad") as caught:
        after.result()
    assert caught.value.details["program"] == "p"
    assert commands(wire.pump()) == [(5, Clear(2))]
    queue.raise_unraised()


def test_every_caller_that_waits_gets_an_exception_of_its_own(wire, queue):
    _, first = read(queue)
    _, second = read(queue)
    wire.flush()
    wire.say(Failed(0, 1, "DeviceError", "no", {}))
    errors = []
    for wait in (first, second):
        with pytest.raises(DeviceError) as caught:
            wait.result()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_an_error_that_nobody_waits_for_is_raised_once_by_the_next_waiting_call(wire, queue):
    queue.launches.append(b"\0" * 8)
    wire.flush()
    wire.say(Failed(0, 1, "LaunchError", "overlap", {}))
    assert wire.pump() == []
    with pytest.raises(LaunchError, match="overlap"):
        queue.raise_unraised()
    queue.raise_unraised()
    _, wait = read(queue)
    assert commands(wire.flush()) == [(2, Clear(1)), (3, Read(7, 0, 4))]
    wire.say(ReadData(0, 3, 0), b"fine")
    wait.result()


def test_an_error_that_nobody_met_is_left_for_the_end_of_the_session(wire, queue):
    queue.launches.append(b"\0" * 8)
    wire.flush()
    wire.say(Failed(0, 1, "LaunchError", "overlap", {}))
    assert isinstance(wire.session.take_unraised(), LaunchError)
    assert wire.session.take_unraised() is None


def test_a_failing_upload_stops_sending(wire, queue):
    wait = queue.upload(3, 8 << 20, MemorySource(memoryview(bytes(8 << 20))), lambda _: None)
    wire.flush()
    wire.say(Failed(0, 1, "DeviceError", "no such buffer", {}))
    with pytest.raises(DeviceError, match="no such buffer"):
        wait.result()
    said = wire.pump()
    assert said[0] == (Abort(0, 1), None)
    assert commands(said) == [(2, Clear(1))]


def test_a_lost_device_fails_everything_until_it_is_reopened(wire, queue):
    _, wait = read(queue)
    wire.flush()
    wire.say(Failed(0, 1, "DeviceLost", "program 'crash' ended it", {"lost": True}))
    with pytest.raises(DeviceLost, match="crash"):
        wait.result()
    assert wire.pump() == []  # nothing clears a loss
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"crash.*device\.reopen\(\)"):
            queue.raise_unraised()
    life = queue.life
    wait = queue.reopen()
    assert wire.flush()[-1] == (Reopen(0, 2), None)
    assert queue.life is not life
    assert life.dead is not None
    wire.say(Result(0, 2, {}))
    wait.result()
    queue.raise_unraised()
    assert queue.life.buffers.take() == 0


def test_a_launch_over_its_time_is_a_timeout_and_what_was_there_is_lost(wire, queue):
    wait = queue.synchronize()
    queue.launches.append(b"\0" * 8)
    wire.flush()
    wire.say(Failed(0, 1, "Timeout", "'spin' ran for more than 30 s", {"lost": True}))
    with pytest.raises(TimeoutError, match="spin"):
        queue.raise_unraised()
    with pytest.raises(DeviceLost, match="spin"):
        queue.raise_unraised()
    assert not wait.done or wait.result() is None


def test_reads_that_wait_when_a_device_is_reopened_fail(wire, queue):
    _, wait = read(queue)
    queue.reopen()
    with pytest.raises(DeviceLost, match="reopened"):
        wait.result()


def test_a_device_that_does_not_open_gets_another_queue(wire):
    queue = wire.session.open_queue("gone/cpu/0")
    _, wait = read(queue)
    wire.flush()
    wire.say(Failed(0, 0, "DeviceError", "there is no device 'gone/cpu/0'", {}))
    with pytest.raises(DeviceError, match="no device"):
        wait.result()
    assert queue.gone
    assert wire.pump()[-1] == (Close(0), None)
    assert wire.session.open_queue("n/cpu/0").number == 1
    wire.say(Ack(0, 1))  # on its way before the close arrived


def test_programs_that_do_not_compile_stop_no_queue(wire, queue):
    identity, compilation = queue.program(
        b"x", dialect="c", name="p", entry="p", signature="p", writes=None, alias=False
    )
    wait = queue.pending.compiled([compilation])
    assert wire.flush() == [(Program(0, 1, 0, "c", "p", "p", "p", None, False), b"x")]
    wire.say(Compiled(0, identity, False, "source.c:1:1: error: unknown type name 'x'"))
    with pytest.raises(CompileError, match="unknown type"):
        wait.result()
    queue.raise_unraised()


def test_a_program_that_the_server_refuses_before_compiling_it_is_told_to_those_who_wait(wire, queue):
    program = {"dialect": "c", "name": "p", "entry": "p", "signature": "p", "writes": None, "alias": False}
    refused, other = queue.program(b"x", **program)[1], queue.program(b"y", **program)
    wait, unharmed = queue.pending.compiled([refused]), queue.pending.compiled([other[1]])
    wire.flush()
    wire.say(Failed(0, 1, "LimitExceeded", "no more programs", {}))
    with pytest.raises(LimitExceeded, match="no more programs"):
        wait.result()
    queue.raise_unraised()
    with pytest.raises(LimitExceeded):
        queue.pending.compiled([refused]).result()
    assert not unharmed.done
    wire.say(Compiled(0, other[0], True, ""))
    unharmed.result()


def test_a_program_that_compiles_lets_its_callers_go(wire, queue):
    program = {"dialect": "c", "name": "p", "entry": "p", "signature": "p", "writes": None, "alias": False}
    first = queue.program(b"x", **program)
    second = queue.program(b"y", **program)
    wait = queue.pending.compiled([first[1], second[1]])
    wire.flush()
    wire.say(Compiled(0, second[0], True, ""))
    assert not wait.done
    wire.say(Compiled(0, first[0], True, ""))
    wait.result()


def test_a_timed_launch_gives_seconds(wire, queue):
    wait = queue.timed_launch(Launch(0, None, None, [], True))
    wire.flush()
    wire.say(Result(0, 1, 0.25))
    assert wait.result() == 0.25


@pytest.mark.parametrize("value", ["0.25", -1.0, float("nan"), None, 3])
def test_seconds_that_are_none_are_refused(wire, queue, value):
    wait = queue.timed_launch(Launch(0, None, None, [], True))
    wire.flush()
    wire.say(Result(0, 1, value))
    with pytest.raises(ProtocolError, match="instead of seconds"):
        wait.result()


def test_the_end_of_a_session_settles_everything_with_its_error(wire, queue):
    _, wait = read(queue)
    flushed = wire.session.when(lambda: False)
    wire.session.end(ConnectionLost("the server is gone"))
    for settled in (wait, flushed):
        with pytest.raises(ConnectionLost, match="the server is gone"):
            settled.result()
    with pytest.raises(ConnectionLost, match="the server is gone"):
        wire.session.open_queue("n/cpu/0")
    with pytest.raises(ConnectionLost, match="the server is gone"):
        queue.raise_unraised()


def test_devices_that_come_and_go_are_noted(wire):
    rows = [{"id": "b/cpu/0", "kind": "cpu"}]
    wire.say(Devices(rows))
    assert wire.session.devices == rows


def test_a_refusal_is_kept_as_its_named_error():
    wire = Wire()
    wire.session.hello()
    wire.say(Refused("LimitExceeded", "16 sessions are open"))
    assert isinstance(wire.session.refused, LimitExceeded)


@pytest.mark.parametrize(
    "message",
    [Open(0, "x", {}), Result(9, 1, None), Ack(0, 99), Seen(10**6)],
    ids=lambda message: type(message).__name__,
)
def test_what_a_server_may_not_say_breaks_the_protocol(wire, queue, message):
    with pytest.raises(ProtocolError):
        wire.say(message)


def test_with_debugging_an_error_names_the_line_that_issued_the_command():
    wire = Wire(debug=True)
    queue = wire.session.open_queue("n/cpu/0")
    queue.command(Alloc(0, 4), line="mine.py:3")
    queue.life.words[0] = words_of("")
    queue.launches.append(b"\0" * 8)
    queue.lines.append("mine.py:4")
    wire.flush()
    wire.say(Failed(0, 2, "LaunchError", "bad", {}))
    with pytest.raises(LaunchError, match=r"bad \(issued at mine\.py:4\)"):
        queue.raise_unraised()


def test_after_a_drop_each_side_sends_what_the_other_lacks_once(wire, queue):
    queue.command(Alloc(0, 4))
    wire.session.flush()
    _, wait = read(queue)
    wire.session.flush()
    wire.cut(lose=1)
    queue.command(Alloc(1, 4))
    wire.session.flush()
    wire.connect()
    wire.pump()
    assert commands(wire.heard) == [(1, Alloc(0, 4)), (2, Read(7, 0, 4)), (3, Alloc(1, 4))]
    wire.say(ReadData(0, 2, 0), b"here")
    wait.result()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_issuing_answering_and_dropping_runs_each_command_once_in_order(data):
    wire = Wire()
    queue = wire.session.open_queue("n/cpu/0")
    issued = 0
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["command", "launch", "flush", "cut", "answer"])):
            case "command":
                issued += 1
                queue.command(Alloc(issued, 4))
            case "launch":
                issued += 1
                queue.life.words[issued] = words_of("i")
                queue.launches.append(queue.life.words[issued].pack(issued, 0, issued))
            case "flush":
                wire.flush()
            case "cut":
                wire.session.flush()
                wire.cut(lose=data.draw(st.integers(0, 3)))
                wire.connect()
            case "answer":
                last = heard_numbers(wire)[-1:]
                if last:
                    wire.say(Ack(0, last[0]))
    wire.flush()
    assert heard_numbers(wire) == list(range(1, issued + 1))


def heard_numbers(wire):
    numbers = []
    for message, bulk in wire.heard:
        if isinstance(message, Batch):
            for number, command in enumerate(message.commands, message.first):
                numbers.append(number)
                if isinstance(launch := parse_command(command), Launch):
                    assert (launch.program, launch.arguments) == (number, [number])
        elif isinstance(message, Launches):
            numbers += range(message.first, message.first + message.count)
            words = np.frombuffer(bulk, np.uint32).reshape(-1, 3)
            expected = [[number, 0, number] for number in range(message.first, message.first + message.count)]
            assert words.tolist() == expected
    return numbers


def heard_counts(wire):
    return sum(message.count for message, _ in wire.heard if isinstance(message, Launches))
