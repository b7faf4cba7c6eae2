"""Programs as both faces show them: compiled once a signature, launched by appending packed words to a list."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.handle import Handle
from wsgrad.client.queue import MAX_PACKED
from wsgrad.client.recorders import OPEN, recorder_of
from wsgrad.client.signature import (
    INDEX,
    MAX_ARGUMENTS,
    guess_c_signature,
    letter_of,
    make_packer,
    plain_scalar,
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
        self._writes = None if writes is None else sorted({operator.index(index) for index in writes})
        if self._writes and not 0 <= self._writes[0] <= self._writes[-1] < MAX_ARGUMENTS:
            raise ValueError(
                f"writes= holds positions of arguments, 0 to {MAX_ARGUMENTS - 1}, not {tuple(writes or ())}"
            )
        self._session = device._server._session
        self._debug = self._session.debug
        self._queue: Queue | None = None
        self._life: Life | None = None
        self._variants: dict[str, _Variant] = {}
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
        if any(compilation.failure for compilation in compilations):
            state = "does not compile"
        elif not compilations:
            state = "compiled when first launched"
        else:
            state = "compiled" if all(compilation.done for compilation in compilations) else "compiling"
        return f"<{type(self).__name__} {self._name!r} ({self._dialect}) on {self._device.id!r}: {state}>"

    def __call__(
        self, *arguments: object, grid: int | Sequence[int] | None = None, block: int | Sequence[int] | None = None
    ) -> None:
        """Launch it: the call joins the device's queue and never waits.

        Args:
            arguments: buffers and scalars in the function's order; a Python int is an int32 and a float a float32,
                NumPy's scalars keep their type. `INDEX` stands where each call of a grid gets its index.
            grid: how many calls, spread over threads; one call without an index if left out.
            block: the size of a work-group, in dialects that have them.

        Raises:
            LaunchError: an argument does not fit; the message says which and why.
        """
        packer = self._packers.get(tuple(map(type, arguments)))
        queue = self._queue
        if packer is not None and block is None and queue is not None and not self._debug and not OPEN:
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
        self._device._server._call(lambda: self._launch(arguments, grid, block))

    @staticmethod
    def _packed(packer: Callable[..., bytes], grid: int, arguments: tuple[object, ...]) -> bytes | None:
        try:
            return packer(grid, *arguments)
        except Exception:
            return None  # the careful way finds out what does not fit

    def _begin(self) -> None:
        """Send it for the signature that its source suggests, so that it is compiled before it is needed."""
        queue = self._current_queue()
        guess = guess_c_signature(self._source, self._entry) if self._dialect == "c" else None
        if guess is not None:
            self._variant(queue, guess)

    def _launch(self, arguments: tuple[object, ...], grid: object, block: object) -> None:
        recorder = recorder_of(self._device) if OPEN else None
        if recorder is not None:
            recorder.launch(self, arguments, grid, block)
            return
        queue = self._current_queue()
        signature = self._signature(arguments)
        count = self._grid(signature, grid, block)
        self._values(signature, arguments)
        variant = self._variant(queue, signature)
        if count == 0:
            return
        types = tuple(map(type, arguments))
        packer = make_packer(signature, variant.handle.id, queue.life, types)
        self._packers[types] = packer
        if len(queue.launches) >= MAX_PACKED:
            queue.flush()
        queue.launches.append(packer(count or 0, *arguments))
        if self._debug:
            queue.lines.append(self._device._line())

    def _start_timed(self, arguments: tuple[object, ...], grid: object, block: object) -> Wait[float]:
        self._device._waiting_queue()
        queue = self._current_queue()
        signature = self._signature(arguments)
        count = self._grid(signature, grid, block)
        values = self._values(signature, arguments)
        variant = self._variant(queue, signature)
        if count == 0:
            return settled(0.0)
        launch = Launch(variant.handle.id, None if count is None else [count], None, values, True)
        return queue.timed_launch(launch, line=self._device._line())

    def _start_ready(self) -> Wait[None]:
        queue = self._current_queue()
        if not self._variants:
            self._begin()
        return queue.pending.compiled([variant.compilation for variant in self._variants.values()])

    def _current_queue(self) -> Queue:
        """The device's queue; what was compiled in an earlier life of the device is forgotten."""
        queue = self._device._usable_queue()
        if queue.life is not self._life:
            self._life = queue.life
            self._variants = {}
            self._packers = {}
            self._queue = queue
        return queue

    def _variant(self, queue: Queue, signature: str) -> _Variant:
        variant = self._variants.get(signature)
        if variant is None:
            for index in self._writes or ():
                if index >= len(signature) or signature[index] != "p":
                    raise self._error(f"writes= names argument {index}, which is not a buffer")
            identity, compilation = queue.program(
                self._encoded,
                dialect=self._dialect,
                name=self._name,
                entry=self._entry,
                signature=signature,
                writes=self._writes,
                alias=self._alias,
                line=self._device._line(),
            )
            variant = _Variant(Handle(identity, queue.life, program=True), compilation)
            self._variants[signature] = variant
        return variant

    def _signature(self, arguments: tuple[object, ...]) -> str:
        if len(arguments) > MAX_ARGUMENTS:
            raise self._error(f"{len(arguments)} arguments are more than {MAX_ARGUMENTS}")
        letters = []
        for position, argument in enumerate(arguments):
            letter = "p" if isinstance(argument, BaseBuffer) else letter_of(argument)
            if letter is None:
                hint = "; copy it with device.array(…) first" if isinstance(argument, np.ndarray) else ""
                raise self._error(f"argument {position} is a {type(argument).__name__}, not a buffer or number{hint}")
            letters.append(letter)
        return "".join(letters)

    def _grid(self, signature: str, grid: object, block: object) -> int | None:
        if block is not None:
            raise self._error(f"block= has no meaning in the dialect {self._dialect!r}")
        if grid is None:
            if "x" in signature:
                raise self._error(f"argument {signature.index('x')} is INDEX, which needs grid=")
            return None
        sizes = tuple(grid) if isinstance(grid, Sequence) else (grid,)
        if len(sizes) != 1:
            raise self._error(f"grid={grid!r}: a grid has one dimension in the dialect {self._dialect!r}")
        try:
            count = operator.index(sizes[0])
        except TypeError:
            raise self._error(f"grid={grid!r} is not a number of calls") from None
        if not 0 <= count <= _MAX_GRID:
            raise self._error(f"grid={grid!r} is outside 0 to {_MAX_GRID}")
        return count

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
