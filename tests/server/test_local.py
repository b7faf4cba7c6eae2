"""Local node processes behind the hub: commands, transfers and programs give what numpy gives."""

import numpy as np
import pytest
from heart import ADD, NOTHING, Queue, as_word, serving

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


async def test_write_and_read_come_back_and_new_memory_is_zero(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 16), c.Write(1, 4, b"abcd"))
        assert await queue.read(1, 0, 12) == b"\0\0\0\0abcd\0\0\0\0"


async def test_upload_and_download_of_many_chunks_come_back(server):
    data = np.random.default_rng(1).integers(0, 256, 9 * (1 << 20) + 12345, dtype=np.uint8).tobytes()
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, len(data) + 8))
        await queue.upload(1, data, offset=8)
        assert await queue.download(1, 8, len(data)) == data
        assert queue.credit == m.SLOTS
    assert server.hub.statistics.uploaded == server.hub.statistics.downloaded == len(data)


async def test_chunks_may_be_sent_before_the_queue_has_reached_them(server):
    data = bytes(range(256)) * (3 << 12)
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, "/* new each time so that it is compiled */\n" + ADD, "add", "ppfi")
        queue.batch(c.Alloc(1, len(data)))
        await queue.upload(1, data)
        assert await queue.download(1, 0, len(data)) == data


async def test_everything_may_be_sent_at_once_without_waiting_for_anything(server):
    data = bytes(range(250)) * 10
    async with server.client() as client:
        queue = client.queues[1] = Queue(client, 1)
        link, client.connection.link = client.connection.link, None
        client.send(m.Open(1, "box/cpu/0", {}))
        queue.batch(c.Alloc(1, 3 * len(data)))
        for index in range(3):
            queue.batch(c.Upload(index, 1, index * len(data), len(data)))
            client.send(m.Chunk(1, index, 0), data)
        number = queue.batch(c.Read(1, 0, 3 * len(data)))
        client.connection.link = link
        client.connection.wake()
        message, read = await client.next(m.ReadData)
        assert (message.number, read) == (number, data * 3)


async def test_packed_and_single_launches_compute_what_numpy_computes(server):
    x = np.arange(1000, dtype=np.float32)
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, ADD, "add", "ppfi", writes=[0])
        queue.batch(c.Alloc(1, x.nbytes), c.Alloc(2, x.nbytes), c.Write(1, 0, x.tobytes()))
        queue.launches([0, 0, 2, 1, as_word(1.5), 1000, 0, 0, 1, 2, as_word(-3.0), 1000], 2)
        timed = queue.batch(c.Launch(0, None, None, [2, 1, 0.25, 1000], True))
        result, _ = await client.next(m.Result)
        assert result.number == timed
        assert 0 <= result.value < 1
        y = np.frombuffer(await queue.read(2, 0, x.nbytes), np.float32)
        np.testing.assert_array_equal(y, x + np.float32(1.5) - np.float32(3) + np.float32(0.25))


async def test_several_devices_of_one_session_keep_apart(cache):
    async with serving(cache, devices=("cpu",) * 3) as server, server.client() as client:
        queues = [await client.open(f"box/cpu/{index}", index + 5) for index in range(3)]
        for index, queue in enumerate(queues):
            queue.batch(c.Alloc(1, 4), c.Write(1, 0, bytes([index] * 4)))
        for index, queue in enumerate(queues):
            assert await queue.read(1, 0, 4) == bytes([index] * 4)


async def test_a_view_keeps_its_buffers_memory(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 64), c.View(2, 1, 16, 8), c.Free(1), c.Write(2, 0, b"12345678"))
        assert await queue.read(2, 2, 4) == b"3456"
        assert server.hub.status()["sessions"][0]["totals"]["memory"] == 64
        queue.batch(c.Free(2))
        await queue.done()
        assert server.hub.status()["sessions"][0]["totals"]["memory"] == 0


async def test_a_long_batch_is_worked_off_in_order(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4), *(c.Fill(1, 0, 4, bytes([n & 255])) for n in range(1000)))
        queue.batch(c.Copy(1, 0, 1, 1, 3))
        assert await queue.read(1, 0, 4) == bytes([999 & 255]) * 4


async def test_a_source_that_does_not_compile_fails_its_launches_with_the_compilers_words(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(3, "void bad(int *p) {\n    *p = undeclared;\n}", "bad", "p", name="broken")
        compiled, _ = await client.next(m.Compiled)
        assert not compiled.ok
        assert "source.c:2:" in compiled.message
        assert "undeclared" in compiled.message
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        number = queue.launches([3, 0, 1], 1)
        failed = await queue.failure()
        assert (failed.number, failed.code) == (number, "CompileError")
        assert "broken" in failed.message
        assert "undeclared" in failed.message
        queue.batch(c.Clear(number), c.Write(1, 0, b"good"))
        assert await queue.read(1, 0, 4) == b"good"


async def test_includes_of_the_servers_files_are_refused(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, '#include "/etc/passwd"\n' + NOTHING, "nothing", "")
        compiled, _ = await client.next(m.Compiled)
        assert not compiled.ok
        assert "root:" not in compiled.message


async def test_the_same_program_is_compiled_once(server):
    source = f"/* {np.random.default_rng().integers(1 << 60)} */ {NOTHING}"
    async with server.client() as a, server.client() as b:
        for client in (a, b, a, b):
            queue = await client.open(number=len(client.queues) + 1)
            for program in range(3):
                queue.program(program, source, "nothing", "")
            for _ in range(3):
                assert (await client.next(m.Compiled))[0].ok
    before = server.hub.status()["compiled"]
    assert before <= 2  # the native loop and this one
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, source, "nothing", "")
        compiled, _ = await client.next(m.Compiled)
        assert compiled.ok
    assert server.hub.status()["compiled"] == before


async def test_reopening_a_living_device_gives_empty_memory(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"abcd"))
        number = queue.reopen()
        queue.batch(c.Alloc(1, 8))
        result, _ = await client.next(m.Result)
        assert result.number == number
        assert await queue.read(1, 0, 8) == bytes(8)
        assert server.hub.status()["sessions"][0]["totals"]["memory"] == 8
