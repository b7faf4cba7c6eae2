"""A peer that sends a tab bytes and takes them back over our frames, and does nothing else: what a tab can do at most.

It runs in a thread of its own, on one connection. The tab's script counts what comes and sends as much of one array.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.transport import cbor
from wsgrad.transport.handshake_trio import accept_websocket, read_http_head
from wsgrad.transport.messages import CHUNK_BYTES, SUBPROTOCOL, Chunk, Ping, message_array
from wsgrad.transport.trio_driver import TrioConnection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wsgrad.transport.connection import Received

_SLOTS: Final = 4
# A message is the array of a Chunk and a byte string of 1 MiB, as on a node's connection.
_SCRIPT: Final = """(() => {
  const socket = new WebSocket('ws://127.0.0.1:PORT/', ['wsgrad.v1']);
  socket.binaryType = 'arraybuffer';
  let chunk = null;
  const seen = new Uint8Array([0x82, 7, 1]); // [kind, count]: one more has come
  socket.onmessage = (event) => {
    if (event.data.byteLength > 1000) { chunk = event.data; socket.send(seen); return; }
    const bytes = new Uint8Array(event.data); // [5, chunks]: so many back
    for (let left = bytes[2] < 24 ? bytes[2] : bytes[3]; left > 0; left--) socket.send(chunk);
  };
  globalThis.bare = socket;
  return true;
})()"""


class BarePeer:
    """Its `there_and_back` may be called once the tab has run `script`."""

    def __init__(self, port: int, token: trio.lowlevel.TrioToken) -> None:
        self.script = _SCRIPT.replace("PORT", str(port))
        self._token = token
        self.connection: TrioConnection | None = None
        self.connected = threading.Event()
        self.acked = 0
        self.received = 0
        self.news = trio.Event()

    def there_and_back(self, nbytes: int) -> float:
        """Seconds for so many bytes to the tab, then as many from it; a multiple of 1 MiB below 256."""
        if not self.connected.wait(30):
            raise RuntimeError("the tab did not connect")
        return trio.from_thread.run(self._there_and_back, nbytes // CHUNK_BYTES, trio_token=self._token)

    async def _there_and_back(self, chunks: int) -> float:
        connection = self.connection
        assert connection is not None
        data = memoryview(bytes(CHUNK_BYTES))
        self.acked = self.received = 0
        start = trio.current_time()
        for index in range(chunks):
            while index - self.acked >= _SLOTS:
                await self._wait()
            connection.send(cbor.encode(message_array(Chunk(1, 1, index * CHUNK_BYTES))), data)
        while self.acked < chunks:
            await self._wait()
        connection.send(cbor.encode(message_array(Ping(chunks))))
        while self.received < chunks:
            await self._wait()
        return trio.current_time() - start

    async def _wait(self) -> None:
        self.news = trio.Event()
        await self.news.wait()

    def handle(self, received: Received) -> None:
        """Count what the tab sent: a whole chunk, or the word that one has come."""
        if received.bulk is None:
            self.acked += 1
        else:
            self.received += 1
        self.news.set()


@contextmanager
def bare_peer() -> Iterator[BarePeer]:
    """The peer on a free port of loopback; it ends with the block."""
    ready = threading.Event()
    made: list[BarePeer] = []
    scopes: list[trio.CancelScope] = []

    async def serve(stream: trio.SocketStream) -> None:
        head, rest = await read_http_head(stream)
        await accept_websocket(stream, head, subprotocol=SUBPROTOCOL)
        peer = made[0]
        peer.connection = TrioConnection.from_stream(stream, client=False, max_bulk=CHUNK_BYTES, leftover=rest)
        peer.connected.set()
        await peer.connection.run(peer.handle)

    async def main() -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            made.append(BarePeer(listener.socket.getsockname()[1], trio.lowlevel.current_trio_token()))
            ready.set()
            await trio.serve_listeners(serve, [listener])

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    ready.wait()
    token = made[0]._token
    try:
        yield made[0]
    finally:
        token.run_sync_soon(scopes[0].cancel)
        thread.join()
