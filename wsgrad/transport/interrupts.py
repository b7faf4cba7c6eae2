"""Holds signals back while the main thread is inside a driver, so that no frame and no bookkeeping is torn.

Python runs a signal's handler between any two steps of the main thread, and the one for Ctrl-C raises
KeyboardInterrupt right there. A `Shield` puts a handler in its place that only takes a note and wakes whoever waits;
the note is delivered to the handler before at a moment when nothing is half done.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# The functions behind `signal.signal` and `getsignal`: the wrappers turn numbers into enums, which costs ten times as
# much as all the rest (15 µs a call, measured). They are the same on every CPython; elsewhere the wrappers do.
try:
    from _signal import getsignal as _getsignal  # type: ignore[import-not-found,unused-ignore]
    from _signal import signal as _signal
except ImportError:
    from signal import getsignal as _getsignal
    from signal import signal as _signal

# Those whose handlers are known to raise, and to be sent at any moment; the most likely one comes back last.
_NAMES = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGTERM", "SIGINT")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any]"


class Shield:
    """Raised by `raise_shield` in the main thread, lowered by `lower`.

    Attributes:
        caught: the signals that were held back, and where they came.
        wake: called by a signal, in the main thread: ends whatever wait it is in.
    """

    __slots__ = ("_handlers", "_mine", "caught", "wake")

    def __init__(self, handlers: list[tuple[int, _Handler]]) -> None:
        self._handlers = handlers
        self._mine = self._catch
        self.caught: list[tuple[int, FrameType | None]] = []
        self.wake: Callable[[], object] | None = None

    def deliver(self) -> None:
        """Hand what was held back to its own handlers, which may raise anything; the shield is up again after it."""
        try:
            self.lower()
        finally:
            self._raise()

    def lower(self) -> None:
        """Put the handlers of before back, and hand them what was held back."""
        try:
            self._restore()
        except BaseException:
            self._restore()  # a signal came whose handler was back already
            raise
        if self.caught:
            self._hand_over()

    def _restore(self) -> None:
        for number, handler in self._handlers:
            if _getsignal(number) is self._mine:  # else somebody installed another one meanwhile
                _signal(number, handler)

    def _hand_over(self) -> None:
        number, frame = self.caught.pop(0)
        try:
            dict(self._handlers)[number](number, frame)
        finally:
            if self.caught:
                self._hand_over()

    def _raise(self) -> None:
        for number, _ in self._handlers:
            _signal(number, self._mine)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught.append((number, frame))
        if self.wake is not None:
            self.wake()


def raise_shield() -> Shield | None:
    """Hold signals back from now on; None where none can be held back: not the main thread, or no Python handlers."""
    if threading.get_ident() != threading.main_thread().ident:
        return None
    handlers = [(number, handler) for number in _SIGNALS if callable(handler := _getsignal(number))]
    if not handlers:
        return None
    shield = Shield(handlers)
    try:
        shield._raise()
    except ValueError:  # a subinterpreter has no signals
        return None
    except BaseException:
        shield.lower()  # one came between two of them
        raise
    return shield
