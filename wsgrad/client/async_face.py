"""The trio face: `open_server` and the objects whose methods wait as coroutines. It adds only waiting.

What doesn't wait is a plain call, as in the blocking face. There is no `timeout=`: a cancel scope withdraws any wait.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from wsgrad.client.async_driver import AsyncDriver
from wsgrad.client.async_timeline import async_timeline
from wsgrad.client.base import BaseDevice, BaseServer
from wsgrad.client.blobs import MIN_CACHED
from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.core import Session
from wsgrad.client.embedded import EmbeddedServer
from wsgrad.client.events import BaseEvent
from wsgrad.client.graph import AsyncGraph
from wsgrad.client.outbox import MAX_UNSENT
from wsgrad.client.program import BaseProgram
from wsgrad.client.recorders import refuse_all
from wsgrad.client.target import AGENT, ROUTE, debugging, target_of, wanted_url
from wsgrad.client.waits import settled
from wsgrad.errors import ConnectionLost, LimitExceeded, WsgradError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

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


class AsyncBuffer(BaseBuffer):
    """An array on a device, or a view of one."""

    __slots__ = ()

    async def numpy(self) -> Array:
        """Wait for what was issued before and return the values in a new array.

        Raises:
            WsgradError: it, or a command issued before it, failed.
        """
        return await self._wait(self._start_numpy)

    async def copy_to(self, target: Array) -> None:
        """Wait like `numpy`, and put the values into an array of the same shape and dtype.

        When it is cancelled its contents are undefined, but nothing more is written into it.
        """
        await self._wait(lambda: self._start_copy_to(self._checked_target(target)))

    async def copy_from(self, source: ArrayLike | BaseBuffer) -> None:
        """Replace the values by those of an array, or of a buffer on any device or server, of the same shape and dtype.

        Returns when `source` may be changed again: an array below 1 MiB is copied, else the device has it. With a
        buffer it waits at most for room; between devices the bytes go from one to the other without coming here.
        """
        checked = self._checked_source(source)
        if isinstance(checked, BaseBuffer) and checked._device is not self._device:
            for device in (checked._device, self._device):
                face: AsyncServer = device._server  # type: ignore[assignment]
                await face._wait(device, lambda: settled(None))
            if self._copy_across(checked):
                return
        server: AsyncServer = self._device._server  # type: ignore[assignment]
        digest = None if isinstance(checked, BaseBuffer) else await server._digest(checked)
        await self._wait(lambda: self._start_copy_from(checked, digest))

    async def _wait(self, start: Callable[[], Wait[T]]) -> T:
        server: AsyncServer = self._device._server  # type: ignore[assignment]
        return await server._wait(self._device, start)


class AsyncEvent(BaseEvent):
    """A moment on a device: when everything issued there before `signal` has run. `await` it or its `wait()`."""

    @property
    def done(self) -> bool:
        """Whether it has happened or failed, as far as is known."""
        return self._event.settled

    async def wait(self) -> None:
        """Wait until it has happened.

        Raises:
            WsgradError: what its device failed with before.
        """
        server: AsyncServer = self._device._server  # type: ignore[assignment]
        await server._driver.wait(self._start_wait)

    def __await__(self) -> Generator[Any, Any, None]:
        return self.wait().__await__()


class AsyncProgram(BaseProgram):
    """A source and the function in it that a launch calls."""

    async def timed(
        self,
        *arguments: object,
        grid: int | Sequence[int] | None = None,
        block: int | Sequence[int] | None = None,
        **constants: float,
    ) -> float:
        """Launch, wait, and return how many seconds it took on the device."""
        server: AsyncServer = self._device._server  # type: ignore[assignment]
        return await server._wait(self._device, lambda: self._start_timed(arguments, grid, block, constants))

    async def ready(self) -> None:
        """Wait until it is compiled.

        Raises:
            CompileError: it does not compile; the message is the compiler's.
            LaunchError: inside a recording.
        """
        server: AsyncServer = self._device._server  # type: ignore[assignment]
        await server._wait(self._device, self._start_ready)


class AsyncDevice(BaseDevice[AsyncBuffer, AsyncProgram]):
    """One device in a session."""

    async def array(self, data: ArrayLike, dtype: DTypeLike | None = None) -> AsyncBuffer:
        """A new buffer with the values of an array, or of anything that NumPy makes one of.

        Returns when `data` may be changed again.
        """
        checked = self._checked_array(data, dtype)
        digest = await self._face._digest(checked)
        return await self._wait(lambda: self._start_array(checked, digest))

    async def arrays(self, data: Iterable[ArrayLike]) -> list[AsyncBuffer]:
        """New buffers with the values of several arrays, with one wait; with `cache=True` one question for all of them.

        Returns when all of `data` may be changed again.
        """
        checked = [self._checked_array(item, None) for item in data]
        digests = [await self._face._digest(array) for array in checked]
        return await self._wait(lambda: self._start_arrays(checked, digests))

    def signal(self) -> AsyncEvent:
        """An event that happens once everything issued here so far has run. Never waits."""
        self._make_room()
        return AsyncEvent(self, self._server._call(self._start_signal))

    async def synchronize(self) -> None:
        """Wait until everything issued on this device has run."""
        await self._wait(self._start_synchronize)

    async def reopen(self) -> None:
        """Give it a new, empty process: after a crash, or to free everything. Buffers of before are lost."""
        await self._wait(self._start_reopen)

    async def flush(self) -> None:
        """Send everything issued so far; don't wait for it to run."""
        await self._face.flush()

    async def close(self) -> None:
        """Free everything on it and let it go; it opens again when it is used next."""
        await trio.lowlevel.checkpoint()
        self._face._call(self._close)

    @property
    def _face(self) -> AsyncServer:
        server: AsyncServer = self._server  # type: ignore[assignment]
        return server

    async def _wait(self, start: Callable[[], Wait[T]]) -> T:
        return await self._face._wait(self, start)

    def _new_graph(self, recorder: Recorder) -> AsyncGraph:
        return AsyncGraph(recorder)

    def _new_buffer(
        self, handle: Handle, base: Handle, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> AsyncBuffer:
        return AsyncBuffer(self, handle, base, offset, shape, dtype)

    def _new_program(
        self, source: str, entry: str, dialect: str, writes: Sequence[int] | None, alias: bool, name: str
    ) -> AsyncProgram:
        return AsyncProgram(self, source, entry, dialect=dialect, writes=writes, alias=alias, name=name)


class AsyncServer(BaseServer[AsyncDevice]):
    """A session with a server, as `open_server` opens it, for the tasks of one trio program."""

    def __init__(self, target: Target, embedded: EmbeddedServer | None) -> None:
        session = Session(agent=AGENT, debug=debugging())
        super().__init__(session, url=target.url, address=target.endpoint.url, count=target.endpoint.count)
        self._embedded = embedded
        self._driver = AsyncDriver(session, target, route=ROUTE)

    async def flush(self) -> None:
        """Send everything issued so far; don't wait for it to run."""

        def start() -> Wait[None]:
            refuse_all(self, "a flush")
            self._session.check()
            return self._session.flushed()

        await self._driver.wait(start)

    async def synchronize(self) -> None:
        """Wait until everything issued on every device has run."""
        await trio.lowlevel.checkpoint_if_cancelled()
        for device in list(self._made.values()):
            if device._queue is not None:
                await device.synchronize()
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_for_device(self, name: str) -> AsyncDevice:
        """Wait until a device of that id, label or kind is there and not paused, such as a browser tab that joins.

        Raises:
            ConnectionLost: the session ended meanwhile.
        """
        return await self._driver.wait(lambda: self._start_awaiting(name))

    def trace(self, path: str | os.PathLike[str]) -> AbstractAsyncContextManager[None]:
        """For `async with`: write a timeline of what happens inside to a file, for Perfetto or `wsgrad trace`.

        The end of it waits until what was issued has run, and for the file; cancelled, only for the file.

        Raises:
            WsgradError: this session is in a timeline already, or is over.
        """
        return async_timeline([self], path)

    async def _wait(self, device: BaseDevice[Any, Any], start: Callable[[], Wait[T]]) -> T:
        """Wait for room, then issue something and wait for it."""
        queue = device._queue
        if queue is not None and queue.life.dead is None:
            if queue.unsent_bytes > MAX_UNSENT:
                await self._driver.wait(lambda: self._session.when(lambda: queue.unsent_bytes <= MAX_UNSENT // 2))
            for ids in (queue.life.buffers, queue.life.programs):
                if ids.exhausted:
                    await self._driver.wait(lambda ids=ids: self._session.after_flush(lambda: not ids.short))  # type: ignore[misc]
        return await self._driver.wait(start)

    async def _drain(self) -> None:
        """Wait for what was issued.

        Raises:
            WsgradError: what no call has raised yet: an error of a command, or the loss of the connection.
        """
        error: WsgradError | None = None
        for wait in self._driver.call(self._session.drained):
            try:
                await self._driver.wait(lambda wait=wait: wait)  # type: ignore[misc]
            except WsgradError as exc:
                error = error or exc
        error = self._session.take_unraised() or error
        if error is not None:
            raise error

    async def _digest(self, array: Array) -> bytes | None:
        """What the server's cache calls an array; None where it is not asked."""
        if self._hasher is None or array.nbytes < MIN_CACHED:
            return None
        return await trio.to_thread.run_sync(self._hasher.digest, array, abandon_on_cancel=True)

    def _caller(self) -> object:
        try:
            return trio.lowlevel.current_task()
        except RuntimeError:
            return super()._caller()

    def _new_device(self, identity: str) -> AsyncDevice:
        return AsyncDevice(self, identity)

    def _call(self, issue: Callable[[], T]) -> T:
        return self._driver.call(issue)

    def _room(self, queue: Queue) -> None:
        if queue.unsent_bytes > MAX_UNSENT:
            raise LimitExceeded(
                f"{queue.unsent_bytes} bytes of commands for {queue.device!r} wait to be sent, more than {MAX_UNSENT}; "
                "let them go first: await server.flush()",
                details={"nbytes": queue.unsent_bytes, "limit": MAX_UNSENT},
            )

    @trio.lowlevel.enable_ki_protection
    def _full(self, queue: Queue) -> None:
        self._room(queue)
        queue.flush()
        self._driver.send()

    def _offer(self) -> str:
        offer = super()._offer()
        if self._embedded is not None and not self._device_rows():
            return f"{offer}; it said: {self._embedded.said() or 'nothing'}"
        return offer


@asynccontextmanager
async def open_server(
    url: str | None = None,
    *,
    token: str | None = None,
    cafile: str | None = None,
    cache: bool = False,
    wait: float = 0.0,
) -> AsyncIterator[AsyncServer]:
    """Open a session with a server for an `async with`, whose end waits for what was issued and frees everything.

    Args:
        url: its address, such as `ws://host:7667#token=…`; `WSGRAD_URL` if left out, and without that a server of our
            own on this machine's CPU, which ends with the session.
        token: the client token, if the address holds none; else `WSGRAD_TOKEN` is used.
        cafile: a PEM file of authorities to trust for `wss://`.
        cache: whether to ask the server for what is uploaded, from 1 MiB on, before it is sent: by a hash of it, which
            takes a moment and a round trip. For slow links; needs `pip install wsgrad[cache]`.
        wait: seconds to wait for a server that is just starting and does not accept connections yet.

    Raises:
        ConnectionLost: there is no server, or it left.
        Unauthorized: the token, or the server's certificate, is wrong.
        WsgradError: at the end, what no call has raised yet: an error of a command, or the loss of the connection.
    """
    wanted = wanted_url(url)
    embedded = None
    try:
        if wanted is None:
            embedded = await trio.to_thread.run_sync(lambda: EmbeddedServer(timeout=_START_SECONDS))
            wanted = embedded.url
        target = target_of(wanted, token=token, cafile=cafile)
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                server: AsyncServer | None = None
                try:
                    server = await _open(nursery, target, embedded, wait)
                    if cache:
                        server._start_caching()
                    yield server
                    await server._drain()
                except BaseException as exc:
                    # Raised again outside the nursery, which would wrap it into a group.
                    error = exc
                finally:
                    if server is not None:
                        await server._driver.close()
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # trio raises Ctrl-C where it strikes, which may be a task of the opening handshake.
            if group.split(KeyboardInterrupt)[1] is None:
                raise KeyboardInterrupt from None
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it would hold this frame, and this frame it
    finally:
        if embedded is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(embedded.stop)


async def _open(nursery: trio.Nursery, target: Target, embedded: EmbeddedServer | None, wait: float) -> AsyncServer:
    give_up = trio.current_time() + wait
    while True:
        server = AsyncServer(target, embedded)
        driver = server._driver
        nursery.start_soon(driver.run)
        try:
            await driver.opened.wait()
            if server._session.attached:
                return server
            if not isinstance(driver.error, ConnectionRefusedError):
                server._session.check()
                raise ConnectionLost(f"the connection to {target.endpoint.url} was lost before it was welcomed")
        except BaseException:
            await driver.close()  # nothing else ends it: it would go on trying to connect
            raise
        left = give_up - trio.current_time()
        if left <= 0:
            raise ConnectionLost(
                f"{driver.error}; start one with wsgrad-serve" + ("" if wait else ", or wait for it with wait=")
            ) from driver.error
        await trio.sleep(min(_RETRY_SECONDS, left))
