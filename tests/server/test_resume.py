"""Sessions over a connection that is cut once, at any byte of either direction: every command runs exactly once."""

import contextlib
import random
import struct
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from heart import ADD, Client, as_word, eventually, serving

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.connection import Connection
from wsgrad.transport.trio_driver import TrioConnection

COUNT = 50_000  # floats: 200 KB, an upload of one chunk
LARGE = 700_000  # floats: 2.8 MB, three chunks


class Proxy:
    """Passes bytes on both ways and cuts its first connections hard, each after so many bytes, counted both ways."""

    def __init__(self, target, cuts):
        self.target = target
        self.cuts = list(cuts)
        self.passed = 0
        self.connections = 0

    async def handle(self, stream):
        self.connections += 1
        left = [self.cuts.pop(0) if self.cuts else None]
        async with await trio.open_tcp_stream("127.0.0.1", self.target) as target, trio.open_nursery() as nursery:

            async def forward(source, sink):
                try:
                    while data := await source.receive_some(1 << 17):
                        if left[0] is not None:
                            data = data[: left[0]]
                            left[0] -= len(data)
                        self.passed += len(data)
                        await sink.send_all(data)
                        if left[0] == 0:
                            break
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                if left[0] == 0:
                    for end in (stream, target):
                        # A reset, as from a link that is gone, instead of an orderly end.
                        end.setsockopt(1, 13, struct.pack("ii", 1, 0))
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward, stream, target)
            nursery.start_soon(forward, target, stream)
        await trio.aclose_forcefully(stream)


class ReconnectingClient(Client):
    """A client that attaches to its session again whenever its connection has ended without a close frame."""

    def __init__(self, port):
        super().__init__(None)
        self.port = port
        self.key = None
        self.links = 0

    async def run(self, task_status):
        task_status.started()
        while True:
            stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            if self.connection is not None:
                self.connection.link = None
            self.connection = TrioConnection.from_stream(stream, client=True, max_bulk=1 << 20)
            self.connection.send(encode(m.message_array(m.Hello(1, "test", self.key, self.link.received, {}))))
            closed = await self.connection.run(self._handle)
            if closed.code != 1006:
                self.closed = closed
                self._wake()
                return

    def _handle(self, received):
        if received.head[0] == m.Welcome.KIND:
            welcome = m.parse_message(received.head)
            self.key = welcome.key
            self.link.resume(welcome.received)
            self.connection.link = self.link
            self.connection.wake()
            self.links += 1
            self._wake()
        else:
            super()._handle(received)

    def send(self, message, bulk=None):
        self.link.push(encode(m.message_array(message)), bulk)
        if self.connection is not None:
            self.connection.wake()


@asynccontextmanager
async def cut_client(server, cuts):
    proxy = Proxy(server.port, cuts)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, proxy.handle, 0)
        client = ReconnectingClient(listeners[0].socket.getsockname()[1])
        await nursery.start(client.run)
        yield client, proxy
        nursery.cancel_scope.cancel()


async def train(client, seed):
    """A random program of uploads, launches, reads and downloads; every result is what numpy gives."""
    rng = random.Random(seed)
    values = np.random.default_rng(seed)
    with trio.fail_after(20):
        await client.until(lambda: client.key is not None)
        queue = await client.open()
        arrays = {1: np.zeros(COUNT, np.float32), 2: np.zeros(COUNT, np.float32), 3: np.zeros(LARGE, np.float32)}
        queue.batch(*(c.Alloc(buffer, array.nbytes) for buffer, array in arrays.items()))
        queue.program(0, ADD, "add", "ppfi", writes=[0])
        for step in range(12):
            match rng.randrange(6):
                case 0 | 1:
                    buffer = rng.choice([1, 2, 3])
                    arrays[buffer] = values.random(arrays[buffer].size, np.float32)
                    await queue.upload(buffer, arrays[buffer].tobytes(), transfer=step)
                case 2 | 3:
                    words = []
                    for _ in range(20):
                        target, source = rng.sample([1, 2], 2)
                        number = rng.randrange(100)
                        words += [0, 0, target, source, as_word(number), COUNT]
                        arrays[target] = arrays[source] + np.float32(number)
                    queue.launches(words, 20)
                case 4:
                    buffer = rng.choice([1, 2, 3])
                    offset = rng.randrange(1000) * 4
                    data = await queue.read(buffer, offset, 4000)
                    np.testing.assert_array_equal(np.frombuffer(data, np.float32), arrays[buffer][offset // 4 :][:1000])
                case 5:
                    buffer = rng.choice([1, 2, 3])
                    data = await queue.download(buffer, 0, arrays[buffer].nbytes, transfer=100 + step)
                    np.testing.assert_array_equal(np.frombuffer(data, np.float32), arrays[buffer])
        for buffer, array in arrays.items():
            data = await queue.download(buffer, 0, array.nbytes, transfer=200 + buffer)
            np.testing.assert_array_equal(np.frombuffer(data, np.float32), array)
        await client.until(lambda: queue.credit == m.SLOTS)
        client.send(m.Bye())
        assert (await client.wait_closed()).code == 1000


@pytest.mark.parametrize("seed", range(4))
async def test_a_cut_at_any_byte_changes_no_result(cache, seed):
    rng = random.Random(seed)
    async with serving(cache) as server:
        async with cut_client(server, []) as (client, proxy):
            await train(client, seed)
        total = proxy.passed
        # A session that is not known to its client yet is opened anew, which is no resume: the first cut is behind it.
        for cut in [rng.randrange(600, total) for _ in range(8)]:
            async with cut_client(server, [cut]) as (client, proxy):
                await train(client, seed)
            assert (proxy.connections, client.links) == (2, 2), f"cut at {cut} of {total}"
        assert server.hub.statistics.launches > 0
        assert server.hub.statistics.lost == server.hub.statistics.errors == 0


async def test_bytes_of_an_old_connection_that_come_late_land_nowhere(cache):
    data = np.random.default_rng(1).integers(0, 256, m.SLOTS << 20, dtype=np.uint8).tobytes()
    async with serving(cache) as server:
        async with server.client() as old:
            queue = await old.open()
            queue.program(1, "void wait(int *p) { for (volatile int i = 0; i < 200000000; i++) ; }", "wait", "p")
            queue.batch(c.Alloc(1, len(data)))
            await queue.done()
            # Half a chunk arrives on a second connection, which then falls silent without an end.
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            half = Connection(client=True, bulk_kinds=m.BULK_KINDS)
            hello = m.Hello(1, "test", old.welcome.key, old.link.received, {})
            await stream.send_all(b"".join(half.encode(encode(m.message_array(hello)))))
            await old.wait_closed()
        (session,) = server.hub._sessions.values()
        link = old.link
        link.resume(session._link.received)
        queue.launches([1, 0, 1], 1)  # while this runs, the chunks stay in their slots
        queue.batch(c.Upload(1, 1, 0, len(data)))
        old.send(m.Chunk(1, 1, 0), data[: 1 << 20])
        sent = []
        while outgoing := link.pop():
            sent.append(b"".join(half.encode(outgoing.head, outgoing.bulk)))
        await stream.send_all(b"".join(sent)[: 1 << 19])
        await eventually(lambda: session._queues[1]._announced == 1)
        async with server.client(key=old.welcome.key, link=link) as new:
            new.queues = {1: queue}
            queue.client = new
            for start in range(1 << 20, len(data), 1 << 20):
                new.send(m.Chunk(1, 1, start), data[start : start + (1 << 20)])
            queue.credit = 0
            await eventually(lambda: session._queues[1]._in.upload is None)
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(bytes(1 << 19))
            assert await queue.download(1, 0, len(data)) == data
        await stream.aclose()


async def test_many_cuts_in_one_session_change_no_result(cache):
    rng = random.Random(5)
    async with serving(cache) as server:
        cuts = [rng.randrange(600, 1 << 21) for _ in range(8)]
        async with cut_client(server, cuts) as (client, proxy):
            await train(client, 2)
        assert proxy.connections > 3


async def test_a_cut_during_the_first_words_leaves_nothing(cache):
    async with serving(cache, resume_grace=0.1) as server:
        for cut in (1, 5, 20, 40, 100):
            async with cut_client(server, [cut]) as (client, _):
                await train(client, 1)


async def test_results_wait_for_a_client_that_is_away(cache):
    async with serving(cache) as server:
        async with server.client() as client:
            queue = await client.open()
            queue.batch(c.Alloc(1, 3 << 20))
            await queue.done()
            number = queue.batch(c.Fill(1, 0, 3 << 20, b"\7"), c.Read(1, 5, 4))
            await client.next(m.ReadData)
            queue.batch(c.Read(1, 9, 2), c.Download(1, 1, 0, 3 << 20))
            with trio.fail_after(5):
                while client.link:
                    await trio.lowlevel.checkpoint()
        async with server.client(key=client.welcome.key, link=client.link) as again:
            again.queues = {1: queue}
            queue.client = again
            _, data = await again.next(m.ReadData, where=lambda message: message.number > number)
            assert data == b"\7\7"
            size = 0
            while size < 3 << 20:
                _, data = await again.next(m.Chunk)
                assert data == b"\7" * (1 << 20)
                size += len(data)
            await queue.done()
