"""What the tests of the server's heart share: a hub behind a loopback port, and a client of the raw protocol."""

import contextlib
import os
import struct
from contextlib import asynccontextmanager

import trio

from wsgrad.server.config import Config
from wsgrad.server.hub import Hub
from wsgrad.server.machine import start_zygote
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode
from wsgrad.transport.link import Link
from wsgrad.transport.trio_driver import TrioConnection

ADD = """void add(float *restrict y, const float *restrict x, float a, int n) {
    for (int i = 0; i < n; i++) y[i] = x[i] + a;
}"""
CRASH = "void crash(int *p) { *(volatile int *)8 = 1; }"
SPIN = "void spin(int *p) { for (volatile int i = 0;; i++) ; }"
NOTHING = "void nothing(void) {}"
SLOW = """#define A x[0] = x[0] * 3 + x[1];
#define B A A A A A A A A A A
#define C B B B B B B B B B B
#define D C C C C C C C C C C
#define E D D D D D D D D D D
void slow(volatile int *x) { E E E E E E E E }"""
"""What takes a compiler seconds."""


class Server:
    """A hub with a port of its own, without the HTTP in front of it."""

    def __init__(self, hub, zygote, port, nursery):
        self.hub = hub
        self.zygote = zygote
        self.port = port
        self.nursery = nursery

    def session(self, client):
        """The session behind a client."""
        return self.hub._sessions[client.welcome.key]

    @asynccontextmanager
    async def client(self, *, key=None, link=None, queues=()):
        """A connected client that has said hello; with key, link and queues of another it goes on with its session."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        connection = TrioConnection.from_stream(stream, client=True, max_bulk=1 << 20)
        client = Client(connection, link)
        for queue in queues:
            client.queues[queue.number] = queue
            queue.client = client
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            connection.send(encode(m.message_array(m.Hello(1, "test", key, client.link.received, {}))))
            client.welcome, _ = await client.next(m.Welcome, m.Refused)
            if isinstance(client.welcome, m.Welcome):
                client.link.resume(client.welcome.received)
                connection.link = client.link
                connection.wake()
            try:
                yield client
            finally:
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def serving(cache, *, devices=("cpu",), **settings):
    config = Config(**{"name": "box", "devices": devices, "cpu_threads": 1, "launch_seconds": 10.0} | settings)
    zygote = start_zygote(config)
    async with Hub(config, zygote, cache_directory=cache) as hub, trio.open_nursery() as nursery:

        async def handle(stream):
            stream.setsockopt(6, 1, 1)
            connection = TrioConnection.from_stream(stream, client=False, max_bulk=1 << 20)
            await hub.serve_client(connection, connection.peer)

        async def handle_node(stream):
            connection = TrioConnection.from_stream(stream, client=False, max_bulk=1 << 20)
            await hub.serve_node(connection, connection.peer)

        listeners = await nursery.start(trio.serve_tcp, handle, 0)
        server = Server(hub, zygote, listeners[0].socket.getsockname()[1], nursery)
        listeners = await nursery.start(trio.serve_tcp, handle_node, 0)
        server.node_port = listeners[0].socket.getsockname()[1]
        yield server
        nursery.cancel_scope.cancel()


class Client:
    """One connection of a client. Messages are kept until somebody asks for one of their type."""

    def __init__(self, connection, link=None):
        self.connection = connection
        self.link = Link() if link is None else link
        self.closed = None
        self.sees = True
        self.queues = {}
        self._kept = []
        self._news = trio.Event()

    async def run(self, task_status):
        task_status.started()
        self.closed = await self.connection.run(self._handle)
        self._wake()

    def _wake(self):
        news, self._news = self._news, trio.Event()
        news.set()

    def _handle(self, received):
        message = m.parse_message(received.head)
        if message.KIND >= 16:
            self.link.note_received(received.nbytes)
            if self.sees:
                self.connection.send(encode(m.message_array(m.Seen(self.link.received))))
        if isinstance(message, m.Seen):
            self.link.seen(message.count)
            return
        if isinstance(message, m.Credit) and message.queue in self.queues:
            self.queues[message.queue].credit += message.slots
        if isinstance(message, m.Ack) and message.queue in self.queues:
            self.queues[message.queue].acked = message.number
        if isinstance(message, m.ReadData):
            queue = self.queues[message.queue]
            queue.acked = max(queue.acked, message.acked)
        self._kept.append((message, None if received.bulk is None else bytes(received.bulk)))
        self._wake()

    def send(self, message, bulk=None):
        self.link.push(encode(m.message_array(message)), bulk, numbered=message.KIND >= 16)
        self.connection.wake()

    async def next(self, *kinds, where=lambda message: True):
        """The next message of one of these types; fails after a while, or when the connection has ended."""
        with trio.fail_after(20):
            while True:
                for index, (message, _) in enumerate(self._kept):
                    if isinstance(message, kinds) and where(message):
                        return self._kept.pop(index)
                if self.closed is not None:
                    raise EOFError(f"closed: {self.closed}")
                await self._news.wait()

    async def until(self, condition):
        with trio.fail_after(20):
            while not condition():
                if self.closed is not None:
                    raise EOFError(f"closed: {self.closed}")
                await self._news.wait()

    async def wait_closed(self):
        with trio.fail_after(20):
            while self.closed is None:
                await self._news.wait()
        return self.closed

    async def open(self, device="box/cpu/0", number=1):
        queue = Queue(self, number)
        self.queues[number] = queue
        self.send(m.Open(number, device, {}))
        answer, _ = await self.next(m.Result, m.Failed)
        assert isinstance(answer, m.Result), answer
        return queue


class Queue:
    """The client's side of a queue."""

    def __init__(self, client, number):
        self.client = client
        self.number = number
        self.next = 1
        self.credit = m.SLOTS
        self.acked = 0

    def batch(self, *commands):
        """Send commands; returns the last one's number."""
        first = self.next
        self.next += len(commands)
        self.client.send(m.Batch(self.number, first, [c.command_array(command) for command in commands]))
        return self.next - 1

    def program(self, program, source, entry, signature, *, writes=None, name="", alias=False):
        number = self.next
        self.next += 1
        message = m.Program(self.number, number, program, "c", name, entry, signature, writes, alias)
        self.client.send(message, source.encode())
        return number

    def launches(self, words, count):
        first = self.next
        self.next += count
        self.client.send(m.Launches(self.number, first, count), struct.pack(f"<{len(words)}I", *words))
        return self.next - 1

    def reopen(self):
        number = self.next
        self.next += 1
        self.client.send(m.Reopen(self.number, number))
        return number

    async def done(self, number=None):
        """Wait until everything, or everything up to a number, is acknowledged."""
        wanted = self.next - 1 if number is None else number
        await self.client.until(lambda: self.acked >= wanted)

    async def upload(self, buffer, data, *, transfer=1, offset=0):
        number = self.batch(c.Upload(transfer, buffer, offset, len(data)))
        for start in range(0, len(data), m.CHUNK_BYTES):
            await self.client.until(lambda: self.credit > 0)
            self.credit -= 1
            self.client.send(m.Chunk(self.number, transfer, start), data[start : start + m.CHUNK_BYTES])
        return number

    async def read(self, buffer, offset, nbytes):
        number = self.batch(c.Read(buffer, offset, nbytes))
        _, data = await self.client.next(m.ReadData, where=lambda message: message.number == number)
        return data

    async def download(self, buffer, offset, nbytes, *, transfer=9):
        number = self.batch(c.Download(transfer, buffer, offset, nbytes))
        parts = []
        while sum(map(len, parts)) < nbytes:
            message, data = await self.client.next(m.Chunk, where=lambda message: message.transfer == transfer)
            assert message.offset == sum(map(len, parts))
            parts.append(data)
        await self.done(number)
        return b"".join(parts)

    async def failure(self):
        message, _ = await self.client.next(m.Failed, where=lambda message: message.queue == self.number)
        return message


def as_word(value):
    """A float32 as the word of a packed launch."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def processes_below(pid):
    """The ids of all processes that descend from one, zombies too."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as file:
                parents[int(entry.name)] = int(file.read().rpartition(b")")[2].split()[1])
    found, wanted = set(), {pid}
    while wanted:
        wanted = {child for child, parent in parents.items() if parent in wanted}
        found |= wanted
    return found


def open_files():
    """The open descriptors of this process, by what they are."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}").partition(":")[0])
    return sorted(found)


async def eventually(condition):
    """Wait for something that nothing announces, such as the end of another process."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


def mapped_rings():
    """How many rings this process still maps."""
    with open("/proc/self/maps") as file:
        return sum("wsgrad-ring" in line for line in file)
