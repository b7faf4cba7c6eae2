"""Issues the two ends of a copy between devices, of one server or of two, in one order for the whole process.

Every queue runs in order, so two copies in opposite directions could wait for each other for ever if their ends were
issued in different orders on different devices: one lock lets only one copy, or run of a graph, be issued at a time.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from wsgrad.client.exchange import RELAYED, Route, State
from wsgrad.transport.commands import Receive, Send
from wsgrad.transport.interrupts import raise_shield
from wsgrad.transport.url import parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wsgrad.client.base import BaseServer
    from wsgrad.client.buffer import BaseBuffer
    from wsgrad.client.queue import Queue

_issuing: Final = threading.Lock()
_owner = 0
_next_transfer = 1
_routes: Final = itertools.count(1)


def copy_between(target: BaseBuffer, source: BaseBuffer) -> None:
    """Issue a copy to another device. Never waits for either.

    Raises:
        WsgradError: a buffer is freed, or its device is lost.
    """
    with issuing():
        _copy(target, source)


@contextmanager
def issuing() -> Iterator[None]:
    """Only this thread issues on several devices meanwhile; Ctrl-C waits."""
    global _owner
    if _owner == threading.get_ident():
        raise RuntimeError("wsgrad was called from a signal handler or finalizer that interrupted a wsgrad call")
    shield = raise_shield()
    try:
        with _issuing:
            _owner = threading.get_ident()
            try:
                yield
            finally:
                _owner = 0
    finally:
        if shield is not None:
            shield.lower()


def take_transfers(count: int) -> int:
    """The first of so many ids in a row, which no other transfer has; called while `issuing`."""
    global _next_transfer
    first = _next_transfer
    if first + count >= RELAYED:
        first = 1
    _next_transfer = first + count
    return first


def _copy(target: BaseBuffer, source: BaseBuffer) -> None:
    here: BaseServer[Any] = source._device._server
    there: BaseServer[Any] = target._device._server
    # Both are looked at before either is issued: a half of a copy would hold its queue.
    queue, buffer = here._call(lambda: _end(source))
    other, place = there._call(lambda: _end(target))
    nbytes = target._nbytes
    if not nbytes:
        return
    transfer = take_transfers(1)
    line = target._device._line()

    def send(route: int) -> int:
        return queue.command(Send(transfer, buffer, 0, nbytes, route), line=line)

    def receive(route: int) -> int:
        return other.command(Receive(transfer, place, 0, nbytes, route), line=line)

    if here is there:
        here._call(lambda: (send(0), receive(0)))
        return
    route = route_between(here, there)
    sent = here._call(lambda: send(route.number))
    received = there._call(lambda: receive(route.number))
    for server in (here, there):
        server._call(partial(server._session.exchange.watch, transfer, route, (queue, sent), (other, received)))


def _end(buffer: BaseBuffer) -> tuple[Queue, int]:
    identity = buffer._check()
    return buffer._device._usable_queue(), identity


def route_between(here: BaseServer[Any], there: BaseServer[Any]) -> Route:
    """The way from one server to another, a new one if there is none; called while `issuing`."""
    route = here._session.exchange.routes.get(there._session)
    if route is None or route.state is State.CLOSED:
        new = Route(next(_routes), here._session, there._session, here._address, parse_endpoint(there.url))
        here._call(lambda: here._session.exchange.expect(new))
        there._call(lambda: there._session.exchange.offer(new))
        return new
    return route
