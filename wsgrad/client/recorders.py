"""Whether a call is to be recorded instead of issued, and by whom; it records nothing.

A recording belongs to the thread or task that opened it. Devices, buffers and programs ask here before they issue
anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from wsgrad.errors import LaunchError

if TYPE_CHECKING:
    from wsgrad.client.base import BaseDevice, BaseServer
    from wsgrad.client.recording import Recorder

OPEN: Final[list[Recorder]] = []
"""All that are open in this process: while there is none, nobody has to ask further."""


def recorder_of(device: BaseDevice[Any, Any]) -> Recorder | None:
    """What records the calls of this thread or task, if anything does.

    Raises:
        LaunchError: it does, but this device is not one of its own.
    """
    if not OPEN:
        return None
    caller = device._server._caller()
    recorder = next((recorder for recorder in list(OPEN) if recorder.caller == caller), None)
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


def refuse_all(server: BaseServer[Any], what: str) -> None:
    """Called where something that concerns all devices of a server can't be recorded.

    Raises:
        LaunchError: it would have to be.
    """
    for recorder in list(OPEN):
        if recorder.caller == server._caller() and any(device.server is server for device in recorder.places):
            refuse(next(device for device in recorder.places if device.server is server), what)


def open_recorder(recorder: Recorder) -> None:
    """Record from here on.

    Raises:
        LaunchError: this thread or task is recording already.
    """
    if any(other.caller == recorder.caller for other in list(OPEN)):
        raise LaunchError("a recording can't be opened inside another one")
    OPEN.append(recorder)
