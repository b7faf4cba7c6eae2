"""A session's ways to other servers, over which it sends and receives transfers: a link, or the client itself.

The source dials the target. While that is under way its chunks wait where they are; if it fails they go through the
client, with the same credit. Over either way travel chunks, and back their credit; `Ack` tells the end with the number
of bytes, `Failed` that the source failed, `Abort` that the target did. In place of a queue stands the transfer's id.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from wsgrad.errors import ConnectionLost, ProtocolError, WsgradError, error_code
from wsgrad.server.dialing import dial
from wsgrad.server.events import Failure
from wsgrad.transport import cbor
from wsgrad.transport.link import Link
from wsgrad.transport.messages import (
    SLOTS,
    Abort,
    Ack,
    Chunk,
    Credit,
    Dialled,
    Failed,
    Ticket,
    message_array,
    parse_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.session import Session
    from wsgrad.server.transfers import Flow, FlowChunk
    from wsgrad.transport.connection import Received
    from wsgrad.transport.messages import Dial, Message
    from wsgrad.transport.trio_driver import TrioConnection

RELAYED: Final = 1 << 31
"""On a client's connection, what concerns a transfer to another server names it by this plus its id as its queue."""
MAX_ROUTES: Final = 64
_MAX_CLOSED: Final = 4096
_log = logging.getLogger(__name__)

Relayed: TypeAlias = Chunk | Credit | Ack | Failed | Abort


class State(enum.Enum):
    WAITING = "waiting"
    OPEN = "open"
    RELAYED = "relayed"
    CLOSED = "closed"


class Route:
    """One way, in one direction.

    Attributes:
        failure: why it is closed.
    """

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        self.state = State.WAITING
        self.failure: Failure | None = None
        self.connection: TrioConnection | None = None
        self.link = Link()

    def say(self, message: Message, transfer: int, bulk: memoryview | None = None, *, client: bool = False) -> None:
        """Say something of a transfer over the link, or through the client where there is none."""
        if self.connection is not None and not client:
            self.link.push(cbor.encode(message_array(message)), bulk, numbered=False)
            self.connection.wake()
        else:
            array = message_array(message)
            array[1] = RELAYED | transfer
            self.session.push(cbor.encode(array), bulk)


class Outlet:
    """Where a transfer of this server leaves; a flow's target."""

    def __init__(self, route: Route, flow: Flow, nbytes: int, forget: Callable[[], None]) -> None:
        self.route = route
        self.flow = flow
        self._nbytes = nbytes
        self._forget = forget
        self._offset = 0
        self._away: deque[Callable[[], None]] = deque()
        self._over = False

    @property
    def has_room(self) -> bool:
        return self.route.state in (State.OPEN, State.RELAYED) and len(self._away) < SLOTS

    def put(self, chunk: FlowChunk) -> None:
        # The chunk stays in its place until the other server has it: nothing is copied here.
        self._away.append(chunk.taken)
        number = self.flow.number
        self.route.say(Chunk(number, self.route.number, self._offset), number, chunk.bulk)
        self._offset += len(chunk.bulk)

    def finished(self) -> None:
        number = self.flow.number
        self.route.say(Ack(number, self._nbytes), number)
        self._over = True
        self._close()

    def failed(self, failure: Failure) -> None:
        number = self.flow.number
        self.route.say(Failed(number, 0, failure.code, failure.message, failure.details), number)
        self.release()

    def credit(self, slots: int) -> None:
        """The other server has worked off chunks.

        Raises:
            ProtocolError: more than it was given.
        """
        if not 1 <= slots <= len(self._away):
            raise ProtocolError(f"credit for {slots} chunks of transfer {self.flow.number}, of {len(self._away)}")
        for _ in range(slots):
            self._away.popleft()()
        self.flow.pump()
        self._close()

    def release(self) -> None:
        """Nothing more will be heard of it: its chunks are given back."""
        self._over = True
        away, self._away = self._away, deque()
        for taken in away:
            taken()
        self._close()

    def _close(self) -> None:
        if self._over and not self._away:
            self._forget()


class Inlet:
    """Where a transfer from another server arrives; a flow's source."""

    def __init__(self, route: Route, flow: Flow) -> None:
        self.route = route
        self.flow = flow
        self.client = False
        self._came = 0
        self._open = 0
        flow.stop = self._stop

    def chunk(self, offset: int, bulk: memoryview, *, client: bool) -> None:
        """The next chunk.

        Raises:
            ProtocolError: it is not the next one, or there is no credit for it.
        """
        if offset != self._came or not bulk or self._open >= SLOTS:
            raise ProtocolError(
                f"{len(bulk)} bytes at {offset} of transfer {self.flow.number}, which is at {self._came}"
            )
        self.client = client
        self._came += len(bulk)
        self._open += 1
        self.flow.offer(bulk, self._taken, owned=True)

    def _taken(self) -> None:
        self._open -= 1
        number = self.flow.number
        self.route.say(Credit(number, 1), number, client=self.client)

    def _stop(self, failure: Failure) -> None:
        number = self.flow.number
        self.route.say(Abort(number, self.route.number), number, client=self.client)


class Routes:
    """All ways of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._routes: dict[int, Route] = {}
        self._outlets: dict[int, Outlet] = {}
        self._inlets: dict[int, Inlet] = {}

    # -- opening

    def offer(self, number: int) -> None:
        """Another server will dial in; the client gets the ticket for it."""
        route = self._get(number)
        if route.state is not State.WAITING:
            raise ProtocolError(f"route {number} is open already")
        ticket = self._session.tickets.make(route)
        self._session.push(cbor.encode(message_array(Ticket(number, ticket))))

    def dial(self, message: Dial) -> None:
        """Dial another server, in a task of the session."""
        route = self._get(message.route)
        if route.state is not State.WAITING or route.connection is not None:
            raise ProtocolError(f"route {message.route} is open already")
        self._session.start(partial(self._dial, route, message))

    async def _dial(self, route: Route, message: Dial) -> None:
        try:
            connection = await dial(self._session.peer_rules, message.url, message.ticket, message.sha256)
        except (WsgradError, ValueError) as error:
            _log.info("session %d has no link to %.200s: %s", self._session.number, message.url, error)
            route.state = State.RELAYED
            self._tell(route, error_code(error), str(error))
            self._pump(route)
            return
        await self.serve(route, connection, where=connection.peer, told=True)

    async def serve(self, route: Route, connection: TrioConnection, *, where: str, told: bool = False) -> None:
        """Run a link to its end."""
        if route.state is not State.WAITING or self._session.ended.is_set():
            connection.close(1008, "its session is over")
            await connection.run(lambda received: None)
            return
        route.state, route.connection = State.OPEN, connection
        connection.link = route.link
        if told:
            self._tell(route, None, "")
        self._pump(route)
        reason = "it was closed"
        try:
            closed = await connection.run(partial(self._received, route))
            reason = closed.reason or f"close code {closed.code}"
        except ProtocolError as error:
            reason = str(error)
        finally:
            self._broken(route, f"the link between {self._session.server_name!r} and {where} broke: {reason}")

    def close(self) -> None:
        """The session is over."""
        for route in self._routes.values():
            self._session.tickets.forget(route)
            connection, route.connection = route.connection, None
            route.state = State.CLOSED
            if connection is not None:
                connection.link = None
                connection.close(1001, "its session has ended")

    # -- transfers

    def outgoing(self, number: int, flow: Flow, nbytes: int) -> None:
        """A queue sends over this way."""
        route = self._get(number)
        flow.receive(nbytes)
        if route.failure is not None:
            flow.target_failed(route.failure)
            return
        if flow.number in self._outlets:
            raise ProtocolError(f"transfer {flow.number} is sent twice")
        outlet = self._outlets[flow.number] = Outlet(route, flow, nbytes, partial(self._forget, flow.number))
        flow.start(outlet)

    def incoming(self, number: int, flow: Flow) -> None:
        """A queue receives over this way."""
        route = self._get(number)
        if route.failure is not None:
            flow.source_failed(route.failure)
        elif not flow.source_over:
            self._inlet(route, flow.number)

    def relayed(self, message: Relayed, bulk: memoryview | None) -> None:
        """The client brings something of a transfer.

        Raises:
            ProtocolError: it can't be.
        """
        transfer = message.queue & ~RELAYED
        if isinstance(message, Chunk):
            route = self._get(message.transfer)
            self._session.statistics.relayed += 0 if bulk is None else len(bulk)
        else:
            end = self._inlets.get(transfer) or self._outlets.get(transfer)
            if end is None:
                return
            route = end.route
        self._take(route, message, transfer, bulk, client=True)

    def _received(self, route: Route, received: Received) -> None:
        message = parse_message(received.head)
        if not isinstance(message, Chunk | Credit | Ack | Failed | Abort):
            raise ProtocolError(f"a {type(message).__name__}, which no server sends to another")
        self._take(route, message, message.queue, received.bulk, client=False)

    def _take(self, route: Route, message: Relayed, transfer: int, bulk: memoryview | None, *, client: bool) -> None:
        outlet, inlet = self._outlets.get(transfer), self._inlets.get(transfer)
        if outlet is not None and outlet.route is not route:
            outlet = None
        match message:
            case Chunk():
                if inlet is None:
                    if route.failure is not None:
                        return
                    inlet = self._inlet(route, transfer)
                inlet.chunk(message.offset, bulk or memoryview(b""), client=client)
            case Credit():
                if outlet is not None:
                    outlet.credit(message.slots)
            case Abort():
                if outlet is not None:
                    failure = Failure("DeviceError", "the transfer was given up by its target")
                    outlet.flow.target_failed(failure)
                    outlet.release()
                    route.say(Failed(transfer, 0, failure.code, failure.message, {}), transfer, client=client)
            case Ack():
                inlet = inlet or self._inlet(route, transfer)
                self._inlets.pop(transfer, None)
                inlet.flow.source_done(message.number)
            case Failed():
                inlet = inlet or self._inlet(route, transfer)
                self._inlets.pop(transfer, None)
                inlet.flow.source_failed(Failure(message.code, message.message, message.details))

    def _forget(self, transfer: int) -> None:
        self._outlets.pop(transfer, None)

    def _inlet(self, route: Route, transfer: int) -> Inlet:
        inlet = self._inlets.get(transfer)
        if inlet is None:
            flow = self._session.transfers.flow(route.number, transfer)
            inlet = self._inlets[transfer] = Inlet(route, flow)
        return inlet

    # -- ends

    def _broken(self, route: Route, reason: str) -> None:
        route.connection = None
        if route.state is State.CLOSED:
            return
        route.state = State.CLOSED
        error = ConnectionLost(reason)
        route.failure = Failure(error_code(error), reason)
        _log.info("session %d: %s", self._session.number, reason)
        self._tell(route, error_code(error), reason)
        for transfer, inlet in list(self._inlets.items()):
            if inlet.route is route and not inlet.client:
                del self._inlets[transfer]
                inlet.flow.source_failed(route.failure)
        for outlet in list(self._outlets.values()):
            if outlet.route is route:
                outlet.flow.target_failed(route.failure)
                outlet.release()

    def _pump(self, route: Route) -> None:
        for outlet in list(self._outlets.values()):
            if outlet.route is route:
                outlet.flow.pump()

    def _tell(self, route: Route, code: str | None, text: str) -> None:
        self._session.push(cbor.encode(message_array(Dialled(route.number, code, text))))

    def _get(self, number: int) -> Route:
        route = self._routes.get(number)
        if route is None:
            live = sum(route.state is not State.CLOSED for route in self._routes.values())
            if not number or live >= MAX_ROUTES or len(self._routes) >= _MAX_CLOSED:
                raise ProtocolError(f"route {number}; a session may have {MAX_ROUTES} routes", close_code=1008)
            route = self._routes[number] = Route(self._session, number)
        return route
