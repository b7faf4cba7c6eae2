"""Compiles programs for local nodes: at most so many at once, each once, from the cache where it can; loads none.

A job waits for its turn from when its program is received, so compiling overlaps with whatever the queue still does.
What nobody wants any more is not compiled, or its compiler is stopped.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import trio

from wsgrad.devices import native
from wsgrad.devices.compiler import ProgramCache, cache_key, full_source
from wsgrad.devices.program_cache import default_directory
from wsgrad.errors import CompileError, DeviceLost
from wsgrad.server.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from wsgrad.server.zygote import Zygote
    from wsgrad.transport.messages import Program

_log = logging.getLogger(__name__)
_MEMORY_NBYTES: Final = 16 << 20
_MEMORY_ENTRIES: Final = 256

_Key: TypeAlias = tuple[str, str, str, bool]
"""All that the outcome depends on: source, entry, signature, alias."""


class Job:
    """One compile, for everybody who wants the same.

    Attributes:
        done: whether it has ended.
        begun: whether it has had its turn.
        binary: the shared object, or None where it failed.
        messages: what the compiler said.
        wants: of those who still want it; when the last one leaves it is not begun, or stopped.
        stop: stops the compiler; None where none runs.
    """

    def __init__(self, key: _Key, message: Program) -> None:
        self.key = key
        self.message = message
        self.done = False
        self.begun = False
        self.binary: bytes | None = None
        self.messages = ""
        self.wants: dict[Want, None] = {}
        self.stop: Callable[[], None] | None = None

    def finish(self, binary: bytes | None, messages: str) -> None:
        """It has ended: tell everybody."""
        self.binary, self.messages, self.done = binary, messages, True
        wants, self.wants = self.wants, {}
        for want in wants:
            want.finished()


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """That somebody wants a job done.

    Attributes:
        session: theirs; it can't keep all processors busy.
        queue: of the session; those of one session take turns.
        finished: called once the job has ended.
    """

    job: Job
    session: object
    queue: object
    finished: Callable[[], None]

    @property
    def over(self) -> bool:
        """Whether it needs no turn any more: another's has come first."""
        return self.job.begun


class Programs:
    """The compiles of a server. Its tasks live in the given nursery."""

    def __init__(self, zygote: Zygote, nursery: trio.Nursery, *, seconds: float, directory: Path | None = None) -> None:
        self._zygote = zygote
        self._nursery = nursery
        self._seconds = seconds
        self._cache = ProgramCache(default_directory() if directory is None else directory)
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._free = processors
        self._turns: Turns[Want] = Turns(max(1, processors // 2))
        self._jobs: dict[_Key, Job] = {}
        self._memory: OrderedDict[_Key, bytes] = OrderedDict()
        self._memory_nbytes = 0
        self.compiled = 0
        self.cached = 0

    def compile(
        self, source: str, message: Program, *, session: object, queue: object, finished: Callable[[], None]
    ) -> Want:
        """Compile a program when its turn comes, or join in where the same one is wanted already.

        Args:
            session: whose it is.
            queue: which of the session's queues.
            finished: called when the job has ended; not if it has already.
        """
        key = (source, message.entry, message.signature, message.alias)
        known = self._memory.get(key)
        if known is not None:
            self._memory.move_to_end(key)
            self.cached += 1
            job = Job(key, message)
            job.finish(known, "")
            return Want(job, session, queue, finished)
        found = self._jobs.get(key)
        if found is None:
            found = self._jobs[key] = Job(key, message)
        want = Want(found, session, queue, finished)
        found.wants[want] = None
        if not found.begun:
            self._turns.add(want)
            self._begin()
        return want

    def hurry(self, want: Want) -> None:
        """Something waits for it already."""
        self._turns.hurry(want)

    def leave(self, want: Want) -> None:
        """Somebody does not want a job any more."""
        job = want.job
        self._turns.discard(want)
        job.wants.pop(want, None)
        if job.done or job.wants:
            return
        # Whoever wants the same from now on can't join in.
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        if job.stop is not None:
            job.stop()

    async def native(self) -> bytes:
        """The shared object of the native loop.

        Raises:
            CompileError: this machine's compiler refuses it.
            DeviceLost: the zygote has ended.
        """
        return await self._binary(native.source(), seconds=60.0)

    def _begin(self) -> None:
        while self._free > 0 and (want := self._turns.take()) is not None:
            want.job.begun = True
            self._free -= 1
            self._nursery.start_soon(self._run, want)

    async def _run(self, turn: Want) -> None:
        job = turn.job
        message = job.message
        binary, messages = None, "the server stopped before the program was compiled"
        try:
            text = full_source(job.key[0], message.entry, message.signature, alias=message.alias)
            try:
                binary = await self._binary(text, seconds=self._seconds, job=job)
            except DeviceLost:
                # One more try: it may have been another's compile that took the process with it.
                await self._zygote.wait_ready()
                binary = await self._binary(text, seconds=self._seconds, job=job)
            messages = ""
            self._remember(job.key, binary)
        except (CompileError, DeviceLost) as error:
            messages = str(error)
        except Exception:
            _log.exception("compiling a program failed")
            messages = "the program could not be compiled because of an error of the server; its log says more"
        finally:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            self._free += 1
            self._turns.done(turn)
            job.finish(binary, messages)
            self._begin()

    async def _binary(self, text: str, *, seconds: float, job: Job | None = None) -> bytes:
        compiler = self._zygote.compiler

        def look_up() -> tuple[str, bytes | None]:
            name = cache_key(compiler, text)
            return name, self._cache.get(name)

        name, binary = await trio.to_thread.run_sync(look_up)
        if binary is not None:
            self.cached += 1
            return binary
        serial = self._zygote.serial()
        if job is not None:
            if not job.wants:
                raise CompileError("nobody wanted the program any more when its turn came")
            job.stop = partial(self._zygote.stop_compile, serial)
        try:
            binary = await self._zygote.compile(serial, text, seconds)
        finally:
            if job is not None:
                job.stop = None
        self.compiled += 1
        await trio.to_thread.run_sync(self._cache.put, name, binary)
        return binary

    def _remember(self, key: _Key, binary: bytes) -> None:
        size = len(binary) + sum(len(part) for part in key if isinstance(part, str))
        if size > _MEMORY_NBYTES // 4:
            return
        self._memory[key] = binary
        self._memory_nbytes += size
        while self._memory_nbytes > _MEMORY_NBYTES or len(self._memory) > _MEMORY_ENTRIES:
            old, dropped = self._memory.popitem(last=False)
            self._memory_nbytes -= len(dropped) + sum(len(part) for part in old if isinstance(part, str))
