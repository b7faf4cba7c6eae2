"""Graphs as users hold them: `record` makes one, `run` issues a replay with one message a server."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any, Self, overload

from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.handle import new_lifetime
from wsgrad.client.recorders import refuse
from wsgrad.client.recording import Recorder, memory_of
from wsgrad.client.session_graphs import new_id
from wsgrad.client.shares import Crossings, Share
from wsgrad.client.transfers import issuing
from wsgrad.errors import DeviceError, LaunchError, LimitExceeded, WsgradError
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.substitution import Placement
from wsgrad.transport.cbor import encode
from wsgrad.transport.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from wsgrad.client.async_face import AsyncDevice
    from wsgrad.client.base import BaseDevice
    from wsgrad.client.blocking import Device
    from wsgrad.client.queue import Queue
    from wsgrad.client.waits import Wait


class BaseGraph:
    """Launches, copies, fills and transfers that were recorded once and run as often as wanted.

    It keeps the buffers and programs it uses. Freed with its last reference, or by `free`; with it go only buffers that
    were allocated while it was recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._plan: Plan | None = None
        self._graph = 0
        self._shares: list[Share] = []
        self._crossings: Crossings | None = None
        self._freed = False
        self._lifetime = new_lifetime()
        self._released: list[weakref.finalize[Any, Any]] = []

    def __repr__(self) -> str:
        count = len(self._recorder.recording.items)
        state = "being recorded" if self._plan is None else "freed" if self._freed else "ready"
        return f"<{type(self).__name__}: {count} item{'' if count == 1 else 's'}, {state}>"

    def explain(self) -> str:
        """The plan as text: queue by queue each step, its items, what it waits for and why."""
        return self._planned().explain()

    def svg(self) -> str:
        """The plan as a picture."""
        return self._planned().svg()

    def free(self) -> None:
        """Let go of it, after the runs that were issued. Idempotent."""
        self._freed = True
        for released in self._released:
            released()
        for number in self._recorder.recording.owned:
            handle = self._recorder.handles[number]
            if handle is not None:
                handle.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    @property
    def _lost(self) -> bool:
        """Whether a device that it runs on is not what it was any more."""
        return any(life.dead is not None for life in self._recorder.lives.values())

    def _planned(self) -> Plan:
        if self._plan is None:
            raise LaunchError("the graph was not recorded to its end: run it after `with record(…)`")
        return self._plan

    def _finish(self) -> None:
        """Plan what was recorded and give each server its part."""
        plan = Plan(self._recorder.recording)
        with issuing():
            self._record(plan)
        self._plan = plan

    def _record(self, plan: Plan) -> None:
        """Give each server its part; called while `issuing`."""
        recorder, graph = self._recorder, new_id()
        servers = [devices[0]._server for devices in recorder.devices]
        crossings = Crossings(plan, servers)
        shares: list[Share] = []
        for number, part in plan.parts.items():
            server = servers[number]
            data = encode(part_array(part))
            if len(data) > CHUNK_BYTES:
                raise LimitExceeded(
                    f"a graph of {len(recorder.recording.items)} items takes {len(data)} bytes, more than "
                    f"{CHUNK_BYTES}: record it as several graphs",
                    details={"nbytes": len(data), "limit": CHUNK_BYTES},
                )
            devices = [recorder.devices[number][device.index] for device in part.devices]
            share = Share(number, server, [])
            handles = [(buffer, recorder.handles[buffer]) for buffer in part.buffers]
            bindings = [[buffer, handle.id] for buffer, handle in handles if handle is not None]
            routes = crossings.rows(number)

            def record(
                share: Share = share,
                devices: list[BaseDevice[Any, Any]] = devices,
                bindings: list[list[int]] = bindings,
                routes: list[list[int]] = routes,
                data: bytes = data,
            ) -> None:
                session = share.server._session
                session.check()
                share.queues = [(device, device._usable_queue()) for device in devices]
                queues = {recorder.places[device].index: queue for device, queue in share.queues}
                session.graphs.record(graph, plan, recorder.lines, queues, bindings, routes, data)

            server._call(record)
            shares.append(share)
            released = weakref.finalize(self._lifetime, server._session.graphs.released.append, graph)
            released.atexit = False
            self._released.append(released)
        self._graph, self._shares, self._crossings = graph, shares, crossings

    def _record_again(self, plan: Plan) -> None:
        """A link between its servers broke: give them their parts anew, with another one."""
        for number in plan.recording.touched:
            handle = self._recorder.handles[number]
            if handle is None or handle.freed:
                raise DeviceError(
                    f"{self!r} can't run any more: a link between its servers broke after its buffer "
                    f"{plan.recording.buffers[number].name} was freed; record it again"
                )
        for released in self._released:
            released()
        self._released.clear()
        self._record(plan)

    # -- running

    def _issue(self, substitutions: Mapping[Any, Any] | None, values: Mapping[str, int]) -> None:
        """Check a replay and issue it on every server."""
        plan = self._planned()
        if self._freed:
            raise DeviceError(f"{self!r} can't run any more")
        self._check_devices()
        given = plan.values(values)
        bindings = self._bindings(plan, substitutions) if substitutions else {}
        self._issue_bound(plan, bindings, given)

    def _run_arguments(self, arguments: Sequence[tuple[BaseBuffer, int, int, int]], values: Mapping[str, int]) -> None:
        """Run it with other memory in place of its first buffers: some buffer there, the offset, size and an id."""
        plan = self._planned()
        self._check_devices()
        places, touched = self._recorder.places, plan.recording.touched
        plan.check_substitutions(
            {
                number: Placement(places[buffer._device], nbytes, memory_of(buffer), offset, repr(buffer))
                for number, (buffer, offset, nbytes, _) in enumerate(arguments)
            }
        )
        bindings = {number: (row[3], 0) for number, row in enumerate(arguments) if number in touched}
        self._issue_bound(plan, bindings, plan.values(values))

    def _issue_bound(self, plan: Plan, bindings: Mapping[int, tuple[int, int]], values: list[int]) -> None:
        for share in self._shares:
            refuse(share.queues[0][0], "running a graph")
        handles = self._recorder.handles
        for number in plan.recording.touched:
            handle = handles[number]
            if number not in bindings and (handle is None or handle.freed):
                name = plan.recording.buffers[number].name
                raise DeviceError(f"the graph can't run: its buffer {name} was freed; substitute another one")
        for share in self._shares:
            for device, _ in share.queues:
                device._make_room()
        if len(self._shares) == 1:
            self._issue_on(self._shares[0], plan, bindings, values, 0)
            return
        with issuing():
            # Looked at before any is issued: the others would wait for what one of them never sends.
            for share in self._shares:
                share.server._session.check()
            crossings = self._crossings
            assert crossings is not None
            if crossings.broken:
                self._record_again(plan)
                crossings = self._crossings
                assert crossings is not None
            transfer = crossings.take_transfers()
            error: WsgradError | None = None
            for share in self._shares:
                try:
                    self._issue_on(share, plan, bindings, values, transfer)
                except WsgradError as exc:
                    error = exc  # its session has ended this moment: those who wait for it are told below
                    share.last = {queue: 0 for _, queue in share.queues}
            crossings.watch(transfer, {share.number: share.by_index(self._recorder.places) for share in self._shares})
            if error is not None:
                raise error

    def _issue_on(
        self, share: Share, plan: Plan, bindings: Mapping[int, tuple[int, int]], values: list[int], transfer: int
    ) -> None:
        buffers = plan.parts[share.number].buffers
        mine: list[list[object]] = [[number, *bound] for number, bound in bindings.items() if number in buffers]

        def run() -> None:
            session = share.server._session
            session.check()
            line = share.queues[0][0]._line()
            share.last = session.graphs.run(self._graph, mine, values, line, transfer=transfer)

        share.server._call(run)

    def _bindings(self, plan: Plan, substitutions: Mapping[Any, Any]) -> dict[int, tuple[int, int]]:
        """What stands for which buffers: the id and an offset, by number."""
        places = self._recorder.places
        placements: dict[int, Placement] = {}
        bindings: dict[int, tuple[int, int]] = {}
        for old, new in substitutions.items():
            if not isinstance(old, BaseBuffer) or not isinstance(new, BaseBuffer):
                raise TypeError("run() takes the buffers to put in place of others as {recorded: new}")
            known = plan.recording.find(memory_of(old))
            if known is None:
                raise LaunchError(f"the graph does not use {old!r}")
            if known.owned or old._nbytes != known.nbytes:
                what_it_is = "belongs to the graph" if known.owned else "is a view of a part of what the graph uses"
                raise LaunchError(f"{old!r} {what_it_is}: nothing can be put in its place")
            identity = new._check()
            place = places.get(new._device)
            if place is None:
                raise LaunchError(f"{new!r} is on {new._device.id!r}, which the graph does not use")
            placements[known.number] = Placement(place, new._nbytes, memory_of(new), new._offset, repr(new))
            bindings[known.number] = identity, 0
        plan.check_substitutions(placements)
        return {number: bound for number, bound in bindings.items() if number in plan.recording.touched}

    def _check_devices(self) -> None:
        for device, life in self._recorder.lives.items():
            if life.dead is not None:
                queue = device._queue
                if queue is not None and queue.life is life:
                    queue.raise_unraised()
                raise life.dead.lost_error(f"{self!r}")


def _start_wait(queue: Queue, number: int) -> Wait[None]:
    queue.raise_unraised()
    return queue.pending.until(number, lambda _: None)


def _raise_first(errors: list[WsgradError]) -> None:
    """What failed in a run, if anything did. One cause fails the run on each device, and is met once."""
    if not errors:
        return
    # One of them may know more of the same: which servers a broken link was between.
    first = max((error for error in errors if str(error).startswith(str(errors[0]))), key=lambda error: len(str(error)))
    for other in errors:
        if not str(first).startswith(str(other)):
            first.add_note(f"another device of the graph: {other}")
    raise first


class Graph(BaseGraph):
    """A graph of the blocking face."""

    def run(
        self,
        substitutions: Mapping[Any, Any] | None = None,
        /,
        *,
        wait: bool = False,
        timeout: float | None = None,
        **values: int,
    ) -> None:
        """Run it once, after everything issued before on its devices. Waits only if asked.

        Args:
            substitutions: buffers to use this time in place of recorded ones, of the same size on the same device.
            wait: whether to wait until it has run.
            timeout: seconds to wait.
            values: of its variables, by name.

        Raises:
            LaunchError: a substitute or value does not fit, or shares memory where the plan relies on its being apart.
            WsgradError: with `wait`, what failed in it or before.
            TimeoutError: it took longer than `timeout` seconds.
        """
        self._issue(substitutions, values)
        if wait:
            self.wait(timeout=timeout)

    def wait(self, *, timeout: float | None = None) -> None:
        """Wait until its last run is over.

        Raises:
            WsgradError: what failed in it, or before it on its devices.
            TimeoutError: it took longer than `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        errors: list[WsgradError] = []
        for share in self._shares:
            for queue, number in share.last.items():
                driver = share.server._driver  # type: ignore[attr-defined]
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    driver.run(lambda queue=queue, number=number: _start_wait(queue, number), left)
                except WsgradError as error:
                    errors.append(error)
        _raise_first(errors)


class AsyncGraph(BaseGraph):
    """A graph of the trio face."""

    def run(self, substitutions: Mapping[Any, Any] | None = None, /, **values: int) -> None:
        """Run it once, after everything issued before on its devices. Never waits; see `Graph.run`."""
        self._issue(substitutions, values)

    async def wait(self) -> None:
        """Wait until its last run is over.

        Raises:
            WsgradError: what failed in it, or before it on its devices.
        """
        errors: list[WsgradError] = []
        for share in self._shares:
            for queue, number in share.last.items():
                driver = share.server._driver  # type: ignore[attr-defined]
                try:
                    await driver.wait(lambda queue=queue, number=number: _start_wait(queue, number))
                except WsgradError as error:
                    errors.append(error)
        _raise_first(errors)


@overload
def record(*devices: Device) -> contextlib.AbstractContextManager[Graph]: ...
@overload
def record(*devices: AsyncDevice) -> contextlib.AbstractContextManager[AsyncGraph]: ...
@contextlib.contextmanager
def record(*devices: BaseDevice[Any, Any]) -> Iterator[Any]:
    """Record what is issued on these devices inside `with`, instead of running it.

    Launches, fills, views, and copies between buffers are recorded, of this thread or task. `empty` makes memory that
    belongs to the graph: it is zero at the start of each run, and can't be used outside. Whatever waits can't be
    recorded. Integers and grids may be a `Var`, or what comes of adding and multiplying integers to it.

    Args:
        devices: of one or several servers.

    Raises:
        LaunchError: something can't be recorded; raised where it is written.

    Example:
        with wsgrad.record(device) as graph:
            double(y, x, wsgrad.Var("n", 1, 4096))
        graph.run({x: other}, n=128)
    """
    recorder = Recorder(devices)
    graph = devices[0]._new_graph(recorder)
    recorder.open()
    try:
        yield graph
    finally:
        recorder.close()
    graph._finish()
