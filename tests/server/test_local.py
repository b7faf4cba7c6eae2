"""Local node processes behind the hub: commands, transfers, programs, and how a process ends."""

import numpy as np
import pytest
import trio
from heart import ADD, CRASH, NOTHING, SPIN, as_word, serving

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


async def test_write_and_read_come_back(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 16), c.Write(1, 4, b"abcd"))
        assert await queue.read(1, 0, 12) == b"\0\0\0\0abcd\0\0\0\0"
