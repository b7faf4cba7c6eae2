"""Sessions beside each other: nobody waits for another, nobody sees another's data."""

import trio
from heart import eventually, serving

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

PEEK = """void peek(char *out, const char *in, int n) {
    for (int i = 0; i < n; i++) out[i] = ((volatile const char *)in)[64 + i];
}"""
SECRET = b"a secret of the first session " * 100


async def test_a_second_client_is_served_while_the_first_one_idles(cache):
    async with serving(cache) as server:
        idle = await trio.open_tcp_stream("127.0.0.1", server.port)
        async with server.client() as first, server.client() as second:
            await first.open()
            queue = await second.open()
            queue.batch(c.Alloc(1, 4))
            assert await queue.read(1, 0, 4) == bytes(4)
        await idle.aclose()


async def test_a_client_cut_in_the_middle_of_a_chunk_costs_nobody_else_anything(cache):
    async with serving(cache, resume_grace=0.1) as server, server.client() as other:
        second = await other.open()
        second.batch(c.Alloc(1, 8), c.Write(1, 0, b"untouched"[:8]))
        async with server.client() as client:
            queue = await client.open()
            queue.batch(c.Alloc(1, 4 << 20), c.Upload(1, 1, 0, 4 << 20))
            frame = client.connection._connection.encode(b"\x84\x13\x01\x01\x00", bytes(1 << 20))
            await client.connection._stream.send_all(b"".join(frame)[:300_000])
            await trio.aclose_forcefully(client.connection._stream)
        assert await second.read(1, 0, 8) == b"untouche"
        await eventually(lambda: len(server.hub.status()["sessions"]) == 1)
        await eventually(lambda: server.zygote.processes == 1)


async def test_ids_of_one_session_mean_nothing_in_another(cache):
    async with serving(cache) as server, server.client() as first, server.client() as second:
        a, b = await first.open(), await second.open()
        a.batch(c.Alloc(1, len(SECRET)), c.Write(1, 0, SECRET))
        assert await a.read(1, 0, 8) == SECRET[:8]
        b.batch(c.Read(1, 0, 8))
        failed = await b.failure()
        assert failed.code == "DeviceError"
        assert "no buffer 1" in failed.message


async def test_a_kernel_that_reads_past_its_buffer_sees_nothing_of_another_session(cache):
    async with serving(cache) as server, server.client() as first:
        queue = await first.open()
        queue.batch(c.Alloc(1, 1 << 16), *(c.Write(1, i * 3000, SECRET) for i in range(21)))
        await queue.done()
        async with server.client() as second:
            # Once beside the living session, and once after it has ended and its memory was given back.
            for round in range(2):
                spy = await second.open(number=round + 1)
                spy.program(0, PEEK, "peek", "ppi", writes=[0])
                spy.batch(c.Alloc(1, 30000), c.Alloc(2, 64))
                spy.launches([0, 0, 1, 2, 30000], 1)
                number = spy.batch(c.Read(1, 0, 30000))
                message, data = await second.next(m.ReadData, m.Failed)
                assert message.number == number or message.code == "DeviceLost"
                assert b"secret" not in (data or b"")
                if not round:
                    first.send(m.Bye())
                    await first.wait_closed()
