"""Measures what one queue's device does while a timeline is made: notes spans and sends them, some at a time.

It never holds more than one message of them: where more come at once, the device waits until the server has taken that.
"""

from __future__ import annotations

import ctypes
import struct
import time
from typing import TYPE_CHECKING, Final

from wsgrad.transport import commands as c
from wsgrad.transport.tracing import MAX_SPANS_NBYTES, RECORD, Profile, SpanKind, Spans

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.devices.base import Reply

_TRACE: Final = struct.Struct("<QQQQQ")
"""`struct trace` of native.c: where the spans are, how many fit, how many there are, graph, number."""
_ROOM: Final = MAX_SPANS_NBYTES // RECORD.size
_PERIOD_NANOSECONDS: Final = 20_000_000
_KINDS: Final = {
    c.Alloc: SpanKind.ALLOC,
    c.Write: SpanKind.WRITE,
    c.Read: SpanKind.READ,
    c.Copy: SpanKind.COPY,
    c.Fill: SpanKind.FILL,
}
now = time.monotonic_ns


class DeviceTrace:
    """The spans of a queue. Of a graph's replay they are its steps, else commands.

    Attributes:
        trace: the timeline's number.
        address: where the native loop finds the `struct trace` to fill.
        step: which step of a graph is run: its place in the device's order, from 1.
    """

    def __init__(self, queue: int, trace: int, reply: Reply) -> None:
        self.trace = trace
        self.step = 0
        self._queue = queue
        self._reply = reply
        self._spans = bytearray(_ROOM * RECORD.size)
        self._anchor = ctypes.c_char.from_buffer(self._spans)
        self._struct = ctypes.create_string_buffer(_TRACE.size)
        self.address = ctypes.addressof(self._struct)
        self._graph = self._number = 0
        self._began = self._sent_at = now()
        self._set(0)

    def beside(self, graph: int, number: int) -> DeviceTrace:
        """Another one, for what goes on beside this replay's launches; it is flushed before this one's last."""
        other = DeviceTrace(self._queue, self.trace, self._reply)
        other.replaying(graph, number)
        return other

    def replaying(self, graph: int, number: int) -> None:
        """From now on what is measured belongs to this replay; 0 and 0: it is a command of its own again."""
        self._graph, self._number = graph, number
        self._set(self._used)

    def add(self, kind: SpanKind, start: int, *, number: int, program: int = 0, nbytes: int = 0) -> None:
        """Note a span that ends now. During a replay it is the present step's, whatever `number` is."""
        step = 0
        if self._graph:
            number, step = self._number, self.step
        self._note(kind, start, program, self._graph, step, number, nbytes)

    def command(self, run: Callable[[int, c.Command], None], number: int, command: c.Command) -> None:
        """Run a command and note it, if it is one that takes time by itself."""
        start = now()
        run(number, command)
        kind = _KINDS.get(type(command))
        if kind is not None:
            nbytes = len(command.data) if isinstance(command, c.Write) else getattr(command, "nbytes", 0)
            self.add(kind, start, number=number, nbytes=nbytes)

    def replayed(self, start: int, graph: int, number: int) -> None:
        """Note a whole replay, as far as it belongs to the timeline: transfers may have held it for long."""
        self._note(SpanKind.REPLAY, max(start, self._began), 0, graph, 0, number, 0)

    def flush(self, *, last: bool = False) -> None:
        """Send what there is."""
        used = self._used
        if used or last:
            self._set(0)
            self._sent_at = now()
            self._reply(Spans(self._queue, self.trace, last), bytes(memoryview(self._spans)[: used * RECORD.size]))

    def settle(self) -> None:
        """A message has been worked off: send what there is, if it is much or old."""
        if self._used > _ROOM // 2 or now() - self._sent_at > _PERIOD_NANOSECONDS:
            self.flush()

    @property
    def _used(self) -> int:
        used: int = _TRACE.unpack_from(self._struct)[2]
        return used

    def _set(self, used: int) -> None:
        address = ctypes.addressof(self._anchor)
        _TRACE.pack_into(self._struct, 0, address, _ROOM, used, self._graph, self._number)

    def _note(self, kind: int, start: int, program: int, graph: int, step: int, number: int, nbytes: int) -> None:
        end = now()
        used = self._used
        if used == _ROOM:
            self.flush()
            used = 0
        values = (kind, 0, program, 0, graph, step, 0, number, start, end, nbytes)
        RECORD.pack_into(self._spans, used * RECORD.size, *values)
        self._set(used + 1)


def switched(trace: DeviceTrace | None, message: Profile, reply: Reply) -> DeviceTrace | None:
    """What measures a queue once the server has said so; what measured it before sends its last."""
    if trace is not None:
        trace.flush(last=True)
    elif not message.on:
        reply(Spans(message.queue, message.trace, True), b"")
    return DeviceTrace(message.queue, message.trace, reply) if message.on else None
