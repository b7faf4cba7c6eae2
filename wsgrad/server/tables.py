"""What a queue may name: its ids, ranges and the session's quotas, checked as Python integers; no I/O, no nodes.

A command goes through `check` once, in issue order, before any node sees it. What passes is noted, so the tables tell
what will exist when the node gets there. A refusal is a named error that the queue puts in the command's place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from wsgrad.errors import CompileError, DeviceError, LaunchError, LimitExceeded, OutOfMemory
from wsgrad.transport.commands import (
    Alloc,
    Clear,
    Command,
    Copy,
    Download,
    Drop,
    Fill,
    Free,
    Launch,
    Read,
    Receive,
    Send,
    Signal,
    Upload,
    UploadCached,
    View,
    Wait,
    Write,
)
from wsgrad.transport.messages import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wsgrad.transport.messages import Program

MAX_ARGUMENTS: Final = 64
MAX_NAME: Final = 64
MAX_CONSTANTS: Final = 32
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_WORDS: Final = {"p": 1, "i": 1, "I": 1, "f": 1, "q": 2, "Q": 2, "d": 2, "x": 0}
_INTEGERS: Final = {
    "i": ("int32", -(1 << 31), (1 << 31) - 1),
    "I": ("uint32", 0, (1 << 32) - 1),
    "q": ("int64", -(1 << 63), (1 << 63) - 1),
    "Q": ("uint64", 0, (1 << 64) - 1),
}
_MOST_FLOAT: Final = 1.7976931348623157e308
_PATTERNS: Final = frozenset({1, 2, 4, 8, 16})


@dataclass(slots=True)
class Quota:
    """What one session holds on all its queues together, and how much it may."""

    max_memory: int
    max_buffers: int
    max_programs: int
    memory: int = 0
    buffers: int = 0
    programs: int = 0


@dataclass(slots=True)
class _Buffer:
    nbytes: int
    views: int = 0
    named: bool = True


@dataclass(slots=True)
class _View:
    nbytes: int
    base: _Buffer


_Memory: TypeAlias = _Buffer | _View


@dataclass(slots=True)
class ProgramEntry:
    """A program of a queue.

    Attributes:
        error: the compiler's message, once it failed to compile.
        live: false once it was dropped.
    """

    name: str
    signature: str
    error: str | None = None
    live: bool = True

    @property
    def words(self) -> int:
        """32-bit words of one packed launch, its program and grid included."""
        return 2 + sum(_WORDS[letter] for letter in self.signature)


class Tables:
    """The ids of one queue. The session's quota is shared by all its queues."""

    def __init__(self, quota: Quota, *, dialects: frozenset[str] = frozenset({"c"}), max_program_nbytes: int) -> None:
        self._quota = quota
        self._dialects = dialects
        self._max_program_nbytes = max_program_nbytes
        self._memory: dict[int, _Memory] = {}
        self._programs: dict[int, ProgramEntry] = {}
        self._nbytes = 0
        self.generation = 0
        """Changes whenever an id has gone, so that it may come to mean something else."""

    @property
    def programs(self) -> Mapping[int, ProgramEntry]:
        """All programs by id, dropped ones too."""
        return MappingProxyType(self._programs)

    def describe(self) -> dict[str, int]:
        """How much there is, for the status page."""
        live = sum(entry.live for entry in self._programs.values())
        return {"memory": self._nbytes, "buffers": len(self._memory), "programs": live}

    def program(self, program: int) -> ProgramEntry | None:
        """The program that last had this id; a dropped one too, since its launches may still be under way."""
        return self._programs.get(program)

    def clear(self) -> None:
        """Everything is gone, with its node: the quota gets it back."""
        self.generation += 1
        for memory in self._memory.values():
            if isinstance(memory, _View):
                self._release_view(memory)
            else:
                self._release_buffer(memory)
        self._quota.buffers -= len(self._memory)
        self._quota.programs -= sum(entry.live for entry in self._programs.values())
        self._memory.clear()
        self._programs.clear()

    def check(self, command: Command) -> None:
        """Check a command and note what it changes.

        Raises:
            WsgradError: it names something that is not there, a range that does not fit, or goes over a quota.
        """
        match command:
            case Launch():
                self._check_launch(command)
            case Write():
                if len(command.data) > INLINE_BYTES:
                    raise LimitExceeded(f"write of {len(command.data)} bytes in a message exceeds {INLINE_BYTES} bytes")
                self.check_range("write", command.buffer, command.offset, len(command.data))
            case Read():
                if command.nbytes > INLINE_BYTES:
                    raise LimitExceeded(f"read of {command.nbytes} bytes in a message exceeds {INLINE_BYTES} bytes")
                self.check_range("read", command.buffer, command.offset, command.nbytes)
            case Alloc():
                self._alloc(command)
            case Free():
                self._free(command.buffer)
            case View():
                self._view(command)
            case Upload() | UploadCached():
                self.check_range("upload", command.buffer, command.offset, command.nbytes)
            case Download():
                self.check_range("download", command.buffer, command.offset, command.nbytes)
            case Copy():
                self.check_range("copy", command.target, command.target_offset, command.nbytes)
                self.check_range("copy", command.source, command.source_offset, command.nbytes)
            case Fill():
                size = len(command.pattern)
                if size not in _PATTERNS or command.nbytes % size:
                    raise DeviceError(f"fill of {command.nbytes} bytes with a pattern of {size}: not a multiple of it")
                self.check_range("fill", command.buffer, command.offset, command.nbytes)
            case Drop():
                self._drop(command.program)
            case Send():
                self.check_range("send", command.buffer, command.offset, command.nbytes)
            case Receive():
                self.check_range("receive", command.buffer, command.offset, command.nbytes)
            case Clear() | Signal() | Wait():
                pass
            case _:
                assert_never(command)

    def may_read(self, buffer: int, nbytes: int) -> bool:
        """Whether a read of its first bytes would pass `check`."""
        memory = self._memory.get(buffer)
        return memory is not None and nbytes <= memory.nbytes

    def check_program(self, message: Program, source_nbytes: int) -> ProgramEntry:
        """Check a new program and note it.

        Raises:
            WsgradError: its id, name, entry, signature or size is refused.
        """
        quota = self._quota
        known = self._programs.get(message.program)
        if known is not None and known.live:
            raise DeviceError(f"program id {message.program} is in use")
        if message.program >= quota.max_programs or quota.programs >= quota.max_programs:
            raise LimitExceeded(
                f"a session may have {quota.max_programs} programs; raise it with --max-programs",
                details={"program": message.program, "limit": quota.max_programs},
            )
        if source_nbytes > self._max_program_nbytes:
            raise LimitExceeded(
                f"program source of {source_nbytes} bytes exceeds the limit of {self._max_program_nbytes}; "
                "raise it with --max-program-size"
            )
        name = message.name or message.entry
        if len(name) > MAX_NAME or any(c in "/\\" or not c.isprintable() for c in name) or ".." in name:
            raise CompileError(f"program name {name[:80]!r} is refused: at most {MAX_NAME} characters and no path")
        if message.dialect not in self._dialects:
            offered = ", ".join(sorted(self._dialects)) or "none"
            raise CompileError(f"the device has no dialect {message.dialect[:40]!r}, it has: {offered}")
        if not _IDENTIFIER.match(message.entry):
            raise CompileError(f"the entry {message.entry[:80]!r} is not the name of a function")
        signature = message.signature
        if len(signature) > MAX_ARGUMENTS:
            raise CompileError(f"{len(signature)} arguments are more than {MAX_ARGUMENTS}")
        if any(letter not in _WORDS for letter in signature):
            raise CompileError(f"the signature {signature!r} is not made of piIqQfdx")
        for index in message.writes or ():
            if index >= len(signature) or signature[index] != "p":
                raise CompileError(f"writes= names argument {index}, which is no buffer of signature {signature!r}")
        _check_constants(message)
        entry = self._programs[message.program] = ProgramEntry(name, signature)
        quota.programs += 1
        return entry

    def _alloc(self, command: Alloc) -> None:
        quota = self._quota
        self._check_new_id(command.buffer)
        if command.nbytes > quota.max_memory - quota.memory:
            raise OutOfMemory(
                f"allocating {command.nbytes} bytes exceeds the session's limit of {quota.max_memory} bytes "
                f"({quota.memory} are in use); raise it with --max-session-memory",
                details={"nbytes": command.nbytes, "limit": quota.max_memory, "used": quota.memory},
            )
        self._charge(command.nbytes)
        quota.buffers += 1
        self._memory[command.buffer] = _Buffer(command.nbytes)

    def _view(self, command: View) -> None:
        self._check_new_id(command.view)
        base = self.check_range("view", command.buffer, command.offset, command.nbytes)
        if not isinstance(base, _Buffer):
            raise DeviceError(f"view of {command.buffer}, which is a view itself: views are of buffers")
        base.views += 1
        self._quota.buffers += 1
        self._memory[command.view] = _View(command.nbytes, base)

    def _free(self, buffer: int) -> None:
        # An unknown id is no error: a buffer whose allocation was refused is freed like any other.
        memory = self._memory.pop(buffer, None)
        if memory is None:
            return
        self.generation += 1
        self._quota.buffers -= 1
        if isinstance(memory, _View):
            self._release_view(memory)
        else:
            self._release_buffer(memory)

    def _release_buffer(self, buffer: _Buffer) -> None:
        buffer.named = False
        if not buffer.views:
            self._charge(-buffer.nbytes)

    def _release_view(self, view: _View) -> None:
        view.base.views -= 1
        if not view.base.views and not view.base.named:
            self._charge(-view.base.nbytes)

    def _charge(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._quota.memory += nbytes

    def _drop(self, program: int) -> None:
        entry = self._programs.get(program)
        if entry is not None and entry.live:
            self.generation += 1
            entry.live = False
            self._quota.programs -= 1

    def _check_new_id(self, buffer: int) -> None:
        quota = self._quota
        if buffer in self._memory:
            raise DeviceError(f"buffer id {buffer} is in use")
        if buffer >= quota.max_buffers or quota.buffers >= quota.max_buffers:
            raise LimitExceeded(
                f"a session may have {quota.max_buffers} buffers and views; raise it with --max-buffers",
                details={"buffer": buffer, "limit": quota.max_buffers},
            )

    def check_range(self, operation: str, buffer: int, offset: int, nbytes: int) -> _Memory:
        """The buffer or view that a range lies in.

        Raises:
            DeviceError: there is none, or the range does not fit.
        """
        memory = self._memory.get(buffer)
        if memory is None:
            raise DeviceError(f"{operation}: there is no buffer {buffer}", details={"operation": operation})
        if offset + nbytes > memory.nbytes:
            raise DeviceError(
                f"{operation} of {nbytes} bytes at offset {offset} does not fit a buffer of {memory.nbytes} bytes",
                details={"operation": operation, "offset": offset, "nbytes": nbytes, "size": memory.nbytes},
            )
        return memory

    def _check_launch(self, command: Launch) -> None:
        entry = self._programs.get(command.program)
        if entry is None or not entry.live:
            raise LaunchError(f"launch: there is no program {command.program}")
        details = {"operation": "launch", "program": entry.name}
        letters = entry.signature.replace("x", "")
        if len(command.arguments) != len(letters):
            raise LaunchError(
                f"launch of {entry.name!r} with {len(command.arguments)} arguments, its signature has {len(letters)}",
                details=details,
            )
        for index, (letter, value) in enumerate(zip(letters, command.arguments, strict=True)):
            problem = self._argument_problem(letter, value)
            if problem:
                raise LaunchError(f"launch of {entry.name!r}: argument {index} {problem}", details=details)

    def _argument_problem(self, letter: str, value: object) -> str | None:
        if letter == "p":
            if type(value) is not int or value not in self._memory:
                return f"names no buffer: {value!r:.40}"
        elif letter in "fd":
            if type(value) is not float and type(value) is not int:
                return f"is no number: {value!r:.40}"
        else:
            name, least, most = _INTEGERS[letter]
            if type(value) is not int or not least <= value <= most:
                return f"does not fit {name}: {value!r:.40}"
        return None


def _check_constants(message: Program) -> None:
    """Raises `CompileError` where a program's constants are not what its dialect takes."""
    constants = message.constants
    if constants and message.dialect != "wgsl":
        raise CompileError(f"the dialect {message.dialect!r} has no override constants: {', '.join(constants)[:80]}")
    if len(constants) > MAX_CONSTANTS:
        raise CompileError(f"{len(constants)} override constants are more than {MAX_CONSTANTS}")
    for name, value in constants.items():
        if not _IDENTIFIER.match(name):
            raise CompileError(f"the override constant {name[:80]!r} is not a name")
        if type(value) not in (int, float, bool) or not -_MOST_FLOAT <= value <= _MOST_FLOAT:  # type: ignore[operator]
            raise CompileError(f"the override constant {name} is no finite number or truth value: {value!r:.40}")
