"""A machine that has joined the hub of a `World`, instead of a model of a node: the real `Machine`, without sockets.

Its connection is two wires with this module between them, which carries what they say, loses it, and lets a liar speak
for the hub. Not real: the sockets, the file of its membership, compilers, and what its processes compute.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from fuzz.model_server import DEVICE, Wire, World
from wsgrad.errors import Unauthorized
from wsgrad.server import joining
from wsgrad.server.joining import Machine, SentAway
from wsgrad.server.membership import Membership
from wsgrad.server.versions import OtherVersion
from wsgrad.transport import cbor
from wsgrad.transport import messages as m
from wsgrad.transport.url import parse_endpoint

if TYPE_CHECKING:
    from trio.testing import MockClock

    from wsgrad.transport.url import Endpoint

_HUB = parse_endpoint("ws://hub")
_TOKEN = "node-token"
_LONG_SECONDS = 40.0
"""Longer than any pause before another try, and than a node may be away."""


class JoinedWorld(World):
    """The hub, a real machine that has joined as `far`, and a local device; work off `machine` as any other node."""

    machine: Machine

    async def join_again(self) -> None:
        """Start the machine, for the first time or after it was sent away."""
        module: Any = joining
        module.open_to = self._dial
        self.near = Wire(client=True)
        self.near.lose()
        self.membership = Membership(Path("none"), _HUB, "far")
        self.membership.path = None
        self._start()
        await self.come_back()

    def _start(self) -> None:
        programs: Any = self.programs
        self.gone = False
        self._life = trio.CancelScope()
        self.machine = Machine(
            _HUB, _TOKEN, "far", self.membership, devices=[dict(DEVICE)], open_device=self.open_local,
            limits=replace(self.hub._limits, hello_seconds=10.0), programs=programs,
        )  # fmt: skip
        self._nursery.start_soon(self._live, self.machine, self._life)

    async def _live(self, machine: Machine, life: trio.CancelScope) -> None:
        with life, contextlib.suppress(SentAway, Unauthorized, OtherVersion):
            await machine.run(lambda: None)
        if machine is self.machine:
            self.gone = True

    async def _dial(self, hub: Endpoint, route: str, *, bearer: str, max_bulk: int) -> Wire:
        await trio.lowlevel.checkpoint()
        if bearer != _TOKEN and not self.hub.knows_node(bearer):
            raise Unauthorized("the token is wrong")
        self.node, self.near = Wire(), Wire(client=True)
        await self.serve(self.hub.serve_node, self.node)
        return self.near

    # -- what happens to it

    def pass_time(self, seconds: float) -> None:
        """So much time goes by at once."""
        clock: MockClock = trio.lowlevel.current_clock()  # type: ignore[assignment]
        clock.jump(seconds)

    def cut(self) -> None:
        """The connection breaks, with what is under way in both directions."""
        self.node.lose()
        self.near.lose()

    async def leave(self) -> None:
        """Its owner stops it; it starts again by `come_back`."""
        self._nursery.start_soon(self.machine.leave)
        await self.turn(4)
        self._life.cancel()
        await self.turn(4)

    async def come_back(self) -> None:
        """Let it join, however long that takes."""
        for _ in range(8):
            if self.gone:
                self._start()
            await self.turn(6)
            node: Any = self.hub.node(self.machine.name)
            if node is not None and node.connection is self.node and not self.near.closed:
                return
            self.pass_time(_LONG_SECONDS)
        raise AssertionError(f"the machine does not come back: {self.near.ended}, {self.near.error}")

    # -- in between

    def pump(self) -> None:
        """Carry what both ends say, and let all processes work off what they were sent."""
        for process in self.processes:
            process.pump()
        node, near = self.node, self.near
        if near._handle is None:
            return
        for head, bulk in node.take():
            self.say(near, m.parse_message(cbor.decode(head)), bulk)  # type: ignore[arg-type]
        if node.ended is not None:
            near.close(node.ended.code, node.ended.reason)
        for head, bulk in near.take():
            node.give(head, bulk)
        if near.ended is not None:
            node.close(near.ended.code, near.ended.reason)

    @property
    def queues(self) -> object:
        """What the machine has of the hub's queues."""
        return None if self.machine._stay is None else self.machine._stay._queues

    async def end(self) -> None:
        """The session is over and the machine stops: nothing of either is left."""
        self._life.cancel()
        await self.turn(10)
        assert all(process.socket is None for process in self.processes)
