"""What the tests of the server's edge share: a port with an echo behind it, and a plain HTTP client."""

import json
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11
import trio

from wsgrad.server.config import Config
from wsgrad.server.listener import Port, open_listeners
from wsgrad.server.statistics import Statistics
from wsgrad.server.tickets import Tickets
from wsgrad.server.tokens import Tokens

TOKENS = Tokens(*(secrets.token_urlsafe(32) for _ in range(3)))


@dataclass
class EchoHub:
    """Behind the port stands this instead of sessions: it sends every message back and remembers who came."""

    clients: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)
    tickets: Tickets = field(default_factory=Tickets)

    async def serve_client(self, connection, peer):
        self.clients.append(peer)
        self.arrived.set()
        await connection.run(lambda received: connection.send(received.raw, received.bulk))

    async def serve_node(self, connection, peer):
        self.nodes.append(peer)
        await connection.run(lambda received: connection.send(received.raw, received.bulk))

    def knows_node(self, secret):
        return False

    def node(self, name):
        return None

    def forget_node(self, name):
        return False

    def status(self):
        counters = {"processes": 0, "compiled": 0, "compiled_from_cache": 0, "statistics": Statistics().describe()}
        return {"sessions": [], "devices": [], "nodes": [], "errors": [], **counters}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Edge:
    """A running port."""

    number: int
    port: Port
    hub: EchoHub
    accepting: trio.CancelScope
    extra: dict = field(default_factory=dict)

    async def connect(self):
        return await trio.open_tcp_stream("127.0.0.1", self.number)

    async def ask(self, path, *headers, method="GET", host=None, stream=None):
        """One request over a new connection, or over `stream`."""
        stream = stream or await self.connect()
        host = f"127.0.0.1:{self.number}" if host is None else host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]
        async with stream:
            await stream.send_all("\r\n".join(lines).encode("latin-1"))
            return await read_answer(stream, method)

    async def until_connections(self, count):
        """Ask for the status, over a connection of its own, until there are only so many others."""
        while True:
            answer = await self.ask("/status.json", bearer(TOKENS.client))
            if json.loads(answer.body)["port"]["connections"] <= count + 1:
                return


async def read_answer(stream, method="GET"):
    """The answer, checked by h11; of a 101 only its head is read."""
    connection = h11.Connection(h11.CLIENT)
    upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "x"), *upgrade]))
    connection.send(h11.EndOfMessage())
    response, body = None, b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            response = event
            if event.status_code == 101:
                break
    headers = {name.decode(): value.decode() for name, value in response.headers}
    return Answer(response.status_code, headers, body)


def bearer(token):
    return f"Authorization: Bearer {token}"


UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
WEBSOCKET = (*UPGRADE, "Sec-WebSocket-Protocol: wsgrad.v1")


@asynccontextmanager
async def serving(*, tls=None, tokens=TOKENS, **settings):
    config = Config(**{"port": 0, **settings})
    listeners = await open_listeners(config.host, config.port)
    hub = EchoHub()
    port = Port(config, tokens, hub, tls=tls)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            accepting = trio.CancelScope()

            async def accept(task_status):
                with accepting:
                    await port.serve(listeners, nursery, task_status=task_status)

            await nursery.start(accept)
            yield Edge(listeners[0].socket.getsockname()[1], port, hub, accepting)
            nursery.cancel_scope.cancel()
