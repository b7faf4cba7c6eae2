"""`wsgrad-serve --join`: lends this machine's devices to a hub over one connection that goes out; nothing listens here.

What a queue of the hub does is `joined`'s; this module dials, joins, comes back after drops, and routes by number.
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
    VERSION,
    Attach,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
_STEADY_SECONDS: Final = 30.0
"""A connection that has lasted so long makes the next pause a short one."""
_MAX_QUEUES: Final = 1024
_MAX_MESSAGE: Final = 4 << 20
_log = logging.getLogger("wsgrad.server.joining")


class SentAway(WsgradError):
    """The hub does not want this machine any more; nothing is gained by dialling again."""


class _Stay:
    """One connection to the hub, once it has joined: its queues and what they say."""

    def __init__(self, machine: Machine, connection: TrioConnection, nursery: trio.Nursery) -> None:
        self.paused = machine.membership.paused
        self._machine = machine
        self._connection = connection
        self._nursery = nursery
        self._link = Link()
        self._holding = 0
        self._queues: dict[int, JoinedQueue] = {}
        connection.link = self._link
        connection.destination = self._destination

    # -- for queues

    def push(self, head: bytes, bulk: memoryview | bytes | None = None) -> None:
        self._link.push(head, bulk, numbered=False)
        if not self._holding:
            self._connection.wake()

    def hold_back(self) -> None:
        self._holding += 1

    def let_go(self) -> None:
        self._holding -= 1
        if not self._holding and self._link:
            self._connection.wake()

    # -- from the hub

    def handle(self, message: Message, received: Received) -> None:
        """Work off a message of the hub.

        Raises:
            ProtocolError: it is not for a node, or for a queue that is not there.
        """
        match message:
            case Attach():
                self._attach(message)
            case Close():
                queue = self._queues.pop(message.queue, None)
                if queue is not None:
                    queue.close()
            case Clock():
                self.push(cbor.encode(message_array(Time(message.token, time.monotonic_ns()))))
            case Present():
                self._present(message)
            case Seen() | Pong():
                pass
            case _:
                number = received.head[1] if len(received.head) > 1 else None
                queue = self._queues.get(number) if type(number) is int else None
                if queue is None:
                    raise ProtocolError(f"a {type(message).__name__} for a queue that is not attached")
                queue.submit(message, received.raw, received.bulk)

    def close(self) -> None:
        """The connection is over: everything of the hub's sessions goes."""
        self._connection.link = None
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()

    def _destination(self, head: list[object], nbytes: int) -> memoryview | None:
        if head[0] != Chunk.KIND or len(head) < 2 or type(head[1]) is not int:
            return None
        queue = self._queues.get(head[1])
        return None if queue is None else queue.destination(nbytes)

    def _attach(self, attach: Attach) -> None:
        if attach.queue in self._queues:
            raise ProtocolError(f"queue {attach.queue} is attached already")
        machine = self._machine
        queue = JoinedQueue(attach, self, Session(attach.session, self._nursery.start_soon), machine.programs)
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

    async def run(self, told: Callable[[], None]) -> None:
        """Join, and join again whenever the connection is lost, after pauses that grow.

        Args:
            told: called once it has joined for the first time.

        Raises:
            SentAway: the hub has kicked or revoked this machine.
            Unauthorized: the hub refuses at the first try: its token or certificate is another.
            OtherVersion: at the first try it says that it speaks another version of the protocol.
        """
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
                reason = await self._once(joined)
            except (Unauthorized, OtherVersion) as error:
                if not started:
                    raise
                reason = str(error)
            except SentAway:
                raise
            except (WsgradError, OSError) as error:
                reason = str(error)
            if trio.current_time() - since > _STEADY_SECONDS:
                pause = FIRST_RETRY_SECONDS
            # Many machines that lost the same hub must not all come back in the same moment.
            seconds = pause * random.uniform(0.5, 1.0)
            _log.warning("not joined to %s now (%s); the next try is in %.1f s", self._hub.url, reason, seconds)
            await trio.sleep(seconds)
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    def keep(self) -> None:
        """Remember name, secret and looks for the next start."""
        try:
            self.membership.keep()
        except OSError as exc:
            _log.warning("%s can't be written, so a restart joins under a new name: %s", exc.filename, exc.strerror)

    async def _once(self, joined: Callable[[], None]) -> str:
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
            stay = _Stay(self, connection, nursery)
            joined()
            if self.membership.label or self.membership.paused:
                shown = Present(self.membership.label, self.membership.paused, 0)
                stay.push(cbor.encode(message_array(shown)))

        connection.send(
            cbor.encode(
                message_array(
                    Join(VERSION, f"wsgrad-serve {version()}", self._wanted, self.membership.secret, self.devices)
                )
            )
        )
        reason = "it did not answer"
        try:
            async with trio.open_nursery() as nursery:
                try:
                    with trio.move_on_after(self.limits.hello_seconds) as silence:
                        closed = await connection.run(handle)
                        reason = closed.reason or f"close code {closed.code}"
                finally:
                    if stay is not None:
                        stay.close()
                    nursery.cancel_scope.cancel()  # what is left cleans up behind itself, shielded and bounded
        except BaseExceptionGroup as group:
            # Of one nursery with one task that raises: the group says nothing of its own.
            errors = [error for error in group.exceptions if not isinstance(error, trio.Cancelled)]
            raise errors[0] if errors else group from None
        return reason

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
