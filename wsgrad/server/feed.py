"""What a queue still has to give to its node, in order, and what holds it: programs, waits, transfers, a full way.

It sends through a port and notes what it sent; it checks nothing and hears no replies. Nothing here waits: `pump` goes
on where it stopped whenever what held it has gone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from wsgrad.server.events import Failure
from wsgrad.server.graphs import Plain, ReplaySent
from wsgrad.server.loads import Load
from wsgrad.server.outstanding import Sent, Transfer
from wsgrad.server.submission import NOTHING, CachedUpload, Joint, refusal
from wsgrad.server.transfers import REPLAYED, ROUTED
from wsgrad.transport import cbor
from wsgrad.transport.commands import Download, Receive, Send, Upload, Wait, command_array
from wsgrad.transport.messages import Abort, Batch, message_array

if TYPE_CHECKING:
    from wsgrad.server.cached import CachedUploads
    from wsgrad.server.journal import Journal
    from wsgrad.server.loads import Loads
    from wsgrad.server.outstanding import Outstanding
    from wsgrad.server.port import Port
    from wsgrad.server.queue import Queue
    from wsgrad.server.transfers import Flow, FlowChunk
    from wsgrad.transport.commands import Command

_STEP: Final = 16
"""Messages to the node before others get a turn."""
_MAX_ITEMS: Final = 1024
_NOTHING: Final = memoryview(b"")
_MAX_TRANSFER: Final = (1 << 32) - 1


@dataclass(slots=True)
class Piece:
    """A chunk of a client's upload on its way to the node; without a slot while a transfer before it needs them."""

    transfer: int
    offset: int
    bulk: memoryview
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class _Receipt:
    """A transfer to this queue that the node was told of: by command `number`, as transfer `transfer`.

    Where it brings no bytes, `empty` is its command, of which the node hears nothing before it has ended.
    """

    number: int
    transfer: int
    flow: Flow
    empty: Joint | None = None


Item: TypeAlias = Sent | Load | Piece | Abort | Plain | CachedUpload | Joint


class Feed:
    """Of one queue. While a transfer to the queue is under way, it is the transfer's target.

    Attributes:
        port: the way to the node; None while there is none.
        running: whether the node is ready.
        receives: transfers to this queue that are not over.
    """

    def __init__(self, queue: Queue, out: Outstanding, journal: Journal, cached: CachedUploads, loads: Loads) -> None:
        self.port: Port | None = None
        self.running = False
        self.receives = 0
        self._queue = queue
        self._out = out
        self._journal = journal
        self._cached = cached
        self._loads = loads
        self._items: deque[Item] = deque()
        self._receiving: _Receipt | None = None
        self._following: deque[_Receipt] = deque()
        self._starting = False
        self._replayed = 0
        self._offset = 0
        self._given = _NOTHING
        self._announced = 0

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._items) or self.receiving

    @property
    def busy(self) -> bool:
        """Whether so much waits that nothing more should be looked at: a refusal is larger than what it refuses."""
        return len(self._items) >= _MAX_ITEMS

    @property
    def receiving(self) -> bool:
        """Whether the node is inside of a transfer to this queue."""
        return self._receiving is not None or bool(self._following)

    def add(self, item: Item) -> None:
        """The next thing for the node."""
        if isinstance(item, Joint) and isinstance(item.command, Receive):
            self.receives += 1
        elif isinstance(item, ReplaySent) and item.graph is not None:
            self._queue.usage.launched(item.graph.launches)
            self.receives += sum(not end.sends for end, _ in item.ends)
        self._items.append(item)

    def pump(self) -> None:
        """Send to the node what may go."""
        if self._receiving is not None:
            self._receiving.flow.pump()
        budget = _STEP
        port = self.port
        if self._loads.compiled and port is not None:
            self._loads.deliver(port)
        while self._items and not self.receiving and self.running and port is not None and not port.full:
            if not budget:
                self._queue.later()
                return
            budget -= 1
            trace = self._queue.trace
            since = 0 if trace is None else time.monotonic_ns()
            if not self._send(self._items[0], port):
                return
            self._items.popleft()
            if trace is not None:
                trace.sent(self._out.sent, since)

    def drop(self, failure: Failure) -> None:
        """The node is gone, or the queue is closed: what waits will not run, and others learn why."""
        items, self._items = self._items, deque()
        flows = [receipt.flow for receipt in (self._receiving, *self._following) if receipt is not None]
        self._receiving = None
        self._following.clear()
        self.receives = 0
        self._given = _NOTHING
        for item in items:
            if isinstance(item, Joint) and isinstance(item.command, Receive) and item.flow is not None:
                flows.append(item.flow)
            elif isinstance(item, ReplaySent):
                flows += [flow for end, flow in item.ends if not end.sends]
        for flow in flows:
            flow.target_failed(failure)

    # -- chunks of a client's uploads

    def announce(self, nbytes: int, *, ready: bool) -> memoryview | None:
        """Where a chunk that is about to come may be received, if a slot is free and no transfer needs it.

        What came with its beginning was not worked off yet, perhaps not even the upload that it belongs to, so nothing
        can be checked. Only one slot is given at a time, and to the chunk that comes next: slots are taken in order.
        """
        self._announced += 1
        free = ready and self._announced == 1 and not self.receives
        slot = self.port.next_slot() if free and self.port is not None else None
        if slot is None:
            return None
        self._given = slot[:nbytes]
        return self._given

    def submitted(self) -> None:
        """An announced chunk is here; one that came with the message that opened its queue was not announced."""
        self._announced = max(0, self._announced - 1)

    def stop_receiving(self) -> bool:
        """The connection is over, no announced chunk will come. Returns whether one was on its way into a slot."""
        announced, self._announced = self._announced, 0
        return self.take_back() and announced > 0

    def take_back(self) -> bool:
        """No chunk will come into the slot that was given. Returns whether there was one."""
        given, self._given = self._given, _NOTHING
        if given and self._receiving is not None:
            self._queue.later()
        return len(given) > 0

    def add_piece(self, transfer: int, offset: int, bulk: memoryview) -> None:
        """A chunk has come, into the slot that was given or into memory of its own."""
        in_place = bulk is self._given
        if in_place:
            self._given = _NOTHING
        piece = Piece(transfer, offset, bulk)
        assert self.port is not None
        if in_place or (not self.receives and self.port.has_room):
            piece.slot, piece.bulk = self.port.take_chunk(bulk, in_place=in_place)
        self._items.append(piece)

    # -- a transfer's target

    @property
    def has_room(self) -> bool:
        port = self.port
        return port is not None and port.has_room and not port.full and not self._given

    def put(self, chunk: FlowChunk) -> None:
        assert self.port is not None
        assert self._receiving is not None
        self.port.pass_on(self._receiving.transfer, self._offset, chunk)
        self._offset += len(chunk.bulk)
        self._queue.usage.bytes_in += len(chunk.bulk)

    def finished(self) -> None:
        assert self.port is not None
        assert self._receiving is not None
        if self._receiving.empty is not None:
            self._go_on(self._receiving.empty, self.port, None)
        self._received()

    def failed(self, failure: Failure) -> None:
        assert self.port is not None
        receipt = self._receiving
        assert receipt is not None
        if receipt.empty is not None:
            self._go_on(receipt.empty, self.port, failure)
        else:
            self._journal.expect(receipt.number, failure)
            self.port.send(failure.fail(self._queue.number, receipt.number))
        # A replay that fails receives no more.
        following, self._following = self._following, deque()
        self.receives -= len(following)
        for follower in following:
            follower.flow.target_failed(failure)
        self._received()

    def _received(self) -> None:
        self._receiving = None
        self.receives -= 1
        if self._following:
            self._receive_next()
        if not self.receiving:
            self._queue.later()

    def _receive_next(self) -> None:
        """Begin what is received next. One may be over at once, so this loops and is not entered again from inside."""
        if self._starting:
            return
        self._starting = True
        while self._following and self._receiving is None:
            receipt = self._receiving = self._following.popleft()
            self._offset = 0
            failure = receipt.flow.failure
            if failure is None:
                receipt.flow.start(self)
            else:
                self.failed(failure)
                receipt.flow.target_failed(failure)
        self._starting = False

    # -- sending

    def _send(self, item: Item, port: Port) -> bool:
        """Whether it went."""
        match item:
            case Sent():
                if self._loads.holds(item):
                    return False
                if item.reserved and not self._queue.session.answers.take(item.reserved, self._queue):
                    return False
                if isinstance(item, ReplaySent) and item.ends:
                    self._replay(item, port)
                    return True
                port.send(item.head, item.bulk)
                self._out.add(item)
                for program in item.drops:
                    self._loads.drop(program)
            case Load():
                sent = self._loads.place(item, port)
                if sent is None:
                    return False
                self._out.add(sent)
            case Piece():
                if item.slot is None:
                    if not self.has_room:
                        return False
                    item.slot, item.bulk = port.take_chunk(item.bulk)
                port.send_chunk(item.transfer, item.offset, item.slot, item.bulk, client=True)
            case Abort():
                port.send(cbor.encode(message_array(item)))
            case Plain():
                port.send(item.head, item.bulk)
            case CachedUpload():
                return self._cached.advance(item, port, self._out)
            case Joint():
                return self._join(item, port)
            case _:
                assert_never(item)
        return True

    def _join(self, item: Joint, port: Port) -> bool:
        command = item.command
        if item.error is not None:
            refused = refusal(self._queue.number, item.number, item.error, command)
            refused.nbytes = item.nbytes
            port.send(refused.head)
            self._out.add(refused)
            if isinstance(command, Receive) and item.flow is not None:
                self.receives -= 1
                item.flow.target_failed(Failure.of(item.error, device=self._queue.device.id))
            return True
        match command:
            case Wait():
                event = item.event
                assert event is not None
                if not event.settled:
                    event.when_settled(self._queue.later)
                    return False
                self._go_on(item, port, event.failure)
            case Send():
                flow = item.flow
                assert flow is not None
                if flow.failure is not None:
                    self._go_on(item, port, None)
                    return True
                transfer = ROUTED | flow.number
                self._out.downloads[transfer] = Transfer(transfer, item.number, command.nbytes, flow)
                flow.stop = partial(self._stop, port, transfer)
                self._command(item, port, Download(transfer, command.buffer, command.offset, command.nbytes))
            case Receive():
                flow = item.flow
                assert flow is not None
                if flow.failure is not None:
                    failure = flow.failure
                    self.receives -= 1
                    self._go_on(item, port, failure)
                    flow.target_failed(failure)
                    return True
                empty = None if command.nbytes else item
                if empty is None:
                    upload = Upload(ROUTED | flow.number, command.buffer, command.offset, command.nbytes)
                    self._command(item, port, upload)
                self._following.append(_Receipt(item.number, ROUTED | flow.number, flow, empty))
                self._receive_next()
        return True

    def _replay(self, item: ReplaySent, port: Port) -> None:
        """A run of a graph with transfers: each has an id of its own for the node, one after the other."""
        assert item.replay is not None
        assert item.graph is not None
        if self._replayed + item.graph.transfers > _MAX_TRANSFER - REPLAYED:
            self._replayed = 0
        first = REPLAYED + self._replayed
        self._replayed += item.graph.transfers
        item.head = cbor.encode(message_array(replace(item.replay, transfer=first)))
        for end, flow in item.ends:
            transfer = first + end.place
            if not end.sends:
                self._following.append(_Receipt(item.first, transfer, flow))
            elif flow.failure is None:
                flow.stop = partial(self._stop, port, transfer)
            if end.sends:
                self._out.downloads[transfer] = Transfer(transfer, item.first, end.nbytes, flow)
        port.send(item.head)
        self._out.add(item)
        self._receive_next()

    def _stop(self, port: Port, transfer: int, _: Failure) -> None:
        port.send(cbor.encode(message_array(Abort(self._queue.number, transfer))))

    def _go_on(self, item: Joint, port: Port, failure: Failure | None) -> None:
        """The command is done, or fails with another's error."""
        if failure is None:
            self._command(item, port, None)
            return
        self._journal.expect(item.number, failure)
        port.send(failure.fail(self._queue.number, item.number))
        self._out.add(Sent(item.number, item.number, item.nbytes, b""))

    def _command(self, item: Joint, port: Port, command: Command | None) -> None:
        array = NOTHING if command is None else command_array(command)
        port.send(cbor.encode(message_array(Batch(self._queue.number, item.number, [array]))))
        self._out.add(Sent(item.number, item.number, item.nbytes, b""))
