"""The devices that a server offers and the names of the nodes behind them; opens nothing by itself.

A node's wanted name is reduced to letters, digits and dashes and made unique; with the secret from its first joining it
gets the same name again, so its devices keep their ids. Secrets are kept as digests.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from wsgrad.errors import ProtocolError
from wsgrad.server.options import MAX_DEVICES
from wsgrad.transport import cbor
from wsgrad.transport.messages import MAX_HEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wsgrad.errors import WsgradError
    from wsgrad.server.port import Port
    from wsgrad.server.queue import Queue
    from wsgrad.transport.messages import Present

MAX_NAMES: Final = 4096
MAX_LIST_NBYTES: Final = MAX_HEAD - (4 << 10)
"""The list of devices is told in one message, beside limits and names: what made it longer would cut off everybody."""
MAX_LABEL: Final = 80
_MAX_TEXT: Final = 200
_MAX_NAME: Final = 40
_MAX_LIMITS: Final = 16
_MAX_LIMIT: Final = (1 << 53) - 1
_LOAD_NBYTES: Final = 32
"""What a device's load takes in the list."""
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    "label": str,
    "compiler": str,
    "arch": str,
    "adapter": str,
    "paused": bool,
    "cpu": str,
    "threads": int,
    "memory": int,
    "alignment": int,
    "f16": bool,
    "bf16": bool,
    "f64": bool,
    "timestamps": bool,
    "native_graphs": bool,
    "software": bool,
    "confined": bool,
}


_IDLE: Final[dict[str, int]] = {"queues": 0, "sessions": 0}


@dataclass(frozen=True, eq=False)
class Device:
    """A device and the way to open it.

    Attributes:
        info: what clients are told; label, `paused` and memory change when its node is shown otherwise.
        memory: bytes that it said to have when it joined.
    """

    id: str
    info: dict[str, object]
    opener: Callable[[Queue], Port]
    memory: object = None

    @property
    def dialects(self) -> frozenset[str]:
        """The languages that its programs may be written in."""
        dialects = self.info["dialects"]
        assert isinstance(dialects, list)
        return frozenset(dialects)

    def open(self, queue: Queue) -> Port:
        """A way for a queue to this device.

        Raises:
            DeviceLost: its node is gone, or there is no room for another queue.
        """
        return self.opener(queue)


def missing_device(identity: str, error: WsgradError) -> Device:
    """A device that can't be opened, for a client that asks for one that is not there."""

    def refuse(queue: Queue) -> Port:
        raise error

    return Device(identity[:200], {"dialects": []}, refuse)


@dataclass(slots=True)
class _Name:
    digest: bytes
    present: bool = True


@dataclass(slots=True)
class Registry:
    """All devices, in the order in which their nodes came; `changed` is called after each change."""

    changed: Callable[[], None] = lambda: None
    _devices: dict[str, Device] = field(default_factory=dict)
    _names: dict[str, _Name] = field(default_factory=dict)

    @property
    def devices(self) -> list[Device]:
        return list(self._devices.values())

    def describe(self, loads: Mapping[str, Mapping[str, int]]) -> list[dict[str, object]]:
        """The devices as clients are told, with how much each is used."""
        return [device.info | {**loads.get(device.id, _IDLE)} for device in self._devices.values()]

    def get(self, device: str) -> Device | None:
        """The device of that id, if it is there."""
        return self._devices.get(device)

    def join(self, wanted: str, secret: str | None) -> tuple[str, str]:
        """Name a node.

        Args:
            wanted: the name it would like.
            secret: what it was given when it joined before; one that nobody knows counts as none.

        Returns:
            Its name and its secret from now on.

        Raises:
            ProtocolError: too many nodes are here.
        """
        if secret is not None and (name := self.name_of(secret)) is not None:
            self._names[name].present = True
            return name, secret
        if len(self._names) >= MAX_NAMES:
            absent = next((name for name, known in self._names.items() if not known.present), None)
            if absent is None:
                raise ProtocolError(f"{MAX_NAMES} nodes have joined this server", close_code=1008)
            del self._names[absent]  # the one that joined first
        base = reduce_name(wanted)
        name = base
        number = 2
        while name in self._names:
            name = f"{base}-{number}"
            number += 1
        new = secrets.token_urlsafe(24)
        self._names[name] = _Name(_digest(new))
        return name, new

    def name_of(self, secret: str) -> str | None:
        """The name that came with this secret."""
        digest = _digest(secret)
        found = None
        for name, known in self._names.items():
            if secrets.compare_digest(known.digest, digest):
                found = name
        return found

    def leave(self, name: str) -> None:
        """A node has left; its name stays its own as long as there is room."""
        if name in self._names:
            self._names[name].present = False

    def forget(self, name: str) -> bool:
        """A name is free again, and its secret no longer good; whether there was one."""
        return self._names.pop(name, None) is not None

    def add(self, name: str, described: list[dict[str, object]], opener: Callable[[Queue, int], Port]) -> list[Device]:
        """Offer a node's devices.

        Raises:
            ProtocolError: a description is malformed, or there would be more devices than clients can be told of.
        """
        counts: dict[str, int] = {}
        devices = []
        if len(described) > MAX_DEVICES:
            raise ProtocolError(f"a node may have {MAX_DEVICES} devices, not {len(described)}")
        for index, values in enumerate(described):
            info = _checked(values)
            kind = info["kind"]
            assert isinstance(kind, str)
            number = counts.get(kind, 0)
            counts[kind] = number + 1
            identity = f"{name}/{kind}/{number}"
            info = {"id": identity, "label": identity, "node": name, "index": number} | info
            devices.append(Device(identity, info, _Opener(opener, index), info.get("memory")))
        offered = self._devices | {device.id: device for device in devices}
        _check_list(device.info for device in offered.values())
        self._devices = offered
        self.changed()
        return devices

    def present(self, devices: list[Device], shown: Present, before: Present) -> None:
        """A node's devices are shown otherwise from now on.

        Raises:
            ProtocolError: with this label the list would be longer than clients can be told of.
        """
        label = clean_label(shown.label)
        changes: dict[str, dict[str, object]] = {}
        for device in devices:
            change = changes[device.id] = {"paused": shown.paused}
            if shown.label != before.label:
                rest = device.id.partition("/")[2]
                change["label"] = device.id if not label else label if len(devices) == 1 else f"{label}/{rest}"
            if shown.memory or device.memory is not None:
                change["memory"] = shown.memory or device.memory
        _check_list(device.info | changes.get(device.id, {}) for device in self._devices.values())
        for device in devices:
            device.info.update(changes[device.id])
            if "memory" not in changes[device.id]:
                device.info.pop("memory", None)

    def remove(self, devices: list[Device]) -> None:
        """These devices are gone, unless their node has come back and offers them anew."""
        for device in devices:
            if self._devices.get(device.id) is device:
                del self._devices[device.id]
        self.changed()


@dataclass(frozen=True, slots=True)
class _Opener:
    open: Callable[[Queue, int], Port]
    index: int

    def __call__(self, queue: Queue) -> Port:
        return self.open(queue, self.index)


def reduce_name(wanted: str) -> str:
    """A name made of letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", wanted[:200].lower()).strip("-")[:_MAX_NAME].strip("-")
    return name or "node"


def clean_label(label: str) -> str:
    """A label that may be shown: one printable line, not too long."""
    return clean_line(label[: 4 * MAX_LABEL])[:MAX_LABEL]


def clean_line(text: str) -> str:
    """Text in one printable line, so that it can neither command a terminal nor turn what stands beside it around."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _check_list(infos: Iterable[dict[str, object]]) -> None:
    listed = list(infos)
    nbytes = len(cbor.encode(listed)) + _LOAD_NBYTES * len(listed)
    if nbytes > MAX_LIST_NBYTES:
        raise ProtocolError(
            f"with this the list of devices has {nbytes} bytes, more than the {MAX_LIST_NBYTES} of a message",
            close_code=1008,
        )


def _checked(values: dict[str, object]) -> dict[str, object]:
    kind, dialects = values.get("kind"), values.get("dialects")
    if type(kind) is not str or not re.fullmatch(r"[a-z0-9-]{1,32}", kind):
        raise ProtocolError(f"a device of kind {kind!r:.60}")
    if type(dialects) is not list or len(dialects) > 16 or not all(type(d) is str and len(d) <= 32 for d in dialects):
        raise ProtocolError(f"a device with dialects {dialects!r:.60}")
    known: dict[str, object] = {"kind": kind, "dialects": [clean_line(dialect) for dialect in dialects]}
    for name, wanted in _KINDS.items():
        value = values.get(name)
        if type(value) is not wanted:
            continue
        if type(value) is not str:
            known[name] = value
        elif text := clean_label(value) if name == "label" else clean_line(value[:_MAX_TEXT]):
            known[name] = text
    limits = values.get("limits")
    if type(limits) is dict and len(limits) <= _MAX_LIMITS and all(map(_is_limit, limits.items())):
        known["limits"] = limits
    return known


def _is_limit(item: tuple[object, object]) -> bool:
    name, value = item
    return (
        type(name) is str
        and len(name) <= _MAX_NAME
        and name.isprintable()
        and type(value) is int
        and 0 <= value <= _MAX_LIMIT
    )


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=32).digest()
