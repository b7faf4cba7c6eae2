"""A server from listening to its last connection: starts the parts in order, waits for the end, drains, stops.

What the parts do is their own business; settings and tokens are ready when this begins.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
from typing import TYPE_CHECKING

import trio

from wsgrad.server.announce import announced
from wsgrad.server.hub import Hub
from wsgrad.server.listener import Port, open_listeners

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from wsgrad.server.config import Config
    from wsgrad.server.tls import Certificate
    from wsgrad.server.tokens import Tokens
    from wsgrad.server.zygote import Zygote

DRAIN_SECONDS = 5.0
"""How long running commands may take when the server stops."""

_log = logging.getLogger("wsgrad.server")
_LAST_SIGNALS_SECONDS = 0.01


async def serve(config: Config, tokens: Tokens, zygote: Zygote | None, tls: Certificate | None) -> None:
    """Serve until a signal comes or the reader of `--ready-fd` is gone.

    Raises:
        OSError: the address can't be listened on, or a file of tokens can't be written.
    """
    failure: OSError | None = None
    with trio.open_signal_receiver(*end_signals()) as signals:
        listeners = await open_listeners(config.host, config.port)
        number = listeners[0].socket.getsockname()[1]
        async with Hub(config, zygote) as hub, trio.open_nursery() as connections:
            port = Port(config, tokens, hub, tls=tls)
            accepting = trio.CancelScope()

            async def accept(task_status: trio.TaskStatus[None]) -> None:
                with accepting:
                    await port.serve(listeners, connections, task_status=task_status)

            await connections.start(accept)
            try:
                with announced(config, tokens, number, hub.devices):
                    patient = await wait_for_end(config, signals)
            except OSError as exc:  # raised outside the nurseries, which would wrap it into groups
                failure, patient = exc, False
            accepting.cancel()
            port.drain()
            if patient:
                await _drain(hub, signals)
            connections.cancel_scope.cancel()
        await end_of(signals)
    if failure is not None:
        raise failure
    _log.info("stopped")


async def end_of(signals: AsyncIterator[int]) -> None:
    """Take what came meanwhile and is obeyed already; left over, trio would deliver it again, and it would end us."""
    with trio.move_on_after(_LAST_SIGNALS_SECONDS):
        async for _ in signals:
            pass


async def wait_for_end(config: Config, signals: AsyncIterator[int]) -> bool:
    """Wait for the end. True: there is somebody to whom running commands matter."""
    patient = True

    async def watch() -> None:
        nonlocal patient
        await _reader_gone(config.ready_fd)
        _log.info("stopping: the reader of --ready-fd is gone")
        patient = False
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        if config.ready_fd >= 0:
            nursery.start_soon(watch)
        async for number in signals:
            _log.info("stopping: %s; once more to stop at once", signal.Signals(number).name)
            break
        nursery.cancel_scope.cancel()
    return patient


async def _drain(hub: Hub, signals: AsyncIterator[int]) -> None:
    async def hurry() -> None:
        async for number in signals:
            _log.info("stopping at once: %s", signal.Signals(number).name)
            break
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hurry)
        with trio.move_on_after(DRAIN_SECONDS + 1):
            await hub.drain(DRAIN_SECONDS)
        nursery.cancel_scope.cancel()


async def _reader_gone(fd: int) -> None:
    """Wait until the other end of a pipe or socket is closed; for ever where the descriptor is neither."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        # The writing end of a pipe never has anything to read: it is woken by the error that follows the last reader.
        await trio.lowlevel.wait_readable(fd)
    elif stat.S_ISSOCK(mode):
        os.set_blocking(fd, False)
        while True:
            await trio.lowlevel.wait_readable(fd)
            try:
                if not os.read(fd, 4096):
                    return
            except BlockingIOError:
                pass
            except OSError:
                return
    else:
        await trio.sleep_forever()


def end_signals() -> list[signal.Signals]:
    """What ends the server; SIGHUP only where it is not ignored, as under nohup."""
    found = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found
