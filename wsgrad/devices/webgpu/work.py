"""Gathers commands in one encoder, submits them, waits for them and says meanwhile what runs; knows no program.

How long launches take is guessed from those before. What is submitted together should be over in a small part of the
time that one launch may take, so that whoever watches this process can tell a long queue from a launch that hangs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from wsgrad.errors import DeviceError, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.devices.pace import Pace

_MAP_READ, _COPY_SRC, _COPY_DST, _QUERY_RESOLVE = 0x1, 0x4, 0x8, 0x200
STAGING_NBYTES: Final = (1 << 20) + 16
"""A chunk of a download and the words around its ragged ends."""
_LEAST_BUDGET_SECONDS: Final = 0.002
_MOST_WRITTEN_NBYTES: Final = 4 << 20


class Work:
    """The commands of one device.

    Attributes:
        device: wgpu's.
        now: the command that the executor works on, and the step of its graph or 0.
        pipeline: what is set in the open pass.
    """

    def __init__(
        self,
        device: Any,  # noqa: ANN401  # wgpu has no types
        *,
        launch_seconds: float,
        report: Callable[[int, int], None],
        lost: Callable[[], None],
    ) -> None:
        self.device = device
        self.now = (0, 0)
        self.pipeline: Any = None
        self._report = report
        self._lost = lost
        self._budget = max(_LEAST_BUDGET_SECONDS, launch_seconds / 8)
        self._encoder: Any = None
        self._written = 0
        self._pass: Any = None
        self._staging = self._buffer(STAGING_NBYTES, _MAP_READ | _COPY_DST)
        self._doomed: list[Any] = []
        self._before_submit: list[Callable[[], None]] = []
        self._paces: set[Pace] = set()
        self._expected = 0.0
        self._suspect: tuple[float, tuple[int, int]] | None = None
        self._submitted: float | None = None
        self._queries: tuple[Any, Any] | None = None

    # -- encoding

    def compute(self) -> Any:  # noqa: ANN401
        """The open compute pass."""
        if self._pass is None:
            self._pass = self.encoder().begin_compute_pass()
            self.pipeline = None
        return self._pass

    def encoder(self) -> Any:  # noqa: ANN401
        """The open encoder, outside of a pass."""
        if self._pass is not None:
            self._pass, ended = None, self._pass
            ended.end()
        if self._encoder is None:
            self._encoder = self.device.create_command_encoder()
        return self._encoder

    def before_submit(self, action: Callable[[], None]) -> None:
        """Call this before each submission: it writes what the commands need."""
        self._before_submit.append(action)

    def doom(self, buffer: Any) -> None:  # noqa: ANN401
        """Destroy a buffer once the commands gathered so far are submitted."""
        if self._encoder is None:
            buffer.destroy()
        else:
            self._doomed.append(buffer)

    def begin(self, pace: Pace, groups: int) -> None:
        """A launch will be encoded: end what was gathered before where both together could take too long."""
        if pace.seconds is None or (self._expected and not self.has_room(pace.expect(groups))):
            self.finish()

    def end(self, pace: Pace, groups: int, at: tuple[int, int]) -> None:
        """The launch at `at` was encoded: count what it should take. The first one of a program runs alone."""
        if pace.seconds is None:
            pace.groups = groups
            self.expect(pace, self._budget, 1, at)
            self.finish()
            return
        if groups > pace.groups:
            pace.seconds, pace.groups = pace.expect(groups), groups
        self.expect(pace, pace.seconds, 1, at)

    def expect(self, pace: Pace, seconds: float, count: int, at: tuple[int, int]) -> None:
        """So many launches were encoded that take so long each, the first of them at `at`."""
        self._paces.add(pace)
        self._expected += seconds * count
        if self._suspect is None or seconds > self._suspect[0]:
            self._suspect = seconds, at

    def has_room(self, seconds: float) -> bool:
        """Whether so much more may be submitted together with what there is."""
        return self._expected + seconds <= self._budget

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:  # noqa: ANN401
        """Write whole words, behind all that was gathered so far."""
        if self._encoder is not None:
            self.submit()
        self.device.queue.write_buffer(buffer, offset, data)
        # The library keeps a copy until the next submission.
        self._written += data.nbytes
        if self._written >= _MOST_WRITTEN_NBYTES:
            self.submit()

    # -- submitting

    def submit(self) -> None:
        """Start what was gathered; what comes next runs behind it.

        Raises:
            DeviceError: the commands are not valid together; none of them has run.
            DeviceLost: the device is gone.
        """
        if self._encoder is None and not self._written:
            return
        for action in self._before_submit:
            action()
        try:
            self.device.queue.submit([] if self._encoder is None else [self.encoder().finish()])
        except Exception as error:
            raise self.translated(error) from error
        finally:
            self._encoder = self._pass = None
            self._written = 0
            for buffer in self._doomed:
                buffer.destroy()
            self._doomed.clear()
        if self._submitted is None:
            self._submitted = time.perf_counter()

    def finish(self) -> None:
        """Run everything so far to its end; raises as `submit` does."""
        try:
            self.submit()
            if self._submitted is not None:
                self._wait(None)
        finally:
            self._settle()

    def read(self, buffer: Any, offset: int, nbytes: int, take: Callable[[memoryview], None]) -> None:  # noqa: ANN401
        """Run all so far, then pass on up to `STAGING_NBYTES` of a buffer; the view is valid during the call only.

        `offset` and `nbytes` are multiples of 4.
        """
        self.encoder().copy_buffer_to_buffer(buffer, offset, self._staging, 0, nbytes)
        try:
            self.submit()
            self._wait((nbytes + 7) & ~7)
        finally:
            self._settle()
        try:
            take(self._staging.read_mapped(0, nbytes, copy=False))
        finally:
            self._staging.unmap()

    def timed(self, encode: Callable[[Any], None], at: tuple[int, int]) -> float:
        """Run one launch alone, which `encode` puts into the pass it is given; the seconds it took.

        The clock is the device's where it has one, else this process's around the submission and its end.
        """
        self.finish()
        timestamps = "timestamp-query" in self.device.features
        if timestamps and self._queries is None:
            resolved = self._buffer(256, _QUERY_RESOLVE | _COPY_SRC)
            self._queries = self.device.create_query_set(type="timestamp", count=2), resolved
        encoder = self.encoder()
        if self._queries is not None:
            indices = {"beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
            self._pass = encoder.begin_compute_pass(timestamp_writes={"query_set": self._queries[0], **indices})
        else:
            self._pass = encoder.begin_compute_pass()
        self.pipeline = None
        encode(self._pass)
        self._suspect = self._budget, at
        started = time.perf_counter()
        if self._queries is None:
            self.finish()
            return time.perf_counter() - started
        self.encoder().resolve_query_set(self._queries[0], 0, 2, self._queries[1], 0)
        stamps: list[int] = []
        self.read(self._queries[1], 0, 16, lambda view: stamps.extend(view.cast("Q")))
        return max(0, stamps[1] - stamps[0]) / 1e9

    def translated(self, error: Exception) -> DeviceError:
        """An error of wgpu as one of ours; where the device is lost, whoever can end this process is told."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        words = [line for line in lines if line not in ("Validation Error", "Caused by:") and "In wgpu" not in line]
        text = "; ".join(words) or type(error).__name__
        if "device is lost" in text.lower() or "device lost" in text.lower():
            self._lost()
            return DeviceLost(f"the driver has lost the device: {text:.500}")
        return DeviceError(f"{text:.1000}")

    def close(self) -> None:
        """Free everything; the device is of no use any more."""
        self._encoder = self._pass = None
        self._doomed.clear()
        self.device.destroy()

    def _buffer(self, nbytes: int, usage: int) -> Any:  # noqa: ANN401
        return self.device.create_buffer(size=nbytes, usage=usage)

    def _wait(self, mapped: int | None) -> None:
        """Wait until all submitted is over; with the staging buffer's first bytes mapped, if so many are wanted."""
        self._report(*(self.now if self._suspect is None else self._suspect[1]))
        try:
            if mapped is not None:
                self._map(mapped)
            elif not _poll(self.device):
                self._map(8)
                self._staging.unmap()
        except Exception as error:
            raise self.translated(error) from error
        finally:
            self._report(*self.now)

    def _map(self, nbytes: int) -> None:
        promise = self._staging.map_async("READ", 0, nbytes)
        # Waiting here and not in the library's thread saves two changes of threads, some 200 µs.
        _poll(self.device)
        promise.sync_wait()

    def _settle(self) -> None:
        """Learn from what is over."""
        if self._submitted is not None:
            elapsed = time.perf_counter() - self._submitted
            ratio = elapsed / self._expected if self._expected else 1.0
            for pace in self._paces:
                if pace.seconds is None:
                    pace.seconds = elapsed
                elif ratio > 1:
                    pace.seconds *= ratio
                else:  # one quick run does not prove much
                    pace.seconds *= max(ratio, 0.25)
        self._paces.clear()
        self._expected = 0.0
        self._suspect = None
        self._submitted = None


def _poll(device: Any) -> bool:  # noqa: ANN401
    """Wait for all that was submitted, where this version of the library has a call for that."""
    wait = getattr(device, "_poll_wait", None)
    if wait is None:
        return False
    wait()
    return True
