"""The devices of one server or of several as a sequence: finding one by name, and the one with the least to do."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from wsgrad.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from wsgrad.client.base import BaseDevice, BaseServer

D = TypeVar("D", bound="BaseDevice[Any, Any]")


class DeviceList(Sequence[D]):
    """Devices as they are now: by index, id or label, or the first of a kind."""

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> D: ...
    @overload
    def __getitem__(self, key: slice) -> list[D]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> D | list[D]:
        """The device of that index, id or label, or the first of that kind.

        Raises:
            DeviceError: no device has that name, or devices of several servers have it.
            IndexError: there are not so many.
        """
        devices = list(self)
        if isinstance(key, slice):
            return devices[key]
        if not isinstance(key, str):
            index = operator.index(key)
            if not -len(devices) <= index < len(devices):
                raise IndexError(f"there is no device {index}; {self._offer()}")
            return devices[index]
        found = self._named(key)
        if not found:
            raise DeviceError(f"there is no device {key!r}; {self._offer()}", details={"device": key})
        return found[0]

    def least_loaded(self, name: str | None = None) -> D:
        """The device with the least to do, as far as is known here; the first of equals. Never waits.

        What counts is first how many queues all clients of its server have open on it, which the server tells a few
        times a second, then how many commands of this client wait there.

        Args:
            name: only among the devices of this kind, label or id.

        Raises:
            DeviceError: there is none, or each is paused or lost.
        """
        self._look()
        devices = [device for device in self if name in (None, device.kind, device.label, device.id)]
        if not devices:
            what = "no device" if name is None else f"no device {name!r}"
            raise DeviceError(f"there is {what}; {self._offer()}", details={"device": name})
        ready = [device for device in devices if takes_work(device)]
        if not ready:
            names = ", ".join(device.id for device in devices)
            raise DeviceError(f"no device takes work now: {names} paused or lost", details={"device": name})
        return min(ready, key=_load)

    def __repr__(self) -> str:
        return repr(list(self))

    def _named(self, name: str) -> list[D]:
        """The devices that a name may mean, the likeliest first."""
        devices = list(self)
        return (
            [device for device in devices if device.id == name]
            or [device for device in devices if device.label == name]
            or [device for device in devices if device.kind == name]
        )

    def _awaited(self, name: str) -> D | None:
        """The device of that name that is not paused, if there is one; rather none that is to be reopened first."""
        ready = [device for device in self._named(name) if device.properties.get("paused") is not True]
        return next((device for device in ready if takes_work(device)), ready[0] if ready else None)

    @abstractmethod
    def _look(self) -> None:
        """Take note of what servers have said."""

    @abstractmethod
    def _offer(self) -> str:
        """The devices there are, in words."""


class Devices(DeviceList[D]):
    """A server's devices as they are now: by index, id or label, or the first of a kind."""

    def __init__(self, server: BaseServer[D]) -> None:
        self._server = server

    def __len__(self) -> int:
        return len(self._server._device_rows())

    def __iter__(self) -> Iterator[D]:
        return iter([self._server._device(str(row["id"])) for row in self._server._device_rows()])

    def _look(self) -> None:
        self._server._look()

    def _offer(self) -> str:
        return self._server._offer()


class AllDevices(DeviceList[D]):
    """The devices of several servers as they are now, in order: by index, id or label, or the first of a kind."""

    def __init__(self, servers: Iterable[BaseServer[D]]) -> None:
        self._servers = tuple(servers)

    def __len__(self) -> int:
        return sum(len(server.devices) for server in self._servers)

    def __iter__(self) -> Iterator[D]:
        return iter([device for server in self._servers for device in server.devices])

    def _named(self, name: str) -> list[D]:
        found = super()._named(name)
        if len(found) > 1 and found[0].kind != name:
            places = " and ".join(device.server._address for device in found)
            raise DeviceError(f"{name!r} is a device of {places}: choose by index", details={"device": name})
        return found

    def _look(self) -> None:
        for server in self._servers:
            server._look()

    def _offer(self) -> str:
        return "; ".join(server._offer() for server in self._servers)


def no_device_came(name: str, seconds: float | None, offer: str) -> str:
    """What a wait for a device says that took too long."""
    return f"no device {name!r} was there and free to use within {seconds:g} s; {offer}"


def takes_work(device: BaseDevice[Any, Any]) -> bool:
    """Whether it is neither paused nor lost, as far as is known."""
    queue = device._queue
    lost = queue is not None and queue.life.dead is not None and not queue.gone
    return not lost and device.properties.get("paused") is not True and not device._server._session.over


def _load(device: BaseDevice[Any, Any]) -> tuple[int, int]:
    queue = device._queue
    own = queue is not None and not queue.gone
    told = device.properties.get("queues")
    waiting = queue.unfinished if queue is not None and own else 0
    # Our own queue may be newer than what the server has told.
    return max(told if isinstance(told, int) else 0, int(own)), waiting
