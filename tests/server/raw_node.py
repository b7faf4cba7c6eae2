"""A node that dials in and says whatever a test wants; what it is told, tests look at."""

from contextlib import asynccontextmanager

import trio

from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.trio_driver import TrioConnection


class RawNode:
    """A node that says what a test wants."""

    def __init__(self, connection):
        self.connection = connection
        self.closed = None
        self.received = []
        self.news = trio.Event()

    def handle(self, received):
        self.received.append((m.parse_message(received.head), received.bulk))
        self.news.set()

    def send(self, message, bulk=None):
        self.connection.send(encode(m.message_array(message)), bulk)

    async def next(self, kind):
        with trio.fail_after(10):
            while True:
                for index, (message, _) in enumerate(self.received):
                    if isinstance(message, kind):
                        return self.received.pop(index)
                self.news = trio.Event()
                await self.news.wait()

    async def run(self, task_status):
        task_status.started()
        self.closed = await self.connection.run(self.handle)


@asynccontextmanager
async def raw_node(server, *, name="raw", secret=None, devices=({"kind": "cpu", "dialects": ["c"]},)):
    stream = await trio.open_tcp_stream("127.0.0.1", server.node_port)
    async with trio.open_nursery() as nursery:
        node = RawNode(TrioConnection.from_stream(stream, client=True, max_bulk=2 << 20))
        await nursery.start(node.run)
        node.send(m.Join(1, "test", name, secret, list(devices)))
        node.joined, _ = await node.next(m.Joined)
        yield node
        node.send(m.Bye())
        nursery.cancel_scope.cancel()
