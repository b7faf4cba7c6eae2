"""`server.trace(path)` of both faces: begins a timeline on servers, and ends it with a file; it measures nothing."""

from __future__ import annotations

import contextlib
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from wsgrad.client.trace import SessionTrace
from wsgrad.client.trace_file import write_timeline
from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Iterator, Sequence
    from typing import TextIO

    from wsgrad.client.base import BaseServer

_BRIEF_SECONDS: Final = 5.0
"""How long servers have to compare clocks, or to send their last, before the timeline goes on without that."""


@contextmanager
def timeline(
    servers: Sequence[BaseServer[Any]], path: str | os.PathLike[str], *, timeout: float | None = None
) -> Iterator[None]:
    """What `Server.trace` is, for one or several servers of the blocking face."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "w", encoding="utf-8"))
        traces = [stack.enter_context(contextlib.closing(SessionTrace(server))) for server in servers]
        try:
            try:
                for trace in traces:
                    with contextlib.suppress(TimeoutError):
                        _driver(trace).run(trace.begin, _BRIEF_SECONDS)
                for trace in traces:
                    trace.recording = True
                yield
            finally:
                for trace in traces:
                    trace.recording = False
            for trace in traces:
                _driver(trace).run(trace.drained, timeout)
        finally:
            for trace in traces:
                try:
                    with contextlib.suppress(TimeoutError, WsgradError):  # what there is is written all the same
                        if trace.begun:
                            _driver(trace).run(trace.end, _BRIEF_SECONDS)
                finally:
                    _driver(trace).call(trace.detach)
            write_timeline(file, traces)


@asynccontextmanager
async def async_timeline(servers: Sequence[BaseServer[Any]], path: str | os.PathLike[str]) -> AsyncIterator[None]:
    """What `AsyncServer.trace` is, for one or several servers of the trio face."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(await trio.to_thread.run_sync(_open, path))
        traces = [stack.enter_context(contextlib.closing(SessionTrace(server))) for server in servers]
        try:
            try:
                for trace in traces:
                    with trio.move_on_after(_BRIEF_SECONDS):
                        await _driver(trace).wait(trace.begin)
                for trace in traces:
                    trace.recording = True
                yield
            finally:
                for trace in traces:
                    trace.recording = False
            for trace in traces:
                await _driver(trace).wait(trace.drained)
        finally:
            with trio.CancelScope(shield=True):
                for trace in traces:
                    if trace.begun:
                        with trio.move_on_after(_BRIEF_SECONDS), contextlib.suppress(WsgradError):
                            await _driver(trace).wait(trace.end)
                    trace.detach()
                await trio.to_thread.run_sync(write_timeline, file, traces)


def _open(path: str | os.PathLike[str]) -> TextIO:
    return open(path, "w", encoding="utf-8")


def _driver(trace: SessionTrace) -> Any:  # noqa: ANN401  (each face has its own)
    return trace.server._driver  # type: ignore[attr-defined]
