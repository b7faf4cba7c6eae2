"""Writes a timeline as Chrome trace events, which Perfetto and chrome://tracing show; it measures nothing.

A process is the client, a server, or a device; its threads are callers, frames, queues and lanes. What overlaps without
nesting (messages that wait for their device, compiles) is written as asynchronous events.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, TextIO

from wsgrad import __version__
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wsgrad.client.trace import SessionTrace

_CLIENT: Final = 1
_FIRST_FRAMES: Final = 1 << 16
"""Numbers of the client's threads from here on are no callers."""
_LANES: Final = {
    SpanKind.LAUNCH: (1, "kernels", "kernel"),
    SpanKind.REPLAY: (1, "kernels", "replay"),
    SpanKind.UPLOAD: (2, "copies", "copy"),
    SpanKind.DOWNLOAD: (2, "copies", "copy"),
    SpanKind.COPY: (2, "copies", "copy"),
    SpanKind.FILL: (2, "copies", "copy"),
    SpanKind.READ: (2, "copies", "copy"),
    SpanKind.WRITE: (2, "copies", "copy"),
    SpanKind.ALLOC: (3, "other", "memory"),
    SpanKind.COMPILE: (3, "other", "compile"),
}
_ASYNC: Final = {
    SpanKind.QUEUED: ("wait", "wait"),
    SpanKind.RUNNING: ("node", "at the node"),
    SpanKind.COMPILING: ("compile", "compile"),
}


def write_timeline(file: TextIO, traces: Sequence[SessionTrace]) -> None:
    """Write what was measured; one event a line, so that nothing has to be in memory at once."""
    metadata = {
        "wsgrad": __version__,
        "start_ns": min((trace.started for trace in traces), default=0),
        "servers": [
            {
                "url": trace.server._address,
                "clock_offset_ns": trace.offset()(trace.started),
                "dropped": trace.dropped,
                "graphs": trace.graphs,
            }
            for trace in traces
        ],
    }
    file.write(f'{{"displayTimeUnit":"ms","metadata":{json.dumps(metadata)},"traceEvents":[\n')
    writer = _Writer(file, min((trace.started for trace in traces), default=0), several=len(traces) > 1)
    for index, trace in enumerate(traces):
        writer.session(index, trace)
    writer.finish()
    file.write("\n]}\n")


class _Writer:
    def __init__(self, file: TextIO, start: int, *, several: bool) -> None:
        self._file = file
        self._start = start
        self._several = several
        self._begun = False
        self._tracks: dict[tuple[int, int], str] = {}
        self._processes: dict[int, str] = {_CLIENT: "client"}
        self._begins: dict[tuple[int, int, str], str] = {}
        self._last_id = 0

    def session(self, index: int, trace: SessionTrace) -> None:
        """All spans of one session."""
        server = len(self._processes) + 1
        self._processes[server] = f"server {trace.server._address}"
        devices: dict[int, int] = {}
        recurring: dict[tuple[int, int, int, int, int], tuple[str, str]] = {}
        frames = _FIRST_FRAMES + 4 * index
        offset = trace.offset()
        for kind, _, name, queue, graph, step, _, number, start, end, nbytes in trace.spans():
            if kind >= SpanKind.CALL:
                self._client(trace, frames, kind, trace.own_names[name], queue, start, end, nbytes)
                continue
            ahead = offset(start)
            start, end = start - ahead, end - ahead
            text = trace.names.get(name, "?")
            if kind in _ASYNC:
                self._overlapping(trace, server, kind, text, queue, number, step, start, end)
            elif kind in (SpanKind.RECEIVED, SpanKind.SENT):
                what = "received" if kind == SpanKind.RECEIVED else "sent"
                tid = 1 if kind == SpanKind.RECEIVED else 2
                self._event(server, tid, f"frames {what}", text, "frame", start, end, nbytes)
            elif kind in _LANES:
                process = devices.get(queue)
                if process is None:
                    process = devices[queue] = len(self._processes) + 1
                    self._processes[process] = f"device {trace.queues.get(queue, '?')} (queue {queue})"
                key = (process, kind, name, graph, step)
                parts = recurring.get(key)
                if parts is None:
                    parts = recurring[key] = self._device(trace, process, kind, text, graph, step)
                times = f'{(start - self._start) / 1000:.3f},"dur":{(end - start) / 1000:.3f}'
                size = f',"bytes":{nbytes}' if nbytes else ""
                self._line(f'{parts[0]}{times},"args":{{"number":{number}{size}{parts[1]}')

    def finish(self) -> None:
        """Say how processes and threads are called."""
        for pid, name in self._processes.items():
            self._metadata("process_name", pid, 0, {"name": name})
            self._metadata("process_sort_index", pid, 0, {"sort_index": pid})
        for (pid, tid), name in self._tracks.items():
            self._metadata("thread_name", pid, tid, {"name": name})
            self._metadata("thread_sort_index", pid, tid, {"sort_index": tid})

    def _client(
        self, trace: SessionTrace, frames: int, kind: int, name: str, caller: int, start: int, end: int, nbytes: int
    ) -> None:
        if kind == SpanKind.CALL:
            names = trace.callers.names
            called_by = names[caller] if caller < len(names) else "others"
            self._event(_CLIENT, caller + 1, called_by, name, "call", start, end)
        elif kind == SpanKind.FLUSH:
            self._event(_CLIENT, frames, f"flushes{self._which(trace)}", name, "flush", start, end)
        else:
            sent = kind == SpanKind.CLIENT_SENT
            lane = ("frames sent" if sent else "frames received") + self._which(trace)
            self._event(_CLIENT, frames + 2 - sent, lane, name, "frame", start, end, nbytes)

    def _which(self, trace: SessionTrace) -> str:
        return f" ({trace.server._address})" if self._several else ""

    def _overlapping(
        self,
        trace: SessionTrace,
        server: int,
        kind: int,
        name: str,
        queue: int,
        number: int,
        count: int,
        start: int,
        end: int,
    ) -> None:
        category, verb = _ASYNC[SpanKind(kind)]
        self._last_id += 1
        tid = 10 + queue
        self._tracks[server, tid] = f"queue {queue} of {trace.queues.get(queue, '?')}"
        arguments: dict[str, object] = {"queue": queue, "number": number}
        if count > 1:
            arguments["commands"] = count
        common = f'"cat":"{category}","id":"{self._last_id:#x}","name":{json.dumps(f"{verb}: {name}")}'
        place = f'"pid":{server},"tid":{tid}'
        self._line(f'{{"ph":"b",{common},{place},"ts":{self._time(start)},"args":{json.dumps(arguments)}}}')
        self._line(f'{{"ph":"e",{common},{place},"ts":{self._time(end)}}}')

    def _device(
        self, trace: SessionTrace, process: int, kind: int, name: str, graph: int, step: int
    ) -> tuple[str, str]:
        """The beginning and the end of an event, as it recurs; between them go the times and a command's number."""
        lane, label, category = _LANES[SpanKind(kind)]
        arguments: dict[str, object] = {}
        if kind == SpanKind.REPLAY:
            name = f"graph {graph}"
        elif kind not in (SpanKind.LAUNCH, SpanKind.COMPILE):
            name = SpanKind(kind).name.lower()
        if graph:
            arguments["graph"] = graph
            found = trace.step(graph, step)
            if found is not None:
                arguments |= {"item": found[0], "of": name}
                name = f"{name} #{found[0]}"
        begin = self._begin(process, lane, label, name, category)
        return begin, ("," + json.dumps(arguments)[1:] if arguments else "}") + "}"

    def _begin(self, pid: int, tid: int, track: str, name: str, category: str) -> str:
        self._tracks.setdefault((pid, tid), track)
        return f'{{"ph":"X","cat":"{category}","name":{json.dumps(name)},"pid":{pid},"tid":{tid},"ts":'

    def _event(
        self, pid: int, tid: int, track: str, name: str, category: str, start: int, end: int, nbytes: int | None = None
    ) -> None:
        key = (pid, tid, name)
        begin = self._begins.get(key)
        if begin is None:
            begin = self._begins[key] = self._begin(pid, tid, track, name, category)
        arguments = "" if nbytes is None else f',"args":{{"bytes":{nbytes}}}'
        self._line(f'{begin}{(start - self._start) / 1000:.3f},"dur":{(end - start) / 1000:.3f}{arguments}}}')

    def _metadata(self, what: str, pid: int, tid: int, arguments: object) -> None:
        self._line(f'{{"ph":"M","name":"{what}","pid":{pid},"tid":{tid},"args":{json.dumps(arguments)}}}')

    def _time(self, nanoseconds: int) -> str:
        return f"{(nanoseconds - self._start) / 1000:.3f}"

    def _line(self, text: str) -> None:
        self._file.write(",\n" + text if self._begun else text)
        self._begun = True
