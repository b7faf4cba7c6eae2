"""Several servers as one object: `connect_all` and `open_all`; how devices of theirs work together is not decided here.

Each server keeps a session of its own. If one fails, what needs it raises its address, and the others go on.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import trio

from wsgrad.client.async_face import AsyncDevice, AsyncServer, open_server
from wsgrad.client.async_timeline import async_timeline
from wsgrad.client.blocking import Device, Server, connect
from wsgrad.client.devices import AllDevices, no_device_came
from wsgrad.client.target import wanted_url
from wsgrad.client.timeline import timeline
from wsgrad.errors import WsgradError, error_code, error_from_wire
from wsgrad.transport.url import parse_endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

    from wsgrad.client.base import BaseDevice, BaseServer

S = TypeVar("S", bound="BaseServer[Any]")
D = TypeVar("D", bound="BaseDevice[Any, Any]")

_START_SECONDS = 30.0
_LOOK_SECONDS = 0.1
"""How long one server's news may wait while another's are waited for."""


class BaseServers(Generic[S, D]):
    """Sessions with several servers. Don't make one yourself: `connect_all` and `open_all` do."""

    def __init__(self, servers: Sequence[S]) -> None:
        self._servers = tuple(servers)

    @property
    def servers(self) -> tuple[S, ...]:
        """The servers, in the order in which they were named."""
        return self._servers

    @property
    def devices(self) -> AllDevices[D]:
        """The devices of all servers in that order, kept up to date."""
        return AllDevices(self._servers)

    @property
    def closed(self) -> bool:
        """Whether all sessions are over."""
        return all(server.closed for server in self._servers)

    @property
    def statistics(self) -> Mapping[str, int]:
        """Counters of all sessions together; `relayed` counts copies between servers that went through this client."""
        total: dict[str, int] = {}
        for server in self._servers:
            for name, count in server.statistics.items():
                total[name] = total.get(name, 0) + count
        return MappingProxyType(total)

    @property
    def relay_reasons(self) -> Mapping[tuple[str, str], str]:
        """Why copies go through this client: by the addresses of the servers that they go from and to."""
        return MappingProxyType(
            {
                (server._address, target): reason
                for server in self._servers
                for target, reason in server.relay_reasons.items()
            }
        )

    def __repr__(self) -> str:
        servers, devices = len(self._servers), len(self.devices)
        lost = [server._address for server in self._servers if server.closed]
        state = "" if not lost else ", closed" if len(lost) == servers else f", lost: {', '.join(lost)}"
        return f"<{type(self).__name__}: {devices} device{_s(devices)} of {servers} server{_s(servers)}{state}>"


class Servers(BaseServers[Server, Device]):
    """Sessions with several servers, as `connect_all` opens them. Threads may share it."""

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
        deadline = _Deadline(timeout)
        for server in self._servers:
            server.flush(timeout=deadline.left)

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Wait until everything issued on every device has run.

        Raises:
            WsgradError: the first error met; the other servers may still be at work.
            TimeoutError: it took longer than `timeout` seconds.
        """
        deadline = _Deadline(timeout)
        for server in self._servers:
            server.synchronize(timeout=deadline.left)

    def trace(self, path: str | os.PathLike[str], *, timeout: float | None = None) -> AbstractContextManager[None]:
        """For `with`: write one timeline of all servers to a file; see `Server.trace`."""
        return timeline(self._servers, path, timeout=timeout)

    def wait_for_device(self, name: str, *, timeout: float | None = None) -> Device:
        """Wait until one of the servers has a device of that id, label or kind that is not paused.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            ConnectionLost: every session has ended.
        """
        deadline = _Deadline(timeout)
        while True:
            living = [server for server in self._servers if not server.closed] or self._servers[:1]
            for server in living:
                left = deadline.left
                seconds = _LOOK_SECONDS / len(living) if len(living) > 1 or left is None else left
                try:
                    return server.wait_for_device(name, timeout=seconds if left is None else min(seconds, left))
                except TimeoutError:
                    if deadline.left == 0.0:
                        raise TimeoutError(no_device_came(name, timeout, self.devices._offer())) from None
                except WsgradError:
                    if self.closed:
                        raise

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for what was issued, then end all sessions. Idempotent.

        Raises:
            WsgradError: the first error of a command, or of a server, that no call has raised yet.
            TimeoutError: what was issued took longer than `timeout` seconds; the sessions are ended all the same.
        """
        deadline = _Deadline(timeout)
        first: Exception | None = None
        try:
            # Work of one server may wait for that of another: all of it is waited for before any session ends.
            for server in self._servers:
                if server.closed:
                    continue
                for wait in server._driver.call(server._session.drained):
                    try:
                        server._driver.run(lambda wait=wait: wait, deadline.left)  # type: ignore[misc]
                    except (WsgradError, TimeoutError) as exc:
                        first = first or exc
            for server in self._servers:
                try:
                    server.close(timeout=deadline.left)
                except (WsgradError, TimeoutError) as exc:
                    first = first or exc
        finally:
            self._end()
        if first is not None:
            raise first

    def _end(self) -> None:
        for server in self._servers:
            server._end()


class AsyncServers(BaseServers[AsyncServer, AsyncDevice]):
    """Sessions with several servers, as `open_all` opens them, for the tasks of one trio program."""

    async def flush(self) -> None:
        """Send everything issued so far; don't wait for it to run."""
        for server in self._servers:
            await server.flush()

    async def synchronize(self) -> None:
        """Wait until everything issued on every device has run."""
        for server in self._servers:
            await server.synchronize()

    def trace(self, path: str | os.PathLike[str]) -> AbstractAsyncContextManager[None]:
        """For `async with`: write one timeline of all servers to a file; see `AsyncServer.trace`."""
        return async_timeline(self._servers, path)

    async def wait_for_device(self, name: str) -> AsyncDevice:
        """Wait until one of the servers has a device of that id, label or kind that is not paused.

        Raises:
            ConnectionLost: every session has ended.
        """
        found: list[AsyncDevice] = []
        errors: list[WsgradError] = []

        async def wait(server: AsyncServer) -> None:
            try:
                found.append(await server.wait_for_device(name))
            except WsgradError as exc:
                errors.append(exc)
            else:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for server in self._servers:
                nursery.start_soon(wait, server)
        if not found:
            raise errors[0]
        return found[0]

    async def _drain(self) -> None:
        first: WsgradError | None = None
        for server in self._servers:
            if not server.closed:
                try:
                    await server._drain()
                except WsgradError as exc:
                    first = first or exc
        if first is not None:
            raise first


def connect_all(
    items: str | Sequence[str] | None = None,
    *,
    cafile: str | None = None,
    cache: bool = False,
    wait: float = 0.0,
    timeout: float = _START_SECONDS,
) -> Servers:
    """Open a session with each of several servers.

    Args:
        items: their addresses, a sequence or joined by commas, each perhaps with `*N` for its first N devices:
            `ws://a:7667#token=…*2,b`; `WSGRAD_URL` if left out, and without that a server of our own on this machine's
            CPU. Without a token in it an address is used with `WSGRAD_TOKEN`.
        cafile: a PEM file of authorities to trust for `wss://`.
        cache: as for `connect`.
        wait: seconds to wait for servers that are just starting and do not accept connections yet.
        timeout: seconds for connecting to all of them.

    Raises:
        InvalidUrl: an address can't be read; nothing was opened.
        ConnectionLost: one is not there, or left; those opened before are closed again.
        Unauthorized: a token, or a server's certificate, is wrong.
        TimeoutError: it took too long.
    """
    deadline, waiting = _Deadline(timeout), _Deadline(wait)
    servers: list[Server] = []
    try:
        for url in _urls(items):
            try:
                server = connect(
                    url, cafile=cafile, cache=cache, wait=waiting.left or 0.0, timeout=deadline.left or 0.0
                )
            except (WsgradError, OSError) as exc:
                raise _located(exc, url) from exc
            servers.append(server)
    except BaseException:
        for server in servers:
            server._end()
        raise
    return Servers(servers)


@asynccontextmanager
async def open_all(
    items: str | Sequence[str] | None = None,
    *,
    cafile: str | None = None,
    cache: bool = False,
    wait: float = 0.0,
) -> AsyncIterator[AsyncServers]:
    """Open a session with each of several servers for an `async with`, whose end waits for what was issued.

    Args:
        items: their addresses; see `connect_all`.
        cafile: a PEM file of authorities to trust for `wss://`.
        cache: as for `open_server`.
        wait: seconds to wait for servers that are just starting and do not accept connections yet.

    Raises:
        InvalidUrl: an address can't be read; nothing was opened.
        ConnectionLost: one is not there, or left; those opened before are closed again.
        Unauthorized: a token, or a server's certificate, is wrong.
        WsgradError: at the end, an error of a command that no call has raised yet.
    """
    waiting = _Deadline(wait)
    async with AsyncExitStack() as stack:
        opened: list[AsyncServer] = []
        for url in _urls(items):
            session = open_server(url, cafile=cafile, cache=cache, wait=waiting.left or 0.0)
            try:
                opened.append(await stack.enter_async_context(session))
            except (WsgradError, OSError) as exc:
                raise _located(exc, url) from exc
        servers = AsyncServers(opened)
        yield servers
        await servers._drain()


class _Deadline:
    """How much is left of a number of seconds; None of no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - time.monotonic())


def _urls(items: str | Sequence[str] | None) -> list[str | None]:
    """The addresses one by one, all of them checked; None for a server of our own."""
    if items is None:
        items = wanted_url(None)
        if items is None:
            return [None]
    urls = [url for item in ([items] if isinstance(items, str) else items) for url in item.split(",")]
    for url in urls:
        parse_endpoint(url)
    if not urls:
        raise ValueError("connect_all needs at least one address")
    return list(urls)


def _located(error: WsgradError | OSError, url: str | None) -> WsgradError | OSError:
    """The error with the server's address in it."""
    address = "a server of our own" if url is None else parse_endpoint(url).url
    if address in str(error):
        return error
    text = f"{address}: {error}"
    if isinstance(error, WsgradError):
        return error_from_wire(error_code(error), text, error.details)
    if isinstance(error, TimeoutError):
        return TimeoutError(text)
    return OSError(error.errno, f"{address}: {os.strerror(error.errno) if error.errno else error}")


def _s(count: int) -> str:
    return "" if count == 1 else "s"
