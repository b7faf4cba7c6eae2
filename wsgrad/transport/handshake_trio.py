"""The WebSocket opening handshake on a trio stream, done by trio-websocket; frames after it are not its business.

trio-websocket moves messages far too slowly for tensors, so it gets a stream that holds the HTTP head and nothing
behind it, and is let go as soon as the handshake is done. What the peer sent behind its head stays with the caller.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import trio
import trio_websocket

from wsgrad.errors import ConnectionLost, ProtocolError, WsgradError
from wsgrad.transport.handshake import (
    HANDSHAKE_SECONDS,
    MAX_HEAD_NBYTES,
    HeadBuffer,
    bad_answer,
    missing_body,
    parse_answer,
    refusal,
    wrong_subprotocol,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BODY_SECONDS = 2


async def read_http_head(
    stream: trio.abc.ReceiveStream,
    *,
    limit: int = MAX_HEAD_NBYTES,
    timeout: float = HANDSHAKE_SECONDS,  # noqa: ASYNC109 - a stranger's time is limited here, not the caller's patience
) -> tuple[bytes, bytes]:
    """Reads an HTTP head.

    Args:
        stream: where it comes from.
        limit: the most bytes it may have.
        timeout: seconds for the whole of it.

    Returns:
        The head with the empty line that ends it, and the bytes received behind it.

    Raises:
        ConnectionLost: the peer left before the head was whole.
        LimitExceeded: the head is over the limit.
        TimeoutError: it did not come in time.
    """
    buffer = HeadBuffer(limit=limit)
    with trio.move_on_after(timeout):
        while True:
            found = buffer.feed(await _receive(stream))
            if found is not None:
                return found
    raise TimeoutError(f"no whole HTTP head came within {timeout:g} s")


async def _receive(stream: trio.abc.ReceiveStream) -> bytes:
    try:
        return bytes(await stream.receive_some(MAX_HEAD_NBYTES))
    except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
        raise ConnectionLost(f"the connection broke during the handshake: {exc.__cause__ or exc}") from exc


class _HeadOnly(trio.abc.Stream):
    """What trio-websocket sees of a stream: our side's bytes go out, one head comes in, then silence.

    It never closes the real stream, and passes nothing on after `detach`: trio-websocket must not answer what it
    takes for the end of the connection.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self.scope = trio.CancelScope()  # of trio-websocket's tasks, set once they have a nursery
        self._detached = False
        self._given = False
        self.lost: Exception | None = None

    def detach(self) -> None:
        self._detached = True

    async def head(self) -> bytes:
        raise NotImplementedError

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._detached:
            return
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            # trio-websocket notes this, but goes on waiting for a handshake that can't come.
            self.lost = exc
            self.scope.cancel()
            raise

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._given:
            self._given = True
            return await self.head()
        await trio.sleep_forever()
        raise AssertionError("sleep_forever returned")

    async def aclose(self) -> None:
        # trio-websocket closes early only where it found the head to be wrong; it would then wait for ever.
        self.scope.cancel()
        await trio.lowlevel.checkpoint()


class _RequestHead(_HeadOnly):
    def __init__(self, stream: trio.abc.Stream, head: bytes) -> None:
        super().__init__(stream)
        self._head = head

    async def head(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._head


class _AnswerHead(_HeadOnly):
    leftover = b""
    error: WsgradError | TimeoutError | None = None

    async def head(self) -> bytes:
        try:
            head, self.leftover = await read_http_head(self._stream)
            answer = parse_answer(head)
            if answer.status == 101:
                return head
            body = bytearray(self.leftover)
            # The status alone is answer enough if the body does not come.
            with trio.move_on_after(_BODY_SECONDS), contextlib.suppress(ConnectionLost):
                while missing_body(answer, body) and (data := await _receive(self._stream)):
                    body += data
            self.error = refusal(answer, body)
        except (WsgradError, TimeoutError) as exc:
            self.error = exc
        # Kept, not raised: out of trio-websocket's task it would come as a group.
        self.scope.cancel()
        await trio.sleep_forever()
        raise AssertionError("sleep_forever returned")


async def accept_websocket(stream: trio.abc.Stream, head: bytes, *, subprotocol: str) -> None:
    """Answers a client's handshake whose HTTP head was already read; authorisation is the caller's, before this.

    Afterwards the stream belongs to the caller alone. The bytes behind the head were never shown to trio-websocket.

    Raises:
        ProtocolError: the head is no valid WebSocket handshake, or does not offer `subprotocol`; a 400 was sent.
        ConnectionLost: the peer left.
    """
    offered: Sequence[str] | None = None
    failure: BaseException | None = None
    wrapper = _RequestHead(stream, head)
    try:
        async with trio.open_nursery() as nursery:
            wrapper.scope = nursery.cancel_scope
            request = await trio_websocket.wrap_server_stream(nursery, wrapper)
            offered = request.proposed_subprotocols
            if subprotocol in offered:
                await request.accept(subprotocol=subprotocol)
            else:
                said = f"this server speaks the WebSocket subprotocol {subprotocol}, which was not offered\n"
                await request.reject(400, body=said.encode())
            wrapper.detach()
            nursery.cancel_scope.cancel()
    except* Exception as group:
        failure = group
    if wrapper.lost is not None:
        raise ConnectionLost("the client left during the handshake") from wrapper.lost
    if offered is None or failure is not None:
        raise ProtocolError("the request is not a valid WebSocket handshake (RFC 6455 section 4.2.1)") from failure
    if subprotocol not in offered:
        # What it does offer is not repeated: a token may be among it.
        raise ProtocolError(f"the client does not offer the WebSocket subprotocol {subprotocol}")


async def open_websocket(
    stream: trio.abc.Stream,
    *,
    host: str,
    path: str,
    headers: Iterable[tuple[str, str]] = (),
    subprotocols: Sequence[str],
) -> bytes:
    """Does a client's handshake.

    Args:
        stream: connected, and encrypted where it should be.
        host: for the Host header, with the port.
        path: what to ask for, such as `/v1/client`.
        headers: more headers, such as Authorization.
        subprotocols: what to offer; the server must choose the first.

    Returns:
        The bytes received behind the server's answer.

    Raises:
        Unauthorized: the server refused us with 401, 403 or 421.
        ConnectionLost: it refused with another status, or left.
        ProtocolError: its answer breaks the rules, or chooses another subprotocol.
        TimeoutError: no answer came.
    """
    opened = False
    chosen: str | None = None
    failure: BaseException | None = None
    extra_headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers]
    wrapper = _AnswerHead(stream)
    try:
        async with trio.open_nursery() as nursery:
            wrapper.scope = nursery.cancel_scope
            connection = await trio_websocket.wrap_client_stream(
                nursery,
                wrapper,  # type: ignore[arg-type]
                host,
                path,
                subprotocols=subprotocols,
                extra_headers=extra_headers,
            )
            opened = True
            chosen = connection.subprotocol
            wrapper.detach()
            nursery.cancel_scope.cancel()
    except* Exception as group:
        failure = group
    if wrapper.error is not None:
        raise wrapper.error
    if wrapper.lost is not None:
        raise ConnectionLost("the server left during the handshake") from wrapper.lost
    if failure is not None or not opened:
        raise bad_answer("its key, headers or subprotocol are wrong") from failure
    if chosen != subprotocols[0]:
        raise wrong_subprotocol(chosen)
    return wrapper.leftover
