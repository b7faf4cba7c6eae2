"""Turns the messages of one queue into runtime calls, in order, and answers them; knows no socket and no process.

A failing command stops its queue: later ones are dropped until the client's `Clear`; only what makes and frees
buffers, views and programs still counts. A download that has no credit holds the queue, so what arrives meanwhile
waits here; the peer bounds how much.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from wsgrad.devices.base import ProgramSpec
from wsgrad.devices.lanes import Lanes
from wsgrad.devices.ranges import Ranges
from wsgrad.devices.replay import Graphs, Halt, ReplayFailure
from wsgrad.devices.trace import now, switched
from wsgrad.devices.transfers import Download, Transfers, Upload
from wsgrad.errors import DeviceError, OutOfMemory, ProtocolError, WsgradError, error_code, error_from_wire
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wsgrad.devices.base import Outlet, Reply, Runtime
    from wsgrad.devices.lanes import Worker

Work: TypeAlias = m.Batch | m.Launches | m.Program | m.Load | m.Chunk | m.Abort | m.Fail | m.Replay | m.Unrecord
_OPERATIONS: Final = {
    c.Alloc: "alloc",
    c.View: "view",
    c.Write: "write",
    c.Upload: "upload",
    c.Read: "read",
    c.Download: "download",
    c.Copy: "copy",
    c.Fill: "fill",
    c.Launch: "launch",
}


@dataclass(slots=True)
class _Task:
    """One message that waits its turn, with what came beside it."""

    work: Work
    bulk: memoryview | None
    commands: Iterator[tuple[int, c.Command]] | None = field(default=None)
    replay: Iterator[Halt] | Lanes | None = field(default=None)
    started: int = 0


class Executor:
    """Runs one queue on one runtime.

    Args:
        queue: the number that stands in every message.
        reply: called with each answer, in order.
        outlet: where the chunks of downloads go.
        progress: told the number of each command before it runs, and the step of a graph, from 1, or 0.
        build: compiles a program's source and returns a descriptor and a size, for nodes that compile themselves;
            raises `CompileError`.
        worker: runs launches of graphs beside their transfers, where the runtime can. The executor is called with its
            lock held then, and calls `resume` when something is done.
    """

    def __init__(
        self,
        queue: int,
        runtime: Runtime,
        *,
        reply: Reply,
        outlet: Outlet,
        progress: Callable[[int, int], None] | None = None,
        build: Callable[[m.Program, str], tuple[int, int]] | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._queue = queue
        self._runtime = runtime
        self._reply = reply
        self._outlet = outlet
        self._progress = progress or (lambda number, step: None)
        self._build = build
        self._worker = worker
        self._lanes: Lanes | None = None
        self._profiles: deque[m.Profile] = deque()
        self._ranges = Ranges(runtime)
        self._graphs = Graphs(runtime)
        self._tasks: deque[_Task] = deque()
        self._moves = Transfers(queue, runtime, reply=reply, outlet=outlet, ended=self._ended)
        self._error: int | None = None
        self._done = 0
        self._acked = 0

    def handle(
        self, work: Work | m.Credit | m.Graph | m.Profile, bulk: memoryview | None = None, fd: int | None = None
    ) -> None:
        """Run one message, or keep it until the download before it has ended.

        Args:
            bulk: its byte string, in memory that stays as it is until the command has run.
            fd: the descriptor that came beside a `Load`; it is not needed any more when `handle` returns.

        Raises:
            ProtocolError: the peer broke the order that the protocol asks for.
        """
        match work:
            case m.Credit():
                self._outlet.add_credit(work.slots)
            case m.Abort() if self._moves.download is not None and work.transfer == self._moves.download.transfer:
                self._moves.end_download()
            case m.Chunk() if self._graphs.keep(work, bulk or memoryview(b"")):
                pass
            case m.Profile():
                self._profiles.append(work)
            case m.Graph():
                self._graphs.add(work, bulk or memoryview(b""))
            case m.Replay():
                self._graphs.announced(work)
                self._tasks.append(_Task(work, None))
            case m.Fail() if any(isinstance(t.work, m.Replay) and t.work.number == work.number for t in self._tasks):
                self._graphs.fail(work)
            case m.Load():
                self._load(work, fd)  # its descriptor can't wait, and no command before it can mean this program
                self._tasks.extend([_Task(work, None)] if work.number else [])
            case _:
                self._tasks.append(_Task(work, bulk))
        self.resume()

    @property
    def computing(self) -> bool:
        """Whether the worker runs launches."""
        return self._lanes is not None and self._lanes.busy

    def resume(self) -> None:
        """Go on with what waits, because something came or the worker has done something."""
        self._measure()
        self._advance()
        self._measure()
        if self._runtime.trace is not None and not self.computing:
            self._runtime.trace.settle()

    def read_now(self, number: int, buffer: int, nbytes: int) -> bytes | None:
        """Run a read and return its bytes; None where `handle` must, as where something waits or has failed."""
        busy = (
            self.waiting or self._moves.upload is not None or self._error is not None or self._runtime.trace is not None
        )
        if busy or (place := self._ranges.find(buffer, nbytes)) is None:
            return None
        self._done = self._acked = number
        return self._runtime.read(*place, nbytes)

    @property
    def waiting(self) -> bool:
        """Whether the next message may have to wait, so that its bulk has to stay where it is."""
        return self._moves.download is not None or bool(self._tasks)

    def close(self) -> None:
        """Free everything that the queue holds."""
        self._tasks.clear()
        self._graphs.close()
        self._ranges.clear()
        self._runtime.close()

    # -- order

    def _ended(self, number: int) -> None:
        self._done = number

    def _advance(self) -> None:
        while True:
            if self._lanes is None and self._moves.download is not None and not self._moves.pump():
                break
            if not self._tasks or not self._step(self._tasks[0]):
                break
            self._tasks.popleft()
        if self._done > self._acked:
            try:
                self._runtime.settle()
            except (WsgradError, MemoryError) as error:
                if self._error is None:
                    self._failed(self._done, None, error)
            self._acked = self._done
            self._reply(m.Ack(self._queue, self._done), None)

    def _step(self, task: _Task) -> bool:
        """Work on the first task; whether it is over."""
        work = task.work
        match work:
            case m.Chunk():
                self._moves.chunk(work, task.bulk or memoryview(b""))
            case m.Abort():
                self._moves.abort_upload(work.transfer)
            case m.Batch():
                return self._batch(work, task)
            case m.Launches():
                self._begin()
                self._launches(work, task.bulk or memoryview(b""))
            case m.Program():
                self._begin()
                self._program(work, task.bulk or memoryview(b""))
            case m.Fail():
                if self._moves.upload is not None and self._moves.upload.number == work.number:
                    self._moves.upload = None  # the rest of its bytes will not come, for this reason
                self._begin()
                if self._error is None:
                    self._fail(work.number, work.code, work.message, work.details)
                self._done = work.number
            case m.Load():
                self._begin()
                self._done = work.number
            case m.Replay():
                return self._replay(work, task)
            case m.Unrecord():
                self._graphs.forget(work.graph)
        return True

    def _begin(self) -> None:
        """Another command may start: an upload that a failure cut short ends here."""
        if self._moves.upload is not None:
            if self._moves.upload.target is not None:
                raise ProtocolError(f"a command came before upload {self._moves.upload.transfer} was whole")
            self._moves.upload = None

    def _batch(self, work: m.Batch, task: _Task) -> bool:
        if task.commands is None:
            self._begin()
            task.commands = enumerate(map(c.parse_command, work.commands), work.first)
        for number, command in task.commands:
            self._progress(number, 0)
            if self._error is None:
                trace = self._runtime.trace
                try:
                    if trace is None:
                        self._run(number, command)
                    else:
                        trace.command(self._run, number, command)
                except (WsgradError, MemoryError) as error:
                    self._failed(number, command, error)
            else:
                self._skip(number, command)
            if self._moves.download is not None and not self._moves.pump():
                return False
            if self._moves.upload is None:
                self._done = number
        return True

    # -- commands

    def _run(self, number: int, command: c.Command) -> None:
        runtime = self._runtime
        match command:
            case c.Launch():
                what = command.program, command.grid, command.block, command.arguments, number
                seconds = runtime.launch(*what, timed=command.timed)
                if command.timed:
                    self._reply(m.Result(self._queue, number, seconds), None)
            case c.Read():
                memory, offset = self._ranges.place(command.buffer, command.offset, command.nbytes)
                data = runtime.read(memory, offset, command.nbytes)
                self._done = self._acked = number
                self._reply(m.ReadData(self._queue, number, number), data)
            case c.Write():
                memory, offset = self._ranges.place(command.buffer, command.offset, len(command.data))
                runtime.write(memory, offset, command.data)
            case c.Alloc():
                self._ranges.alloc(command.buffer, command.nbytes)
            case c.View():
                self._ranges.view(command)
            case c.Free():
                self._ranges.free(command.buffer)
            case c.Upload():
                place = self._ranges.place(command.buffer, command.offset, command.nbytes)
                self._moves.upload = Upload(number, command.transfer, place, command.nbytes) if command.nbytes else None
            case c.Download():
                memory, offset = self._ranges.place(command.buffer, command.offset, command.nbytes)
                aborts = (t.work.transfer for t in self._tasks if isinstance(t.work, m.Abort))
                if command.nbytes and command.transfer not in aborts:
                    self._moves.download = Download(number, command.transfer, memory, offset, command.nbytes)
            case c.Copy():
                target = self._ranges.place(command.target, command.target_offset, command.nbytes)
                runtime.copy(
                    *target, *self._ranges.place(command.source, command.source_offset, command.nbytes), command.nbytes
                )
            case c.Fill():
                if len(command.pattern) not in (1, 2, 4, 8, 16) or command.nbytes % len(command.pattern):
                    raise DeviceError(f"a pattern of {len(command.pattern)} bytes can't fill {command.nbytes} bytes")
                memory, offset = self._ranges.place(command.buffer, command.offset, command.nbytes)
                runtime.fill(memory, offset, command.nbytes, command.pattern)
            case c.Drop():
                runtime.drop(command.program)
            case c.Clear():
                return

    def _skip(self, number: int, command: c.Command) -> None:
        """A command behind an error."""
        match command:
            case c.Free():
                self._ranges.free(command.buffer)
            case c.Drop():
                self._runtime.drop(command.program)
            case c.Alloc() | c.View():
                # The client holds an object for it, and goes on using that once it has raised the error.
                with contextlib.suppress(WsgradError, MemoryError):
                    self._run(number, command)
            case c.Clear() if command.error == self._error:
                self._error = None
            case c.Upload() if command.nbytes:
                self._moves.upload = Upload(number, command.transfer, None, command.nbytes)
            case _:
                return

    # -- programs and packed launches

    def _launches(self, work: m.Launches, words: memoryview) -> None:
        self._progress(work.first, 0)
        if self._error is None:
            try:
                failure = self._runtime.launch_packed(words, work.first)
            except MemoryError as error:
                self._failed(work.first, None, error)
            else:
                if failure is not None:
                    details = {"operation": "launch", **failure.error.details}
                    if failure.program is not None:
                        details["program"] = failure.program
                    self._fail(failure.number, error_code(failure.error), str(failure.error), details)
        self._done = work.first + work.count - 1

    def _load(self, work: m.Load, fd: int | None) -> None:
        spec = ProgramSpec(work.name, work.entry, work.signature, _indices(work.writes), work.alias)
        # A program that can't be mapped fails where it is launched, like one that did not compile.
        with contextlib.suppress(WsgradError):
            self._runtime.load(work.program, spec, (fd, work.nbytes) if fd is not None and work.nbytes else None)

    def _program(self, work: m.Program, source: memoryview) -> None:
        self._progress(work.number, 0)
        spec = ProgramSpec(work.name, work.entry, work.signature, _indices(work.writes), work.alias, work.constants)
        code: tuple[int, int] | None = None
        message = ""
        started = now()
        try:
            if self._build is None:
                raise DeviceError("this node does not compile programs")
            code = self._build(work, bytes(source).decode())
        except (WsgradError, UnicodeDecodeError) as error:
            message = str(error)
        try:
            self._runtime.load(work.program, spec, code)
        except WsgradError as error:
            code, message = None, str(error)
        finally:
            if code is not None:
                os.close(code[0])
        if self._runtime.trace is not None:
            self._runtime.trace.add(SpanKind.COMPILE, started, number=work.number, program=work.program)
        self._reply(m.Compiled(self._queue, work.program, code is not None, message), None)
        self._done = work.number

    # -- graphs

    def _replay(self, work: m.Replay, task: _Task) -> bool:
        """Go on with a replay; whether it is over."""
        trace = self._runtime.trace
        if trace is not None and not self.computing:
            trace.replaying(work.graph, work.number)
        if not task.started:
            task.started = now()
            self._begin()
        if self._error is None:
            try:
                if task.replay is None:
                    task.replay = self._begin_replay(work)
                if isinstance(task.replay, Lanes):
                    if trace is not None and self._moves.beside is None:
                        self._moves.beside = trace.beside(work.graph, work.number)
                    over = task.replay.go_on(self._graphs.failure(work))
                else:
                    over = self._run_replay(work, task.replay)
            except ReplayFailure as failure:
                details: dict[str, object] = {"operation": "replay", "graph": work.graph, "step": failure.step}
                if failure.program is not None:
                    details |= {"operation": "launch", "program": failure.program}
                self._failed(work.number, None, failure.error, details)
            except (WsgradError, MemoryError) as error:
                self._failed(work.number, None, error, {"operation": "replay", "graph": work.graph})
            else:
                if not over:
                    return False
        if trace is not None:
            trace.replaying(0, 0)
            trace.replayed(task.started, work.graph, work.number)
        self._lanes = self._moves.upload = self._moves.download = None
        self._end_beside()
        unused = self._graphs.over(work)
        if unused:
            self._reply(m.Credit(self._queue, unused), None)
        self._done = work.number
        return True

    def _begin_replay(self, work: m.Replay) -> Iterator[Halt] | Lanes:
        graph = self._graphs.start(work)
        values = self._ranges.place, self._ranges.frees, work.bindings, work.values
        progress = partial(self._progress, work.number)
        if self._worker is None or not graph.parallel:
            return graph.replay(*values, progress)
        self._lanes = graph.lanes(*values, progress, self._worker)
        self._lanes.join(work, self._moves, self._graphs.take)
        return self._lanes

    def _measure(self) -> None:
        """Begin or end timelines; not while the worker notes something in the present one."""
        while self._profiles and not self.computing:
            self._end_beside()
            self._runtime.trace = switched(self._runtime.trace, self._profiles.popleft(), self._reply)

    def _end_beside(self) -> None:
        beside, self._moves.beside = self._moves.beside, None
        if beside is not None:
            beside.flush()

    def _run_replay(self, work: m.Replay, halts: Iterator[Halt]) -> bool:
        """Run until the end, or until bytes or credit have to come first; whether that was the end."""
        while True:
            failure = self._graphs.failure(work)
            if failure is not None:
                raise error_from_wire(failure.code, failure.message, failure.details)
            while self._moves.upload is not None:
                kept = self._graphs.take(self._moves.upload.transfer)
                if kept is None:
                    return False
                self._moves.chunk(*kept)
            halt = next(halts, None)
            if halt is None:
                return True
            if not halt.nbytes:
                continue
            # Until the replay is over, what is done is what was done before it.
            done, transfer = work.number - 1, work.transfer + halt.place
            if not halt.sends:
                self._moves.upload = Upload(done, transfer, halt.at, halt.nbytes)
                continue
            self._moves.download = Download(done, transfer, *halt.at, halt.nbytes)
            if not self._moves.pump():
                return False

    # -- errors

    def _failed(
        self, number: int, command: c.Command | None, error: Exception, details: dict[str, object] | None = None
    ) -> None:
        details = dict(details or {})
        if isinstance(error, WsgradError):
            details |= error.details
        else:
            error = OutOfMemory("the device's process has no memory left for its own work")
        operation = _OPERATIONS.get(type(command)) if command is not None else None
        if operation is not None:
            details["operation"] = operation
        if isinstance(command, c.Launch):
            name = self._runtime.program_name(command.program)
            if name is not None:
                details["program"] = name
        self._fail(number, error_code(error), str(error), details)
        if isinstance(command, c.Upload) and command.nbytes:
            self._moves.upload = Upload(number, command.transfer, None, command.nbytes)

    def _fail(self, number: int, code: str, message: str, details: dict[str, object]) -> None:
        self._error = number
        self._reply(m.Failed(self._queue, number, code, message, details), None)


def _indices(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
