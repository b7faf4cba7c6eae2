"""The server's heart: owns sessions, devices, nodes and the zygote; connections come to it opened and admitted.

A client's connection opens a session or attaches to one, a node's connection joins and offers devices. What a peer does
wrong ends its own connection and session, never anything else.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.errors import ConnectionLost, LimitExceeded, ProtocolError, WsgradError, error_code
from wsgrad.server import audit, blobs
from wsgrad.server.config import version
from wsgrad.server.dialing import PeerRules
from wsgrad.server.limits import Limits
from wsgrad.server.machine import own_devices
from wsgrad.server.nodes import Device, Registry, clean_label
from wsgrad.server.programs import Programs
from wsgrad.server.remote import RemoteNode
from wsgrad.server.session import Session
from wsgrad.server.sources import Sources
from wsgrad.server.statistics import Statistics
from wsgrad.server.tickets import Tickets
from wsgrad.server.usage import Ledger, add_totals
from wsgrad.server.versions import OtherVersion, check_version
from wsgrad.transport import cbor
from wsgrad.transport.messages import VERSION, Bye, Hello, Join, Joined, Refused, message_array, parse_message
from wsgrad.transport.timing import PASSING_CODES

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from wsgrad.server.config import Config
    from wsgrad.server.routes import Route
    from wsgrad.server.zygote import Zygote
    from wsgrad.transport.connection import Received
    from wsgrad.transport.messages import Present
    from wsgrad.transport.trio_driver import TrioConnection

_log = logging.getLogger(__name__)
_KEY_NBYTES: Final = 16
_BROKEN_CODES: Final = PASSING_CODES - {1001}
"""A page that goes away says 1001, and has lost what was in it."""
_NEWS_SECONDS: Final = 0.25
"""How often clients are told at most how devices are used and shown; a device that comes or goes is told at once."""


class Hub:
    """`async with Hub(config, zygote) as hub:` is the life of everything behind the port."""

    def __init__(self, config: Config, zygote: Zygote | None, *, cache_directory: Path | None = None) -> None:
        self.statistics = Statistics()
        self.ledger = Ledger()
        self.name = config.name
        self.tickets = Tickets()
        self.peer_rules = PeerRules(config)
        self._config = config
        self._limits = Limits.of(config)
        self._zygote = zygote
        self._cache_directory = cache_directory
        self._registry = Registry(self._devices_changed)
        self._sessions: dict[bytes, Session] = {}
        self._numbers = itertools.count(1)
        self._programs: Programs | None = None
        self._nodes: list[RemoteNode] = []
        self._nursery: trio.Nursery | None = None
        self._own_name = ""
        self._news = trio.Event()
        self._told: list[dict[str, object]] = []
        self.blobs: blobs.BlobCache
        self.sources = Sources()
        self._stack = contextlib.AsyncExitStack()
        self._draining = False

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            # Sessions end before the zygote does: it collects their processes.
            servants = await stack.enter_async_context(trio.open_nursery())
            stack.callback(servants.cancel_scope.cancel)
            servants.start_soon(self._tell_news)
            directory = Path(self._config.cache_dir or blobs.default_directory())
            self.blobs = blobs.BlobCache(servants, directory, self._config.cache_size)
            if self._zygote is not None:
                self._programs = Programs(
                    self._zygote, servants, seconds=self._limits.compile_seconds, directory=self._cache_directory
                )
                native = self._programs.native if "cpu" in self._config.devices else None
                servants.start_soon(self._zygote.run, native)
                await self._zygote.settled.wait()
                name, _ = self._registry.join(self._config.name, None)
                self._own_name = name
                infos, open_device = own_devices(self._config, self._limits, self._zygote)
                self._registry.add(name, infos, lambda queue, index: open_device(queue, index, self._limits))
            self._nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(self._nursery.cancel_scope.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._draining = True
        return await self._stack.__aexit__(kind, exc, traceback)

    # -- for the port

    async def serve_client(self, connection: TrioConnection, peer: str) -> None:
        """Serve a client's connection until it is over; its session may live on."""
        self.statistics.connections += 1
        session: Session | None = None

        def handle(received: Received) -> None:
            nonlocal session
            if session is not None:
                try:
                    session.handle(connection, received)
                except ProtocolError as error:
                    # At once: the driver still waits a moment for the peer's answer to its close.
                    session.end(error.close_code, str(error))
                    raise
                return
            came.set()
            try:
                check_version(received.head, Hello.KIND)
                hello = parse_message(received.head)
                if not isinstance(hello, Hello):
                    raise ProtocolError(f"a {type(hello).__name__} where Hello comes first")
                session = self._admit(hello, connection, scope, peer)
            except WsgradError as error:
                if isinstance(error, ProtocolError) and not isinstance(error, OtherVersion):
                    raise
                _log.info("refused %s: %s", peer, error)
                audit.note("refused", peer=peer, route="/v1/client", why=str(error))
                connection.send(cbor.encode(message_array(Refused(error_code(error), str(error)))))
                connection.close(1008, str(error))

        came = trio.Event()
        assert self._nursery is not None
        self._nursery.start_soon(self._await_first, connection, peer, "/v1/client", "Hello", came)
        with trio.CancelScope() as scope:
            try:
                closed = await connection.run(handle)
                _log.debug("%s: closed with %d %s", peer, closed.code, closed.reason)
            except ProtocolError as error:
                self.statistics.protocol_errors += 1
                _log.info("%s broke the protocol: %s", peer, error)
                if session is not None and session.connection is connection:
                    session.end(error.close_code, str(error))
            except Exception:
                _log.exception("%s: its connection ended by an error of the server", peer)
                if session is not None and session.connection is connection:
                    session.end(1011, "internal error")
            finally:
                came.set()
        if session is not None:
            session.detach(connection)

    async def serve_node(self, connection: TrioConnection, peer: str) -> None:
        """Serve a node's connection until it is over; if it broke, the node may come back for a while."""
        self.statistics.connections += 1
        node: RemoteNode | None = None
        reason = "its connection ended"
        broke = False

        def handle(received: Received) -> None:
            nonlocal node
            if node is None:
                came.set()
                try:
                    check_version(received.head, Join.KIND)
                except OtherVersion as error:
                    _log.info("refused %s: %s", peer, error)
                    audit.note("refused", peer=peer, route="/v1/node", why=str(error))
                    connection.send(cbor.encode(message_array(Refused(error_code(error), str(error)))))
                    connection.close(1008, str(error))
                    return
                join = parse_message(received.head)
                if not isinstance(join, Join):
                    raise ProtocolError(f"a {type(join).__name__} where Join comes first")
                node = self._join(join, connection, peer)
            elif received.head[0] == Bye.KIND:
                node.left = True
                connection.close(1000, "good-bye")
            else:
                node.handle(connection, received)

        came = trio.Event()
        assert self._nursery is not None
        self._nursery.start_soon(self._await_first, connection, peer, "/v1/node", "Join", came)
        try:
            closed = await connection.run(handle)
            reason = closed.reason or f"close code {closed.code}"
            broke = closed.code in _BROKEN_CODES
        except ProtocolError as error:
            self.statistics.protocol_errors += 1
            reason = str(error)
            _log.warning("node %s broke the protocol: %s", peer, error)
        except Exception:
            reason = "an error of the server"
            _log.exception("node %s: its connection ended by an error of the server", peer)
        finally:
            came.set()
            if node is None or node.connection is not connection:
                pass
            elif broke and not node.left and self._limits.node_grace and self._nursery is not None:
                node.detach(connection)
                self._nursery.start_soon(self._await_node, node, reason, peer)
            else:
                self._leaves(node, reason, peer)

    async def _await_node(self, node: RemoteNode, reason: str, peer: str) -> None:
        _log.info("node %s is away: %s", node.name, reason)
        audit.note("node away", node=node.name, peer=peer, why=reason)
        if not await node.returned():
            self._leaves(node, reason, peer)

    def _leaves(self, node: RemoteNode, reason: str, peer: str) -> None:
        _log.info("node %s leaves: %s", node.name, reason)
        audit.note("node left", node=node.name, peer=peer, why=reason)
        self._nodes.remove(node)
        if all(other.name != node.name for other in self._nodes):
            self._registry.leave(node.name)
        node.leave(reason)
        self._registry.remove(node.devices)

    async def serve_peer(self, connection: TrioConnection, peer: str, route: Route) -> None:
        """Serve another server's connection, for the session whose ticket it had."""
        self.statistics.connections += 1
        await route.session.routes.serve(route, connection, where=peer)

    @property
    def devices(self) -> list[dict[str, object]]:
        """The devices there are now, as clients are told, with how much each is used."""
        loads: dict[str, Counter[str]] = {}
        for session in self._sessions.values():
            for device, queues in Counter(session.devices_in_use).items():
                loads.setdefault(device, Counter()).update(queues=queues, sessions=1)
        return self._registry.describe(loads)

    def status(self) -> dict[str, object]:
        """Sessions, devices and counters; no key and no token."""
        sessions = [session.describe() for session in self._sessions.values()]
        usages = self.ledger.totals(session.usages for session in self._sessions.values())
        devices, nodes = self.devices, [node.describe() for node in self._nodes]
        return {
            "totals": add_totals(devices, nodes, sessions, usages),
            "devices": devices,
            "sessions": sessions,
            "nodes": nodes,
            "errors": self.ledger.errors,
            "processes": 0 if self._zygote is None else self._zygote.processes,
            "compiled": 0 if self._programs is None else self._programs.compiled,
            "compiled_from_cache": 0 if self._programs is None else self._programs.cached,
            "cache": {"kept": self.blobs.kept, "damaged": self.blobs.damaged},
            "statistics": self.statistics.describe(),
        }

    def knows_node(self, secret: str) -> bool:
        """Whether a node was given this secret when it joined."""
        return self._registry.name_of(secret) is not None

    def node(self, name: str) -> RemoteNode | None:
        """The node of that name that dialled in, if it is here."""
        return next((node for node in self._nodes if node.name == name), None)

    def forget_node(self, name: str) -> bool:
        """End the secret of a node that dialled in, now or before; whether there was one."""
        return name != self._own_name and self._registry.forget(name)

    async def drain(self, seconds: float) -> None:
        """Open no more sessions, and give running commands so much time; then end every session."""
        self._draining = True
        with trio.move_on_after(seconds):
            # Once in a server's life; idleness has too many causes to tell of each.
            while any(not session.idle for session in self._sessions.values() if session.connection is not None):  # noqa: ASYNC110
                await trio.sleep(0.01)
        sessions = list(self._sessions.values())
        for session in sessions:
            session.end(1001, "the server is stopping")
        with trio.move_on_after(seconds):
            for session in sessions:
                await session.freed.wait()

    # -- for sessions

    def device(self, device: str) -> Device | None:
        """The device of that id."""
        return self._registry.get(device)

    @property
    def programs(self) -> Programs:
        """Compiles for local devices, which alone ask for it."""
        assert self._programs is not None
        return self._programs

    def welcome(self) -> dict[str, object]:
        """What a client is told when it arrives."""
        return {
            "server": f"wsgrad {version()}",
            "name": self._config.name,
            "devices": self.devices,
            "limits": self._limits.describe(),
            "cache": self.blobs.available,
        }

    def forget(self, session: Session, reason: str) -> None:
        """A session has ended."""
        if self._sessions.pop(session.key, None) is not None:
            self.ledger.absorb(session.usages)
            seconds = round(trio.current_time() - session.opened_at, 3)
            audit.note("session ended", session=session.number, seconds=seconds, why=reason)
        self.loads_changed()

    def loads_changed(self) -> None:
        """A device is used more or less, or is shown otherwise: clients are told soon."""
        self._news.set()

    # -- inside

    async def _await_first(
        self, connection: TrioConnection, peer: str, route: str, first: str, came: trio.Event
    ) -> None:
        """Turn a peer away that says nothing; `came` is also set when its connection is over."""
        seconds = self._limits.hello_seconds
        with trio.move_on_after(seconds):
            await came.wait()
            return
        why = f"no {first} came within {seconds:g} s (--handshake-seconds)"
        _log.info("refused %s: %s", peer, why)
        audit.note("refused", peer=peer, route=route, why=why)
        connection.close(1008, why)

    def _admit(self, hello: Hello, connection: TrioConnection, scope: trio.CancelScope, peer: str) -> Session:
        if hello.key is not None:
            session = self._sessions.get(hello.key)
            if session is None:
                raise ConnectionLost("this server has no such session: it has ended, or the server was started anew")
            self.statistics.resumes += 1
            _log.info("%s goes on with session %d", peer, session.number)
            audit.note("session resumed", session=session.number, peer=peer, agent=clean_label(hello.agent))
        else:
            if self._draining:
                raise ConnectionLost("the server is stopping")
            if len(self._sessions) >= self._limits.max_sessions:
                raise LimitExceeded(
                    f"the server has {self._limits.max_sessions} sessions; raise it with --max-sessions"
                )
            session = Session(
                self,
                secrets.token_bytes(_KEY_NBYTES),
                next(self._numbers),
                self._limits,
                agent=clean_label(hello.agent),
            )
            self._sessions[session.key] = session
            assert self._nursery is not None
            self._nursery.start_soon(session.run)
            self.statistics.sessions += 1
            _log.info("%s opens session %d (%.80s)", peer, session.number, hello.agent)
            audit.note("session opened", session=session.number, peer=peer, agent=session.agent)
        try:
            session.attach(connection, hello.received, scope)
        except ProtocolError as error:
            session.end(error.close_code, str(error))
            raise
        return session

    def _join(self, join: Join, connection: TrioConnection, peer: str) -> RemoteNode:
        node = self._back(join, connection)
        if node is not None:
            _log.info("node %s is back from %s", node.name, peer)
            audit.note("node back", node=node.name, peer=peer)
            return node
        name, secret = self._registry.join(join.name, join.secret)
        before = [node for node in self._nodes if node.name == name]
        node = RemoteNode(name, self._limits, self._presented, agent=clean_label(join.agent))
        try:
            node.joined(self._registry.add(name, join.devices, node.open))
        except ProtocolError:
            if secret != join.secret:
                self._registry.forget(name)
            elif not before:
                self._registry.leave(name)
            raise
        for old in before:
            old.close("it has joined again")
        node.attach(connection, None)
        self._welcome(node, connection, secret, None)
        self._nodes.append(node)
        _log.info("%s joins as node %s with %d devices (%.80s)", peer, name, len(node.devices), join.agent)
        audit.note("node joined", node=name, peer=peer, devices=len(node.devices), agent=node.agent)
        return node

    def _back(self, join: Join, connection: TrioConnection) -> RemoteNode | None:
        """The node that comes back with this, if it is still known here what it had."""
        if join.received is None or join.secret is None:
            return None
        node = self.node(self._registry.name_of(join.secret) or "")
        if node is None or node.left or node.stay != join.stay:
            return None
        try:
            received = node.attach(connection, join.received)
        except ProtocolError as error:
            _log.warning("node %s can not go on where it was: %s", node.name, error)
            return None
        self.statistics.node_resumes += 1
        self._welcome(node, connection, join.secret, received)
        return node

    def _welcome(self, node: RemoteNode, connection: TrioConnection, secret: str, received: int | None) -> None:
        info: dict[str, object] = {
            "launch_seconds": self._limits.launch_seconds,
            "grace": self._limits.node_grace,
            "stay": node.stay,
        }
        connection.send(cbor.encode(message_array(Joined(VERSION, node.name, secret, info, received))))
        node.start_link()

    def _presented(self, node: RemoteNode, shown: Present) -> None:
        self._registry.present(node.devices, shown, node.shown)
        self.loads_changed()

    def _devices_changed(self) -> None:
        self._told = self.devices
        for session in list(self._sessions.values()):
            try:
                session.tell_devices(self._told)
            except Exception:
                _log.exception("session %d ended by an error of the server", session.number)
                session.end(1011, "internal error")

    async def _tell_news(self) -> None:
        """Tell clients what changes often, but not often: whoever makes it change must not flood them."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            if self.devices != self._told:
                self._devices_changed()
            await trio.sleep(_NEWS_SECONDS)
