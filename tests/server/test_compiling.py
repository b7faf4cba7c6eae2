"""Programs that compile while their queue goes on: what waits for them, in which order, and what nobody waits for."""

from contextlib import contextmanager

import pytest
from heart import ADD, NOTHING, SLOW, as_word, eventually, serving

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


@pytest.fixture
async def client(server):
    async with server.client() as client:
        yield client


@contextmanager
def no_compilers(server):
    """Inside, no compile begins."""
    programs = server.hub.programs
    free, programs._free = programs._free, 0
    try:
        yield
    finally:
        programs._free = free
        programs._begin()


def new(client, text, n=0):
    """The source as nobody has compiled it before."""
    return f"/* {n} of {id(client)} */{text}"


async def test_a_program_that_is_not_launched_holds_nothing(server, client):
    queue = await client.open()
    with no_compilers(server):
        for program in range(20):
            queue.program(program, new(client, NOTHING, program), "nothing", "")
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"abcd"))
        assert await queue.read(1, 0, 4) == b"abcd"
        await queue.done()
        assert server.session(client).idle
    for _ in range(20):
        compiled, _ = await client.next(m.Compiled)
        assert compiled.ok
    queue.launches([n for program in range(20) for n in (program, 0)], 20)
    await queue.done()
    assert not any(isinstance(message, m.Failed) for message, _ in client._kept)


@pytest.mark.parametrize("packed", [True, False])
async def test_a_launch_waits_for_its_own_program_and_nothing_behind_it_overtakes(server, client, packed):
    queue = await client.open()
    queue.batch(c.Alloc(0, 16), c.Alloc(1, 16))
    queue.program(0, ADD, "add", "ppfi", writes=[0])
    queue.launches([0, 0, 0, 1, as_word(1.0), 4], 1)
    await client.next(m.Compiled)
    with no_compilers(server):
        queue.program(1, new(client, SLOW), "slow", "p")
        queue.program(2, new(client, ADD), "add", "ppfi", writes=[0])
        free = queue.launches([0, 0, 0, 1, as_word(2.0), 4], 1)
        if packed:
            queue.launches([0, 0, 0, 1, as_word(3.0), 4, 2, 0, 1, 0, as_word(0.5), 4], 2)
        else:
            queue.batch(c.Write(0, 0, b"\0\0\x40\x40"), c.Launch(2, None, None, [1, 0, 0.5, 4], False))
        await queue.done(free)
        read = queue.batch(c.Read(1, 0, 4))
        assert await queue_stays(queue, free)
    data = (await client.next(m.ReadData, where=lambda message: message.number == read))[1]
    assert data == as_word(3.5).to_bytes(4, "little")
    # The slow one had come first.
    assert [message.program for message, _ in client._kept if isinstance(message, m.Compiled)] == [2]


async def queue_stays(queue, number):
    """Whether a ping's time passes without an acknowledgement beyond `number`."""
    client = queue.client
    client.send(m.Clock(7))
    await client.next(m.Time)
    return queue.acked == number


async def test_a_program_that_does_not_compile_fails_its_launch_in_its_place(server, client):
    queue = await client.open()
    queue.batch(c.Alloc(1, 4))
    with no_compilers(server):
        queue.program(0, new(client, "void f(int *x) { y = 1; }"), "f", "p")
        queue.batch(c.Write(1, 0, b"abcd"))
        number = queue.launches([0, 0, 1], 1)
        queue.batch(c.Write(1, 0, b"efgh"))
    failed = await queue.failure()
    assert (failed.number, failed.code) == (number, "CompileError")
    assert "'y'" in failed.message
    queue.batch(c.Clear(number))
    assert await queue.read(1, 0, 4) == b"abcd"


async def test_a_dropped_program_is_not_compiled_and_its_id_is_free_again(server, client):
    programs = server.hub.programs
    before = programs.compiled
    queue = await client.open()
    with no_compilers(server):
        for program in range(5):
            queue.program(program, new(client, NOTHING, program), "nothing", "")
        queue.batch(*(c.Drop(program) for program in range(5)))
        await queue.done()
        assert not programs._jobs
        queue.program(0, new(client, ADD), "add", "ppfi", writes=[0])
        queue.batch(c.Alloc(0, 16), c.Alloc(1, 16))
        queue.launches([0, 0, 0, 1, as_word(2.5), 4], 1)
    assert await queue.read(0, 0, 4) == as_word(2.5).to_bytes(4, "little")
    assert [message.program for message, _ in client._kept if isinstance(message, m.Compiled)] == [0]
    assert programs.compiled == before + 1


async def test_the_compiler_of_a_dropped_program_is_stopped_unless_another_wants_the_same(server, client):
    programs = server.hub.programs
    free = programs._free
    queue = await client.open()
    queue.program(0, new(client, SLOW), "slow", "p")
    queue.program(1, new(client, SLOW), "slow", "p")
    await eventually(lambda: any(job.stop for job in programs._jobs.values()))
    queue.batch(c.Drop(0))
    await queue.done()
    assert len(programs._jobs) == 1
    queue.batch(c.Drop(1))
    await queue.done()
    assert not programs._jobs
    before = programs.compiled
    await eventually(lambda: programs._free == free)
    assert programs.compiled == before
    assert not any(isinstance(message, m.Compiled) for message, _ in client._kept)


async def test_two_queues_share_the_compilers(server, client):
    first, second = await client.open(number=1), await client.open(number=2)
    with no_compilers(server):
        for program in range(30):
            first.program(program, new(client, NOTHING, program), "nothing", "")
        second.program(0, new(client, ADD), "add", "ppfi", writes=[0])
        await first.done()
        await second.done()
    await client.next(m.Compiled, where=lambda message: message.queue == 2)
    assert len([message for message, _ in client._kept if isinstance(message, m.Compiled)]) < 10


async def test_many_sources_that_wait_are_bounded(server, client, monkeypatch):
    monkeypatch.setattr("wsgrad.server.loads._MAX_LATE_NBYTES", 300)
    queue = await client.open()
    with no_compilers(server):
        numbers = [queue.program(program, new(client, ADD, program), "add", "ppfi") for program in range(4)]
        await queue.done(numbers[1])
        assert await queue_stays(queue, numbers[1])
    await queue.done(numbers[3])
