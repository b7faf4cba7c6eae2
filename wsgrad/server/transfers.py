"""Bytes on their way from one queue to another: pairs both ends and passes chunks on as they come; it holds no copy.

A chunk stays where its source has it, mostly in a slot of a ring, until the target takes it; the source is told then,
so it can't run ahead. However one end fails, the other learns the same cause, and nothing waits for what will not come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from wsgrad.errors import ProtocolError
from wsgrad.server.events import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FLOWS: Final = 1 << 16
ROUTED: Final = 1 << 31
"""Ids of downloads and uploads that the server makes for transfers begin here; a client's own are below."""
REPLAYED: Final = 3 << 30
"""From here on they are of transfers inside of graphs."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowChunk:
    """A chunk on its way.

    Attributes:
        owned: whether its memory stays as it is after `taken` was called.
        taken: tells the source that its memory is no longer needed.
    """

    bulk: memoryview
    owned: bool
    taken: Callable[[], None]


class Target(Protocol):
    """Where chunks go."""

    @property
    def has_room(self) -> bool:
        """Whether it takes a chunk now. It asks the flow to `pump` when that changes."""

    def put(self, chunk: FlowChunk) -> None:
        """Take the next chunk, and call its `taken` when it is no longer needed."""

    def finished(self) -> None:
        """The last chunk was put."""

    def failed(self, failure: Failure) -> None:
        """No more will come."""


class Flow:
    """One transfer.

    Attributes:
        number: its id.
        failure: why it can't come to its end.
        stop: called once if the target fails, so that the source sends no more.
        over: called once both ends are done.
    """

    def __init__(self, number: int, forget: Callable[[], None]) -> None:
        self.number = number
        self.failure: Failure | None = None
        self.stop: Callable[[Failure], None] | None = None
        self.over: Callable[[], None] | None = None
        self._forget = forget
        self._chunks: deque[FlowChunk] = deque()
        self._sent: int | None = None
        self._wanted: int | None = None
        self._came = 0
        self._put = 0
        self._target: Target | None = None
        self._source_done = False
        self._target_done = False

    # -- the source

    @property
    def source_over(self) -> bool:
        """Whether nothing more comes from the source."""
        return self._source_done

    def send(self, nbytes: int) -> None:
        """There is a source that will send so many bytes.

        Raises:
            ProtocolError: there is one already.
        """
        if self._sent is not None:
            raise ProtocolError(f"transfer {self.number} is sent twice")
        self._sent = nbytes
        self._compare()

    def offer(self, bulk: memoryview, taken: Callable[[], None], *, owned: bool) -> None:
        """The next chunk; `taken` is called once its memory is no longer needed."""
        if self.failure is not None:
            taken()
            return
        self._came += len(bulk)
        if self._wanted is not None and self._came > self._wanted:
            taken()
            self._mismatch(self._came, self._wanted)
            return
        self._chunks.append(FlowChunk(bulk, owned, taken))
        self.pump()

    def source_done(self, nbytes: int | None = None) -> None:
        """All of the source's chunks were offered, of `nbytes` in all where `send` did not say."""
        if self._source_done:
            return
        self._source_done = True
        self.stop = None
        if nbytes is not None and self._sent is None:
            self._sent = nbytes
            self._compare()
            self.pump()
        if self.failure is None and self._came != (self._sent or 0):
            self._fail(Failure("DeviceError", f"a transfer ended after {self._came} of {self._sent} bytes"))
        self._close()

    def source_failed(self, failure: Failure) -> None:
        """The source will not send what is missing."""
        self._source_done = True
        self.stop = None
        if not self._target_done:
            self._fail(failure)
        self._close()

    # -- the target

    def receive(self, nbytes: int) -> None:
        """There is a target that will take so many bytes.

        Raises:
            ProtocolError: there is one already.
        """
        if self._wanted is not None:
            raise ProtocolError(f"transfer {self.number} is received twice")
        self._wanted = nbytes
        self._compare()

    def start(self, target: Target) -> None:
        """The target is ready; `receive` came before, and nothing has failed."""
        self._target = target
        self.pump()

    def target_failed(self, failure: Failure) -> None:
        """The target takes no more: the source's chunks are thrown away."""
        self._target_done = True
        self._target = None
        self._fail(failure)
        self._close()

    def pump(self) -> None:
        """Pass on what the target has room for."""
        target = self._target
        if target is None:
            return
        while self._chunks and target.has_room:
            if self._sent is None and self._put + len(self._chunks[0].bulk) == self._wanted:
                return  # with its last byte the target is done: not before it is known that no more come
            chunk = self._chunks.popleft()
            self._put += len(chunk.bulk)
            target.put(chunk)
        if self._put == self._wanted == self._sent:
            self._target = None
            self._target_done = True
            target.finished()
            self._close()

    # -- both

    def fail(self, failure: Failure) -> None:
        """It can't come to its end: both ends learn why. Idempotent."""
        self._fail(failure)
        self._close()

    def _fail(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        chunks, self._chunks = self._chunks, deque()
        for chunk in chunks:
            chunk.taken()
        stop, self.stop = self.stop, None
        if stop is not None and not self._source_done:
            stop(failure)
        target, self._target = self._target, None
        if target is not None:
            self._target_done = True
            target.failed(failure)

    def _compare(self) -> None:
        if self._sent is not None and self._wanted is not None and self._sent != self._wanted:
            self._mismatch(self._sent, self._wanted)

    def _mismatch(self, sent: int, wanted: int) -> None:
        text = f"a transfer of {sent} bytes to a place of {wanted} bytes"
        self._fail(Failure("DeviceError", text, {"operation": "transfer", "nbytes": sent, "size": wanted}))

    def _close(self) -> None:
        if self._source_done and self._target_done:
            self._forget()
            over, self.over = self.over, None
            if over is not None:
                over()


class Transfers:
    """The transfers of a session, by route (0 within the session) and id."""

    def __init__(self) -> None:
        self._flows: dict[tuple[int, int], Flow] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def flow(self, route: int, number: int) -> Flow:
        """The transfer of that id; whichever end comes first makes it.

        Raises:
            ProtocolError: the id is out of range, or there are too many.
        """
        key = (route, number)
        flow = self._flows.get(key)
        if flow is None:
            if number >= REPLAYED - ROUTED:
                raise ProtocolError(f"transfer {number}; ids of transfers are below {REPLAYED - ROUTED}")
            if len(self._flows) >= MAX_FLOWS:
                raise ProtocolError(f"a session may have {MAX_FLOWS} transfers under way", close_code=1008)
            flow = self._flows[key] = Flow(number, partial(self._forget, key))
        return flow

    def _forget(self, key: tuple[int, int]) -> None:
        self._flows.pop(key, None)

    def fail_route(self, route: int, failure: Failure) -> None:
        """The link is gone: what was to go over it fails."""
        for (over, _), flow in list(self._flows.items()):
            if over == route:
                flow.source_failed(failure)
                flow.target_failed(failure)
