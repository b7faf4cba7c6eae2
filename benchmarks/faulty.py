"""A link that fails: it ends, resets, half closes, holds, delays, dribbles or swallows connections at random bytes.

What fails where follows from the seed, the number of the connection and the direction alone; when that byte comes, and
what each end has sent by then, does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.link import PIECE_NBYTES, Link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["close", "reset", "half-close", "hold", "delay", "dribble", "black hole"]

COMMON: Final[dict[Kind, float]] = {
    "close": 22,
    "reset": 22,
    "half-close": 10,
    "hold": 20,
    "delay": 12,
    "dribble": 14,
}
"""How often each kind comes, as weights. Black holes are left out: each costs 15 s of silence."""

_OPENING_NBYTES = 2_000
"""About what opening a connection and going on with a session takes, one way."""
_MOST_NBYTES = 6 << 20
_PATIENCE_SECONDS = 0.002
_UNSPECIFIED = struct.pack("H14x", socket.AF_UNSPEC)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens behind so many bytes of one direction of a connection, counted from the fault before.

    `amount` is seconds for holds and delays, and pieces for delays and dribbles; other kinds have none.
    """

    after: int
    kind: Kind
    seconds: float = 0.0
    pieces: int = 0


def faults_of(
    seed: int | str, number: int, *, to_server: bool, weights: dict[Kind, float] | None = None
) -> Iterator[Fault]:
    """The faults of one direction of connection `number`, without end."""
    chosen = COMMON if weights is None else weights
    kinds: Sequence[Kind] = list(chosen)
    rng = random.Random(f"{seed}/{number}/{'up' if to_server else 'down'}")
    while True:
        where = rng.random()
        if where < 0.3:
            after = rng.randrange(_OPENING_NBYTES)
        elif where < 0.7:
            after = int(100 * (_MOST_NBYTES / 100) ** rng.random())
        else:
            after = rng.randrange(_MOST_NBYTES)
        kind = rng.choices(kinds, weights=list(chosen.values()))[0]
        seconds = {"hold": rng.uniform(0.01, 0.4), "delay": rng.uniform(0.001, 0.03)}.get(kind, 0.0)
        yield Fault(after, kind, seconds, rng.randint(3, 40))


class FaultyLink(Link):
    """Fails at random, or where it is told to; what it does to one connection it does not do to another.

    Attributes:
        faults: how many there were of each kind.
        failing: whether anything fails now.
        most: it stops failing after so many faults.
        cut_after: so many bytes more may pass, over all connections that aren't spared and both ways together; then
            the one that brought them to that is closed.
    """

    def __init__(
        self,
        url: str,
        *,
        seed: int | str | None = None,
        most: int | None = None,
        weights: dict[Kind, float] | None = None,
        routes: Sequence[bytes] = (b"/v1/client", b"/v1/node"),
    ) -> None:
        """Makes a link.

        Args:
            url: the server's address.
            seed: what the faults follow from; without one nothing fails by itself.
            most: so many faults at most.
            weights: how often each kind comes; `COMMON` if left out.
            routes: connections to other routes, such as links between servers, don't fail; encrypted ones all may.
        """
        super().__init__(url)
        self.faults: Counter[Kind] = Counter()
        self.failing = seed is not None
        self.most = most
        self.cut_after: int | None = None
        self.routes = tuple(routes)
        self._seed = seed
        self._weights = weights

    def connected(self, number: int, client: socket.socket, server: socket.socket) -> None:
        passage = _Passage(self, number, client, server)
        for to_server in (True, False):
            self._start(lambda to_server=to_server: passage.run(to_server=to_server))  # type: ignore[misc]

    def faults_of(self, number: int, *, to_server: bool) -> Iterator[Fault]:
        """The faults of one direction of a connection."""
        if self._seed is None:
            return iter(())
        return faults_of(self._seed, number, to_server=to_server, weights=self._weights)

    def may_fail(self, kind: Kind) -> bool:
        """Count a fault, if there may be one now."""
        with self._lock:
            if not self.failing or (self.most is not None and self.faults.total() >= self.most):
                return False
            self.faults[kind] += 1
            return True

    def count(self, number: int, nbytes: int) -> int | None:
        """Take note of bytes that are about to pass; returns how many may where the connection is to be cut then."""
        with self._lock:
            if self.cut_after is None or number <= self.sparing:
                return None
            self.cut_after -= nbytes
            if self.cut_after > 0:
                return None
            left = nbytes + self.cut_after
            self.cut_after = None
            return left


class _Passage:
    """One connection by way of the link."""

    def __init__(self, link: FaultyLink, number: int, client: socket.socket, server: socket.socket) -> None:
        self._link = link
        self._number = number
        self._client = client
        self._server = server
        self._running = 2
        self._lock = threading.Lock()
        self._held_until = 0.0  # by time.monotonic(), for both directions
        self._swallows = False
        self._known = threading.Event()  # whether it is a connection that may fail
        self._spared = False

    def run(self, *, to_server: bool) -> None:
        """Carry one direction until it ends."""
        source, sink = (self._client, self._server) if to_server else (self._server, self._client)
        whole = False
        try:
            with contextlib.suppress(OSError):
                whole = self._carry(source, sink, to_server=to_server)
        finally:
            self._known.set()
            if not whole:
                self._link.hang_up(source, sink)
            with self._lock:
                self._running -= 1
                last = not self._running
            if last:
                self._link.over(self._number)

    def _carry(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> bool:
        """Carry bytes. Returns True where only this direction has ended."""
        faults = self._link.faults_of(self._number, to_server=to_server)
        fault = next(faults, None)
        passed = 0
        while data := source.recv(PIECE_NBYTES):
            if to_server and not self._known.is_set():
                line = data.split(b"\r\n", 1)[0]
                shown = line.startswith(b"GET ")
                self._spared = shown and not any(route in line for route in self._link.routes)
                self._known.set()
            self._known.wait()
            if self._swallows:
                break
            if (cut := self._link.count(self._number, len(data))) is not None:
                sink.sendall(data[:cut])
                return False
            while data:
                if fault is None or self._spared or passed + len(data) <= fault.after:
                    self._send(sink, data)
                    passed += len(data)
                    break
                piece, data = data[: fault.after - passed], data[fault.after - passed :]
                if piece:
                    self._send(sink, piece)
                if self._link.may_fail(fault.kind):
                    match fault.kind:
                        case "close":
                            return False
                        case "reset":
                            self._reset(source, sink)
                            return False
                        case "half-close":
                            sink.shutdown(socket.SHUT_WR)
                            self._swallow(source)
                            return True
                        case "black hole":
                            self._swallows = True
                            data = b""
                            break
                        case "hold":
                            self._held_until = time.monotonic() + fault.seconds
                        case "delay" | "dribble":
                            data = self._slow(source, sink, data, fault)
                passed = 0
                fault = next(faults, None)
            if self._swallows:
                break
        if self._swallows:
            # An end that gives up is not heard of at the other one, which has to find out by itself.
            self._swallow(source)
            return True
        return False

    def _send(self, sink: socket.socket, data: bytes) -> None:
        """Send, once nothing is held any more."""
        while (left := self._held_until - time.monotonic()) > 0 and self._link.failing:
            time.sleep(min(left, 0.02))
        if not self._swallows:
            sink.sendall(data)

    def _slow(self, source: socket.socket, sink: socket.socket, data: bytes, fault: Fault) -> bytes:
        """Let some pieces pass late, or a few bytes at a time. Returns what is left of the data."""
        for number in range(fault.pieces):
            if fault.kind == "delay":
                time.sleep(fault.seconds)
                self._send(sink, data)
                if number + 1 == fault.pieces or not self._link.failing:
                    return b""
                data = source.recv(PIECE_NBYTES)
            else:
                few = 1 + number % 7
                self._send(sink, data[:few])
                data = data[few:]
                time.sleep(_PATIENCE_SECONDS)  # so that it isn't joined with what follows
            if not data:
                break
        return data

    @staticmethod
    def _swallow(source: socket.socket) -> None:
        while source.recv(PIECE_NBYTES):
            pass

    @staticmethod
    def _reset(*sockets: socket.socket) -> None:
        """Reset connections: what was sent and not yet read is lost at their other ends.

        To close them would do only once no other thread waits in them; to dissolve them does at once.
        """
        for sock in sockets:
            ctypes.CDLL(None).connect(sock.fileno(), _UNSPECIFIED, len(_UNSPECIFIED))
