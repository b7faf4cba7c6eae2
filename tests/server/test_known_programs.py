"""Programs whose source the server has seen: named by their hash, asked for where it has forgotten them."""

from hashlib import sha256

import pytest
from heart import ADD, as_word, serving

from wsgrad.server.sources import Sources
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

LARGE = ADD + "\n// " + "x" * 5000


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


@pytest.fixture
async def client(server):
    async with server.client() as client:
        yield client


def name(queue, program, source, *, nbytes=None):
    number = queue.next
    queue.next += 1
    digest = sha256(source.encode()).digest()
    nbytes = len(source) if nbytes is None else nbytes
    queue.client.send(
        m.KnownProgram(queue.number, number, program, "c", "", "add", "ppfi", [0], False, {}, nbytes, digest)
    )
    return number


async def check(queue, program):
    queue.batch(c.Alloc(0, 16), c.Alloc(1, 16))
    queue.launches([program, 0, 0, 1, as_word(2.5), 4], 1)
    assert await queue.read(0, 0, 4) == as_word(2.5).to_bytes(4, "little")


async def test_a_source_that_was_sent_is_compiled_from_its_name(server, client):
    first, second = await client.open(number=1), await client.open(number=2)
    first.program(0, LARGE, "add", "ppfi", writes=[0])
    await first.done()
    received = server.hub.statistics.received
    name(second, 7, LARGE)
    await check(second, 7)
    assert server.hub.statistics.received - received < 1000
    assert server.hub.statistics.known_programs == 1


async def test_another_client_may_name_it_too_but_needs_the_whole_hash_and_the_size(server, client):
    queue = await client.open()
    queue.program(0, LARGE, "add", "ppfi", writes=[0])
    await queue.done()
    async with server.client() as other:
        queue = await other.open()
        name(queue, 0, LARGE)
        await check(queue, 0)
        asked = name(queue, 1, LARGE, nbytes=len(LARGE) - 1)
        assert (await other.next(m.Missing))[0] == m.Missing(1, asked, 0)
        other.send(m.Source(1, asked), LARGE.encode())
        assert "is not the one that was named" in (await other.wait_closed()).reason


async def test_a_source_that_is_not_there_is_asked_for_and_holds_only_launches_of_it(server, client):
    queue = await client.open()
    queue.batch(c.Alloc(5, 8), c.Write(5, 0, b"abcdefgh"))
    number = name(queue, 0, LARGE)
    queue.batch(c.Fill(5, 0, 8, b"z"))
    assert (await client.next(m.Missing))[0] == m.Missing(1, number, 0)
    assert await queue.read(5, 0, 8) == b"z" * 8
    queue.batch(c.Alloc(0, 16), c.Alloc(1, 16))
    launched = queue.launches([0, 0, 0, 1, as_word(2.5), 4], 1)
    await queue.done(launched - 1)
    client.send(m.Source(1, number), LARGE.encode())
    compiled, _ = await client.next(m.Compiled)
    assert compiled.ok
    assert await queue.read(0, 0, 4) == as_word(2.5).to_bytes(4, "little")
    assert next(iter(server.session(client)._queues.values()))._in.held == 0
    # It was seen now.
    name(queue, 1, LARGE)
    queue.launches([1, 0, 0, 1, as_word(4.0), 4], 1)
    assert await queue.read(0, 4, 4) == as_word(4.0).to_bytes(4, "little")


async def test_a_wrong_or_broken_source_ends_the_session(server):
    for bad in (LARGE.encode() + b" ", b"\xff" * 5000):
        async with server.client() as client:
            queue = await client.open()
            number = queue.next
            digest = sha256(LARGE.encode() if bad[0] != 0xFF else bad).digest()
            client.send(m.KnownProgram(1, number, 0, "c", "", "add", "ppfi", None, False, {}, 5000, digest))
            await client.next(m.Missing)
            client.send(m.Source(1, number), bad)
            assert "program 0" in (await client.wait_closed()).reason


async def test_a_refused_program_asks_for_nothing(client):
    queue = await client.open()
    number = name(queue, 0, LARGE, nbytes=2 << 20)
    failure = await queue.failure()
    assert (failure.number, failure.code) == (number, "LimitExceeded")
    queue.batch(c.Clear(number))
    await queue.done()
    assert not any(isinstance(message, m.Missing) for message, _ in client._kept)


async def test_a_source_comes_through_although_a_reopening_waits(client):
    queue = await client.open()
    asked = name(queue, 0, LARGE)
    await client.next(m.Missing)
    number = queue.reopen()
    client.send(m.Source(1, asked), LARGE.encode())
    await client.next(m.Result, where=lambda message: message.number == number)
    queue.program(0, LARGE, "add", "ppfi", writes=[0])
    await check(queue, 0)


async def test_a_source_that_nobody_asked_for_is_thrown_away(client):
    queue = await client.open()
    asked = name(queue, 0, LARGE)
    await client.next(m.Missing)
    client.send(m.Source(1, asked), LARGE.encode())
    client.send(m.Source(1, asked), LARGE.encode())
    await check(queue, 0)


def test_the_sources_that_are_used_least_are_forgotten():
    sources = Sources(max_bytes=10_000)
    first, second = sources.add(b"a" * 4500), sources.add(b"b" * 4500)
    assert sources.add(b"a" * 4500) == first
    third = sources.add(b"c" * 4500)
    assert sources.find(second) is None
    assert sources.find(first) == b"a" * 4500
    assert sources.find(third) == b"c" * 4500
