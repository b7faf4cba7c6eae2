"""This server's own devices: what clients are told of them, and how a queue gets its node process; starts nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from wsgrad.devices.tinygrad.listing import list_wrapped
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

    import trio

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

    @property
    def processes(self) -> trio.Semaphore:
        """Room for its node processes."""


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
        driven=_chosen(config.devices),
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
    for kind, place, info in zygote.driven:
        infos.append(info | {"memory": limits.max_session_memory})
        ways.append(partial(_open_driven, zygote, kind, place))
    return infos, lambda queue, index, limits: ways[index](queue, index, limits)


def _open_cpu(zygote: Zygote, threads: int, queue: Opening, index: int, limits: Limits) -> Port:
    session = queue.session
    return LocalPort(
        queue,
        zygote,
        limits,
        index=index,
        session=session.number,
        threads=threads,
        start=session.start,
        room=session.processes,
    )


def _open_driven(zygote: Zygote, kind: str, place: str, queue: Opening, index: int, limits: Limits) -> Port:
    session = queue.session
    return DriverPort(
        queue,
        zygote,
        limits,
        kind=kind,
        place=place,
        index=index,
        session=session.number,
        start=session.start,
        room=session.processes,
    )


def _chosen(devices: Sequence[str]) -> list[tuple[str, str, dict[str, object]]]:
    """The devices with drivers that names stand for, each once, in the order given: kind, place, what clients are told.

    `webgpu` stands for all adapters and `tinygrad:AMD` for all devices of that kind; a number behind picks one.
    """
    chosen: dict[tuple[str, str], dict[str, object]] = {}
    listed: dict[str, list[dict[str, object]]] = {}
    for name in devices:
        kind, _, rest = name.partition(":")
        if kind == "cpu":
            continue
        group, _, number = ("", "", rest) if kind == "webgpu" else rest.partition(":")
        key = f"{kind}:{group}" if group else kind
        if key not in listed:
            listed[key] = list_adapters() if kind == "webgpu" else list_wrapped(group)
        found = listed[key]
        if number and int(number) >= len(found):
            known = ", ".join(f"{place} is {info['adapter']}" for place, info in enumerate(found))
            raise DeviceError(f"{name}: there is no such adapter; {known}")
        for place in [int(number)] if number else range(len(found)):
            chosen[kind, f"{group}:{place}" if group else str(place)] = found[place]
    return [(kind, place, info) for (kind, place), info in chosen.items()]
