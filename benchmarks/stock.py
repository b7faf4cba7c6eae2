"""Stock trio-websocket with its defaults and CBOR messages of 1 MiB: what a straightforward program would reach.

The second reference of `benchmarks.transport`. Nothing of wsgrad is used here.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import cbor2
import trio
import trio_websocket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_MESSAGE_BYTES = (1 << 20) - 16  # with its CBOR head it just fits the default limit


def _decode(message: str | bytes) -> Any:  # noqa: ANN401  # CBOR holds anything
    assert isinstance(message, bytes)
    return cbor2.loads(message)


async def _answer(request: trio_websocket.WebSocketRequest) -> None:
    websocket = await request.accept()
    payload = bytes(_MESSAGE_BYTES)
    try:
        while True:
            operation, nbytes = _decode(await websocket.get_message())
            if operation == "sink":
                while nbytes > 0:
                    nbytes -= len(_decode(await websocket.get_message()))
                await websocket.send_message(cbor2.dumps("done"))
            elif operation == "source":
                while nbytes > 0:
                    await websocket.send_message(cbor2.dumps(payload[:nbytes]))
                    nbytes -= min(nbytes, _MESSAGE_BYTES)
            else:
                await websocket.send_message(cbor2.dumps(payload[:nbytes]))
    except trio_websocket.ConnectionClosed:
        pass


def _serve(port: int) -> None:
    trio.run(partial(trio_websocket.serve_websocket, _answer, "127.0.0.1", port, None))


async def _drive(port: int, pipe: Connection) -> None:
    async with trio_websocket.open_websocket_url(f"ws://127.0.0.1:{port}") as websocket:
        payload = bytes(_MESSAGE_BYTES)
        pipe.send("ready")
        while True:
            try:
                operation, nbytes = await trio.to_thread.run_sync(pipe.recv)
            except EOFError:
                return
            start = time.perf_counter()
            await websocket.send_message(cbor2.dumps([operation, nbytes]))
            left = nbytes
            if operation == "sink":
                while left > 0:
                    await websocket.send_message(cbor2.dumps(payload[:left]))
                    left -= _MESSAGE_BYTES
                await websocket.get_message()
            else:
                while left > 0:
                    left -= len(_decode(await websocket.get_message()))
            pipe.send(time.perf_counter() - start)


def _client(port: int, pipe: Connection) -> None:
    trio.run(_drive, port, pipe)


class StockPeer:
    """Two processes joined by stock trio-websocket; seconds of one operation between them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def round_trip(self) -> float:
        """Seconds until 4 bytes asked for are here."""
        return self._run("echo", 4)

    def upload(self, nbytes: int) -> float:
        """Seconds until all bytes have been received and that was said."""
        return self._run("sink", nbytes)

    def download(self, nbytes: int) -> float:
        """Seconds until all bytes asked for are here."""
        return self._run("source", nbytes)

    def _run(self, operation: str, nbytes: int) -> float:
        self._pipe.send((operation, nbytes))
        return float(self._pipe.recv())


@contextmanager
def stock_peer() -> Iterator[StockPeer]:
    """Both processes; they end with the block."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = context.Process(target=_serve, args=(port,), daemon=True)
    server.start()
    ours, theirs = context.Pipe()
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        client = context.Process(target=_client, args=(port, theirs), daemon=True)
        client.start()
        theirs.close()
        try:
            assert ours.recv() == "ready"
            yield StockPeer(ours)
        finally:
            ours.close()
            client.join(5)
            client.kill()
            client.join()
    finally:
        server.kill()
        server.join()
