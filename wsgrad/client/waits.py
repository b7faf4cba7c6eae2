"""What a caller waits for, and how a queue's error becomes an exception; who waits, and how, is a driver's business."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from wsgrad.errors import DeviceLost, WsgradError, error_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_HINT = re.compile(r"; device\.reopen\(\) starts (it|the device) anew$")
"""How a server ends its words for a lost device, whose own advice takes its place."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that stopped a queue, kept as values: each caller that meets it gets an exception of its own."""

    number: int
    code: str
    message: str
    details: dict[str, object] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """Whether the device's process is gone with everything in it."""
        return self.details.get("lost") is True

    def error(self) -> WsgradError:
        """A new exception."""
        return error_from_wire(self.code, self.message, self.details)

    def lost_error(self, what: str) -> WsgradError:
        """What later uses of a device, or of things that went with it, raise."""
        if not self.lost:
            return self.error()
        cause = _HINT.sub("", self.message)
        message = f"{what} is lost: {cause}; call device.reopen() and make it again"
        return DeviceLost(message, details=self.details)


class Wait(Generic[T]):
    """Settled once, with a value or an error. `notify` is set by the driver whose caller waits for it.

    Attributes:
        done: whether it is settled.
        notify: called when it is settled, in whatever thread or task that happens.
    """

    __slots__ = ("_error", "_finish", "_value", "_withdraw", "done", "notify")

    def __init__(
        self, finish: Callable[[object], T] | None = None, *, withdraw: Callable[[], None] | None = None
    ) -> None:
        """Make one.

        Args:
            finish: makes the result of the value, in the waiting caller.
            withdraw: called when the caller gives up.
        """
        self.done = False
        self.notify: Callable[[], object] | None = None
        self._finish = finish
        self._withdraw = withdraw
        self._value: object = None
        self._error: WsgradError | None = None

    def settle(self, value: object = None) -> None:
        """What was waited for has come."""
        if not self.done:
            self._value = value
            self._settled()

    def fail(self, error: WsgradError) -> None:
        """It will not come."""
        if not self.done:
            self._error = error
            self._settled()

    def withdraw(self) -> None:
        """The caller gives up; what comes now goes nowhere."""
        if not self.done:
            self._settled()
            if self._withdraw is not None:
                self._withdraw()

    def result(self) -> T:
        """The result, once it is settled.

        Raises:
            WsgradError: it failed.
        """
        assert self.done
        if self._error is not None:
            raise self._error
        if self._finish is None:
            return cast("T", self._value)
        return self._finish(self._value)

    def _settled(self) -> None:
        self.done = True
        if self.notify is not None:
            self.notify()


def settled(value: T) -> Wait[T]:
    """A wait that is over already."""
    wait: Wait[T] = Wait()
    wait.settle(value)
    return wait
