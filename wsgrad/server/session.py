"""One client's session: its link, its queues and its end; connections come and go, and it never waits for a device.

A session outlives its connection by the grace time. However it ends, its queues free their nodes at once and the task
that runs it waits, for a bounded time, until their processes are gone.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.errors import DeviceError, LimitExceeded, ProtocolError, error_code
from wsgrad.server.events import Events
from wsgrad.server.graphs import Graphs
from wsgrad.server.limits import MAX_QUEUES, MAX_RETAINED, Limits
from wsgrad.server.nodes import missing_device
from wsgrad.server.queue import Queue
from wsgrad.server.routes import RELAYED, Routes
from wsgrad.server.tables import Quota
from wsgrad.server.trace import SessionTrace
from wsgrad.server.transfers import Transfers
from wsgrad.server.upload_rate import UploadRate
from wsgrad.server.usage import Usage, sum_of
from wsgrad.transport import cbor
from wsgrad.transport.express import Request
from wsgrad.transport.link import Link
from wsgrad.transport.messages import (
    Abort,
    Ack,
    Batch,
    Bye,
    Chunk,
    Clock,
    Close,
    Credit,
    Devices,
    Dial,
    Failed,
    Forget,
    KnownProgram,
    Launches,
    Open,
    Peer,
    Program,
    Record,
    Release,
    Reopen,
    Run,
    Seen,
    Settle,
    Source,
    Time,
    Trace,
    Welcome,
    message_array,
    parse_message,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from wsgrad.errors import WsgradError
    from wsgrad.server.hub import Hub
    from wsgrad.server.nodes import Device
    from wsgrad.server.programs import Programs
    from wsgrad.server.transfers import Flow
    from wsgrad.transport.commands import Receive, Send
    from wsgrad.transport.connection import Received
    from wsgrad.transport.trio_driver import TrioConnection

_log = logging.getLogger(__name__)
_TICK_SECONDS: Final = 1.0
_MAX_UNSEEN: Final = 64 << 20
"""Bytes for the client that a session keeps at most, slots of rings included."""


class Answers:
    """How many bytes of answers a session may still ask its nodes for; queues wait here for room."""

    def __init__(self, later: Callable[[Queue], None]) -> None:
        self._later = later
        self._used = 0
        self._waiting: dict[Queue, None] = {}

    def take(self, nbytes: int, queue: Queue) -> bool:
        """Reserve room, or note that the queue waits for it. An empty budget gives any amount."""
        if self._used and self._used + nbytes > MAX_RETAINED:
            self._waiting[queue] = None
            return False
        self._used += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Room that is no longer needed."""
        self._used -= nbytes
        if nbytes and self._waiting:
            waiting, self._waiting = self._waiting, {}
            for queue in waiting:
                self._later(queue)


class Session:
    """A session, run by `run` in the server's nursery; every other method returns at once.

    Attributes:
        key: what a client needs to attach; never logged.
        number: its name in logs and towards nodes.
        agent: what its client calls itself.
        trace: measures while the client makes a timeline; None most of the time.
        ended: set when it has ended.
        freed: set when nothing of it is left.
    """

    def __init__(self, hub: Hub, key: bytes, number: int, limits: Limits, *, agent: str) -> None:
        self.key = key
        self.number = number
        self.agent = agent
        self.limits = limits
        self.statistics = hub.statistics
        self.usages: dict[str, Usage] = {}
        self.blobs = hub.blobs
        self.sources = hub.sources
        self.quota = Quota(limits.max_session_memory, limits.max_buffers, limits.max_programs)
        self.answers = Answers(self.later)
        self.upload_rate = UploadRate(limits.upload_rate)
        self.processes = trio.Semaphore(MAX_QUEUES)
        self.events = Events()
        self.transfers = Transfers()
        self.trace: SessionTrace | None = None
        self.tickets = hub.tickets
        self.peer_rules = hub.peer_rules
        self.server_name = hub.name
        self.routes = Routes(self)
        self.connection: TrioConnection | None = None
        self.ended = trio.Event()
        self.freed = trio.Event()
        self.opened_at = self._active_at = self._detached_at = trio.current_time()
        self._hub = hub
        self._link = Link()
        self._queues: dict[int, Queue] = {}
        self._graphs = Graphs(self._queues.get, self.start, self.later, self.flow_from, self.flow_to, limits)
        self._todo: dict[Queue, None] = {}
        self._work = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._holding = False
        self._unstarted: list[Callable[[], Awaitable[None]]] = []
        self._abandon: trio.CancelScope | None = None
        self._end_code: tuple[int, str] | None = None

    def __repr__(self) -> str:
        return f"<Session {self.number} with {len(self._queues)} devices>"

    # -- life

    async def run(self) -> None:
        """Live until the session ends; then everything of it is freed."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for function in self._unstarted:
                    nursery.start_soon(function)
                self._unstarted.clear()
                nursery.start_soon(self._turns)
                nursery.start_soon(self._ticks)
                nursery.start_soon(self.upload_rate.run)
                await self.ended.wait()
                # Only what cleans up behind itself is left; it is shielded and bounded.
                nursery.cancel_scope.cancel()
        except Exception:
            _log.exception("session %d ended by an error of the server", self.number)
            self.end(1011, "internal error")
        finally:
            self.end(1001, "the server is stopping")
            self._nursery = None
            self._link = Link()
            connection, self.connection = self.connection, None
            if connection is not None and self._end_code is not None:
                connection.close(*self._end_code)
            self.freed.set()

    def start(self, function: Callable[[], Awaitable[None]]) -> None:
        """Run a task that ends with the session; it must not raise."""
        if self._nursery is None:
            self._unstarted.append(function)
        else:
            self._nursery.start_soon(function)

    def end(self, code: int, reason: str) -> None:
        """End the session. Its connection closes with the code once everything is freed. Idempotent."""
        if self.ended.is_set():
            return
        _log.info("session %d ends: %s", self.number, reason)
        self.ended.set()  # first: whatever closing the queues would still say to the client is not kept any more
        self._end_code = (code, reason)
        self.routes.close()
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
        self._todo.clear()
        if self.connection is not None:
            self.connection.link = None
        self._hub.forget(self, reason)

    # -- connections

    def attach(self, connection: TrioConnection, received: int, scope: trio.CancelScope) -> None:
        """Go on over this connection; one that was there before is closed.

        Args:
            received: numbered messages that the client has.
            scope: cancelling it drops the connection at once.

        Raises:
            ProtocolError: the client claims to have what was never sent.
        """
        self._link.resume(received)
        old = self.connection
        if old is not None:
            old.link = None
            old.destination = None
            old.close(1008, "another connection attached to this session")
            if self._stop_receiving() and self._abandon is not None:
                # Its half chunk lies in a slot that the new connection will fill.
                self._abandon.cancel()
        self._abandon = scope
        self.connection = connection
        connection.destination = self._destination
        info = self._hub.welcome()
        connection.send(cbor.encode(message_array(Welcome(1, self.key, self._link.received, info))))
        self._link.told()
        connection.link = self._link
        connection.wake()

    def detach(self, connection: TrioConnection) -> None:
        """This connection is over; the session waits for another."""
        if self.connection is connection:
            self.connection = None
            self._stop_receiving()
            self._detached_at = trio.current_time()

    def push(
        self, head: bytes, bulk: memoryview | bytes | None = None, on_seen: Callable[[], None] | None = None
    ) -> None:
        """Send a numbered message to the client, now or when it is there again."""
        if self.ended.is_set():
            return
        link = self._link
        link.push(head, bulk, on_seen=on_seen)
        if link.unsent_bytes + link.unseen_bytes > _MAX_UNSEEN:
            self.end(1008, f"more than {_MAX_UNSEEN} bytes are kept that the client has not seen")
            return
        if self.connection is not None and not self._holding:
            self.connection.wake()

    def hold_back(self) -> None:
        """Let messages for the client gather until `let_go`, which must follow without waiting."""
        self._holding = True

    def let_go(self) -> None:
        """Send what has gathered."""
        self._holding = False
        if self.connection is not None and self._link:
            self.connection.wake()

    def tell_devices(self, devices: list[dict[str, object]]) -> None:
        """The list of devices has changed."""
        if self.connection is not None:
            self.connection.send(cbor.encode(message_array(Devices(devices))))

    def handle(self, connection: TrioConnection, received: Received) -> None:
        """Work off one message of the client.

        Raises:
            ProtocolError: it breaks the protocol.
        """
        if connection is not self.connection or self.ended.is_set():
            return
        trace = self.trace
        started = time.monotonic_ns() if trace is not None else 0
        self.statistics.received += received.nbytes
        asked = received.express
        if type(asked) is Request and (queue := self._queues.get(asked.queue)) and queue.read_now(asked, received.raw):
            self._note_received(connection, received)
            return
        message = parse_message(received.head)
        if message.KIND >= 16:
            self._note_received(connection, received)
        match message:
            case Chunk() | Abort() | Credit() | Ack() | Failed() if message.queue >= RELAYED:
                self.routes.relayed(message, received.bulk)
            case Batch() | Launches() | Program() | KnownProgram() | Source() | Chunk() | Abort() | Reopen():
                self._queue(message.queue).submit(message, received.raw, received.bulk)
            case Record():
                self._graphs.record(message, received.bulk)
            case Run():
                for run in self._graphs.run(message):
                    self._queue(run.queue).submit(run, received.raw, None)
            case Forget():
                for end in self._graphs.forget(message):
                    if (queue := self._queues.get(end.queue)) is not None:
                        queue.submit(end, received.raw, None)
            case Seen():
                self._link.seen(message.count)
            case Release():
                self.events.release(message.events)
            case Settle():
                self.events.settle(message)
            case Peer():
                self.routes.offer(message.route)
            case Dial():
                self.routes.dial(message)
            case Open():
                self._open(message)
            case Close():
                self._queue(message.queue).close()
                del self._queues[message.queue]
                self._hub.loads_changed()
            case Bye():
                self.end(1000, "the client said good-bye")
            case Clock():
                connection.send(cbor.encode(message_array(Time(message.token, time.monotonic_ns()))))
            case Trace():
                self._trace(message)
            case _:
                raise ProtocolError(f"a {type(message).__name__}, which no client sends inside a session")
        if trace is not None and trace is self.trace:
            trace.received(message, received.nbytes, started)

    def _note_received(self, connection: TrioConnection, received: Received) -> None:
        self._active_at = trio.current_time()
        if self._link.note_received(received.nbytes):
            connection.send(cbor.encode(message_array(Seen(self._link.received))))

    # -- queues

    def later(self, queue: Queue) -> None:
        """Give a queue a turn soon."""
        self._todo[queue] = None
        self._work.set()

    @property
    def devices_in_use(self) -> list[str]:
        """The id of each open queue's device."""
        return [queue.device.id for queue in self._queues.values()]

    def device(self, device: str) -> Device | None:
        """The device of that id, if it is there now."""
        return self._hub.device(device)

    def flow_from(self, command: Send) -> Flow:
        """The transfer that a queue sends.

        Raises:
            ProtocolError: it is sent already.
        """
        flow = self.transfers.flow(command.route, command.transfer)
        flow.send(command.nbytes)
        if command.route:
            self.routes.outgoing(command.route, flow, command.nbytes)
        return flow

    def flow_to(self, command: Receive) -> Flow:
        """The transfer that a queue receives.

        Raises:
            ProtocolError: it is received already.
        """
        flow = self.transfers.flow(command.route, command.transfer)
        flow.receive(command.nbytes)
        if command.route:
            self.routes.incoming(command.route, flow)
        return flow

    @property
    def programs(self) -> Programs:
        """Compiles programs for the queues on local devices."""
        return self._hub.programs

    @property
    def idle(self) -> bool:
        """Whether all commands are worked off and the client, if it is there, has been sent all of it."""
        sent = self.connection is None or not self._link
        return sent and all(queue.idle for queue in self._queues.values())

    def describe(self) -> dict[str, object]:
        """The session for the status page; without its key."""
        now = trio.current_time()
        return {
            "session": self.number,
            "client": self.agent,
            "peer": None if self.connection is None else self.connection.peer,
            "connected": self.connection is not None,
            "seconds": round(now - self.opened_at, 1),
            "devices": sorted(set(self.devices_in_use)),
            "totals": {
                "memory": self.quota.memory,
                "buffers": self.quota.buffers,
                "programs": self.quota.programs,
                **sum_of(self.usages.values()).describe(),
            },
            "queues": [queue.describe() for queue in self._queues.values()],
        }

    def usage_of(self, device: str) -> Usage:
        """Where what is done with a device is counted."""
        if (usage := self.usages.get(device)) is None:
            usage = Usage(statistics=self.statistics)
            if self.device(device) is not None:  # a client may name any number that there are not
                self.usages[device] = usage
        return usage

    def failed(self, device: str, error: WsgradError, *, lost: bool = False) -> None:
        """A command failed on a device, or the device was lost."""
        self.statistics.lost += lost
        self.statistics.errors += not lost
        self.usage_of(device).errors += 1
        self._hub.ledger.note(device=device, session=self.number, code=error_code(error), message=str(error))

    def _trace(self, message: Trace) -> None:
        """Measure from now on, or no longer. A timeline that was begun before ends with the next."""
        if self.trace is not None:
            self.trace.end()
            self.trace = None
        if message.on:
            self.trace = SessionTrace(message.trace, self.push)
            self.trace.watch(self._link)
            for queue in self._queues.values():
                queue.begin_trace(self.trace)
            self.start(self.trace.run)

    def _queue(self, number: int) -> Queue:
        queue = self._queues.get(number)
        if queue is None:
            raise ProtocolError(f"there is no queue {number}")
        return queue

    def _open(self, message: Open) -> None:
        if message.queue >= RELAYED:
            raise ProtocolError(f"queue {message.queue}; numbers of queues are below {RELAYED}")
        if message.queue in self._queues:
            raise ProtocolError(f"queue {message.queue} is open already")
        if len(self._queues) >= 2 * MAX_QUEUES:
            raise ProtocolError(f"{len(self._queues)} queues, most of which never opened", close_code=1008)
        device = self.device(message.device)
        if device is None:
            device = missing_device(message.device, DeviceError(f"there is no device {message.device[:200]!r}"))
        elif len(self._queues) >= MAX_QUEUES:
            error = LimitExceeded(f"a session may have {MAX_QUEUES} open devices")
            device = missing_device(message.device, error)
        # One that can't open exists all the same: commands for it are on their way, and others may wait for them.
        self._queues[message.queue] = Queue(self, message.queue, device)
        self._hub.loads_changed()
        _log.info("session %d opens %s", self.number, device.id)

    def _destination(self, head: list[object], nbytes: int) -> memoryview | None:
        if head[0] != Chunk.KIND:
            return None
        message = parse_message(head)
        assert isinstance(message, Chunk)
        # Its queue may be opened by a message that came with it and was not worked off yet.
        queue = self._queues.get(message.queue)
        return None if queue is None else queue.destination(nbytes)

    def _stop_receiving(self) -> bool:
        """No chunk of the old connection will come any more. Returns whether one was on its way into a slot."""
        receiving = [queue for queue in self._queues.values() if queue.stop_receiving()]
        return bool(receiving)

    async def _turns(self) -> None:
        """Give turns to the queues that asked for one."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._todo:
                queue = next(iter(self._todo))
                del self._todo[queue]
                try:
                    queue.work()
                except ProtocolError as error:
                    self.end(error.close_code, str(error))
                await trio.lowlevel.checkpoint()

    async def _ticks(self) -> None:
        """End the session when nobody wants it any more; tell the client what has been received."""
        limits = self.limits
        tick = min(_TICK_SECONDS, max(0.01, limits.resume_grace / 4), max(0.01, (limits.idle_seconds or 4) / 4))
        while True:
            await trio.sleep(tick)
            now = trio.current_time()
            if self.connection is not None and self._link.untold:
                self._link.told()
                self.connection.send(cbor.encode(message_array(Seen(self._link.received))))
            if self.connection is None and now - self._detached_at >= limits.resume_grace:
                self.end(1001, f"its client did not come back within {limits.resume_grace:g} s")
            elif limits.idle_seconds and now - self._active_at >= limits.idle_seconds and self.idle:
                self.end(1008, f"nothing was done for {limits.idle_seconds:g} s (--idle-seconds)")
