"""Programs as both faces show them: compiled once a signature, launched by appending packed words to a list."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from wsgrad.client.arguments import STRUCT_ALIGNMENT, arguments_of
from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.handle import Handle
from wsgrad.client.queue import MAX_PACKED
from wsgrad.client.recorders import OPEN, recorder_of, refuse
from wsgrad.client.signature import (
    INDEX,
    MAX_ARGUMENTS,
    PROBE_ENTRY,
    c_probe,
    make_packer,
    plain_scalar,
    words_of,
)
from wsgrad.client.waits import settled
from wsgrad.errors import LaunchError, LimitExceeded
from wsgrad.transport.commands import Launch
from wsgrad.transport.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.client.base import BaseDevice
    from wsgrad.client.life import Life
    from wsgrad.client.pending import Compilation
    from wsgrad.client.queue import Queue
    from wsgrad.client.waits import Wait

_MAX_NAME = 64
_MAX_GRID = (1 << 32) - 1
_MAX_STRUCTS = 256
_Constants: TypeAlias = tuple[tuple[str, int | float | bool], ...]
_PROBE: tuple[str, _Constants] = ("?", ())
"""In place of a signature: compiled without a call, only to hear whether it compiles."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """The program compiled for one signature."""

    handle: Handle
    compilation: Compilation


class BaseProgram:
    """A source and the function in it that a launch calls. Freed with its last reference."""

    def __init__(
        self,
        device: BaseDevice[Any, Any],
        source: str,
        entry: str,
        *,
        dialect: str,
        writes: Sequence[int] | None,
        alias: bool,
        name: str,
    ) -> None:
        for what, text in (("source", source), ("entry", entry), ("name", name)):
            if not isinstance(text, str):
                hint = f"; pass {what}.decode()" if isinstance(text, bytes | bytearray) else ""
                raise TypeError(f"a program's {what} is a str, not {type(text).__name__}{hint}")
        if not 0 < len(name) <= _MAX_NAME or any(c in "/\\" or not c.isprintable() for c in name) or ".." in name:
            raise ValueError(f"the name {name!r:.80} is refused: 1 to {_MAX_NAME} printable characters and no path")
        if not entry.isidentifier() or not entry.isascii():
            raise ValueError(f"the entry {entry!r:.80} can't be the name of a function")
        if dialect not in device.dialects:
            raise LaunchError(
                f"{device.id!r} has no dialect {dialect!r}, it has {', '.join(device.dialects) or 'none'}"
            )
        self._encoded = source.encode()
        if len(self._encoded) > CHUNK_BYTES:
            raise LimitExceeded(f"the source of {name!r} has {len(self._encoded)} bytes, the limit is {CHUNK_BYTES}")
        self._device = device
        self._source = source
        self._entry = entry
        self._dialect = dialect
        self._name = name
        self._alias = alias
        self._arguments = arguments_of(dialect, source, entry)
        self._writes = None if writes is None else sorted({operator.index(index) for index in writes})
        if self._writes and not 0 <= self._writes[0] <= self._writes[-1] < MAX_ARGUMENTS:
            raise ValueError(
                f"writes= holds positions of arguments, 0 to {MAX_ARGUMENTS - 1}, not {tuple(writes or ())}"
            )
        self._given_writes = self._writes is not None
        if self._writes is None:
            self._writes = self._arguments.writes
        self._session = device._server._session
        self._debug = self._session.debug
        self._queue: Queue | None = None
        self._life: Life | None = None
        self._variants: dict[tuple[str, _Constants], _Variant] = {}
        self._structs: dict[bytes, BaseBuffer] = {}
        self._packers: dict[tuple[type, ...], Callable[..., bytes]] = {}

    @property
    def name(self) -> str:
        """How errors call it."""
        return self._name

    @property
    def entry(self) -> str:
        """The function that a launch calls."""
        return self._entry

    @property
    def source(self) -> str:
        """Its text."""
        return self._source

    @property
    def device(self) -> BaseDevice[Any, Any]:
        """Where it runs."""
        return self._device

    def __repr__(self) -> str:
        compilations = [variant.compilation for variant in self._variants.values()]
        if not compilations:
            state = "compiled when first launched"
        elif all(compilation.failure for compilation in compilations):
            state = "does not compile"
        else:
            state = "compiled" if all(compilation.done for compilation in compilations) else "compiling"
        return f"<{type(self).__name__} {self._name!r} ({self._dialect}) on {self._device.id!r}: {state}>"

    def __call__(
        self,
        *arguments: object,
        grid: int | Sequence[int] | None = None,
        block: int | Sequence[int] | None = None,
        **constants: float,
    ) -> None:
        """Launch it: the call joins the device's queue and never waits.

        Args:
            arguments: buffers and scalars in the function's order; a Python int is an int32 and a float a float32,
                NumPy's scalars keep their type. `INDEX` stands where each call of a grid gets its index. In WGSL a
                number takes the type of its `var<uniform>`, and a structured one a NumPy scalar with its fields.
            grid: how many calls, spread over threads; one call without an index if left out. In WGSL and for kernels
                one to three numbers of work-groups, 1 if left out.
            block: the size of a work-group in one to three dimensions, for kernels; 1 if left out.
            constants: values of the WGSL source's `override`s; each set of them is compiled once.

        Raises:
            LaunchError: an argument does not fit; the message says which and why.
        """
        packer = self._packers.get(tuple(map(type, arguments)))
        queue = self._queue
        plain = block is None and not constants and not self._debug and not OPEN
        if packer is not None and plain and queue is not None:
            trace = self._session.trace
            started = 0 if trace is None else time.monotonic_ns()
            launches = queue.launches
            if grid is None:
                words = self._packed(packer, 0, arguments)
            elif type(grid) is int and 0 < grid <= _MAX_GRID:
                words = self._packed(packer, grid, arguments)
            else:
                words = None
            if words is not None:
                if len(launches) >= MAX_PACKED:
                    self._device._server._full(queue)
                # One append: no thread and no interrupt can cut it, so it takes no lock.
                launches.append(words)
                if self._session.asleep:
                    self._session.wake()
                if trace is not None:
                    trace.launched(self._name, started)
                return
        self._device._make_room()
        self._device._server._call(lambda: self._launch(arguments, grid, block, constants))

    @staticmethod
    def _packed(packer: Callable[..., bytes], grid: int, arguments: tuple[object, ...]) -> bytes | None:
        try:
            return packer(grid, *arguments)
        except Exception:
            return None  # the careful way finds out what does not fit

    def _begin(self) -> None:
        """Send it for the signature that its source suggests, so that it is compiled before it is needed."""
        queue = self._current_queue()
        guess = self._arguments.guess()
        if guess is not None:
            self._variant(queue, guess)

    def _launch(
        self, arguments: tuple[object, ...], grid: object, block: object, constants: Mapping[str, object]
    ) -> None:
        recorder = recorder_of(self._device) if OPEN else None
        if recorder is not None:
            recorder.launch(self, arguments, grid, block, constants)
            return
        queue = self._current_queue()
        dressed = self._dressed(queue, arguments)
        signature = self._signature(dressed)
        sizes, block_sizes = self._grid(signature, grid), self._block(block)
        values = self._values(signature, dressed)
        variant = self._variant(queue, signature, constants)
        if sizes is not None and 0 in sizes:
            return
        if block_sizes is not None or (sizes is not None and len(sizes) > 1):
            launch = Launch(variant.handle.id, sizes, block_sizes, values, False)
            queue.command(launch, nbytes=64 + 9 * len(values), line=self._device._line())
            return
        types = tuple(map(type, dressed))
        packer = make_packer(signature, variant.handle.id, queue.life, types)
        queue.life.words[variant.handle.id] = words_of(signature)
        if not constants and dressed is arguments:
            self._packers[types] = packer
        if len(queue.launches) >= MAX_PACKED:
            queue.flush()
        queue.launches.append(packer(sizes[0] if sizes else 0, *dressed))
        if self._debug:
            queue.lines.append(self._device._line())

    def _start_timed(
        self, arguments: tuple[object, ...], grid: object, block: object, constants: Mapping[str, object]
    ) -> Wait[float]:
        self._device._waiting_queue()
        queue = self._current_queue()
        dressed = self._dressed(queue, arguments)
        signature = self._signature(dressed)
        sizes, block_sizes = self._grid(signature, grid), self._block(block)
        values = self._values(signature, dressed)
        variant = self._variant(queue, signature, constants)
        if sizes is not None and 0 in sizes:
            return settled(0.0)
        launch = Launch(variant.handle.id, sizes, block_sizes, values, True)
        return queue.timed_launch(launch, line=self._device._line())

    def _start_ready(self) -> Wait[None]:
        refuse(self._device, "waiting for a program")
        queue = self._current_queue()
        if not self._variants:
            self._begin()
        if self._dialect == "c" and self._arguments.guess() is None and _PROBE not in self._variants:
            self._probe(queue)
        return queue.pending.compiled([variant.compilation for variant in self._variants.values()])

    def _probe(self, queue: Queue) -> None:
        """Let a source be compiled whose parameters are not understood: with no call, but what needs the function."""
        source = c_probe(self._source, self._entry).encode()
        if len(source) <= CHUNK_BYTES:
            identity, compilation = queue.program(
                source,
                dialect=self._dialect,
                name=self._name,
                entry=PROBE_ENTRY,
                signature="",
                writes=None,
                alias=self._alias,
            )
            self._variants[_PROBE] = _Variant(Handle(identity, queue.life, program=True), compilation)

    def _current_queue(self) -> Queue:
        """The device's queue; what was compiled in an earlier life of the device is forgotten."""
        queue = self._device._usable_queue()
        if queue.life is not self._life:
            self._life = queue.life
            self._variants = {}
            self._packers = {}
            self._structs = {}
            self._queue = queue
        return queue

    def _variant(self, queue: Queue, signature: str, constants: Mapping[str, object] | None = None) -> _Variant:
        checked = self._constants(constants) if constants else ()
        variant = self._variants.get((signature, checked))
        if variant is None:
            writes = self._writes
            for index in writes or ():
                if index >= len(signature) or signature[index] != "p":
                    if self._given_writes:
                        raise self._error(f"writes= names argument {index}, which is not a buffer")
                    # The source has more bindings than there are arguments, which its compiler will say better.
                    writes = None
                    break
            identity, compilation = queue.program(
                self._encoded,
                dialect=self._dialect,
                name=self._name,
                entry=self._entry,
                signature=signature,
                writes=writes,
                alias=self._alias,
                constants=dict(checked),
                line=self._device._line(),
            )
            variant = _Variant(Handle(identity, queue.life, program=True), compilation)
            self._variants[signature, checked] = variant
        return variant

    def _constants(self, constants: Mapping[str, object]) -> _Constants:
        """Override constants in one order, as numbers that travel.

        Raises:
            LaunchError: the dialect has none, or a value is no number.
        """
        if self._dialect != "wgsl":
            named = ", ".join(constants)
            raise self._error(f"{named}= means nothing in the dialect {self._dialect!r}; only WGSL has overrides")
        plain: list[tuple[str, int | float | bool]] = []
        for name, value in sorted(constants.items()):
            if isinstance(value, bool | np.bool_):
                plain.append((name, bool(value)))
            elif isinstance(value, int | np.integer):
                plain.append((name, int(value)))
            elif isinstance(value, float | np.floating) and math.isfinite(value):
                plain.append((name, float(value)))
            else:
                raise self._error(f"{name}={value!r:.40} is no finite number or truth value")
        return tuple(plain)

    def _dressed(self, queue: Queue, arguments: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments with small buffers in place of structured scalars."""
        try:
            return self._arguments.dressed(arguments, lambda data: self._struct(queue, data))
        except ValueError as exc:
            raise self._error(str(exc)) from None

    def _struct(self, queue: Queue, data: bytes) -> BaseBuffer:
        """A buffer that holds these bytes, padded; the last few are kept."""
        buffer = self._structs.pop(data, None)
        if buffer is None:
            padded = data + bytes(-len(data) % STRUCT_ALIGNMENT)
            identity = queue.life.buffers.take()
            handle = Handle(identity, queue.life, nbytes=len(padded))
            line = self._device._line()
            queue.alloc(identity, len(padded), line=line)
            queue.write(identity, memoryview(padded), line=line)
            buffer = self._device._new_buffer(handle, handle, 0, (len(padded),), np.dtype(np.uint8))
            if len(self._structs) >= _MAX_STRUCTS:
                del self._structs[next(iter(self._structs))]
        self._structs[data] = buffer
        return buffer

    def _signature(self, arguments: tuple[object, ...]) -> str:
        if len(arguments) > MAX_ARGUMENTS:
            raise self._error(f"{len(arguments)} arguments are more than {MAX_ARGUMENTS}")
        letters = []
        for position, argument in enumerate(arguments):
            try:
                letters.append(self._arguments.letter(position, argument))
            except ValueError as exc:
                raise self._error(f"argument {position} {exc}") from None
        return "".join(letters)

    def _block(self, block: object) -> list[int] | None:
        if block is None:
            return None
        if not self._arguments.blocks:
            raise self._error(f"block= has no meaning in the dialect {self._dialect!r}")
        sizes = []
        for size in tuple(block) if isinstance(block, Sequence) else (block,):
            if not isinstance(size, int | np.integer) or not 1 <= size <= _MAX_GRID:
                raise self._error(f"block={block!r:.80} is not made of numbers of at least 1")
            sizes.append(int(size))
        if not 1 <= len(sizes) <= self._arguments.dimensions:
            raise self._error(f"block={block!r:.80} has not one to {self._arguments.dimensions} dimensions")
        return sizes

    def _grid(self, signature: str, grid: object) -> list[int] | None:
        if grid is None:
            if "x" in signature:
                raise self._error(f"argument {signature.index('x')} is INDEX, which needs grid=")
            return None
        given = tuple(grid) if isinstance(grid, Sequence) else (grid,)
        most = self._arguments.dimensions
        if not 1 <= len(given) <= most:
            dimensions = "one dimension" if most == 1 else f"one to {most} dimensions"
            raise self._error(f"grid={grid!r}: a grid has {dimensions} in the dialect {self._dialect!r}")
        sizes = []
        for size in given:
            try:
                sizes.append(operator.index(size))
            except TypeError:
                raise self._error(f"grid={grid!r} is not a number of calls") from None
            if not 0 <= sizes[-1] <= _MAX_GRID:
                raise self._error(f"grid={grid!r} is outside 0 to {_MAX_GRID}")
        return sizes

    def _values(self, signature: str, arguments: tuple[object, ...]) -> list[object]:
        """The arguments as they travel unpacked: ids and plain numbers, without the index."""
        values: list[object] = []
        for position, (letter, argument) in enumerate(zip(signature, arguments, strict=True)):
            if isinstance(argument, BaseBuffer):
                if argument._device is not self._device:
                    raise self._error(f"argument {position} is {argument!r}, not a buffer of {self._device.id!r}")
                if argument.freed:
                    raise self._error(f"argument {position} is {argument!r}")
                values.append(argument._check())
            elif argument is not INDEX:
                try:
                    values.append(plain_scalar(letter, argument))
                except ValueError as exc:
                    raise self._error(f"argument {position}: {exc}") from None
        return values

    def _error(self, text: str) -> LaunchError:
        details = {"operation": "launch", "program": self._name}
        return LaunchError(f"launch of {self._name!r}: {text}", details=details)
