"""Events as their sessions know them: when they happen, what they fail with, which other sessions wait, when they go.

Sans-IO, called with the driver's lock. An event belongs to the session of the device that signals it. A device of
another session waits for an event of its own there, which this client settles when the first one is settled.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from wsgrad.client.handle import new_lifetime
from wsgrad.client.waits import Failure, Wait, settled
from wsgrad.transport.cbor import encode
from wsgrad.transport.commands import Signal
from wsgrad.transport.commands import Wait as WaitCommand
from wsgrad.transport.messages import Release, Settle, message_array

if TYPE_CHECKING:
    from wsgrad.client.base import BaseDevice
    from wsgrad.client.core import Session
    from wsgrad.client.queue import Queue

_LOOKED_AT: Final = 64
"""So many events that nobody holds, besides those that are new, may turn out to be needed before a flush stops."""
_MAX_RELEASED: Final = 8192
"""So many ids fit into one message."""


class Known:
    """An event that a session's server knows by an id.

    Attributes:
        identity: the id.
        settled: whether it has happened or failed, as far as this client has heard.
        failure: what it failed with.
    """

    __slots__ = ("_named", "failure", "identity", "settled")

    def __init__(self, identity: int) -> None:
        self.identity = identity
        self.settled = False
        self.failure: Failure | None = None
        self._named: dict[Queue, int] = {}

    def named(self, queue: Queue, number: int) -> None:
        """Command `number` names it."""
        self._named[queue] = number

    @property
    def may_go(self) -> bool:
        """Whether the server may forget it: what names it later, a command or our settling it, would make it anew."""
        return self.settled and self._met()

    def _met(self) -> bool:
        """Whether the server has worked off all commands that name it."""
        return all(queue.gone or queue.pending.acknowledged >= number for queue, number in self._named.items())


class Signalled(Known):
    """An event of a device of this session; command `number` of `queue` signals it."""

    __slots__ = ("_copies", "number", "queue")

    def __init__(self, identity: int, queue: Queue, number: int) -> None:
        super().__init__(identity)
        self.queue = queue
        self.number = number
        self._copies: dict[Session, Known] = {}
        self.named(queue, number)

    def copy(self, session: Session) -> Known | None:
        """The event that stands for this one in another session, if there is one."""
        return self._copies.get(session)

    def copied(self, session: Session, copy: Known) -> None:
        """That session waits for this event from now on."""
        self._copies[session] = copy
        if self.settled:
            self._pass_on(session, copy)

    @property
    def may_go(self) -> bool:
        return self._met()

    @property
    def awaited(self) -> bool:
        """Whether other sessions wait for it."""
        return bool(self._copies)

    def settle(self, failure: Failure | None) -> None:
        """It has happened, or failed."""
        self.settled = True
        if failure is not None:
            details: dict[str, object] = {"cause": self.queue.device} | failure.details
            details.pop("lost", None)
            self.failure = Failure(failure.number, failure.code, failure.message, details)
        for session, copy in self._copies.items():
            self._pass_on(session, copy)

    def release(self) -> None:
        """Nobody holds it any more: neither do the other sessions."""
        for session, copy in self._copies.items():
            session.events.dropped.append(copy)

    def _pass_on(self, session: Session, copy: Known) -> None:
        failure = self.failure
        message = (
            Settle(copy.identity, None, "", {})
            if failure is None
            else Settle(copy.identity, failure.code, failure.message, failure.details)
        )
        copy.settled = True
        session.exchange.post(encode(message_array(message)))


class Signals:
    """The signals of one queue that are not settled."""

    def __init__(self) -> None:
        self._signals: deque[Signalled] = deque()

    def add(self, event: Signalled) -> None:
        """The next one."""
        self._signals.append(event)

    def acknowledged(self, number: int) -> None:
        """All commands up to `number` have run; those behind an error were settled when that came."""
        while self._signals and self._signals[0].number <= number:
            self._signals.popleft().settle(None)

    def failed(self, failure: Failure) -> None:
        """The server drops commands from the failed one on: all signals there are, since none was issued knowing it."""
        self.acknowledged(failure.number - 1)
        signals, self._signals = self._signals, deque()
        for event in signals:
            event.settle(failure)

    @property
    def awaited(self) -> bool:
        """Whether another session waits for one."""
        return any(event.awaited for event in self._signals)


class SessionEvents:
    """Owned by the session.

    Attributes:
        dropped: events that nobody holds. Only appended to by finalizers and other sessions, in any thread.
    """

    def __init__(self, session: Session) -> None:
        self.dropped: deque[Known] = deque()
        self._session = session
        self._going: deque[Known] = deque()
        self._next = 0

    def signal(self, queue: Queue, line: str) -> Signalled:
        """Issue a signal."""
        identity = self._take()
        number = queue.command(Signal(identity), line=line)
        event = Signalled(identity, queue, number)
        if queue.unraised is not None:
            event.settle(queue.unraised)  # it is dropped: what clears the error comes behind it
        else:
            queue.signals.add(event)
        return event

    def wait(self, queue: Queue, event: Known, line: str) -> None:
        """Issue a wait for an event of this session."""
        event.named(queue, queue.command(WaitCommand(event.identity), line=line))

    def wait_for_copy(self, queue: Queue, event: Signalled, line: str) -> Known:
        """Issue a wait for an event of another session; returns what stands for it here."""
        copy = event.copy(self._session) or Known(self._take())
        self.wait(queue, copy, line)
        return copy

    def flush(self) -> None:
        """Let the server forget events that no command will name any more."""
        new = len(self.dropped)
        for _ in range(new):
            event = self.dropped.popleft()
            if isinstance(event, Signalled):
                event.release()
            self._going.append(event)
        gone: list[int] = []
        # Not all of them each time: this is called often, and thousands may wait for their commands to run.
        kept, most = 0, min(len(self._going), new + _LOOKED_AT)
        while kept < most and self._going and len(gone) < _MAX_RELEASED:
            event = self._going.popleft()
            if event.may_go:
                gone.append(event.identity)
            else:
                kept += 1
                self._going.append(event)
        if gone:
            self._session.link.push(encode(message_array(Release(gone))))

    def _take(self) -> int:
        self._next += 1
        return self._next & 0xFFFFFFFF


class BaseEvent:
    """A moment on a device: when everything issued there before `signal` has run. A face adds waiting."""

    def __init__(self, device: BaseDevice[Any, Any], event: Signalled) -> None:
        self._device = device
        self._event = event
        # A finalizer may run in any thread and between any two steps, so it only appends.
        self._lifetime = new_lifetime()
        self._free = weakref.finalize(self._lifetime, device._server._session.events.dropped.append, event)
        self._free.atexit = False

    @property
    def device(self) -> BaseDevice[Any, Any]:
        """The device that signals it."""
        return self._device

    def __repr__(self) -> str:
        event = self._event
        state = "pending" if not event.settled else "failed" if event.failure is not None else "done"
        return f"<{type(self).__name__} of {self._device.id!r}, {state}>"

    def _start_wait(self) -> Wait[None]:
        event = self._event
        if not event.settled:
            return event.queue.pending.until(event.number, lambda _: None)
        if event.failure is None:
            return settled(None)
        unraised = event.queue.unraised
        if unraised is not None and unraised.number == event.failure.number:
            event.queue.raise_unraised()
        raise event.failure.error()
