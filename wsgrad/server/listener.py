"""The server's port: accepts, counts, encrypts, and hands each opened connection to the hub.

Every connection is a task of its own from its first byte, so a slow, silent or lost one costs nobody else anything.
Heads and tokens are `door`'s business, sessions and nodes the hub's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import Counter
from typing import TYPE_CHECKING, Protocol, get_args

import trio

from wsgrad.errors import ConnectionLost, WsgradError
from wsgrad.server import audit, http, pages, status
from wsgrad.server.admin import Admin
from wsgrad.server.auth import Gate, network_of, plain_address
from wsgrad.server.door import Door, send
from wsgrad.server.invitation import page_address
from wsgrad.server.pages import Pages
from wsgrad.transport.messages import (
    CHUNK_BYTES,
    INLINE_BYTES,
    MAX_HEAD,
    MAX_WORDS_BYTES,
    Chunk,
    Launches,
    Message,
    ReadData,
)
from wsgrad.transport.trio_driver import TrioConnection, peer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wsgrad.server.auth import Visitor
    from wsgrad.server.config import Config
    from wsgrad.server.door import Admitted
    from wsgrad.server.remote import RemoteNode
    from wsgrad.server.routes import Route
    from wsgrad.server.tickets import Tickets
    from wsgrad.server.tls import Certificate
    from wsgrad.server.tokens import Role, Tokens

_TLS_RECORD = 0x16
_LAST_WORDS_SECONDS = 2.0
"""How long it may take to tell somebody that the time is over."""

_log = logging.getLogger("wsgrad.server.listener")


class Hub(Protocol):
    """What the port asks of the server's heart."""

    async def serve_client(self, connection: TrioConnection, peer: str) -> None:
        """Serve a client's connection until it is over."""

    async def serve_node(self, connection: TrioConnection, peer: str) -> None:
        """Serve a node's connection until it is over."""

    async def serve_peer(self, connection: TrioConnection, peer: str, route: Route) -> None:
        """Serve another server's connection until it is over."""

    def knows_node(self, secret: str) -> bool:
        """Whether a node was given this secret when it joined."""

    def node(self, name: str) -> RemoteNode | None:
        """The node of that name that dialled in, if it is here."""

    def forget_node(self, name: str) -> bool:
        """End the secret of that name; whether there was one."""

    @property
    def tickets(self) -> Tickets:
        """What other servers may come with."""

    def status(self) -> dict[str, object]:
        """Sessions, devices and counters for `/status.json`."""


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on every address of the host, all on one port, which may be one that a server left a moment ago.

    Raises:
        OSError: the name is unknown, the address is not this machine's, or the port is taken.
    """
    listeners = await trio.open_tcp_listeners(port, host=host)
    if port or len(listeners) == 1:
        return listeners
    # Port 0 gave each address a port of its own: take the first one's for all.
    addresses = [listener.socket.getsockname() for listener in listeners]
    for listener in listeners[1:]:
        await listener.aclose()
    del listeners[1:]
    for address in addresses[1:]:
        listeners += await trio.open_tcp_listeners(addresses[0][1], host=address[0])
    return listeners


class Port:
    """All connections of one server.

    Attributes:
        counters: what happened so far.
    """

    def __init__(self, config: Config, tokens: Tokens, hub: Hub, *, tls: Certificate | None = None) -> None:
        self.counters = status.PortCounters()
        self._config = config
        self._tokens = tokens
        self._number = config.port
        self._gate = Gate(config, tokens, knows_node=hub.knows_node)
        self._hub = hub
        self._tls = tls
        self._door = Door(
            self._gate,
            self.counters,
            self._status,
            hub.tickets,
            Pages(pages.directory()),
            Admin(hub, tokens, config.token_file),
            max_delayed=config.max_connections_per_address,
        )
        self._connections: Counter[str] = Counter()
        message = config.max_message_size - MAX_HEAD
        limits = {Chunk.KIND: CHUNK_BYTES, Launches.KIND: MAX_WORDS_BYTES, ReadData.KIND: INLINE_BYTES}
        self._max_bulk = lambda kind: limits.get(kind, message)

    async def serve(
        self,
        listeners: list[trio.SocketListener],
        nursery: trio.Nursery,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled, then close the listeners; the connections are tasks of `nursery` and go on."""
        self._number = listeners[0].socket.getsockname()[1]
        await trio.serve_listeners(
            self._serve_connection,
            listeners,
            handler_nursery=nursery,
            task_status=task_status,  # type: ignore[arg-type]
        )

    def _status(self, role: Role | None, visitor: Visitor) -> dict[str, object]:
        document = status.document(self._config, self.counters, self._hub.status())
        page = page_address(self._config, self._number, scheme=visitor.scheme, asked=visitor.host)
        return status.shown_to(role, document, page=page, node_token=self._tokens.node)

    def drain(self) -> None:
        """Let no more connections become sessions; those still in their handshake are told that the server stops."""
        self._door.draining = True

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        self.counters.accepted += 1
        self.counters.connections += 1
        peer = peer_of(stream)
        try:
            address = plain_address(stream.socket.getpeername()[0])
            if self._gate.trusts(address):  # its visitors are counted one by one, once they are known
                await self._handle(stream, address, peer, by_proxy=True)
            else:
                with self._counted(address) as count:
                    if count <= self._config.max_connections_per_address:
                        await self._handle(stream, address, peer, by_proxy=False)
                    else:
                        await self._turn_away(stream, peer, count)
        except (OSError, ConnectionLost, TimeoutError, trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            _log.debug("%s left during its handshake: %s", peer, exc)
        except WsgradError as exc:
            _log.info("the connection of %s ended: %s", peer, exc)
        except Exception:
            # A bad peer never stops the server: what goes wrong with it, foreseen or not, ends here.
            _log.exception("the connection of %s ended by an error of this server", peer)
        finally:
            self.counters.connections -= 1
            await trio.aclose_forcefully(stream)

    async def _handle(self, stream: trio.SocketStream, address: str, peer: str, *, by_proxy: bool) -> None:
        seconds = self._config.handshake_seconds
        due = trio.current_time() + seconds
        late = f"no whole request came within {seconds:g} s (--handshake-seconds)"
        secured: trio.abc.Stream | None = None
        admitted: Admitted | None = None
        with trio.move_on_at(due) as limit:
            secured = await self._encrypt(stream, peer)
        if limit.cancelled_caught and self._tls is None:
            secured = stream  # it can be told so; words could not be read where TLS is not agreed on
        elif limit.cancelled_caught:
            self._note_refusal(peer, f"its TLS handshake was not over within {seconds:g} s (--handshake-seconds)")
        if secured is None:
            return
        with trio.move_on_at(due + _LAST_WORDS_SECONDS) as limit:
            admitted = await self._door.admit(secured, address, peer, due=due, late=late)
        if limit.cancelled_caught:
            _log.debug("%s was not done with its handshake after %g s", peer, seconds)
        elif admitted is not None:
            await self._serve_admitted(admitted, by_proxy=by_proxy)

    async def _serve_admitted(self, admitted: Admitted, *, by_proxy: bool) -> None:
        connection = TrioConnection.from_stream(
            admitted.stream,
            client=False,
            max_bulk=self._max_bulk,
            leftover=admitted.leftover,
            peer=admitted.peer,
        )
        with self._counted(admitted.address) if by_proxy else contextlib.nullcontext(0) as count:
            if count > self._config.max_connections_per_address:
                audit.note("refused", peer=admitted.peer, route=admitted.route, why=_too_many(self._config))
                connection.close(1008, _too_many(self._config))
                await connection.run(lambda received: None)
                return
            _log.info("%s connected at %s", admitted.peer, admitted.route)
            who = {"peer": admitted.peer, "route": admitted.route}
            audit.note("connected", **who, **({"proxy": admitted.proxy} if admitted.proxy else {}))
            since = trio.current_time()
            connection.kinds = {} if _log.isEnabledFor(logging.DEBUG) else None
            try:
                if admitted.claim is not None:
                    await self._hub.serve_peer(connection, admitted.peer, admitted.claim)
                elif admitted.route == "/v1/client":
                    await self._hub.serve_client(connection, admitted.peer)
                else:
                    await self._hub.serve_node(connection, admitted.peer)
            finally:
                seconds = round(trio.current_time() - since, 3)
                audit.note("disconnected", **who, seconds=seconds, why=connection.why_ended)
            _log.debug("%s disconnected; it sent %s", admitted.peer, _summary(connection.kinds))

    async def _encrypt(self, stream: trio.SocketStream, peer: str) -> trio.abc.Stream | None:
        first = await stream.socket.recv(1, socket.MSG_PEEK)
        if not first:
            return None
        if self._tls is None:
            if first[0] != _TLS_RECORD:
                return stream
            self._note_refusal(peer, "it speaks TLS, but this port does not: start with --tls or --tls-cert")
            return None
        if first[0] != _TLS_RECORD:
            self._note_refusal(peer, "it does not speak TLS")
            await send(stream, http.text(400, "this port speaks TLS: use wss:// or https://"))
            return None
        encrypted = trio.SSLStream(stream, self._tls.context(), server_side=True, https_compatible=True)
        await encrypted.do_handshake()
        return encrypted

    async def _turn_away(self, stream: trio.SocketStream, peer: str, count: int) -> None:
        self._note_refusal(peer, _too_many(self._config))
        # Who opens twice as many does not even get an answer: answers take time too.
        if self._tls is None and count <= 2 * self._config.max_connections_per_address:
            await send(stream, http.text(429, _too_many(self._config), ("Retry-After", "5")))

    def _note_refusal(self, peer: str, why: str) -> None:
        self.counters.refused += 1
        _log.info("refused %s: %s", peer, why)
        audit.note("refused", peer=peer, why=why)

    @contextlib.contextmanager
    def _counted(self, address: str) -> Iterator[int]:
        key = network_of(address)
        self._connections[key] += 1
        try:
            yield self._connections[key]
        finally:
            self._connections[key] -= 1
            if not self._connections[key]:
                del self._connections[key]


def _summary(kinds: dict[int, int] | None) -> str:
    names = {message.KIND: message.__name__ for message in get_args(Message)}
    return ", ".join(f"{count} {names.get(kind, kind)}" for kind, count in (kinds or {}).items()) or "nothing"


def _too_many(config: Config) -> str:
    limit = config.max_connections_per_address
    return f"one address may hold {limit} connections; raise it with --max-connections-per-address"
