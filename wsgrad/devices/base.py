"""What drives one kind of device: the interface between the executor and a runtime; contains no runtime.

A runtime knows memory and programs. Which commands exist, their order, ids' lifetimes, transfers and errors are the
executor's. A runtime raises the named errors of `wsgrad.errors`, which the executor sends to the client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wsgrad.devices.trace import DeviceTrace
    from wsgrad.errors import WsgradError
    from wsgrad.graph.native import Run
    from wsgrad.graph.part import DevicePart, PartStep


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """What a runtime has to know about a program besides its code.

    Attributes:
        name: what errors show.
        entry: the function to call.
        signature: one letter per argument, as in `compiler.full_source`.
        writes: the arguments that are written; None stands for every buffer.
        alias: two written arguments may be the same range.
        constants: values of the source's `override`s, where the dialect has them.
    """

    name: str
    entry: str
    signature: str
    writes: tuple[int, ...] | None
    alias: bool
    constants: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """A packed launch that failed, by its command number; the ones before it have run."""

    number: int
    error: WsgradError
    program: str | None


class Runtime(ABC):
    """One device in one session. `memory` is what `allocate` returned; ranges are checked before they come here.

    Attributes:
        slots_from: ids of buffers from here on are no client's: graphs bind their slots there.
        trace: notes each launch while a timeline is made; None most of the time.
    """

    slots_from: ClassVar[int] = 1 << 31
    trace: DeviceTrace | None = None

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """What the node can tell about this device once it is open."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """New zeroed memory; raises `OutOfMemory`."""

    @abstractmethod
    def release(self, memory: int) -> None:
        """Give memory back."""

    @abstractmethod
    def bind(self, buffer: int, memory: int, offset: int, nbytes: int) -> None:
        """Let launches use a range of memory under an id."""

    @abstractmethod
    def unbind(self, buffer: int) -> None:
        """Launches can't use this id any more."""

    @abstractmethod
    def write(self, memory: int, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into memory."""

    @abstractmethod
    def read(self, memory: int, offset: int, nbytes: int) -> bytes:
        """Take a few bytes out of memory."""

    @abstractmethod
    def read_into(self, memory: int, offset: int, target: memoryview) -> None:
        """Fill `target` from memory."""

    @abstractmethod
    def copy(self, target: int, target_offset: int, source: int, source_offset: int, nbytes: int) -> None:
        """Copy between two ranges, which may overlap."""

    @abstractmethod
    def fill(self, memory: int, offset: int, nbytes: int, pattern: bytes) -> None:
        """Repeat a pattern over a range whose size is a multiple of the pattern's."""

    @abstractmethod
    def load(self, program: int, spec: ProgramSpec, code: tuple[int, int] | None) -> None:
        """Make a program ready: `code` is a descriptor and a size, or None if compiling it failed."""

    @abstractmethod
    def drop(self, program: int) -> None:
        """Forget a program."""

    @abstractmethod
    def launch(
        self,
        program: int,
        grid: Sequence[int] | None,
        block: Sequence[int] | None,
        arguments: Sequence[object],
        number: int,
        *,
        timed: bool = False,
    ) -> float:
        """Run one launch; where it is timed, to its end, and return the seconds it took by the best clock there is."""

    @abstractmethod
    def launch_packed(self, words: memoryview, first: int) -> LaunchFailure | None:
        """Run packed launches, commands `first` … in order, up to the first that fails."""

    def prepare(self, part: DevicePart) -> Prepared | None:
        """Make a graph's launches ready for a replay of the runtime's own; None where they are run one by one."""
        return None

    def settle(self) -> None:  # noqa: B027  # a runtime that runs each command at once has nothing left to do
        """Run everything so far to its end, before it is acknowledged. Raises what failed."""

    @abstractmethod
    def program_name(self, program: int) -> str | None:
        """The name of a program, if there is one under this id."""

    @abstractmethod
    def close(self) -> None:
        """Free everything."""


class DriverRuntime(Runtime):
    """A runtime that runs ahead of its device, in a process of its own."""

    @abstractmethod
    def progress(self, number: int, step: int) -> None:
        """The executor works on this command, and this step of a graph."""


class Prepared(ABC):
    """A graph's launches as a runtime keeps them.

    Attributes:
        queue: what to do in order: runs of launches, and between them the steps that `run` can't do.
    """

    queue: tuple[Run | PartStep, ...]

    @abstractmethod
    def bind(self, slot: int, memory: int, offset: int, nbytes: int) -> None:
        """From now on a slot stands for this range."""

    @abstractmethod
    def patch(self, values: Sequence[int]) -> None:
        """From now on the variables have these values."""

    @abstractmethod
    def run(self, run: Run, first: int) -> LaunchFailure | None:
        """Run launches, steps `first` … of the graph in order, up to the first that fails: its number is the step's."""

    @abstractmethod
    def close(self) -> None:
        """Forget everything."""


class Outlet(ABC):
    """Where the chunks of a download go: a shared ring or a connection."""

    @abstractmethod
    def add_credit(self, slots: int) -> None:
        """So many more chunks may be sent."""

    @abstractmethod
    def place(self) -> memoryview | None:
        """Where to put the next chunk, at most as long as the view; None until there is credit."""

    @abstractmethod
    def send(self, transfer: int, offset: int, nbytes: int) -> None:
        """Send what was put into the last place; takes one credit."""


if TYPE_CHECKING:
    from wsgrad.transport.messages import Message

    Reply = Callable[[Message, bytes | None], None]
