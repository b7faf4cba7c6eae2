"""A node that dialled in: its devices, and the queues of any number of sessions on its one link.

Every queue has a number of its own on this link, so a node tells sessions apart by it. The link outlives a connection
that breaks: what the node has not seen is kept, and sent again once it is back. What it says is checked like a
stranger's.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.errors import DeviceError, DeviceLost, ProtocolError
from wsgrad.server.outstanding import InvalidReply
from wsgrad.server.port import Loss, Port
from wsgrad.transport import cbor
from wsgrad.transport.link import Link, Outgoing
from wsgrad.transport.messages import (
    CHUNK_BYTES,
    SLOTS,
    UNNUMBERED_KINDS,
    Chunk,
    Present,
    Refused,
    Seen,
    Time,
    message_array,
    parse_message,
)
from wsgrad.transport.tracing import Alignment

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.limits import Limits
    from wsgrad.server.nodes import Device
    from wsgrad.server.queue import Queue
    from wsgrad.transport.connection import Received
    from wsgrad.transport.messages import Program
    from wsgrad.transport.trio_driver import TrioConnection

_log = logging.getLogger(__name__)
_FULL_NBYTES: Final = 1 << 18
"""With so much unsent, queues hold what can wait."""
_MOST_UNSEEN: Final = 16 << 20
"""And with so much that the node has not told to have seen."""
_MAX_KEPT: Final = 64 << 20
"""A node that is sent more than this, seen or not, has left."""
_OPEN_SECONDS: Final = 30.0
_MAX_QUEUES: Final = 1024
_CLOCK_NANOSECONDS: Final = 1_000_000
"""By how much clocks may have drifted apart since they were compared."""


class _NodeLink(Link):
    """Messages to a node; says when there is room again."""

    def __init__(self, drained: Callable[[], None]) -> None:
        super().__init__()
        self._drained = drained

    @property
    def full(self) -> bool:
        return self.unsent_bytes > _FULL_NBYTES or self.unseen_bytes > _MOST_UNSEEN

    def pop(self) -> Outgoing | None:
        was_full = self.full
        outgoing = super().pop()
        if was_full and not self.full:
            self._drained()
        return outgoing

    def seen(self, count: int) -> None:
        was_full = self.full
        super().seen(count)
        if was_full and not self.full:
            self._drained()


class RemoteNode:
    """A node from its joining until it leaves, over one connection after another.

    Attributes:
        connection: the present one, or None while the node is away.
        left: whether it is not to come back to what it has here.
        stay: tells this joining from others with the same secret.
        name: its name in device ids.
        devices: what it offers.
        shown: how it shows itself.
        agent: what it calls itself.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        presented: Callable[[RemoteNode, Present], None],
        *,
        agent: str = "",
    ) -> None:
        self.name = name
        self.agent = agent
        self.devices: list[Device] = []
        self.shown = Present("", False, 0)
        self.connection: TrioConnection | None = None
        self.left = False
        self.stay = secrets.randbits(53)
        self._peer = ""
        self._presented = presented
        self._limits = limits
        self._link = _NodeLink(self._drained)
        self._numbers = itertools.count(1)
        self._last = 0
        self._ports: dict[int, RemotePort] = {}
        self._back = trio.Event()
        self._untold: Present | None = None
        self.alignment = Alignment(lambda clock: self._say(message_array(clock)))

    # -- connections

    def attach(self, connection: TrioConnection, received: int | None) -> int | None:
        """Go on over this connection, or start; one that was there before is closed. `start_link` is to follow.

        Args:
            received: numbered messages that the node has, if it comes back.

        Returns:
            How many of the node's numbered messages are here, if it comes back.

        Raises:
            ProtocolError: the node claims to have what was never sent.
        """
        if received is not None:
            self._link.resume(received)
        old, self.connection = self.connection, connection
        if old is not None:
            old.link = old.destination = None
            old.close(1008, "it has joined again")
        connection.destination = self._destination
        self._peer = connection.peer
        self._back.set()
        return None if received is None else self._link.received

    def start_link(self) -> None:
        """The node has been welcomed: now it gets what is for it."""
        connection, untold = self.connection, self._untold
        assert connection is not None
        self._link.told()
        connection.link = self._link
        connection.wake()
        if untold is not None:
            self._untold = None
            self.tell(untold)

    def detach(self, connection: TrioConnection) -> None:
        """The connection broke; the node may come back. `returned` is to follow."""
        connection.link = None
        self.connection = None
        self._back = trio.Event()

    async def returned(self) -> bool:
        """Wait for a node that is away; whether it has come back in time, whatever has become of it since then."""
        back = self._back
        with trio.move_on_after(self._limits.node_grace):
            await back.wait()
        return self.connection is not None or self._back is not back

    @property
    def full(self) -> bool:
        """Whether the node takes messages more slowly than they come."""
        return self._link.full

    def open(self, queue: Queue, index: int) -> Port:
        """A way for a queue to the node's device of that index.

        Raises:
            DeviceLost: the node has left, or has as many queues as it may.
            DeviceError: it takes no work at present.
        """
        if self.left:
            raise DeviceLost(f"node {self.name!r} has left")
        if self.shown.paused:
            raise DeviceError(
                f"device {queue.device.id!r} is paused by its owner; take another, or wait until `paused` is no longer "
                "among its properties"
            )
        if len(self._ports) >= _MAX_QUEUES:
            raise DeviceLost(f"node {self.name!r} has {_MAX_QUEUES} queues open already")
        self._last = next(self._numbers)
        port = self._ports[self._last] = RemotePort(queue, self._last, self)
        options: dict[str, object] = {
            "memory": self._limits.max_session_memory,
            "launch_seconds": self._limits.launch_seconds,
            "client": queue.session.agent,
        }
        port.attach(queue.session.number, index, options)
        queue.session.start(port.wait_open)
        return port

    def handle(self, connection: TrioConnection, received: Received) -> None:
        """Work off one message of the node.

        Raises:
            ProtocolError: it answers nothing that was asked; the node is not worth keeping.
        """
        if connection is not self.connection:
            return
        if received.head[0] in UNNUMBERED_KINDS:
            self._handle_unnumbered(received)
            return
        if self._link.note_received(received.nbytes):
            self._say(message_array(Seen(self._link.received)))
        port = self._port(received.head)
        if port is None:
            return
        try:
            port.owner.reply(port, received.head, received.raw, received.bulk)
        except InvalidReply as exc:
            raise ProtocolError(f"an invalid reply: {exc}", close_code=1008) from exc

    def _handle_unnumbered(self, received: Received) -> None:
        match parse_message(received.head):
            case Time() as answer:
                self.alignment.answer(answer)
            case Present() as shown:
                self.present(shown)
            case Seen(count):
                self._link.seen(count)
            case message:
                raise ProtocolError(f"a {type(message).__name__}, which no node sends once it has joined")

    def present(self, shown: Present) -> None:
        """Show the node like this from now on.

        Raises:
            ProtocolError: the list of devices would be too long with it.
        """
        self._presented(self, shown)
        self.shown = shown

    def joined(self, devices: list[Device]) -> None:
        """These are its devices, shown as it described them."""
        self.devices = devices
        labels = {str(device.info["label"]) for device in devices if device.info["label"] != device.id}
        label = labels.pop() if len(devices) == 1 and labels else ""
        self.shown = Present(label, any(device.info.get("paused") is True for device in devices), 0)

    def tell(self, shown: Present) -> None:
        """Tell the node how an administrator wants it shown, now or when it is back."""
        if self.connection is None:
            self._untold = shown
        else:
            self._say(message_array(shown))

    def refuse(self, code: str, reason: str) -> None:
        """Send the node away, saying why."""
        self._say(message_array(Refused(code, reason)))
        self.close(reason)

    def describe(self) -> dict[str, object]:
        """The node for the status page; without its secret."""
        return {
            "name": self.name,
            "label": self.shown.label or self.name,
            "paused": self.shown.paused,
            "memory": self.shown.memory,
            "agent": self.agent,
            "peer": self._peer,
            "away": self.connection is None,
            "devices": [device.id for device in self.devices],
            "queues": len(self._ports),
        }

    def leave(self, reason: str) -> None:
        """It does not come back: every queue on the node's devices is lost. Idempotent."""
        self.left = True
        if self.connection is not None:
            self.connection.link = None
        for port in list(self._ports.values()):
            port.owner.lost(port, Loss(f"node {self.name!r} left ({reason})"))
        self._ports.clear()

    def close(self, reason: str) -> None:
        """End the connection, or the waiting for one; whoever serves it makes the node leave."""
        self.left = True
        self._back.set()
        if self.connection is not None:
            self.connection.close(1008, reason)

    def send(self, head: bytes, bulk: memoryview | None) -> None:
        """Send a message, behind others if the node is slow, and when it is back if it is away."""
        if self.left:
            return
        self._link.push(head, bulk)
        if self.connection is not None:
            self.connection.wake()
        if self._link.unsent_bytes + self._link.unseen_bytes > _MAX_KEPT:
            self.close(f"more than {_MAX_KEPT} bytes are kept that it has not seen")

    def _say(self, array: list[object]) -> None:
        """Send what is of no use to a later connection."""
        if self.connection is not None:
            self.connection.send(cbor.encode(array))

    def forget(self, number: int) -> None:
        """A queue is closed; replies to it that are still under way are thrown away."""
        self._ports.pop(number, None)

    def _port(self, head: list[object]) -> RemotePort | None:
        number = head[1] if len(head) > 1 else None
        if type(number) is not int or not 0 < number <= self._last:
            raise ProtocolError(f"a message of kind {head[0]!r:.20} for a queue that never was")
        return self._ports.get(number)

    def _destination(self, head: list[object], nbytes: int) -> None:
        # Before memory is spent on it: a node may have so many chunks under way and no more.
        port = self._port(head)
        if head[0] == Chunk.KIND and (nbytes > CHUNK_BYTES or (port is not None and not port.may_download)):
            raise ProtocolError(f"a chunk of {nbytes} bytes without credit")

    def _drained(self) -> None:
        # Called from inside the connection's writing, so the queues only ask for a turn here.
        for port in self._ports.values():
            port.owner.later()


class RemotePort(Port):
    """A queue on a node that dialled in."""

    def __init__(self, owner: Queue, number: int, node: RemoteNode) -> None:
        super().__init__(owner, number)
        self._node = node

    @property
    def full(self) -> bool:
        return self._node.full

    @property
    def compiles(self) -> bool:
        return True

    @property
    def may_download(self) -> bool:
        """Whether the node has credit for another chunk."""
        return self.downloading < SLOTS

    @property
    def clock(self) -> tuple[int | None, int]:
        alignment = self._node.alignment
        return (alignment.offset if alignment.known else None), alignment.slack + _CLOCK_NANOSECONDS

    def align(self) -> None:
        self._node.alignment.start()

    async def wait_open(self) -> None:
        """Give the node so much time to say that the queue is ready."""
        await trio.sleep(_OPEN_SECONDS)
        if self.owner.opening:
            self.owner.lost(self, Loss(f"node {self._node.name!r} was not ready after {_OPEN_SECONDS:g} s"))

    def next_slot(self) -> memoryview | None:
        return None

    def send_program(self, message: Program, source: memoryview) -> None:
        self._send(cbor.encode(message_array(replace(message, queue=self.number))), source)

    def _keep(self, slot: int, bulk: memoryview, *, owned: bool) -> memoryview:
        # It waits in the link until the connection takes it.
        return bulk if owned else memoryview(bytes(bulk))

    def _send_slot(self, transfer: int, offset: int, slot: int, bulk: memoryview) -> None:
        self._send(cbor.encode(message_array(Chunk(self.number, transfer, offset))), bulk)

    def _send(self, head: bytes, bulk: memoryview | None) -> None:
        self._node.send(head, bulk)

    def _end(self) -> None:
        self._node.forget(self.number)
