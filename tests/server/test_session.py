"""Sessions: who may open and attach, how they end, and that nothing a peer sends harms anybody but itself."""

import secrets

import pytest
import trio
from heart import NOTHING, Queue, eventually, processes_below, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.trio_driver import TrioConnection


@pytest.fixture
async def server(cache):
    async with serving(cache, max_sessions=3, resume_grace=0.3) as server:
        yield server


async def test_a_welcome_tells_key_devices_and_limits(server):
    async with server.client() as client:
        info = client.welcome.info
        assert len(client.welcome.key) == 16
        assert info["server"].startswith("wsgrad ")
        assert info["name"] == "box"
        assert info["limits"]["max_buffers"] == 60_000
        (device,) = info["devices"]
        assert device["id"] == "box/cpu/0"
        assert device["dialects"] == ["c"]
        assert device["confined"] is True


async def test_an_unknown_key_is_refused(server):
    async with server.client(key=secrets.token_bytes(16)) as client:
        assert isinstance(client.welcome, m.Refused)
        assert client.welcome.code == "ConnectionLost"
        assert (await client.wait_closed()).code == 1008


async def test_more_sessions_than_allowed_are_refused_and_leave_room_when_they_end(server):
    async with server.client() as a, server.client(), server.client():
        async with server.client() as fourth:
            assert (fourth.welcome.code, "--max-sessions" in fourth.welcome.message) == ("LimitExceeded", True)
        a.send(m.Bye())
        await a.wait_closed()
        async with server.client() as fourth:
            assert isinstance(fourth.welcome, m.Welcome)


async def test_the_newest_connection_wins(server):
    async with server.client() as old:
        queue = await old.open()
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"kept"))
        await queue.done()
        async with server.client(key=old.welcome.key, link=old.link, queues=[queue]):
            closed = await old.wait_closed()
            assert closed.code == 1008
            assert "another connection" in closed.reason
            assert await queue.read(1, 0, 4) == b"kept"
    assert server.hub.statistics.resumes == 1


async def test_a_session_waits_for_its_client_for_the_grace_time_and_no_longer(server):
    async with server.client() as client:
        await client.open()
    assert len(server.hub.status()["sessions"]) == 1
    await eventually(lambda: not server.hub.status()["sessions"])
    await eventually(lambda: not processes_below(server.zygote._process.pid))
    async with server.client(key=client.welcome.key) as late:
        assert late.welcome.code == "ConnectionLost"


async def test_an_idle_session_ends_with_a_reason(cache):
    async with serving(cache, idle_seconds=0.2) as server, server.client() as client:
        await client.open()
        closed = await client.wait_closed()
        assert closed.code == 1008
        assert "--idle-seconds" in closed.reason


async def test_a_client_that_claims_to_have_what_was_never_sent_ends_its_session(server):
    async with server.client() as client:
        client.send(m.Seen(1000))
        closed = await client.wait_closed()
        assert closed.code == 1002
    assert server.hub.status()["sessions"] == []


async def test_who_says_nothing_is_dropped(cache):
    async with serving(cache, handshake_seconds=0.1) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        connection = TrioConnection.from_stream(stream, client=True, max_bulk=1)
        with trio.fail_after(5):
            await connection.run(lambda received: None)


async def test_draining_lets_running_commands_end_and_refuses_new_sessions(server):
    source = "void wait(int *p) { for (volatile int i = 0; i < 50000000; i++) ; *p = 7; }"
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, source, "wait", "p")
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        queue.launches([1, 0, 1], 1)
        number = queue.batch(c.Read(1, 0, 4))
        await eventually(lambda: server.hub.status()["sessions"][0]["queues"][0]["unacknowledged"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.hub.drain, 5.0)
            await trio.testing.wait_all_tasks_blocked()
            async with server.client() as late:
                assert isinstance(late.welcome, m.Refused)
            message, data = await client.next(m.ReadData)
            assert (message.number, data) == (number, b"\x07\0\0\0")
            assert (await client.wait_closed()).code == 1001
    assert server.hub.status()["sessions"] == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (m.Batch(9, 1, [[2, 1]]), "no queue 9"),
        (m.Batch(1, 5, [[2, 1]]), "command 5 of queue 1 where 1 comes next"),
        (m.Batch(1, 1, []), "without commands"),
        (m.Batch(1, 1, [[99]]), "unknown kind of command"),
        (m.Batch(1, 1, [[5, 1, 1, 0, 4], [2, 1]]), "not the last command"),
        (m.Open(1, "box/cpu/0", {}), "open already"),
        (m.Hello(1, "x", None, 0, {}), "Hello"),
        (m.Load(1, 1, 1, "a", "a", "", None, False, 0), "Load"),
        (m.Ack(1, 1), "Ack"),
    ],
)
async def test_messages_that_break_the_protocol_end_the_session_with_words(server, message, words):
    async with server.client() as client, server.client() as other:
        await client.open()
        client.send(message)
        closed = await client.wait_closed()
        assert closed.code == 1002
        assert words in closed.reason
        queue = await other.open()
        queue.batch(c.Alloc(1, 1))
        assert await queue.read(1, 0, 1) == b"\0"


@pytest.mark.parametrize(
    ("message", "bulk", "words"),
    [
        (m.Launches(1, 1, 3), bytes(16), "3 packed launches in 16 bytes"),
        (m.Launches(1, 1, 1), bytes(9), "1 packed launches in 9 bytes"),
        (m.Launches(1, 1, 0), b"", "0 packed launches"),
        (m.Chunk(1, 1, 0), bytes(10), "none is under way"),
        (m.Chunk(1, 1, 0), b"", "a chunk of 0 bytes"),
    ],
)
async def test_bulk_that_does_not_fit_ends_the_session_with_words(server, message, bulk, words):
    async with server.client() as client:
        await client.open()
        client.send(message, bulk)
        closed = await client.wait_closed()
        assert closed.code == 1002
        assert words in closed.reason


async def test_chunks_without_credit_and_commands_inside_an_upload_end_the_session(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, "/* compiled anew: the queue stands still */" + NOTHING, "nothing", "")
        queue.launches([1, 0], 1)
        queue.batch(c.Alloc(1, 8 << 20), c.Upload(1, 1, 0, 8 << 20))
        for index in range(m.SLOTS + 1):
            client.send(m.Chunk(1, 1, index << 20), bytes(1 << 20))
        assert "without credit" in (await client.wait_closed()).reason
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 8 << 20), c.Upload(1, 1, 0, 8 << 20))
        queue.batch(c.Free(1))
        assert "inside upload" in (await client.wait_closed()).reason


async def test_opening_what_is_not_there_is_an_error_that_leaves_the_session(server):
    async with server.client() as client:
        queue = client.queues[1] = Queue(client, 1)
        client.send(m.Open(1, "nowhere/cpu/0", {}))
        queue.batch(c.Alloc(1, 4))  # a client does not wait for the answer
        failed, _ = await client.next(m.Failed)
        assert (failed.number, failed.code) == (0, "DeviceError")
        assert "nowhere/cpu/0" in failed.message
        await queue.done()
        client.send(m.Close(1))
        await client.open()


FIELD = st.one_of(
    st.integers(0, 3),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=20),
    st.lists(st.integers(0, 3), max_size=4),
    st.just({}),
)
COMMAND = st.builds(lambda kind, fields: [kind, *fields], st.integers(0, 13), st.lists(FIELD, max_size=5))
VALID = st.one_of(
    st.builds(c.Alloc, st.integers(0, 3), st.integers(0, 100)),
    st.builds(c.View, st.integers(0, 3), st.integers(0, 3), st.integers(0, 100), st.integers(0, 100)),
    st.builds(c.Write, st.integers(0, 3), st.integers(0, 100), st.binary(max_size=20)),
    st.builds(c.Read, st.integers(0, 3), st.integers(0, 100), st.integers(0, 100)),
    st.builds(c.Upload, st.integers(0, 3), st.integers(0, 3), st.integers(0, 100), st.integers(0, 100)),
    st.builds(c.Download, st.integers(0, 3), st.integers(0, 3), st.integers(0, 100), st.integers(0, 100)),
    st.builds(c.Free, st.integers(0, 3)),
    st.builds(c.Clear, st.integers(0, 9)),
).map(c.command_array)
ANYTHING = st.one_of(
    st.lists(st.one_of(VALID, COMMAND), min_size=1, max_size=4).map(lambda commands: ("batch", commands)),
    st.lists(VALID, min_size=1, max_size=4).map(lambda commands: ("batch", commands)),
    st.tuples(st.just("raw"), st.integers(0, 60), st.lists(FIELD, max_size=8), st.binary(max_size=50)),
    st.tuples(st.just("chunk"), st.integers(0, 3), st.integers(0, 3), st.binary(max_size=100)),
)


async def test_a_session_answers_anything_by_words_and_the_server_lives(server):
    from wsgrad.transport.cbor import encode

    examples = []

    @given(st.lists(ANYTHING, max_size=8))
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def collect(messages):
        examples.append(messages)

    collect()
    async with server.client() as steady:
        queue = await steady.open()
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"mine"))
        for messages in examples:
            async with server.client() as client:
                fuzzed = await client.open()
                for message in messages:
                    match message:
                        case ("batch", commands):
                            client.send(m.Batch(1, fuzzed.next, commands))
                            fuzzed.next += len(commands)
                        case ("chunk", transfer, offset, data):
                            client.send(m.Chunk(1, transfer, offset), data)
                        case ("raw", kind, fields, data):
                            head = encode([kind, *fields])
                            client.link.push(head, data if kind in m.BULK_KINDS else None, numbered=kind >= 16)
                            client.connection.wake()
                client.send(m.Bye())
                closed = await client.wait_closed()
                assert closed.code in (1000, 1002, 1008, 1009), closed
        assert await queue.read(1, 0, 4) == b"mine"
        await eventually(lambda: len(server.hub.status()["sessions"]) == 1)


@pytest.mark.parametrize("last", [m.Bye(), m.Close(1)], ids=["bye", "close"])
async def test_a_session_ends_whole_though_what_still_waits_is_malformed(server, last):
    async with server.client() as client:
        await client.open(number=1)
        await client.open(number=2)
        # A long batch is looked into in turns, and the last message comes before the turn that would refuse it.
        commands = [c.command_array(c.Clear(0))] * 100 + [[0]]
        client.link.push(encode(m.message_array(m.Batch(1, 1, commands))))
        client.send(last)
        if isinstance(last, m.Close):
            client.send(m.Bye())
        await client.wait_closed()
        await eventually(lambda: not server.hub._sessions and not server.zygote.processes)
