"""The graphs of one session: numbers them, forgets what nobody holds, and tells which item an error means."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from wsgrad.client.outbox import Joint
from wsgrad.graph.explain import what
from wsgrad.transport.cbor import encode
from wsgrad.transport.messages import Forget, Record, Run, message_array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wsgrad.client.queue import Queue
    from wsgrad.client.waits import Failure
    from wsgrad.graph.plan import Plan
    from wsgrad.transport.link import Link

_ids: Final = itertools.count(1)


def new_id() -> int:
    """The id of a new graph, the same on all its servers, so that each can name what failed on another."""
    return next(_ids)


class SessionGraphs:
    """Owned by the session; called with its driver's lock.

    Attributes:
        released: ids whose graph went. Only appended to by finalizers, which may run anywhere, in any thread.
        known: by id the plan, where each item was issued, and the queues.
        forgotten: told, while a timeline is made, of each graph before it is known no more.
    """

    def __init__(self, link: Link) -> None:
        self.released: deque[int] = deque()
        self.known: dict[int, tuple[Plan, list[str], list[Queue]]] = {}
        self.forgotten: Callable[[int], None] | None = None
        self._link = link

    def record(
        self,
        graph: int,
        plan: Plan,
        lines: list[str],
        queues: Mapping[int, Queue],
        bindings: Sequence[Sequence[int]],
        routes: Sequence[Sequence[int]],
        data: bytes,
    ) -> None:
        """Send a graph's part.

        Args:
            graph: its id, higher than those that were recorded before it.
            plan: of the whole graph.
            lines: where each item was issued, or nothing.
            queues: by the index of their devices in the part.
            bindings: `[buffer number, buffer]` pairs.
            routes: `[server, the way there, the way from there]` for each server that it exchanges bytes with.
            data: the part in CBOR.
        """
        self.known[graph] = plan, lines, list(queues.values())
        pairs: list[list[object]] = [[index, queue.number] for index, queue in queues.items()]
        record = Record(graph, pairs, [list(row) for row in bindings], [list(row) for row in routes])
        self._link.push(encode(message_array(record)), data)

    def run(
        self, graph: int, bindings: list[list[object]], values: Sequence[int], line: str, *, transfer: int = 0
    ) -> dict[Queue, int]:
        """Issue a replay; returns which command it is on each queue.

        Args:
            graph: its id.
            bindings: `[buffer number, buffer, offset]` for what is substituted.
            values: of its variables.
            line: where it was issued.
            transfer: what the numbers of its sending steps are added to for the ids of transfers between servers.
        """
        _, _, queues = self.known[graph]
        numbers = {queue: queue.joint_number(line) for queue in queues}
        pairs: list[list[object]] = [[queue.number, number] for queue, number in numbers.items()]
        self._join(numbers, encode(message_array(Run(graph, pairs, bindings, list(values), transfer))))
        return numbers

    def flush(self) -> None:
        """Let the server forget what nobody holds any more, behind all runs that were issued."""
        while self.released:
            graph = self.released.popleft()
            if self.forgotten is not None:
                self.forgotten(graph)
            _, _, queues = self.known.pop(graph)
            self._join({queue: 0 for queue in queues if not queue.gone}, encode(message_array(Forget(graph))))

    def named(self, failure: Failure) -> Failure:
        """An error in a graph, with the item of the recording that it was."""
        graph, step = failure.details.get("graph"), failure.details.get("step")
        known = self.known.get(graph) if isinstance(graph, int) else None
        if known is None or not isinstance(step, int) or not 1 <= step <= len(known[0].schedule.steps):
            return failure
        plan, lines, _ = known
        done = plan.schedule.step(step)
        item = done.items[0]
        text = f"{failure.message} (item {item} of its graph: {what(plan.recording, done)}"
        text += f", issued at {lines[item]})" if lines[item] else ")"
        return replace(failure, message=text, details=failure.details | {"item": item})

    def _join(self, numbers: Mapping[Queue, int], head: bytes) -> None:
        if not numbers:
            self._link.push(head)
            return
        joint = Joint()
        for queue, number in numbers.items():
            queue.join(joint, head, number)
        for queue in numbers:
            queue.outbox.pump()
