"""The blocking face: `connect` and the objects whose methods wait in the calling thread. It adds only waiting."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any, Self, TypeVar

from wsgrad.client.base import BaseDevice, BaseServer
from wsgrad.client.blobs import MIN_CACHED
from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.core import Session
from wsgrad.client.devices import no_device_came
from wsgrad.client.embedded import EmbeddedServer
from wsgrad.client.events import BaseEvent
from wsgrad.client.graph import Graph
from wsgrad.client.handle import new_lifetime
from wsgrad.client.outbox import MAX_UNSENT
from wsgrad.client.program import BaseProgram
from wsgrad.client.recorders import refuse_all
from wsgrad.client.target import AGENT, ROUTE, debugging, target_of, wanted_url
from wsgrad.client.timeline import timeline
from wsgrad.errors import ConnectionLost, WsgradError
from wsgrad.transport.blocking_driver import BlockingDriver
from wsgrad.transport.dial import dial

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import ArrayLike, DTypeLike

    from wsgrad.client.arrays import Array
    from wsgrad.client.handle import Handle
    from wsgrad.client.queue import Queue
    from wsgrad.client.recording import Recorder
    from wsgrad.client.target import Target
    from wsgrad.client.waits import Wait

T = TypeVar("T")

_START_SECONDS = 30.0
_RETRY_SECONDS = 0.05


class Buffer(BaseBuffer):
    """An array on a device, or a view of one."""

    __slots__ = ()

    def numpy(self, *, timeout: float | None = None) -> Array:
        """Wait for what was issued before and return the values in a new array.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; the session lives.
            WsgradError: it, or a command issued before it, failed.
        """
        return self._wait(self._start_numpy, timeout)

    def copy_to(self, target: Array, *, timeout: float | None = None) -> None:
        """Wait like `numpy`, and put the values into an array of the same shape and dtype.

        After a time-out or Ctrl-C its contents are undefined, but nothing more is written into it.
        """
        checked = self._checked_target(target)
        self._wait(lambda: self._start_copy_to(checked), timeout)

    def copy_from(self, source: ArrayLike | BaseBuffer, *, timeout: float | None = None) -> None:
        """Replace the values by those of an array, or of a buffer on any device or server, of the same shape and dtype.

        Returns when `source` may be changed again: an array below 1 MiB is copied, else the device has it. With a
        buffer it never waits; between devices the bytes go from one to the other without coming here.
        """
        checked = self._checked_source(source)
        if isinstance(checked, BaseBuffer) and self._copy_across(checked):
            return
        server: Server = self._device._server  # type: ignore[assignment]
        digest = None if isinstance(checked, BaseBuffer) else server._digest(checked)
        self._wait(lambda: self._start_copy_from(checked, digest), timeout)

    def _wait(self, start: Callable[[], Wait[T]], timeout: float | None) -> T:
        self._device._make_room()
        server: Server = self._device._server  # type: ignore[assignment]
        return server._driver.run(start, timeout)


class Event(BaseEvent):
    """A moment on a device: when everything issued there before `signal` has run."""

    @property
    def done(self) -> bool:
        """Whether it has happened or failed. Looks at what has come, and does not wait."""
        if not self._event.settled:
            server: Server = self._device._server  # type: ignore[assignment]
            server._driver.flush(server._session.flush)
        return self._event.settled

    def wait(self, *, timeout: float | None = None) -> None:
        """Wait until it has happened.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; the session lives.
            WsgradError: what its device failed with before.
        """
        server: Server = self._device._server  # type: ignore[assignment]
        server._driver.run(self._start_wait, timeout)


class Program(BaseProgram):
    """A source and the function in it that a launch calls."""

    def timed(
        self,
        *arguments: object,
        grid: int | Sequence[int] | None = None,
        block: int | Sequence[int] | None = None,
        timeout: float | None = None,
        **constants: float,
    ) -> float:
        """Launch, wait, and return how many seconds it took on the device."""
        self._device._make_room()
        server: Server = self._device._server  # type: ignore[assignment]
        return server._driver.run(lambda: self._start_timed(arguments, grid, block, constants), timeout)

    def ready(self, *, timeout: float | None = None) -> None:
        """Wait until it is compiled.

        Raises:
            CompileError: it does not compile; the message is the compiler's.
            LaunchError: inside a recording.
        """
        self._device._make_room()
        server: Server = self._device._server  # type: ignore[assignment]
        server._driver.run(self._start_ready, timeout)


class Device(BaseDevice[Buffer, Program]):
    """One device in a session."""

    def array(self, data: ArrayLike, dtype: DTypeLike | None = None, *, timeout: float | None = None) -> Buffer:
        """A new buffer with the values of an array, or of anything that NumPy makes one of.

        Returns when `data` may be changed again.
        """
        checked = self._checked_array(data, dtype)
        digest = self._face._digest(checked)
        self._make_room()
        return self._wait(lambda: self._start_array(checked, digest), timeout)

    def arrays(self, data: Iterable[ArrayLike], *, timeout: float | None = None) -> list[Buffer]:
        """New buffers with the values of several arrays, with one wait; with `cache=True` one question for all of them.

        Returns when all of `data` may be changed again.
        """
        checked = [self._checked_array(item, None) for item in data]
        digests = [self._face._digest(array) for array in checked]
        self._make_room()
        return self._wait(lambda: self._start_arrays(checked, digests), timeout)

    def signal(self) -> Event:
        """An event that happens once everything issued here so far has run. Never waits."""
        self._make_room()
        return Event(self, self._server._call(self._start_signal))

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Wait until everything issued on this device has run."""
        self._wait(self._start_synchronize, timeout)

    def reopen(self, *, timeout: float | None = None) -> None:
        """Give it a new, empty process: after a crash, or to free everything. Buffers of before are lost."""
        self._wait(self._start_reopen, timeout)

    def flush(self, *, timeout: float | None = None) -> None:
        """Send everything issued so far; don't wait for it to run."""
        self._face.flush(timeout=timeout)

    def close(self) -> None:
        """Free everything on it and let it go; it opens again when it is used next."""
        self._face._call(self._close)

    @property
    def _face(self) -> Server:
        server: Server = self._server  # type: ignore[assignment]
        return server

    def _wait(self, start: Callable[[], Wait[T]], timeout: float | None) -> T:
        return self._face._driver.run(start, timeout)

    def _new_graph(self, recorder: Recorder) -> Graph:
        return Graph(recorder)

    def _new_buffer(
        self, handle: Handle, base: Handle, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Buffer:
        return Buffer(self, handle, base, offset, shape, dtype)

    def _new_program(
        self, source: str, entry: str, dialect: str, writes: Sequence[int] | None, alias: bool, name: str
    ) -> Program:
        return Program(self, source, entry, dialect=dialect, writes=writes, alias=alias, name=name)


class Server(BaseServer[Device]):
    """A session with a server, as `connect` opens it. Threads may share it."""

    def __init__(self, target: Target, embedded: EmbeddedServer | None) -> None:
        endpoint = target.endpoint
        session = Session(agent=AGENT, debug=debugging())
        super().__init__(session, url=target.url, address=endpoint.url, count=endpoint.count)
        self._embedded = embedded
        self._ended = False
        self._driver = BlockingDriver(
            session,
            lambda timeout: dial(endpoint, route=ROUTE, token=target.token, cafile=target.cafile, timeout=timeout),
            peer=endpoint.url,
        )
        self._lifetime = new_lifetime()
        self._abandon = weakref.finalize(self._lifetime, _abandon, self._driver, embedded)
        self._abandon.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def flush(self, *, timeout: float | None = None) -> None:
        """Send everything issued so far; don't wait for it to run."""

        def start() -> Wait[None]:
            refuse_all(self, "a flush")
            self._session.check()
            return self._session.flushed()

        self._driver.run(start, timeout)

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Wait until everything issued on every device has run."""
        for device in list(self._made.values()):
            if device._queue is not None:
                device.synchronize(timeout=timeout)

    def wait_for_device(self, name: str, *, timeout: float | None = None) -> Device:
        """Wait until a device of that id, label or kind is there and not paused, such as a browser tab that joins.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            ConnectionLost: the session ended meanwhile.
        """
        try:
            return self._driver.run(lambda: self._start_awaiting(name), timeout)
        except TimeoutError:
            raise TimeoutError(no_device_came(name, timeout, self._offer())) from None

    def trace(
        self, path: str | os.PathLike[str], *, timeout: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """For `with`: write a timeline of what happens inside to a file, for Perfetto or `wsgrad trace`.

        The end of `with` waits until what was issued has run, at most `timeout` seconds, and then for the file.

        Raises:
            WsgradError: this session is in a timeline already, or is over.
            TimeoutError: it took longer than `timeout` seconds; what was measured until then is in the file.
        """
        return timeline([self], path, timeout=timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for what was issued, then end the session: the server frees everything of it. Idempotent.

        Raises:
            WsgradError: what no call has raised yet: an error of a command, or the loss of the connection.
            TimeoutError: what was issued took longer than `timeout` seconds; the session is ended all the same.
        """
        if self._ended:
            return
        error: WsgradError | None = None
        try:
            for wait in self._driver.call(self._session.drained):
                try:
                    self._driver.run(lambda wait=wait: wait, timeout)  # type: ignore[misc]
                except WsgradError as exc:
                    error = error or exc
            error = self._session.take_unraised() or error
        finally:
            self._end()
        if error is not None:
            raise error

    def _end(self) -> None:
        self._ended = True
        self._abandon.detach()
        try:
            self._driver.close()
        finally:
            if self._embedded is not None:
                self._embedded.stop()

    def _digest(self, array: Array) -> bytes | None:
        """What the server's cache calls an array; None where it is not asked."""
        return self._hasher.digest(array) if self._hasher is not None and array.nbytes >= MIN_CACHED else None

    def _new_device(self, identity: str) -> Device:
        return Device(self, identity)

    def _call(self, issue: Callable[[], T]) -> T:
        return self._driver.call(issue)

    def _look(self) -> None:
        if not self._session.over:
            self._driver.flush(lambda: None)

    def _room(self, queue: Queue) -> None:
        if queue.unsent_bytes > MAX_UNSENT:
            self._driver.run(lambda: self._session.when(lambda: queue.unsent_bytes <= MAX_UNSENT // 2))
        for ids in (queue.life.buffers, queue.life.programs):
            if ids.exhausted and queue.life.dead is None:
                self._driver.run(lambda ids=ids: self._session.after_flush(lambda: not ids.short))  # type: ignore[misc]

    def _full(self, queue: Queue) -> None:
        self._driver.flush(queue.flush)
        self._room(queue)

    def _offer(self) -> str:
        offer = super()._offer()
        if self._embedded is not None and not self._device_rows():
            return f"{offer}; it said: {self._embedded.said() or 'nothing'}"
        return offer


def _abandon(driver: BlockingDriver, embedded: EmbeddedServer | None) -> None:
    driver.abandon()
    if embedded is not None:
        embedded.abandon()


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    cafile: str | None = None,
    cache: bool = False,
    wait: float = 0.0,
    timeout: float = _START_SECONDS,
) -> Server:
    """Open a session with a server.

    Args:
        url: its address, such as `ws://host:7667#token=…`; `WSGRAD_URL` if left out, and without that a server of our
            own on this machine's CPU, which ends with the session.
        token: the client token, if the address holds none; else `WSGRAD_TOKEN` is used.
        cafile: a PEM file of authorities to trust for `wss://`.
        cache: whether to ask the server for what is uploaded, from 1 MiB on, before it is sent: by a hash of it, which
            takes a moment and a round trip. For slow links; needs `pip install wsgrad[cache]`.
        wait: seconds to wait for a server that is just starting and does not accept connections yet.
        timeout: seconds for connecting.

    Raises:
        ConnectionLost: there is no server, or it left.
        Unauthorized: the token, or the server's certificate, is wrong.
        TimeoutError: it took too long.
    """
    wanted = wanted_url(url)
    embedded = None
    if wanted is None:
        embedded = EmbeddedServer(timeout=timeout)
        wanted = embedded.url
    try:
        target = target_of(wanted, token=token, cafile=cafile)
        give_up = time.monotonic() + wait
        while True:
            server = Server(target, embedded)
            try:
                server._driver.open(timeout)
            except ConnectionRefusedError as exc:
                server._abandon.detach()
                left = give_up - time.monotonic()
                if left <= 0:
                    raise ConnectionLost(
                        f"no server at {target.endpoint.url}: the connection was refused; start one with wsgrad-serve"
                        + ("" if wait else ", or wait for it with wait=")
                    ) from exc
                time.sleep(min(_RETRY_SECONDS, left))
            except BaseException:
                server._abandon.detach()
                raise
            else:
                break
        if cache:
            try:
                server._start_caching()
            except BaseException:
                server._end()
                raise
        return server
    except BaseException:
        if embedded is not None:
            with contextlib.suppress(OSError):
                embedded.stop()
        raise
