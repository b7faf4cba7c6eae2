"""`server.trace(path)` of the trio face: begins a timeline on servers, and ends it with a file; it measures nothing."""

from __future__ import annotations

import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from wsgrad.client.timeline import BRIEF_SECONDS, driver_of
from wsgrad.client.trace import Callers, SessionTrace
from wsgrad.client.trace_file import write_timeline
from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Sequence
    from typing import TextIO

    from wsgrad.client.base import BaseServer


@asynccontextmanager
async def async_timeline(servers: Sequence[BaseServer[Any]], path: str | os.PathLike[str]) -> AsyncIterator[None]:
    """What `AsyncServer.trace` is, for one or several servers of the trio face."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(await trio.to_thread.run_sync(_open, path))
        callers = Callers()
        traces = [stack.enter_context(contextlib.closing(SessionTrace(server, callers))) for server in servers]
        try:
            try:
                for trace in traces:
                    with trio.move_on_after(BRIEF_SECONDS):
                        await driver_of(trace).wait(trace.begin)
                for trace in traces:
                    trace.recording = True
                yield
            finally:
                for trace in traces:
                    trace.recording = False
            for trace in traces:
                await driver_of(trace).wait(trace.drained)
        finally:
            with trio.CancelScope(shield=True):
                for trace in traces:
                    if trace.begun:
                        with trio.move_on_after(BRIEF_SECONDS), contextlib.suppress(WsgradError):
                            await driver_of(trace).wait(trace.end)
                    trace.detach()
                await trio.to_thread.run_sync(write_timeline, file, traces)


def _open(path: str | os.PathLike[str]) -> TextIO:
    return open(path, "w", encoding="utf-8")
