"""Whether a call is to be recorded instead of issued, and by whom; it records nothing.

A recording belongs to the thread or task that opened it. Devices, buffers and programs ask here before they issue
anything.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from wsgrad.errors import LaunchError

if TYPE_CHECKING:
    from contextvars import Token

    from wsgrad.client.base import BaseDevice
    from wsgrad.client.recording import Recorder

OPEN: Final[list[Recorder]] = []
"""All that are open in this process: while there is none, nobody has to ask further."""
_current: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder_of(device: BaseDevice[Any, Any]) -> Recorder | None:
    """What records the calls of this thread or task, if anything does.

    Raises:
        LaunchError: it does, but this device is not one of its own.
    """
    recorder = _current.get() if OPEN else None
    if recorder is not None and device not in recorder.places:
        raise LaunchError(f"{device.id!r} is used inside a recording that is not for it: give it to record(…) too")
    return recorder


def refuse(device: BaseDevice[Any, Any], what: str) -> None:
    """Called where something can't be recorded.

    Raises:
        LaunchError: it would have to be.
    """
    if OPEN and recorder_of(device) is not None:
        raise LaunchError(f"{what} can't be recorded: a graph runs later and waits for nobody; do it outside record(…)")


def open_recorder(recorder: Recorder) -> Token[Recorder | None]:
    """Record from here on; returns what `close_recorder` needs.

    Raises:
        LaunchError: something is being recorded already.
    """
    if _current.get() is not None:
        raise LaunchError("a recording can't be opened inside another one")
    OPEN.append(recorder)
    return _current.set(recorder)


def close_recorder(recorder: Recorder, token: Token[Recorder | None]) -> None:
    """Record no more."""
    OPEN.remove(recorder)
    _current.reset(token)
