"""Numbers from bug reports of systems like ours: what overflows there is an answer here."""

import pytest
from heart import serving

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

MOST = (1 << 53) - 1


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


async def test_ranges_that_overflow_are_an_error_reply_and_the_session_lives(server):
    commands = [
        c.Read(1, MOST, 8),
        c.Read(1, (1 << 32) - 4, 8),
        c.Write(1, MOST, b"x"),
        c.Upload(1, 1, MOST, MOST),
        c.Download(1, 1, 8, MOST),
        c.Copy(1, MOST, 1, 0, 8),
        c.Copy(1, 0, 1, MOST, MOST),
        c.Fill(1, MOST, 8, b"x"),
        c.View(2, 1, MOST, MOST),
        c.Alloc(3, MOST),
    ]
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 16), c.Write(1, 0, b"still here"))
        for command in commands:
            number = queue.batch(command)
            failed = await queue.failure()
            assert (failed.number, failed.code) == (
                number,
                "OutOfMemory" if type(command) is c.Alloc else "DeviceError",
            )
            if type(command) is c.Upload:
                client.send(m.Abort(1, 1))
            queue.batch(c.Clear(number))
        assert await queue.read(1, 0, 10) == b"still here"


@pytest.mark.parametrize("command", [[6, 1, -1, 8], [6, 1, 0, -8], [1, 2, -1], [4, 1, -(1 << 63), b"x"], [1, -1, 8]])
async def test_negative_numbers_are_no_message_and_end_only_their_own_session(server, command):
    async with server.client() as client, server.client() as other:
        queue, second = await client.open(), await other.open()
        second.batch(c.Alloc(1, 4), c.Write(1, 0, b"mine"))
        client.send(m.Batch(1, queue.next, [command]))
        closed = await client.wait_closed()
        assert (closed.code, "unsigned" in closed.reason) == (1002, True)
        assert await second.read(1, 0, 4) == b"mine"
