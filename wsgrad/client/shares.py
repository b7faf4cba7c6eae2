"""What each server has of a graph, and the transfers of a graph that go from one server to another; issues no run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from wsgrad.client.exchange import Route, State
from wsgrad.client.transfers import route_between, take_transfers
from wsgrad.graph.part import SendOp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wsgrad.client.base import BaseDevice, BaseServer
    from wsgrad.client.queue import Queue
    from wsgrad.graph.items import Device
    from wsgrad.graph.plan import Plan


@dataclass(slots=True)
class Share:
    """What one server has of a graph.

    Attributes:
        number: the server's in the graph.
        queues: those that it runs on, each with its device.
        last: which command the last run is on each of them.
    """

    number: int
    server: BaseServer[Any]
    queues: list[tuple[BaseDevice[Any, Any], Queue]]
    last: dict[Queue, int] = field(default_factory=dict)

    def by_index(self, places: Mapping[BaseDevice[Any, Any], Device]) -> dict[int, tuple[Queue, int]]:
        """The queues and their commands of the last run, by the indices of their devices in the graph."""
        return {places[device].index: (queue, self.last[queue]) for device, queue in self.queues}


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A sending step whose bytes go to another server; both ends are a server and a device's index there."""

    step: int
    source: tuple[int, int]
    target: tuple[int, int]


class Crossings:
    """The transfers of a graph between servers, and the ways that they take. Made while `issuing`."""

    def __init__(self, plan: Plan, servers: Sequence[BaseServer[Any]]) -> None:
        self._servers = servers
        self._crossings: list[_Crossing] = []
        self._routes: dict[tuple[int, int], Route] = {}
        self._count = len(plan.schedule.steps) + 1
        for number, part in plan.parts.items():
            for device in part.devices:
                for step in device.by_number:
                    op = step.op
                    if isinstance(op, SendOp) and op.server != number:
                        ends = (number, device.index), (op.server, op.device)
                        self._crossings.append(_Crossing(step.number, *ends))
        for here, there in sorted({(crossing.source[0], crossing.target[0]) for crossing in self._crossings}):
            self._routes[here, there] = route_between(servers[here], servers[there])

    @property
    def broken(self) -> bool:
        """Whether a link has broken, so that the graph must be recorded with another one."""
        return any(route.state is State.CLOSED for route in self._routes.values())

    def rows(self, server: int) -> list[list[int]]:
        """`[server, the way there, the way from there]` for each server that this one exchanges bytes with."""
        ways = {
            other: [
                self._routes[pair].number if pair in self._routes else 0 for pair in ((server, other), (other, server))
            ]
            for other in range(len(self._servers))
            if other != server
        }
        return [[other, *numbers] for other, numbers in ways.items() if any(numbers)]

    def take_transfers(self) -> int:
        """What the numbers of the sending steps are added to for the ids of a run's transfers."""
        return take_transfers(self._count) if self._crossings else 0

    def watch(self, transfer: int, ends: Mapping[int, Mapping[int, tuple[Queue, int]]]) -> None:
        """A run was issued: let its transfers through, and each end know of the other's failure.

        Args:
            transfer: what `take_transfers` gave.
            ends: the queues and the run's commands there, by server and device.
        """
        for crossing in self._crossings:
            (source, device), (target, other) = crossing.source, crossing.target
            send, receive = ends[source][device], ends[target][other]
            route = self._routes[source, target]
            for server in (self._servers[source], self._servers[target]):
                exchange = server._session.exchange
                server._call(partial(exchange.watch, transfer + crossing.step, route, send, receive))
