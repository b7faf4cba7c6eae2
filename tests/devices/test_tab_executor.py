"""What a queue does with commands in a tab: the tests of the other executors, and what only a late device does."""

from __future__ import annotations

import random
import socket
import struct

import numpy as np
import pytest
from device_rigs import PATIENCE_SECONDS, ExecutorRig
from tab_rigs import FakeTab, TabServer, require_node
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
    CPU,
    OTHER,
    replay,
    send_graph,
    test_a_freed_buffer_is_missed_by_the_next_replay_even_if_its_memory_is_there_again,
    test_a_replay_launches_copies_and_fills_with_its_own_values_and_buffers,
    test_a_replay_whose_sender_failed_fails_with_the_cause,
    test_a_replay_with_values_or_buffers_that_do_not_fit_fails_without_running,
    test_a_step_that_fails_is_named_and_what_follows_is_dropped,
    test_chunks_of_a_replay_that_fails_or_is_dropped_give_their_credit_back,
    test_transfers_stop_a_replay_for_credit_and_for_bytes_and_chunks_may_come_early,
)
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Request

from wsgrad.devices.ring import SLOT_BYTES
from wsgrad.graph.items import Copy, Fill, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.part import SendOp
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
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


@pytest.mark.parametrize(
    ("reason", "state"),
    [("no Join came within 10 s (--handshake-seconds)", "waiting"), ("a device list is too long", "refused")],
)
def test_a_tab_whose_join_came_too_late_tries_again_and_one_that_is_refused_does_not(reason, state):
    require_node()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tab = FakeTab(f"ws://127.0.0.1:{listener.getsockname()[1]}")
        listener.settimeout(PATIENCE_SECONDS)
        with listener.accept()[0] as stream:
            core, asked = WSConnection(ConnectionType.SERVER), False
            while not asked:
                core.receive_data(stream.recv(4096))
                asked = any(isinstance(event, Request) for event in core.events())
            stream.sendall(core.send(AcceptConnection(subprotocol=m.SUBPROTOCOL)))
            stream.sendall(core.send(CloseConnection(1008, reason)))
            while CloseConnection not in map(type, core.events()):
                core.receive_data(stream.recv(4096))
        said = tab.wait_for(lambda event: event["event"] == "state" and event["state"] != "connecting")
        tab.close()
    assert (said["state"], said["message"]) == (state, reason)


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
    # Those that programs write have room for it: beyond its buffer a program fails in a tab, and does anything in C.
    ids = range(1, 6)
    offset, nbytes = rng.choice([0, 0, 1, 7, 64]), rng.choice([0, 1, 4, 16, 33, 64])
    buffer, other = rng.choice(ids), rng.choice(ids)
    match rng.choice("aAfvzwrcplLudxkkkkggRRRRU"):
        case "a":
            return "batch", [c.Alloc(buffer, rng.choice([16, 64, 100]))]
        case "A":
            return "batch", [c.Alloc(i, 64) for i in ids]
        case "f":
            return "batch", [c.Free(buffer)]
        case "v":
            return "batch", [c.View(other, buffer, offset, max(nbytes, 16))]
        case "z":
            return "batch", [
                c.Alloc(6, min(nbytes, 4)),
                c.View(7, 6, 0, 4),
                c.Read(7, 0, 1),
                c.Free(rng.choice([6, 7])),
            ]
        case "w":
            return "batch", [c.Write(buffer, offset, rng.randbytes(nbytes)), c.Read(buffer, 0, 16)]
        case "r":
            return "batch", [c.Read(buffer, offset, nbytes)]
        case "c":
            return "batch", [c.Copy(buffer, offset, other, 0, nbytes), c.Read(buffer, offset, nbytes)]
        case "p":
            return "batch", [c.Fill(buffer, offset, nbytes, rng.choice([b"a", b"bc", b"defg", b"bad"]))]
        case "l":
            return "batch", [c.Launch(rng.choice([1, 1, 1, 2, 3]), None, None, [buffer, 2], rng.random() < 0.3)]
        case "L":
            return "launches", [[rng.choice([1, 1, 1, 2, 3]), 0, buffer, rng.choice([1, 4])]] * 3
        case "u":
            return "upload", buffer, rng.randbytes(nbytes), offset
        case "d":
            return "download", buffer, nbytes, offset
        case "x":
            return ("fail",)
        case "g":
            return "record", rng.choice([1, 2]), [buffer, other], recording(rng)
        case "R":
            substitutes = [rng.choice([None, None, rng.choice(ids)]) for _ in range(2)]
            values = rng.choice([[0], [1], [2], [3], [4], [4], [5], [], [1, 1], ["x"]])
            return "replay", rng.choice([1, 2]), substitutes, offset, values, rng.randbytes(16)
        case "U":
            return "unrecord", rng.choice([1, 2])
    return ("clear",)


def recording(rng):
    """A graph of a few steps of every kind on two buffers of 16 bytes, some of which can't run."""
    made = Recording()
    here = [made.buffer(CPU, 16, memory=name) for name in "yx"]
    there = made.buffer(OTHER, 16, memory="z")
    made.add(Fill(CPU, Range(here[0], 0, 8), b"defg"))
    n = Var("n", 0, 4)
    sends = 0
    for _ in range(rng.choice([1, 2, 4, 7])):
        target, source = rng.choice([here, here[::-1]])
        at, nbytes = rng.choice([0, 4, 8]), rng.choice([4, 8])
        match rng.choice("lLcfsr"):
            case "l":
                made.add(Launch(CPU, rng.choice([1, 1, 1, 2, 3]), "pi", (Operand(Range(target, 0, 16)), 4)))
            case "L":
                made.add(Launch(CPU, 1, "pi", (Operand(Range(target, 0, 16)), rng.choice([n, n * -1 + 4]))))
            case "c":
                made.add(Copy(CPU, Range(target, at, nbytes), Range(source, 0, nbytes)))
            case "f":
                made.add(Fill(CPU, Range(target, at, nbytes), rng.choice([b"a", b"bc", b"hijk"])))
            case "s" if sends < m.SLOTS:
                sends += 1
                made.add(Transfer(Range(there, 0, nbytes), Range(target, at, nbytes)))
            case _:
                made.add(Transfer(Range(target, at, nbytes), Range(there, 0, nbytes)))
    return made


def transfers(made):
    """What a replay of it sends and receives, in order: whether it sends, and how many bytes."""
    device = Plan(made).parts[0].devices[0]
    found = []
    for step in sorted(device.lanes[1] + device.lanes[2], key=lambda step: step.number):
        sends = isinstance(step.op, SendOp)
        found.append((sends, device.slots[step.op.source if sends else step.op.target].nbytes))
    return found


def play(rig, seed, known=None):
    """Do the moves; the answers that any two executors must agree on. `known` are the failures of another one."""
    rig.program(1, ADD_ONE, "pi", name="one")
    rig.program(2, "void entry(int *a { }", "pi", name="two")
    seen = []
    graphs = {}
    chunks = returned = 0
    for transfer, move in enumerate(moves(seed)):
        match move:
            case ("replay", graph, *_) if graph in graphs:
                coming = sum(sends for sends, _ in transfers(graphs[graph][1]))
            case _:
                coming = int(move[0] == "download")
        if chunks + coming > m.SLOTS:
            returned = settle(rig, returned)
            chunks = 0
        chunks += coming
        match move:
            case ("batch", commands):
                rig.batch(*commands)
            case ("launches", words):
                rig.launches(*words)
            case ("upload", buffer, data, offset):
                rig.batch(c.Upload(16 * transfer, buffer, offset, len(data)))
                if data:
                    rig.send_chunk(16 * transfer, 0, data)
            case ("download", buffer, nbytes, offset):
                rig.batch(c.Download(16 * transfer, buffer, offset, nbytes))
            case ("record", graph, bound, made):
                graphs[graph] = transfer, made  # ids of graphs only grow
                bindings = {number: bound[number] for number in sorted(made.touched - {2})}
                send_graph(rig, transfer, made, bindings, piece=100)
            case ("replay", graph, substitutes, offset, values, data) if graph in graphs:
                recorded, made = graphs[graph]
                given = [(number, substitutes[number], offset) for number in (0, 1) if substitutes[number] is not None]
                fitting = values if made.variables or len(values) > 1 else []
                replay(rig, recorded, [row for row in given if row[0] in made.touched], fitting, 16 * transfer)
                for place, (sends, nbytes) in enumerate(transfers(made)):
                    if not sends:
                        have_credit(rig)
                        rig.send_chunk(16 * transfer + place, 0, bytes(data[:nbytes]).ljust(nbytes, b"!"))
            case ("unrecord", graph) if graph in graphs:
                recorded, _ = graphs.pop(graph)
                rig.send(m.Unrecord(rig.queue, recorded))
            case ("fail",):
                rig.number += 1
                rig.send(m.Fail(rig.queue, rig.number, "LimitExceeded", "no", {}))
            case ("clear",):
                rig.batch(c.Clear(0))
                if known is None:
                    rig.settle()
                    number = next((a.number for a, _ in reversed(rig.received) if isinstance(a, m.Failed)), 0)
                    seen.append(number)
                else:
                    number = known.pop(0)
                rig.batch(c.Clear(number))
        have_credit(rig)
        assert transfer < 1000
    settle(rig, returned)
    while rig.upload_credit < m.SLOTS:
        rig.wait_for(m.Credit)
    answers = []
    for message, bulk in rig.received:
        match message:
            case m.ReadData():
                answers.append(("read", message.number, bytes(bulk)))
            case m.Failed():
                kept = ("operation", "program", "graph", "step")
                details = {key: message.details[key] for key in kept if key in message.details}
                # Of what is wrong with a launch each device may look at something else first.
                code = None if details.get("operation") == "launch" else message.code
                answers.append(("failed", message.number, code, details))
            case m.Chunk():
                answers.append(("chunk", message.transfer, message.offset, bytes(bulk)))
            case m.Result() if message.number:
                answers.append(("result", message.number))
    return answers, seen


def have_credit(rig):
    while rig.upload_credit < 1:
        rig.wait_for(m.Credit)


def settle(rig, returned):
    """Let everything run, and return the credit of the chunks that came; how many came so far."""
    rig.run(c.Clear(0))
    came = sum(isinstance(message, m.Chunk) for message, _ in rig.received)
    for _ in range(returned, came):
        rig.send(m.Credit(rig.queue, 1))
    return came


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
