"""This server's own devices: what clients are told of them, and how a queue gets its node process; starts nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from wsgrad.devices.toolchain import find_compiler
from wsgrad.devices.webgpu.listing import list_adapters
from wsgrad.errors import DeviceError
from wsgrad.server.cpu import cpu_info
from wsgrad.server.driver import DriverPort
from wsgrad.server.local import LocalPort
from wsgrad.server.port import Owner
from wsgrad.server.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from wsgrad.server.config import Config
    from wsgrad.server.limits import Limits
    from wsgrad.server.port import Port


class Holder(Protocol):
    """The session that a queue belongs to, as far as opening a device needs it."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def start(self) -> Callable[[Callable[[], Awaitable[None]]], None]:
        """Runs a task that ends with it."""


class Opening(Owner, Protocol):
    """A queue that opens a device."""

    @property
    def session(self) -> Holder:
        """Whose it is."""


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
) -> tuple[list[dict[str, object]], Callable[[Opening, int, Limits], Port]]:
    """The devices as in a node's `Join`, and what opens one by its place and holds it to limits."""
    infos: list[dict[str, object]] = []
    ways: list[Callable[[Opening, int, Limits], Port]] = []
    count = config.devices.count("cpu")
    if count:
        info = cpu_info(
            zygote.compiler,
            threads=config.cpu_threads,
            memory=limits.max_session_memory,
            confined=not config.unconfined,
        )
        infos += [dict(info) for _ in range(count)]
        ways += [partial(_open_cpu, zygote, config.cpu_threads)] * count
    for adapter, info in zygote.adapters:
        infos.append(info | {"memory": limits.max_session_memory})
        ways.append(partial(_open_adapter, zygote, adapter))
    return infos, lambda queue, index, limits: ways[index](queue, index, limits)


def _open_cpu(zygote: Zygote, threads: int, queue: Opening, index: int, limits: Limits) -> Port:
    session = queue.session
    return LocalPort(queue, zygote, limits, index=index, session=session.number, threads=threads, start=session.start)


def _open_adapter(zygote: Zygote, adapter: int, queue: Opening, index: int, limits: Limits) -> Port:
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
