"""What timelines are made of on the wire: spans in fixed records, the messages that carry them, and aligned clocks.

It decides nothing about what is measured: devices, server and client each have a module `trace` for that. Times are
nanoseconds of the clock of whoever measured, `CLOCK_MONOTONIC` where there is one.
"""

from __future__ import annotations

import enum
import itertools
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

# At run time: the table of messages reads the annotations.
from wsgrad.transport.fields import U32, U53, U64, Arrays, Bool  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.transport.link import Outgoing

RECORD: Final = struct.Struct("<HHIIIIIQqqQ")
"""One span: kind, 0, name, queue, graph, step, 0, number, start, end, bytes.

From a node `name` is the program's id, and `step` the place of a graph's step in the device's order, from 1; from a
server `name` is one that its `Traced` has introduced, and `step` the step's number in the graph.
"""
MAX_SPANS_NBYTES: Final = (1 << 16) // RECORD.size * RECORD.size
"""The most bytes of spans in one message."""
_ALIGN_COUNT: Final = 5
_SAMPLES: Final = 16


class SpanKind(enum.IntEnum):
    """What a span is. Up to `COMPILE` nodes measure, then the server, from `CALL` on the client."""

    LAUNCH = 1
    REPLAY = 2
    UPLOAD = 3
    DOWNLOAD = 4
    COPY = 5
    FILL = 6
    READ = 7
    WRITE = 8
    ALLOC = 9
    COMPILE = 10
    QUEUED = 32
    """From a message's arrival at the server until it was given to the node; `step` commands, up to `number`."""
    RUNNING = 33
    """From there until the node has acknowledged the last of them."""
    RECEIVED = 34
    """Working off one message of the client."""
    SENT = 35
    """Handing one message to the connection."""
    COMPILING = 36
    CALL = 48
    FLUSH = 49
    CLIENT_RECEIVED = 50
    CLIENT_SENT = 51


@dataclass(frozen=True, slots=True)
class Clock:
    """Asks for the other side's clock; answered at once by `Time` with the same token."""

    KIND: ClassVar[int] = 10
    token: U32


@dataclass(frozen=True, slots=True)
class Time:
    """The answer to `Clock`: nanoseconds of the clock that the answerer's spans are measured with."""

    KIND: ClassVar[int] = 11
    token: U32
    nanoseconds: U64


@dataclass(frozen=True, slots=True)
class Trace:
    """Client → server: measure from now on, as trace `trace`, or no longer. The end is answered by a last `Traced`."""

    KIND: ClassVar[int] = 44
    trace: U32
    on: Bool


@dataclass(frozen=True, slots=True)
class Traced:
    """Server → client. Bulk: spans of a trace, as records of 56 bytes.

    `names` introduces `[number, text]` for the spans of this message and later ones; `dropped` spans were lost so far.
    """

    KIND: ClassVar[int] = 45
    trace: U32
    names: Arrays
    dropped: U53
    last: Bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Server → node: measure this queue from now on, as trace `trace`, or no longer; the end is answered by `Spans`."""

    KIND: ClassVar[int] = 55
    queue: U32
    trace: U32
    on: Bool


@dataclass(frozen=True, slots=True)
class Spans:
    """Node → server. Bulk: spans of a queue, as records of 56 bytes; `last` where no more of this trace will come."""

    KIND: ClassVar[int] = 56
    queue: U32
    trace: U32
    last: Bool


class Alignment:
    """How far another clock is ahead of ours: asks it a few times, and believes the answer that came fastest.

    Args:
        send: sends the question.
    """

    def __init__(self, send: Callable[[Clock], None]) -> None:
        self._send = send
        self._tokens = itertools.count(1)
        self._asked: dict[int, int] = {}
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)
        self._left = 0

    def start(self, count: int = _ALIGN_COUNT) -> None:
        """Ask so many times, one after the other."""
        self._left = count
        self._asked.clear()  # answers that are still out belonged to a connection that is gone, or come too late
        self._ask()

    @property
    def done(self) -> bool:
        """Whether all that was asked has been answered."""
        return not self._asked

    def answer(self, answer: Time) -> None:
        """Take an answer; one that nobody waits for is ignored."""
        now = time.monotonic_ns()
        asked = self._asked.pop(answer.token, None)
        if asked is None:
            return
        self._samples.append((now - asked, answer.nanoseconds - (asked + now) // 2))
        if self._left:
            self._ask()

    @property
    def known(self) -> bool:
        """Whether there was any answer."""
        return bool(self._samples)

    @property
    def offset(self) -> int:
        """What to take off the other clock's times; 0 where both may as well be the same clock."""
        round_trip, ahead = min(self._samples, default=(0, 0))
        return 0 if abs(ahead) <= round_trip else ahead

    @property
    def slack(self) -> int:
        """By how much that may be wrong."""
        round_trip, _ = min(self._samples, default=(0, 0))
        return round_trip

    def forget(self) -> None:
        """Start anew: clocks drift."""
        self._samples.clear()

    def _ask(self) -> None:
        self._left -= 1
        token = next(self._tokens) & 0xFFFFFFFF
        self._asked[token] = time.monotonic_ns()
        self._send(Clock(token))


class FrameWatch:
    """Makes spans of what a link gives out: a message's lasts until the next is taken, or nothing is left to send.

    Args:
        record: told the kind and size of a message, and its times.
    """

    def __init__(self, record: Callable[[int, int, int, int], None]) -> None:
        self._record = record
        self._open: tuple[int, int, int] | None = None

    def __call__(self, outgoing: Outgoing | None) -> None:
        """The link has given out this message, or has no more."""
        now = time.monotonic_ns()
        if self._open is not None:
            kind, nbytes, started = self._open
            self._record(kind, nbytes, started, now)
            self._open = None
        if outgoing is not None:
            # An array's head of one byte, then a small integer in one byte or two.
            kind = outgoing.head[1] if outgoing.head[1] < 24 else outgoing.head[2]
            self._open = kind, outgoing.nbytes, now
