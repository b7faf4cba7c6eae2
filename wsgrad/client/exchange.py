"""What a session does for other sessions of this client: opens ways between servers, carries what has no link.

Sans-IO. `post` may be called from any thread; everything else is called with the driver's lock, and a session reaches
another one only by posting to it.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from wsgrad.errors import ConnectionLost
from wsgrad.transport.cbor import encode
from wsgrad.transport.messages import Abort, Dial, Failed, Peer, message_array

if TYPE_CHECKING:
    from wsgrad.client.core import Session
    from wsgrad.client.queue import Queue
    from wsgrad.client.waits import Failure
    from wsgrad.transport.messages import Dialled, Ticket
    from wsgrad.transport.url import Endpoint

RELAYED: Final = 1 << 31
"""In place of a queue, this plus a transfer's id stands for a transfer that goes through this client."""


class State(enum.Enum):
    OPENING = "opening"
    OPEN = "open"
    RELAYED = "relayed"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Route:
    """The way from one session's server to another's.

    Attributes:
        origin: the source's address.
        endpoint: the target's address.
        issued: transfers that were issued before it was known which way they go.
        broken: in the words of each server at its ends, how the link broke.
    """

    number: int
    source: Session
    target: Session
    origin: str
    endpoint: Endpoint
    state: State = State.OPENING
    issued: int = 0
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """A transfer between two sessions until both of its ends are done."""

    transfer: int
    route: Route
    ends: tuple[tuple[Queue, int], tuple[Queue, int]]

    @property
    def done(self) -> bool:
        return all(queue.gone or queue.over or queue.pending.acknowledged >= number for queue, number in self.ends)


class Exchange:
    """Owned by a session.

    Attributes:
        routes: ways from here, by the session that they lead to.
        reasons: why transfers to a server go through this client, by its address.
    """

    def __init__(self, session: Session) -> None:
        self.routes: dict[Session, Route] = {}
        self.reasons: dict[str, str] = {}
        self._session = session
        self._posts: deque[tuple[bytes, memoryview | None]] = deque()
        self._numbered: dict[int, Route] = {}
        self._ways: list[Route] = []
        self._opening = 0
        self._watched: dict[int, _Watched] = {}
        self._under_way: dict[Route, int] = {}

    @property
    def posted(self) -> bool:
        """Whether other sessions have something for this server."""
        return bool(self._posts)

    @property
    def attentive(self) -> bool:
        """Whether another session needs what this server says, although no caller may be waiting for it."""
        if self._opening:
            return True
        # Only the oldest is looked at: this is asked often, and there may be thousands.
        while self._watched:
            transfer, watched = next(iter(self._watched.items()))
            if not watched.done:
                break
            self._forget(transfer, watched)
        return any(route.state is not State.OPEN for route in self._under_way)

    def post(self, head: bytes, bulk: memoryview | None = None) -> None:
        """Another session has something for this server. From any thread."""
        if not self._session.over:
            self._posts.append((head, bulk))
            self._session.wake()

    def flush(self) -> None:
        """Give the link what was posted."""
        while self._posts:
            self._session.link.push(*self._posts.popleft())

    # -- ways

    def offer(self, route: Route) -> None:
        """This server is the target of a new way: it makes a ticket."""
        self._ways.append(route)
        self._numbered[route.number] = route
        self._opening += 1
        self._session.link.push(encode(message_array(Peer(route.number))))

    def expect(self, route: Route) -> None:
        """This server is the source of a new way: it dials once the target's ticket is there."""
        self._ways.append(route)
        self.routes[route.target] = route
        self._numbered[route.number] = route
        self._opening += 1

    def on_ticket(self, message: Ticket) -> None:
        """The target's ticket: the source can dial."""
        route = self._numbered.get(message.route)
        if route is not None:
            self._opening -= 1
            endpoint = route.endpoint
            dial = Dial(route.number, endpoint.url, message.ticket, endpoint.sha256)
            route.source.exchange.post(encode(message_array(dial)))

    def on_dialled(self, message: Dialled) -> None:
        """A way is open, or goes through this client, or is gone."""
        route = self._numbered.get(message.route)
        if route is None:
            return
        if route.state is State.OPENING and self._session is route.source:
            self._opening -= 1
            if message.code is None:
                route.state = State.OPEN
            else:
                route.state = State.RELAYED
                self.reasons[route.endpoint.url] = message.message
                self._session.statistics["relayed"] += route.issued
        else:
            route.state = State.CLOSED
            del self._numbered[message.route]
            route.broken += (message.message,)

    def named(self, failure: Failure) -> Failure:
        """An error by a link that broke, with the addresses of both servers: each knows only its own end."""
        if failure.code != ConnectionLost.__name__:
            return failure
        # It may have come by way of the other server, in its words.
        route = next((route for route in reversed(self._ways) if failure.message in route.broken), None)
        if route is None:
            return failure
        return replace(
            failure, message=f"{failure.message} (between {route.origin} and {route.endpoint.url}, for this client)"
        )

    # -- transfers

    def watch(self, transfer: int, route: Route, send: tuple[Queue, int], receive: tuple[Queue, int]) -> None:
        """A transfer was issued between this session and another."""
        watched = _Watched(transfer, route, (send, receive))
        if self._session.ended is not None:
            self._tell(watched, self._session.ended)
            return
        self._watched[transfer] = watched
        self._under_way[route] = self._under_way.get(route, 0) + 1
        if self._session is route.source:
            if route.state is State.OPENING:
                route.issued += 1
            elif route.state is State.RELAYED:
                self._session.statistics["relayed"] += 1

    def carry(self, number: int, raw: bytes, bulk: memoryview | None) -> None:
        """The server says something of a transfer that its other end has to hear."""
        watched = self._watched.get(number & ~RELAYED)
        if watched is not None:
            route = watched.route
            other = route.target if route.source is self._session else route.source
            other.exchange.post(raw, bulk)

    def end(self, failure: Failure) -> None:
        """The session is over: the other ends of its transfers are told, where no link would tell them."""
        for watched in self._watched.values():
            self._tell(watched, failure)
        for route in self._numbered.values():
            route.state = State.CLOSED
        self._opening = 0
        self._watched.clear()
        self._under_way.clear()
        self._posts.clear()

    def _forget(self, transfer: int, watched: _Watched) -> None:
        del self._watched[transfer]
        self._under_way[watched.route] -= 1
        if not self._under_way[watched.route]:
            del self._under_way[watched.route]

    def _tell(self, watched: _Watched, failure: Failure) -> None:
        number, route = RELAYED | watched.transfer, watched.route
        if self._session is route.source:
            route.target.exchange.post(encode(message_array(Failed(number, 0, failure.code, failure.message, {}))))
        else:
            route.source.exchange.post(encode(message_array(Abort(number, route.number))))
