"""A machine that joins a hub, from first dialling to its end: starts the parts in order, waits, and listens nowhere."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING

import trio

from wsgrad.devices.directories import user_directory
from wsgrad.server.announce import write_ready
from wsgrad.server.joining import Machine
from wsgrad.server.lifetime import end_of, end_signals, wait_for_end
from wsgrad.server.limits import Limits
from wsgrad.server.machine import own_devices
from wsgrad.server.membership import Membership
from wsgrad.server.programs import Programs

if TYPE_CHECKING:
    from wsgrad.server.config import Config
    from wsgrad.server.zygote import Zygote
    from wsgrad.transport.url import Endpoint

_log = logging.getLogger("wsgrad.server")


async def lend(config: Config, hub: Endpoint, token: str, zygote: Zygote) -> None:
    """Lend this machine's devices to a hub until a signal comes or the reader of `--ready-fd` is gone.

    Raises:
        Unauthorized: the hub refuses the token, or its certificate is another.
        SentAway: the hub does not want this machine any more.
        OSError: the state directory can't be used.
    """
    failures: list[Exception] = []
    directory = user_directory("XDG_STATE_HOME", ".local/state", os.environ)
    limits = Limits.of(config)
    with trio.open_signal_receiver(*end_signals()) as signals, Membership(directory, hub, config.name) as membership:
        if membership.path is None:
            _log.warning("another process of this machine has joined as %s, so this one gets a new name", config.name)
        async with trio.open_nursery() as servants:
            programs = Programs(zygote, servants, seconds=limits.compile_seconds)
            servants.start_soon(zygote.run, programs.native if "cpu" in config.devices else None)
            await zygote.settled.wait()
            devices, open_device = own_devices(config, limits, zygote)
            machine = Machine(
                hub,
                token,
                config.name,
                membership,
                devices=devices,
                open_device=open_device,
                limits=limits,
                programs=programs,
            )

            async def stay() -> None:
                try:
                    await machine.run(joined)
                except Exception as exc:  # raised outside the nurseries, which would wrap it into groups
                    failures.append(exc)
                    nursery.cancel_scope.cancel()

            def joined() -> None:
                if config.ready_fd >= 0:
                    said = {"url": hub.url, "name": machine.name, "pid": os.getpid()}
                    write_ready(config.ready_fd, json.dumps(said) + "\n")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(stay)
                await wait_for_end(config, signals)
                await machine.leave()
                nursery.cancel_scope.cancel()
            servants.cancel_scope.cancel()
        await end_of(signals)
    if failures:
        raise failures[0]
    _log.info("stopped")
