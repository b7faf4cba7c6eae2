"""`server.trace(path)` of the blocking face: begins a timeline on servers, ends it with a file; it measures nothing."""

from __future__ import annotations

import contextlib
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from wsgrad.client.trace import Callers, SessionTrace
from wsgrad.client.trace_file import write_timeline
from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from wsgrad.client.base import BaseServer

BRIEF_SECONDS: Final = 5.0
"""How long servers have to compare clocks, or to send their last, before the timeline goes on without that."""


@contextmanager
def timeline(
    servers: Sequence[BaseServer[Any]], path: str | os.PathLike[str], *, timeout: float | None = None
) -> Iterator[None]:
    """What `Server.trace` is, for one or several servers of the blocking face."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "w", encoding="utf-8"))
        callers = Callers()
        traces = [stack.enter_context(contextlib.closing(SessionTrace(server, callers))) for server in servers]
        try:
            try:
                for trace in traces:
                    with contextlib.suppress(TimeoutError):
                        driver_of(trace).run(trace.begin, BRIEF_SECONDS)
                for trace in traces:
                    trace.recording = True
                yield
            finally:
                for trace in traces:
                    trace.recording = False
            deadline = None if timeout is None else time.monotonic() + timeout
            for trace in traces:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                driver_of(trace).run(trace.drained, left)
        finally:
            for trace in traces:
                try:
                    with contextlib.suppress(TimeoutError, WsgradError):  # what there is is written all the same
                        if trace.begun:
                            driver_of(trace).run(trace.end, BRIEF_SECONDS)
                finally:
                    driver_of(trace).call(trace.detach)
            write_timeline(file, traces)


def driver_of(trace: SessionTrace) -> Any:  # noqa: ANN401  (each face has its own)
    """The driver of the server that a timeline is of."""
    return trace.server._driver  # type: ignore[attr-defined]
