"""`wsgrad-serve --join`: lends this machine's devices to a hub over a connection that goes out; nothing listens here.

What a queue of the hub does is `joined`'s; this module dials, joins, comes back after drops, and routes by number. A
drop costs the hub's sessions a pause only if the machine is back soon; then each side sends what the other lacks.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.errors import ConnectionLost, DeviceError, DeviceLost, ProtocolError, Unauthorized, WsgradError
from wsgrad.server.config import version
from wsgrad.server.dialing import open_to
from wsgrad.server.joined import JoinedQueue, Session
from wsgrad.server.versions import OtherVersion
from wsgrad.transport import cbor
from wsgrad.transport.link import Link
from wsgrad.transport.messages import (
    UNNUMBERED_KINDS,
    VERSION,
    Attach,
    Bye,
    Chunk,
    Clock,
    Close,
    Join,
    Joined,
    Pong,
    Present,
    Refused,
    Seen,
    Time,
    message_array,
    parse_message,
)
from wsgrad.transport.timing import PASSING_CODES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from wsgrad.server.limits import Limits
    from wsgrad.server.membership import Membership
    from wsgrad.server.port import Port
    from wsgrad.server.programs import Programs
    from wsgrad.transport.connection import Received
    from wsgrad.transport.messages import Message
    from wsgrad.transport.trio_driver import TrioConnection
    from wsgrad.transport.url import Endpoint

    Opener = Callable[[JoinedQueue, int, Limits], Port]
    """Opens the device of an index for a queue, held to these limits."""

ROUTE: Final = "/v1/node"
FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 30.0
_AWAY_RETRY_SECONDS: Final = 2.0
"""The longest pause while there is something to come back to."""
_STEADY_SECONDS: Final = 30.0
"""A connection that has lasted so long makes the next pause a short one."""
_MAX_QUEUES: Final = 1024
_MAX_MESSAGE: Final = 4 << 20
_MAX_KEPT: Final = 64 << 20
_LEAVE_SECONDS: Final = 1.0
_log = logging.getLogger("wsgrad.server.joining")


class SentAway(WsgradError):
    """The hub does not want this machine any more; nothing is gained by dialling again."""


class _Stay:
    """The time from one joining until the hub has given this machine up: its queues and what they say.

    It lasts over one connection after another; `run` is its life.

    Attributes:
        paused: whether work waits.
        over: whether there is nothing left to come back to.
        stay: what the hub calls it.
    """

    def __init__(self, machine: Machine, grace_seconds: float, stay: int | None) -> None:
        self.stay = stay
        self.paused = machine.membership.paused
        self.over = False
        self._machine = machine
        self._grace_seconds = grace_seconds
        self._connection: TrioConnection | None = None
        self._nursery: trio.Nursery | None = None
        self._unstarted: list[Callable[[], Awaitable[None]]] = []
        self._changed = trio.Event()
        self._link = Link()
        self._holding = 0
        self._queues: dict[int, JoinedQueue] = {}

    async def run(self) -> None:
        """Live until the machine has been away from the hub for too long, or `close`."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for function in self._unstarted:
                    nursery.start_soon(function)
                self._unstarted.clear()
                while not self.over:
                    changed, away = self._changed, self._connection is None
                    with trio.move_on_after(self._grace_seconds if away else float("inf")) as waiting:
                        await changed.wait()
                    if waiting.cancelled_caught:
                        self.close()
                nursery.cancel_scope.cancel()  # what is left cleans up behind itself, shielded and bounded
        finally:
            self.close()

    @property
    def received(self) -> int:
        """How many numbered messages of the hub have come."""
        return self._link.received

    # -- connections

    def attach(self, connection: TrioConnection, received: int) -> None:
        """Go on over this connection.

        Args:
            received: how many of our messages the hub has.

        Raises:
            ProtocolError: it claims to have what was never sent.
        """
        self._link.resume(received)
        self._connection = connection
        connection.destination = self._destination
        connection.link = self._link
        self._tell_change()
        connection.wake()

    def detach(self) -> None:
        """The connection is over."""
        if self._connection is not None:
            self._connection.link = self._connection.destination = None
            self._connection = None
            for queue in self._queues.values():
                queue.forget_announced()
            self._tell_change()

    def close(self) -> None:
        """Everything of the hub's sessions goes. Idempotent."""
        self.over = True
        self.detach()
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _start(self, function: Callable[[], Awaitable[None]]) -> None:
        if self._nursery is None:
            self._unstarted.append(function)
        else:
            self._nursery.start_soon(function)

    # -- for queues

    def push(self, head: bytes, bulk: memoryview | bytes | None = None) -> None:
        if self.over:
            return
        self._link.push(head, bulk)
        if not self._holding:
            self._wake()
        if self._link.unsent_bytes + self._link.unseen_bytes > _MAX_KEPT:
            _log.warning("more than %d bytes are kept that the hub has not seen: its sessions end here", _MAX_KEPT)
            self.close()

    def hold_back(self) -> None:
        self._holding += 1

    def let_go(self) -> None:
        self._holding -= 1
        if not self._holding and self._link:
            self._wake()

    def say(self, message: Message) -> None:
        """Send what is of no use to a later connection."""
        if self._connection is not None:
            self._connection.send(cbor.encode(message_array(message)))

    def say_good_bye(self) -> bool:
        """Leave the hub. Returns whether there is a connection to say so."""
        if self._connection is None:
            return False
        self.say(Bye())
        self._connection.close(1000, "this machine leaves")
        return True

    def _wake(self) -> None:
        if self._connection is not None:
            self._connection.wake()

    # -- from the hub

    def handle(self, message: Message, received: Received) -> None:
        """Work off a message of the hub.

        Raises:
            ProtocolError: it is not for a node, or for a queue that is not there.
        """
        if message.KIND not in UNNUMBERED_KINDS and self._link.note_received(received.nbytes):
            self.say(Seen(self._link.received))
        match message:
            case Attach():
                self._attach(message)
            case Close():
                queue = self._queues.pop(message.queue, None)
                if queue is not None:
                    queue.close()
            case Clock():
                self.say(Time(message.token, time.monotonic_ns()))
            case Present():
                self._present(message)
            case Seen():
                self._link.seen(message.count)
            case Pong():
                pass
            case _:
                number = received.head[1] if len(received.head) > 1 else None
                queue = self._queues.get(number) if type(number) is int else None
                if queue is None:
                    raise ProtocolError(f"a {type(message).__name__} for a queue that is not attached")
                queue.submit(message, received.raw, received.bulk)

    def _destination(self, head: list[object], nbytes: int) -> memoryview | None:
        if head[0] != Chunk.KIND or len(head) < 2 or type(head[1]) is not int:
            return None
        queue = self._queues.get(head[1])
        return None if queue is None else queue.destination(nbytes)

    def _attach(self, attach: Attach) -> None:
        if attach.queue in self._queues:
            raise ProtocolError(f"queue {attach.queue} is attached already")
        machine = self._machine
        queue = JoinedQueue(attach, self, Session(attach.session, self._start), machine.programs)
        self._queues[attach.queue] = queue
        try:
            if self.paused:
                raise DeviceError("this machine is paused by its owner")
            if len(self._queues) > _MAX_QUEUES:
                raise DeviceLost(f"this machine has {_MAX_QUEUES} queues open already")
            if attach.device >= len(machine.devices):
                raise DeviceLost(f"this machine has no device {attach.device}")
            queue.port = machine.open(queue, attach.device, _limits(machine.limits, attach.options))
        except WsgradError as error:
            queue.refuse(error)
            return
        client = attach.options.get("client")
        _log.info(
            "session %d of the hub (%.80s) opens %s",
            attach.session,
            client if isinstance(client, str) else "?",
            machine.devices[attach.device].get("kind"),
        )

    def _present(self, shown: Present) -> None:
        """An administrator of the hub wants the machine shown so."""
        membership = self._machine.membership
        membership.label, membership.paused = shown.label, shown.paused
        self._machine.keep()
        if self.paused != shown.paused:
            _log.warning("an administrator of the hub has %s this machine", "paused" if shown.paused else "resumed")
        self.paused = shown.paused
        for queue in self._queues.values():
            queue.pump()


class Machine:
    """This machine as a node of one hub.

    Attributes:
        devices: as they are told to the hub.
        open: opens one of them.
        name: what the hub calls this machine; empty before it has joined.
    """

    def __init__(
        self,
        hub: Endpoint,
        token: str,
        wanted: str,
        membership: Membership,
        *,
        devices: Sequence[dict[str, object]],
        open_device: Opener,
        limits: Limits,
        programs: Programs | None,
    ) -> None:
        self.devices = list(devices)
        self.open = open_device
        self.limits = limits
        self.programs = programs
        self.membership = membership
        self.name = ""
        self._hub = hub
        self._token = token
        self._wanted = wanted
        self._stay: _Stay | None = None
        self._leaving = False
        self._over = trio.Event()

    async def run(self, told: Callable[[], None]) -> None:
        """Join, and join again whenever the connection is lost, after pauses that grow.

        Args:
            told: called once it has joined for the first time.

        Raises:
            SentAway: the hub has kicked or revoked this machine.
            Unauthorized: the hub refuses at the first try: its token or certificate is another.
            OtherVersion: at the first try it says that it speaks another version of the protocol.
        """
        ended: WsgradError | None = None
        async with trio.open_nursery() as nursery:
            try:
                await self._run(told, nursery)
            except (SentAway, Unauthorized, OtherVersion) as error:
                ended = error
            self._over.set()
            nursery.cancel_scope.cancel()
        if ended is not None:  # raised here, where no nursery wraps it into a group
            raise ended

    async def _run(self, told: Callable[[], None], nursery: trio.Nursery) -> None:
        pause = FIRST_RETRY_SECONDS
        started = False

        def joined() -> None:
            nonlocal started
            if not started:
                started = True
                told()

        while True:
            since = trio.current_time()
            try:
                reason = await self._once(joined, nursery)
            except (Unauthorized, OtherVersion) as error:
                if not started:
                    raise
                reason = str(error)
            except SentAway:
                raise
            except (WsgradError, OSError) as error:
                reason = str(error)
            if self._leaving:
                return
            if trio.current_time() - since > _STEADY_SECONDS:
                pause = FIRST_RETRY_SECONDS
            if self._stay is not None and not self._stay.over:
                pause = min(pause, _AWAY_RETRY_SECONDS)
            # Many machines that lost the same hub must not all come back in the same moment.
            seconds = pause * random.uniform(0.5, 1.0)
            _log.warning("not joined to %s now (%s); the next try is in %.1f s", self._hub.url, reason, seconds)
            await trio.sleep(seconds)
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    async def leave(self) -> None:
        """Say good-bye to the hub, which else would wait for this machine, and give that a moment to arrive."""
        self._leaving = True
        if self._stay is not None and self._stay.say_good_bye():
            with trio.move_on_after(_LEAVE_SECONDS):
                await self._over.wait()

    def keep(self) -> None:
        """Remember name, secret and looks for the next start."""
        try:
            self.membership.keep()
        except OSError as exc:
            _log.warning("%s can't be written, so a restart joins under a new name: %s", exc.filename, exc.strerror)

    async def _once(self, joined: Callable[[], None], nursery: trio.Nursery) -> str:
        """One connection; returns why it ended."""
        connection = await self._dial()
        stay: _Stay | None = None

        def handle(received: Received) -> None:
            nonlocal stay
            message = parse_message(received.head)
            if isinstance(message, Refused):
                raise self._refused(message)
            if stay is not None:
                stay.handle(message, received)
                return
            if not isinstance(message, Joined):
                raise ProtocolError(f"the hub answers Join with {type(message).__name__}")
            silence.deadline = float("inf")
            self._joined(message)
            stay = self._stay_on(message, nursery)
            stay.attach(connection, message.received or 0)
            joined()
            if message.received is None and (self.membership.label or self.membership.paused):
                stay.say(Present(self.membership.label, self.membership.paused, 0))

        before = self._stay
        received = before.received if before is not None and not before.over else None
        agent, secret = f"wsgrad-serve {version()}", self.membership.secret
        stay_id = None if received is None or before is None else before.stay
        join = Join(VERSION, agent, self._wanted, secret, self.devices, received, stay_id)
        connection.send(cbor.encode(message_array(join)))
        broke = False
        reason = "it did not answer"
        try:
            with trio.move_on_after(self.limits.hello_seconds) as silence:
                closed = await connection.run(handle)
                reason = closed.reason or f"close code {closed.code}"
                broke = closed.code in PASSING_CODES
        finally:
            if stay is not None:
                stay.detach()
                if not broke:
                    stay.close()
        return reason

    def _stay_on(self, message: Joined, nursery: trio.Nursery) -> _Stay:
        """The stay that goes on, or another one where the hub knows nothing of it any more."""
        stay = self._stay
        if stay is not None and not stay.over and message.received is not None:
            _log.info("back at %s", self._hub.url)
            return stay
        if message.received is not None:
            raise ProtocolError("the hub goes on with what has ended here")
        if stay is not None:
            stay.close()
        grace = message.info.get("grace")
        stay_id = message.info.get("stay")
        stay = self._stay = _Stay(
            self,
            float(grace) if isinstance(grace, int | float) and grace > 0 else 0.0,
            stay_id if isinstance(stay_id, int) else None,
        )
        nursery.start_soon(stay.run)
        return stay

    def _joined(self, message: Joined) -> None:
        if message.version != VERSION:
            raise OtherVersion(
                f"the hub speaks version {message.version} of the protocol, wsgrad {version()} {VERSION}"
            )
        if message.name != self.name:
            _log.info("joined %s as %s with %d devices", self._hub.url, message.name, len(self.devices))
        self.name = message.name
        if self.membership.secret != message.secret:
            self.membership.secret = message.secret
            self.keep()

    def _refused(self, message: Refused) -> WsgradError:
        if message.code == "Unauthorized":
            self.membership.forget()
        if message.code in ("Kicked", "Unauthorized"):
            return SentAway(f"{self._hub.url} has sent this machine away: {message.message}")
        if message.code == ProtocolError.__name__:
            return OtherVersion(f"the hub refuses: {message.message}")
        return ConnectionLost(f"the hub refuses: {message.message}")

    async def _dial(self) -> TrioConnection:
        """Dial with the node token; where that is no longer good, with what an earlier joining has brought."""
        dial = partial(open_to, self._hub, ROUTE, max_bulk=_MAX_MESSAGE)
        try:
            return await dial(bearer=self._token)
        except Unauthorized:
            if self.membership.secret is None:
                raise
        return await dial(bearer=self.membership.secret)


def _limits(own: Limits, options: dict[str, object]) -> Limits:
    """What a session of the hub is held to: the hub's limits or this machine's, whichever is less."""
    memory, seconds = options.get("memory"), options.get("launch_seconds")
    if type(memory) is int and 0 < memory < own.max_session_memory:
        own = replace(own, max_session_memory=memory)
    if isinstance(seconds, int | float) and 0 < seconds < own.launch_seconds:
        own = replace(own, launch_seconds=float(seconds))
    return own
