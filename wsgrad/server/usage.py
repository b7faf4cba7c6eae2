"""What each device was used for, in counters that only go up, and the last errors; shown by status page and metrics.

A session counts for each of its devices as things pass by; when it ends, its counts stay with the device.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from wsgrad.server.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wsgrad.server.submission import Checked

MAX_ERRORS: Final = 50
MAX_MESSAGE: Final = 300
_MAX_DEVICES: Final = 4096
_HELD: Final = {"memory_used": "memory", "buffers": "buffers", "programs": "programs"}
"""What a device's description calls what its queues have."""


@dataclass(slots=True)
class Usage:
    """What a session did with a device.

    Attributes:
        launches: alone, packed, and those of graphs.
        bytes_in: of the client's messages for it, and of what other devices sent it.
        bytes_out: of the data that it gave to the client or to other devices.
        errors: commands that failed on it, and times that it was lost.
        statistics: the server's, which count some of that as well.
    """

    launches: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    errors: int = 0
    statistics: Statistics = field(default_factory=Statistics, repr=False, compare=False)

    def launched(self, count: int) -> None:
        """So many launches have come."""
        self.launches += count
        self.statistics.launches += count

    def checked(self, batch: Checked) -> None:
        """A batch was checked."""
        self.launched(batch.launches)
        self.statistics.refused += batch.refused

    def add(self, other: Usage) -> None:
        """Count the other's as well."""
        self.launches += other.launches
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.errors += other.errors

    def describe(self) -> dict[str, int]:
        """The counters by name."""
        return {
            "launches": self.launches,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "errors": self.errors,
        }


def sum_of(usages: Iterable[Usage]) -> Usage:
    """All of them as one."""
    total = Usage()
    for usage in usages:
        total.add(usage)
    return total


def with_usage(
    devices: Iterable[Mapping[str, object]], sessions: Iterable[Mapping[str, object]], usages: Mapping[str, Usage]
) -> list[dict[str, object]]:
    """Devices as clients are told, with what sessions hold on them now and what was done with them so far.

    Args:
        devices: as the registry describes them.
        sessions: as they describe themselves.
        usages: all that devices did.
    """
    held: dict[str, Counter[str]] = {}
    for session in sessions:
        queues = session["queues"]
        assert isinstance(queues, list)
        for queue in queues:
            counts = {key: queue[name] for key, name in _HELD.items()}
            held.setdefault(queue["device"], Counter()).update(counts)
    nothing: Counter[str] = Counter()
    found = []
    for device in devices:
        identity = str(device["id"])
        holds = held.get(identity, nothing)
        found.append(
            {**device, **{key: holds[key] for key in _HELD}, **usages.get(identity, Usage()).describe()},
        )
    return found


class Ledger:
    """What ended sessions did, by device, and what went wrong lately on any."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, Usage] = OrderedDict()
        self._errors: deque[dict[str, object]] = deque(maxlen=MAX_ERRORS)

    @property
    def errors(self) -> list[dict[str, object]]:
        """The last errors, the oldest first."""
        return list(self._errors)

    def note(self, *, device: str, session: int, code: str, message: str) -> None:
        """Something went wrong on a device. The same again at once only moves its time on: one cause may fail much."""
        error: dict[str, object] = {
            "device": device,
            "session": session,
            "code": code,
            "message": message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…",
        }
        now = round(time.time(), 3)
        last = self._errors[-1] if self._errors else {}
        if error.items() <= last.items():
            last["at"] = now
        else:
            self._errors.append({"at": now, **error})

    def absorb(self, usages: Mapping[str, Usage]) -> None:
        """A session has ended."""
        for device, usage in usages.items():
            self._ended.setdefault(device, Usage()).add(usage)
            self._ended.move_to_end(device)
        while len(self._ended) > _MAX_DEVICES:  # names of nodes that came and went
            self._ended.popitem(last=False)

    def totals(self, sessions: Iterable[Mapping[str, Usage]]) -> dict[str, Usage]:
        """All that devices did, in ended sessions and in these."""
        totals: dict[str, Usage] = {}
        for usages in (self._ended, *sessions):
            for device, usage in usages.items():
                totals.setdefault(device, Usage()).add(usage)
        return totals
