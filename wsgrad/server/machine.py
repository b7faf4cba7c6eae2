"""This server's own devices: what clients are told of them, and how a queue gets its node process; starts nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from wsgrad.devices.toolchain import find_compiler
from wsgrad.devices.webgpu.listing import list_adapters
from wsgrad.errors import DeviceError
from wsgrad.server.cpu import cpu_info
from wsgrad.server.driver import DriverPort
from wsgrad.server.local import LocalPort
from wsgrad.server.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wsgrad.server.config import Config
    from wsgrad.server.limits import Limits
    from wsgrad.server.port import Port
    from wsgrad.server.queue import Queue


def start_zygote(config: Config) -> Zygote | None:
    """Start what local devices need, in the main thread before trio runs; None where the server offers none.

    Raises:
        DeviceError: there is no compiler, no driver or no such adapter; says what to install.
    """
    if not config.devices:
        return None
    compiler = find_compiler() if "cpu" in config.devices else None
    zygote = Zygote(
        compiler=compiler,
        unconfined=config.unconfined,
        threads=config.cpu_threads,
        adapters=_chosen(config.devices),
    )
    zygote.start()
    return zygote


def own_devices(
    config: Config, limits: Limits, zygote: Zygote
) -> tuple[list[dict[str, object]], Callable[[Queue, int], Port]]:
    """The devices as in a node's `Join`, and what opens one by its place."""
    infos: list[dict[str, object]] = []
    ways: list[Callable[[Queue, int], Port]] = []
    count = config.devices.count("cpu")
    if count:
        info = cpu_info(
            zygote.compiler,
            threads=config.cpu_threads,
            memory=limits.max_session_memory,
            confined=not config.unconfined,
        )
        infos += [dict(info) for _ in range(count)]
        ways += [partial(_open_cpu, zygote, limits, config.cpu_threads)] * count
    for adapter, info in zygote.adapters:
        infos.append(info | {"memory": limits.max_session_memory})
        ways.append(partial(_open_adapter, zygote, limits, adapter))
    return infos, lambda queue, index: ways[index](queue, index)


def _open_cpu(zygote: Zygote, limits: Limits, threads: int, queue: Queue, index: int) -> Port:
    session = queue.session
    return LocalPort(queue, zygote, limits, index=index, session=session.number, threads=threads, start=session.start)


def _open_adapter(zygote: Zygote, limits: Limits, adapter: int, queue: Queue, index: int) -> Port:
    session = queue.session
    return DriverPort(
        queue,
        zygote,
        limits,
        kind="webgpu",
        adapter=adapter,
        index=index,
        session=session.number,
        start=session.start,
    )


def _chosen(devices: Sequence[str]) -> list[tuple[int, dict[str, object]]]:
    """The adapters that `webgpu`, all of them, and `webgpu:N` stand for, in the order given and each once."""
    wanted = [name for name in devices if name != "cpu"]
    if not wanted:
        return []
    found = list_adapters()
    places: dict[int, None] = {}
    for name in wanted:
        _, colon, number = name.partition(":")
        if colon and int(number) >= len(found):
            known = ", ".join(f"{place} is {info['adapter']}" for place, info in enumerate(found))
            raise DeviceError(f"{name}: there is no such adapter; {known}")
        places |= dict.fromkeys([int(number)] if colon else range(len(found)))
    return [(place, found[place]) for place in places]
