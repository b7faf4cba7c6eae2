"""A session's events: who signals them, who waits for them, and the error they pass on; pure bookkeeping without I/O.

An event happens when the queue that signals it has worked off all before the signal. It fails with the error that made
the queue drop the signal, and whoever waits for it fails with the same. An event that no queue of this session signals
belongs to another server: the client says how it ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from wsgrad.errors import ProtocolError, WsgradError, error_code
from wsgrad.transport import cbor
from wsgrad.transport.messages import Fail, message_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.transport.messages import Settle

MAX_EVENTS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed, for whatever depends on it. `details` never say that a device is lost: theirs is not."""

    code: str
    message: str
    details: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, error: WsgradError, *, device: str) -> Failure:
        """The failure of something on a device; one that came from another device keeps that as its cause."""
        kept = {key: value for key, value in error.details.items() if key != "lost"}
        return cls(error_code(error), str(error), {"cause": device} | kept)

    def fail(self, queue: int, number: int) -> bytes:
        """The encoded message that lets a command of a queue fail with this."""
        return cbor.encode(message_array(Fail(queue, number, self.code, self.message, self.details)))


class Event:
    """One event.

    Attributes:
        settled: whether it has happened or failed.
        failure: what it failed with.
        signalled: whether a queue of this session is to signal it, or the client has said how it ended.
    """

    __slots__ = ("_waiting", "failure", "settled", "signalled")

    def __init__(self) -> None:
        self.settled = False
        self.failure: Failure | None = None
        self.signalled = False
        self._waiting: list[Callable[[], None]] = []

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call this once, when it is settled; it must do no more than ask for a turn."""
        if call not in self._waiting:
            self._waiting.append(call)

    def settle(self, failure: Failure | None) -> None:
        """It has happened, or failed."""
        self.settled = True
        self.failure = failure
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()


class Events:
    """The events that a session's commands name."""

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}

    def __len__(self) -> int:
        return len(self._events)

    def signal(self, number: int) -> Event:
        """The event that a queue signals.

        Raises:
            ProtocolError: it is signalled already.
        """
        event = self._get(number)
        if event.signalled:
            raise ProtocolError(f"event {number} is signalled twice")
        event.signalled = True
        return event

    def wait(self, number: int) -> Event:
        """The event that a queue waits for; it may be signalled later, here or on another server."""
        return self._get(number)

    def settle(self, message: Settle) -> None:
        """The client says how an event of another server ended.

        Raises:
            ProtocolError: it is no event of another server.
        """
        event = self.signal(message.event)
        event.settle(None if message.code is None else Failure(message.code, message.message, message.details))

    def release(self, numbers: list[int]) -> None:
        """No command will name these any more; those that wait keep theirs."""
        for number in numbers:
            self._events.pop(number, None)

    def _get(self, number: int) -> Event:
        event = self._events.get(number)
        if event is None:
            if len(self._events) >= MAX_EVENTS:
                raise ProtocolError(f"a session may hold {MAX_EVENTS} events", close_code=1008)
            event = self._events[number] = Event()
        return event
