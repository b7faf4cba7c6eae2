"""Holds Ctrl-C back while the main thread is inside a driver, so that no frame and no bookkeeping is torn.

Python runs a signal's handler between any two steps of the main thread, and the default one raises KeyboardInterrupt
right there. A `Shield` puts a handler in its place that only takes a note and wakes whoever waits; the note is
delivered to the handler before at a moment when nothing is half done.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

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

_SIGINT = int(signal.SIGINT)


class Shield:
    """Raised by `raise_shield` in the main thread, lowered by `lower`.

    Attributes:
        caught: what the held-back signal's handler is to be called with, or None.
        wake: called by the signal, in the main thread: ends whatever wait it is in.
    """

    __slots__ = ("_handler", "caught", "wake")

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self.caught: tuple[int, FrameType | None] | None = None
        self.wake: Callable[[], object] | None = None

    def deliver(self) -> None:
        """Hand the held-back signal to its own handler, which may raise anything; the shield is up again after it."""
        caught, self.caught = self.caught, None
        if caught is not None:
            _signal(_SIGINT, self._handler)
            try:
                self._handler(*caught)
            finally:
                _signal(_SIGINT, self._catch)

    def lower(self) -> None:
        """Put the handler of before back, and hand it what was held back."""
        if _getsignal(_SIGINT) == self._catch:  # else somebody installed another one meanwhile
            _signal(_SIGINT, self._handler)
        caught, self.caught = self.caught, None
        if caught is not None:
            self._handler(*caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = (number, frame)
        if self.wake is not None:
            self.wake()


def raise_shield() -> Shield | None:
    """Hold back Ctrl-C from now on; None where nothing can be held back: not the main thread, or no Python handler."""
    if threading.get_ident() != threading.main_thread().ident:
        return None
    handler = _getsignal(_SIGINT)
    if not callable(handler):
        return None
    shield = Shield(handler)
    try:
        _signal(_SIGINT, shield._catch)
    except ValueError:  # a subinterpreter has no signals
        return None
    return shield
