"""Turns what is issued inside `with record(...)` into the items of a graph; plans nothing and sends nothing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.recorders import OPEN, open_recorder, recorder_of
from wsgrad.client.signature import INDEX, plain_scalar
from wsgrad.errors import DeviceError, LaunchError
from wsgrad.graph import items
from wsgrad.graph.items import Access, Affine, Operand, Range, affine
from wsgrad.graph.items import Var as Var
from wsgrad.graph.recording import PATTERNS, Recording

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wsgrad.client.base import BaseDevice
    from wsgrad.client.handle import Handle
    from wsgrad.client.life import Life
    from wsgrad.client.program import BaseProgram

RESERVED: Final = frozenset({"substitutions", "timeout", "wait"})
"""Names that variables can't have, since `run` has them."""
_INT32: Final = (-(1 << 31), (1 << 31) - 1)


class Recorder:
    """What one `record` collects.

    Attributes:
        caller: the thread or task whose calls are recorded.
        devices: by their servers' numbers and, there, their own.
        places: which device of the graph each is.
        recording: the items.
        lives: of the devices, in which the graph means something.
        handles: what keeps the memory of each buffer of the recording, by its number there.
        programs: what keeps the programs.
        lines: with `WSGRAD_DEBUG=1`, where each item was issued.
    """

    def __init__(self, devices: Sequence[BaseDevice[Any, Any]]) -> None:
        if not devices:
            raise ValueError("record() needs the devices whose work it is to record")
        self.caller = devices[0]._server._caller()
        self.devices: list[list[BaseDevice[Any, Any]]] = []
        self.places: dict[BaseDevice[Any, Any], items.Device] = {}
        self.recording = Recording()
        self.lives: dict[BaseDevice[Any, Any], Life] = {}
        self.handles: list[Handle | None] = []
        self.programs: set[Handle] = set()
        self.lines: list[str] = []
        self._servers: list[object] = []
        self._regions: dict[int, int] = {}
        self._allocated: list[weakref.ref[BaseBuffer]] = []
        self._blank: set[int] = set()
        for device in devices:
            if device not in self.places:
                self._add_device(device)

    def open(self) -> None:
        """Record from here on."""
        open_recorder(self)

    def close(self) -> None:
        """Record no more: what was allocated belongs to the graph now."""
        OPEN.remove(self)
        for reference in self._allocated:
            buffer = reference()
            if buffer is not None:
                buffer._id = None

    # -- buffers

    def own(self, buffer: BaseBuffer) -> None:
        """A buffer, or a view of one, was made that goes with the graph."""
        buffer._owned = True
        self._allocated.append(weakref.ref(buffer))
        if buffer._base is buffer._handle:
            self._blank.add(self._declare(buffer, buffer._base, buffer._nbytes, memory=memory_of(buffer), owned=True))

    def region(self, buffer: BaseBuffer, offset: int, nbytes: int) -> int:
        """Declare what an argument lies in, apart from all other memory: its number, for `_region` of the argument."""
        alone = (offset, nbytes) == (buffer._offset, buffer._nbytes)
        number = self._declare(
            buffer, buffer._handle if alone else buffer._base, nbytes, memory=("argument", len(self.handles))
        )
        self._regions[number] = offset
        return number

    def copy(self, target: BaseBuffer, source: BaseBuffer) -> None:
        """Bytes from one buffer to another, on the same device or not."""
        to, whence = self._range(target), self._range(source)
        if not to.nbytes:
            return
        device, other = self.places[target._device], self.places[source._device]
        if device == other:
            self._add(items.Copy(device, to, whence), target._device)
        else:
            self._add(items.Transfer(to, whence), target._device)

    def fill(self, target: BaseBuffer, pattern: bytes) -> None:
        """A pattern over a buffer."""
        if len(pattern) not in PATTERNS:
            raise LaunchError(
                f"a fill with elements of {len(pattern)} bytes can't be recorded: only of 1, 2, 4, 8 or 16 bytes"
            )
        range_ = self._range(target)
        if range_.nbytes:
            self._add(items.Fill(self.places[target._device], range_, pattern), target._device)

    def launch(
        self,
        program: BaseProgram,
        arguments: tuple[object, ...],
        grid: object,
        block: object,
        constants: Mapping[str, object],
    ) -> None:
        """A launch; variables may stand for integers and in the grid."""
        device = program._device
        queue = program._current_queue()
        self._check_life(device)
        arguments = program._dressed(queue, arguments)
        plain = tuple(_stand_in(argument) for argument in arguments)
        signature = program._signature(plain)
        sizes = _sizes_of(grid)
        counts, block_sizes = program._grid(signature, _plain_sizes(sizes)), program._block(block)
        program._values(signature, plain)
        variant = program._variant(queue, signature, constants)
        if counts is not None and 0 in counts:
            return
        self.programs.add(variant.handle)
        writes = program._writes
        given: list[items.Argument] = []
        for position, (letter, argument) in enumerate(zip(signature, arguments, strict=True)):
            if isinstance(argument, BaseBuffer):
                access = Access.BOTH if writes is None or position in writes else Access.READ
                given.append(Operand(self._range(argument), access))
            elif isinstance(argument, Var | Affine):
                _check_name(argument)
                given.append(argument)
            elif argument is INDEX:
                given.append(items.INDEX)
            else:
                given.append(plain_scalar(letter, argument))
        dims: tuple[items.Size, ...] | None = None
        if counts is not None:
            assert sizes is not None
            dims = tuple(
                size if isinstance(size, Var | Affine) else count for size, count in zip(sizes, counts, strict=True)
            )
            for size in dims:
                if isinstance(size, Var | Affine):
                    _check_name(size)
        launch = items.Launch(
            self.places[device],
            variant.handle.id,
            signature,
            tuple(given),
            grid=dims,
            block=None if block_sizes is None else tuple(block_sizes),
            alias=program._alias,
            name=program._name,
        )
        self._add(launch, device)

    def _add_device(self, device: BaseDevice[Any, Any]) -> None:
        server = device._server
        if not any(server is known for known in self._servers):
            self._servers.append(server)
            self.devices.append([])
        number = next(at for at, known in enumerate(self._servers) if known is server)
        self.places[device] = items.Device(number, len(self.devices[number]), device.id)
        self.devices[number].append(device)

    def _check_life(self, device: BaseDevice[Any, Any]) -> None:
        life = device._usable_queue().life
        if self.lives.setdefault(device, life) is not life:
            raise DeviceError(f"{device.id!r} was reopened or closed inside a recording")

    def _declare(self, buffer: BaseBuffer, handle: Handle, nbytes: int, *, memory: object, owned: bool = False) -> int:
        device = buffer._device
        self._check_life(device)
        name = f"{buffer._type}{list(buffer._shape)}".replace(" ", "")
        number = self.recording.buffer(
            self.places[device], nbytes, memory=memory, name=f"{name} #{len(self.handles)}", owned=owned
        )
        if number == len(self.handles):
            self.handles.append(handle)
        return number

    def _range(self, buffer: BaseBuffer) -> Range:
        """The bytes that a buffer or view stands for."""
        recorder_of(buffer._device)
        buffer._check()
        if buffer._region is not None and buffer._region[0] is self:
            number = buffer._region[1]
            return Range(number, buffer._offset - self._regions[number], buffer._nbytes)
        base = buffer._base
        if base.freed:
            raise DeviceError(f"{buffer!r} can't be recorded: the buffer it is a view of was freed")
        number = self._declare(buffer, base, base.nbytes, memory=memory_of(buffer))
        return Range(number, buffer._offset, buffer._nbytes)

    def _add(self, item: items.Item, device: BaseDevice[Any, Any]) -> None:
        """Append an item; memory that is to be new in each run is zeroed before its first use, if that matters."""
        for number in {range_.buffer for range_, _ in item.accesses} & self._blank:
            self._blank.discard(number)
            buffer = self.recording.buffers[number]
            whole = Range(number, 0, buffer.nbytes)
            uses = [(range_, access) for range_, access in item.accesses if range_.buffer == number]
            if whole.nbytes and uses != [(whole, Access.WRITE)]:
                self.recording.add(items.Fill(buffer.device, whole, b"\0"))
                self.lines.append(device._line())
        self.recording.add(item)
        self.lines.append(device._line())


def memory_of(buffer: BaseBuffer) -> tuple[str, int]:
    """What tells a buffer's memory from other memory, while somebody holds it."""
    return "memory", id(buffer._base)


def _stand_in(argument: object) -> object:
    """A number of the type that a variable will have."""
    if not isinstance(argument, Var | Affine):
        return argument
    low, high = affine(argument).bounds
    return 0 if _INT32[0] <= low and high <= _INT32[1] else np.int64(0)


def _sizes_of(grid: object) -> tuple[object, ...] | None:
    """The sizes of a grid, of which each may be a variable."""
    if grid is None:
        return None
    return tuple(grid) if isinstance(grid, Sequence) else (grid,)


def _plain_sizes(sizes: tuple[object, ...] | None) -> tuple[object, ...] | None:
    """The same with ones in place of variables."""
    return None if sizes is None else tuple(1 if isinstance(size, Var | Affine) else size for size in sizes)


def _check_name(size: Var | Affine) -> None:
    name = affine(size).var.name
    if name in RESERVED or not name.isidentifier():
        raise LaunchError(f"a variable can't be called {name!r}: its value is given as run({name}=…)")
