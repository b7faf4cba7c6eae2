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
HELD: Final = ("memory", "buffers", "programs")
"""What a queue has, as it and its device describe it."""


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


def add_totals(
    devices: Iterable[dict[str, object]],
    nodes: Iterable[dict[str, object]],
    sessions: Iterable[Mapping[str, object]],
    usages: Mapping[str, Usage],
) -> dict[str, int]:
    """Give devices and nodes their `totals`: what sessions hold on them now, and what was done with them so far.

    Args:
        devices: as the registry describes them.
        nodes: as they describe themselves.
        sessions: as they describe themselves.
        usages: all that devices did, by their ids.

    Returns:
        The whole server's.
    """
    everything = Counter({"sessions": 0} | Usage().describe())
    totals: dict[str, Counter[str]] = {}
    for identity, usage in usages.items():
        totals[identity] = Counter(usage.describe())
        everything.update(usage.describe())
    for session in sessions:
        everything["sessions"] += 1
        queues, used = session["queues"], session["devices"]
        assert isinstance(queues, list)
        assert isinstance(used, list)
        for queue in queues:
            held = {key: queue[key] for key in HELD}
            totals.setdefault(queue["device"], Counter()).update(held)
            everything.update(held)
        for identity in used:
            totals.setdefault(identity, Counter())["sessions"] += 1
    for device in devices:
        device["totals"] = _named(totals.get(str(device["id"]), Counter()))
    for node in nodes:
        own = node["devices"]
        assert isinstance(own, list)
        node["totals"] = _named(sum((totals.get(identity, Counter()) for identity in own), Counter()))
    return _named(everything)


def _named(counts: Counter[str]) -> dict[str, int]:
    return {key: counts[key] for key in (*HELD, *Usage().describe(), "sessions")}


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
            last["time"] = now
        else:
            self._errors.append({"time": now, **error})

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
