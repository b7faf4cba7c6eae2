"""The limits of sessions: over each comes a named error with the option and the values, and the session lives."""

import json
import os
import tracemalloc

import numpy as np
import pytest
import trio
from edge_port import TOKENS, bearer
from edge_port import serving as serving_edge
from heart import SPIN, mapped_rings, serving
from server_process import running_server

import wsgrad
from wsgrad.devices.ring import Ring
from wsgrad.server.intake import Intake
from wsgrad.server.limits import MAX_QUEUES, Limits
from wsgrad.server.outstanding import Outstanding
from wsgrad.server.upload_rate import UploadRate
from wsgrad.server.usage import Usage
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection
from wsgrad.transport.trio_driver import TrioConnection

MIB = 1 << 20
SHORT_WAIT = SPIN.replace(";;", "; i < 100000000;").replace("{ }", ";")
"""What keeps a device busy for a moment."""
NOTHING = "void nothing(void) {}"


async def goes_on(queue, failed):
    """Whether a queue works behind its failure."""
    queue.batch(c.Clear(failed.number))
    queue.batch(c.Free(40), c.Alloc(40, 4), c.Write(40, 0, b"live"))
    return await queue.read(40, 0, 4) == b"live"


def allocations(queue):
    queue.batch(c.Alloc(1, 600_000), c.Alloc(2, 600_000))


def buffers(queue):
    queue.batch(*(c.Alloc(number, 4) for number in range(1, 51)))


def programs(queue):
    for number in (5, 6, 7):
        queue.program(number, NOTHING, "nothing", "")


def long_program(queue):
    queue.program(5, "//" + "x" * 2000 + "\n" + NOTHING, "nothing", "")


LIMITS = {
    "--max-session-memory": ({"max_session_memory": MIB}, allocations, "OutOfMemory", ["1048576", "600000"]),
    "--max-buffers": ({"max_buffers": 45}, buffers, "LimitExceeded", ["45 buffers"]),
    "--max-programs": ({"max_programs": 6}, programs, "LimitExceeded", ["6 programs"]),
    "--max-program-size": ({"max_program_size": 1000}, long_program, "LimitExceeded", ["2024", "1000"]),
}


@pytest.mark.parametrize("option", LIMITS)
async def test_over_a_limit_comes_a_named_error_and_the_session_lives(cache, option):
    limits, action, code, values = LIMITS[option]
    async with serving(cache, **limits) as server, server.client() as client:
        queue = await client.open()
        action(queue)
        failed = await queue.failure()
        assert failed.code == code
        for word in (option, *values):
            assert word in failed.message
        assert await goes_on(queue, failed)


@pytest.mark.parametrize(("option", "limit"), [("--max-queue-size", 20_000), ("--max-queue-commands", 20)])
async def test_what_is_too_much_for_a_queue_fails_in_its_place_and_the_session_lives(cache, option, limit):
    limits = {option[2:].replace("-", "_"): limit, "launch_seconds": 60.0}
    async with serving(cache, **limits) as server, server.client() as client:
        queue = await client.open()
        queue.program(0, SHORT_WAIT, "spin", "p")
        queue.program(1, "void add(int *p, int n) { *p += n; }", "add", "pi")
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        queue.launches([0, 0, 1], 1)
        fitting = queue.launches([1, 0, 1, 1], 1)
        too_many = queue.next
        for _ in range(30):
            queue.launches([1, 0, 1, 100] * 3, 3)
            queue.batch(c.Alloc(2, 4), c.Free(2))
        failed = await queue.failure()
        assert failed.code == "LimitExceeded"
        assert option in failed.message
        assert failed.details["limit"] == limit
        assert fitting < too_many <= failed.number
        fitted, left = divmod(failed.number - too_many, 5)
        assert left in (0, 3)
        await queue.done()
        assert await goes_on(queue, failed)
        data = await queue.read(1, 0, 4)
        assert int.from_bytes(data, "little") == 1 + 300 * (fitted + (left == 3))


async def test_a_message_that_comes_alone_may_be_larger_than_a_queue(cache):
    async with serving(cache, max_queue_commands=5, max_queue_size=1) as server, server.client() as client:
        queue = await client.open()
        queue.batch(*(c.Alloc(number, 4) for number in range(30)))
        await queue.done()
        assert await queue.read(29, 0, 4) == bytes(4)


@pytest.mark.parametrize(
    ("message", "bulk"),
    [
        (m.Batch(1, 1, [c.command_array(c.Alloc(1000, 70000))]), None),
        (m.Batch(1, 1, [c.command_array(c.Free(70000))] * 60), None),
        (m.Batch(1, 1, [c.command_array(c.Clear(0))] * 500), None),
        (m.Batch(1, 1, [c.command_array(c.Write(1, 0, bytes(1000)))]), None),
        (m.Launches(1, 1, 8), bytes(64)),
        (m.Program(1, 1, 2, "c", "name", "entry", "pi", [0], False), b"void entry(int *x, int n) {}"),
    ],
    ids=["one", "sixty", "many", "write", "launches", "program"],
)
def test_a_queue_counts_what_keeping_a_message_takes(message, bulk):
    ours = Connection(client=True, bulk_kinds=m.BULK_KINDS)
    theirs = Connection(client=False, bulk_kinds=m.BULK_KINDS)
    frame = b"".join(bytes(part) for part in ours.encode(encode(m.message_array(message)), bulk))
    intake = Intake(1, Usage(), Outstanding(Usage()), Limits(), UploadRate(0), lambda message: None)
    count = 60
    theirs.feed(frame)
    tracemalloc.start()
    try:
        for _ in range(count):
            [received] = theirs.feed(frame)
            bulk = memoryview(b"") if received.bulk is None else received.bulk
            intake.admit(m.parse_message(received.head), received.raw, bulk, busy=True)
            del received, bulk
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(intake.waiting) >= count
    assert 0.7 * taken <= intake.held <= 2 * taken


async def test_opening_and_closing_without_end_makes_no_more_rings_than_there_may_be_devices(cache, monkeypatch):
    mapped = []
    create = Ring.create

    def watched():
        mapped.append(mapped_rings())
        return create()

    monkeypatch.setattr(Ring, "create", watched)
    before = mapped_rings()
    async with serving(cache) as server, server.client() as client, server.client() as other:
        queue = await other.open()
        for number in range(1, 801):
            client.send(m.Open(number, "box/cpu/0", {}))
            client.send(m.Close(number))
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"live"))
        assert await queue.read(1, 0, 4) == b"live"
        last = await client.open(number=2000)
        last.batch(c.Alloc(1, 4), c.Write(1, 0, b"last"))
        assert await last.read(1, 0, 4) == b"last"
    assert max(mapped) - before <= 1 + MAX_QUEUES


async def test_uploads_over_the_rate_are_only_slower(cache):
    data = os.urandom(10 * MIB)
    async with serving(cache, upload_rate=4 * MIB) as server, server.client() as client, server.client() as other:
        queue, quick = await client.open(), await other.open()
        queue.batch(c.Alloc(1, len(data)))
        quick.batch(c.Alloc(1, 2 * MIB))
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.upload, 1, data)
            await quick.upload(1, data[: 2 * MIB])
            assert await quick.download(1, 0, 2 * MIB) == data[: 2 * MIB]
        await queue.done()
        # A second's worth may come at once, and so may the chunks that there is credit for from the start.
        assert trio.current_time() - started >= (10 - 4 - m.SLOTS - 1) / 4
        assert await queue.download(1, 0, len(data)) == data


async def test_the_bucket_fills_with_time_and_gives_credit_in_order(autojump_clock):
    rate = UploadRate(1000)
    given = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rate.run)
        rate.take(1000)
        rate.give(lambda: given.append(("at once", trio.current_time())))
        began = trio.current_time()
        rate.take(500)
        rate.give(lambda: given.append("first"))
        rate.take(1500)
        rate.give(lambda: given.append("second"))
        await trio.sleep(1.9)
        assert len(given) == 1
        await trio.sleep(0.2)
        assert given[1:] == ["first", "second"]
        await trio.sleep(100)
        rate.take(1500)  # no more than a second's worth was saved
        rate.give(lambda: given.append("third"))
        await trio.sleep(0.4)
        assert len(given) == 3
        await trio.sleep(0.2)
        assert len(given) == 4
        nursery.cancel_scope.cancel()
    assert given[0] == ("at once", began)


async def test_credit_that_is_late_is_not_given_twice_where_a_device_is_lost(cache):
    async with serving(cache, upload_rate=1) as server, server.client() as client:
        queue = await client.open()
        queue.program(0, "void crash(void) { __builtin_trap(); }", "crash", "")
        queue.batch(c.Alloc(1, 2 * MIB))
        await queue.upload(1, bytes(2 * MIB))
        await queue.done()
        queue.launches([0, 0], 1)
        await queue.failure()
        session = server.session(client)
        assert session._queues[1]._in.credit + queue.credit <= 2 * m.SLOTS
        assert session._queues[1]._in.credit <= m.SLOTS - 2  # what is owed is late as it was


async def test_status_json_shows_every_limit():
    given = {
        "max_sessions": 5,
        "max_connections_per_address": 6,
        "handshake_seconds": 7.0,
        "max_session_memory": 8,
        "max_buffers": 9,
        "max_programs": 10,
        "max_graphs": 11,
        "max_graphs_size": 12,
        "max_queue_size": 13,
        "max_queue_commands": 14,
        "upload_rate": 15,
        "max_program_size": 16,
        "compile_seconds": 17.0,
        "launch_seconds": 18.0,
        "idle_seconds": 19.0,
        "resume_grace": 20.0,
    }
    async with serving_edge(**given) as edge:
        answer = await edge.ask("/status.json", bearer(TOKENS.client))
        limits = json.loads(answer.body)["limits"]
        assert {name: limits.get(name) for name in given} == given


def test_a_client_holds_itself_to_the_limits_of_its_server(tmp_path):
    limits = ["--max-queue-size", "30000", "--max-queue-commands", "40", "--upload-rate", "50MiB"]
    with (
        running_server(tmp_path, "--device", "cpu*2", "--cpu-threads", "1", *limits) as server,
        wsgrad.connect(server.ready["url"]) as connected,
    ):
        assert connected.info["limits"]["max_queue_commands"] == 40
        one, two = connected.devices
        add = one.program("void add(int *x, int by, int i) { x[i] += by; }", "add")
        x, y = one.zeros(1000, np.int32), two.zeros(1000, np.int32)
        with wsgrad.record(one, two) as graph:
            add(x, 1, wsgrad.INDEX, grid=1000)
            y.copy_from(x)
        for _ in range(200):
            add(x, 1, wsgrad.INDEX, grid=1000)
        for turn in range(100):
            graph.run()
            x[:10].copy_from(np.full(10, turn, np.int32))
        assert x.numpy().tolist() == [99] * 10 + [300] * 990
        assert y.numpy()[10:].tolist() == [300] * 990
        big = np.arange(MIB, dtype=np.int32)
        assert (one.array(big).numpy() == big).all()


async def test_a_client_that_says_no_hello_is_told_why_it_is_turned_away(cache, notes):
    async with serving(cache, handshake_seconds=0.3) as server, server.client() as other:
        queue = await other.open()
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        silent = TrioConnection.from_stream(stream, client=True, max_bulk=MIB)
        with trio.fail_after(30):
            closed = await silent.run(lambda received: None)
        assert (closed.code, closed.reason) == (1008, "no Hello came within 0.3 s (--handshake-seconds)")
        (refused,) = notes("refused")
        assert (refused["route"], refused["why"]) == ("/v1/client", closed.reason)
        queue.batch(c.Alloc(1, 4))
        assert await queue.read(1, 0, 4) == bytes(4)
