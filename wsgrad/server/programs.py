"""Compiles programs for local nodes: at most so many at once, each once, from the cache where it can; loads none.

A job starts when its program is received, so compiling overlaps with whatever the queue still does; the queue waits for
it only when it comes to the program's place.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.devices import native
from wsgrad.devices.compiler import ProgramCache, cache_key, full_source
from wsgrad.devices.program_cache import default_directory
from wsgrad.errors import CompileError, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from wsgrad.server.zygote import Zygote
    from wsgrad.transport.messages import Program

_log = logging.getLogger(__name__)
_MEMORY_NBYTES: Final = 16 << 20
_MEMORY_ENTRIES: Final = 256


class Job:
    """One compile.

    Attributes:
        done: whether it has ended.
        binary: the shared object, or None where it failed.
        messages: what the compiler said.
        owners: those who still want it; without any it is not begun.
    """

    def __init__(self, owner: object) -> None:
        self.done = False
        self.binary: bytes | None = None
        self.messages = ""
        self.owners = {owner}
        self._callbacks: list[Callable[[Job], None]] = []

    def when_done(self, callback: Callable[[Job], None]) -> None:
        """Call back once it has ended, at once if it has."""
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def finish(self, binary: bytes | None, messages: str) -> None:
        self.binary, self.messages, self.done = binary, messages, True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Programs:
    """The compiles of a server. Its tasks live in the given nursery."""

    def __init__(self, zygote: Zygote, nursery: trio.Nursery, *, seconds: float, directory: Path | None = None) -> None:
        self._zygote = zygote
        self._nursery = nursery
        self._seconds = seconds
        self._cache = ProgramCache(default_directory() if directory is None else directory)
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._at_once = trio.CapacityLimiter(processors)
        self._per_owner = max(1, processors // 2)
        self._owners: dict[object, trio.CapacityLimiter] = {}
        self._running: dict[tuple[object, ...], Job] = {}
        self._memory: OrderedDict[tuple[object, ...], bytes] = OrderedDict()
        self._memory_nbytes = 0
        self.compiled = 0
        self.cached = 0

    def compile(self, source: str, message: Program, owner: object) -> Job:
        """Start to compile a program, or join in where the same one is being compiled.

        Args:
            owner: whose it is: one of them can't keep all processors busy.
        """
        key = (source, message.entry, message.signature, message.alias)
        known = self._memory.get(key)
        if known is not None:
            self._memory.move_to_end(key)
            self.cached += 1
            job = Job(owner)
            job.finish(known, "")
            return job
        running = self._running.get(key)
        if running is not None:
            running.owners.add(owner)
            return running
        job = self._running[key] = Job(owner)
        share = self._owners.setdefault(owner, trio.CapacityLimiter(self._per_owner))
        self._nursery.start_soon(self._run, job, key, message, source, share)
        return job

    def forget_owner(self, owner: object) -> None:
        """An owner is gone: what it alone wanted and was not begun is not compiled any more."""
        self._owners.pop(owner, None)
        for job in self._running.values():
            job.owners.discard(owner)

    async def native(self) -> bytes:
        """The shared object of the native loop.

        Raises:
            CompileError: this machine's compiler refuses it.
            DeviceLost: the zygote has ended.
        """
        return await self._binary(native.source(), seconds=60.0)

    async def _run(
        self, job: Job, key: tuple[object, ...], message: Program, source: str, share: trio.CapacityLimiter
    ) -> None:
        binary, messages = None, "the server stopped before the program was compiled"
        try:
            text = full_source(source, message.entry, message.signature, alias=message.alias)
            async with share, self._at_once:
                if not job.owners:
                    messages = "nobody wanted the program any more when its turn came"
                    return
                try:
                    binary = await self._binary(text, seconds=self._seconds)
                except DeviceLost:
                    # One more try: it may have been another's compile that took the process with it.
                    await self._zygote.wait_ready()
                    binary = await self._binary(text, seconds=self._seconds)
            messages = ""
            self._remember(key, binary)
        except (CompileError, DeviceLost) as error:
            messages = str(error)
        except Exception:
            _log.exception("compiling a program failed")
            messages = "the program could not be compiled because of an error of the server; its log says more"
        finally:
            del self._running[key]
            job.finish(binary, messages)

    async def _binary(self, text: str, *, seconds: float) -> bytes:
        compiler = self._zygote.compiler

        def look_up() -> tuple[str, bytes | None]:
            name = cache_key(compiler, text)
            return name, self._cache.get(name)

        name, binary = await trio.to_thread.run_sync(look_up)
        if binary is not None:
            self.cached += 1
            return binary
        binary = await self._zygote.compile(text, seconds)
        self.compiled += 1
        await trio.to_thread.run_sync(self._cache.put, name, binary)
        return binary

    def _remember(self, key: tuple[object, ...], binary: bytes) -> None:
        size = len(binary) + sum(len(part) for part in key if isinstance(part, str))
        if size > _MEMORY_NBYTES // 4:
            return
        self._memory[key] = binary
        self._memory_nbytes += size
        while self._memory_nbytes > _MEMORY_NBYTES or len(self._memory) > _MEMORY_ENTRIES:
            old, dropped = self._memory.popitem(last=False)
            self._memory_nbytes -= len(dropped) + sum(len(part) for part in old if isinstance(part, str))
