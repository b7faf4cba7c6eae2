"""`jit`: a function whose device work is recorded at its first call for given shapes and dtypes, and replayed after."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec

from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.recorders import recorder_of
from wsgrad.client.recording import Recorder
from wsgrad.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from wsgrad.client.base import BaseDevice
    from wsgrad.client.graph import BaseGraph
    from wsgrad.client.handle import Handle

P = ParamSpec("P")

_KEPT: Final = 64
"""Graphs that a function keeps; the least recently used goes."""


@dataclass(frozen=True, slots=True)
class _Region:
    """The part of some memory that arguments lie in.

    Attributes:
        buffer: one of them.
        identity: the id that stands for the region's start.
    """

    buffer: BaseBuffer
    offset: int
    nbytes: int
    identity: int


class Jitted(Generic[P]):
    """A function under `jit`."""

    def __init__(self, function: Callable[P, None], devices: Sequence[BaseDevice[Any, Any]] = ()) -> None:
        """Wrap a function that works on `devices`, and on those of its arguments."""
        self._function = function
        self._devices = devices
        self._graphs: dict[Hashable, BaseGraph] = {}
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", repr(self._function))
        return f"<jit {name}, {len(self._graphs)} graph{'' if len(self._graphs) == 1 else 's'}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run the function's work on these arguments.

        Raises:
            LaunchError: the function does what can't be recorded, or returns something.
        """
        self._replay(args, kwargs)

    def replay(self, buffers: Sequence[BaseBuffer], values: Callable[[], Mapping[str, int]]) -> BaseGraph:
        """Run the function's work on buffers, with the values that its variables have this time; returns the graph.

        Args:
            buffers: the function's arguments.
            values: called once the graph is recorded.
        """
        graph = self._replay(tuple(buffers), {}, values)
        assert graph is not None
        return graph

    def _replay(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: Callable[[], Mapping[str, int]] | None = None,
    ) -> BaseGraph | None:
        arguments = [*args, *kwargs.values()]
        buffers = [argument for argument in arguments if isinstance(argument, BaseBuffer)]
        if buffers and recorder_of(buffers[0]._device) is not None:
            # Inside another recording its work becomes part of that.
            self._function(*args, **kwargs)
            return None
        regions = _regions(buffers)
        order = {base: at for at, base in enumerate(regions)}
        key: list[Hashable] = [tuple(kwargs)]
        for argument in arguments:
            if isinstance(argument, BaseBuffer):
                region = regions[argument._base]
                offset = argument._offset - region.offset
                key.append(
                    (argument._device, argument._shape, argument._type, order[argument._base], offset, region.nbytes)
                )
            else:
                # Equal numbers may still differ: 0.0 and -0.0 do.
                key.append((type(argument), argument, repr(argument)))
        shape = tuple(key)
        try:
            hash(shape)
        except TypeError as exc:
            raise TypeError(f"{self!r} takes buffers and values that can be compared, not {arguments!r:.200}") from exc
        graph = self._graphs.pop(shape, None)
        if graph is None or graph._lost:
            graph = self._record(buffers, regions, args, kwargs)
        self._graphs[shape] = graph
        while len(self._graphs) > _KEPT:
            self._graphs.pop(next(iter(self._graphs))).free()
        graph._run_arguments(
            [(region.buffer, region.offset, region.nbytes, region.identity) for region in regions.values()],
            {} if values is None else values(),
        )
        return graph

    def _record(
        self,
        buffers: list[BaseBuffer],
        regions: dict[Handle, _Region],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> BaseGraph:
        devices = dict.fromkeys([*self._devices, *(buffer._device for buffer in buffers)])
        if not devices:
            raise LaunchError(f"{self!r} was called without a buffer, so nothing tells on which device it works")
        recorder = Recorder(list(devices))
        numbers = {
            base: recorder.region(region.buffer, region.offset, region.nbytes) for base, region in regions.items()
        }

        def stand_in(argument: object) -> object:
            """A buffer that is known to be an argument, whatever else the function uses of the same memory."""
            if not isinstance(argument, BaseBuffer):
                return argument
            shape, dtype = argument._shape, argument._type
            made = type(argument)(argument._device, argument._handle, argument._base, argument._offset, shape, dtype)
            made._region = recorder, numbers[argument._base]
            return made

        graph: BaseGraph = next(iter(devices))._new_graph(recorder)
        recorder.open()
        try:
            given: Any = [stand_in(argument) for argument in args]
            named: Any = {name: stand_in(argument) for name, argument in kwargs.items()}
            returned: object = self._function(*given, **named)
        finally:
            recorder.close()
        if returned is not None:
            raise LaunchError(f"{self!r} returned {returned!r:.100}: it has to write its results into its arguments")
        graph._finish()
        # Each run brings memory for the arguments: that of the first call need not be kept.
        recorder.handles[: len(regions)] = [None] * len(regions)
        return graph


def _regions(buffers: list[BaseBuffer]) -> dict[Handle, _Region]:
    """One for each memory: the argument itself where one lies in it, all of the memory where several do."""
    regions: dict[Handle, _Region] = {}
    for buffer in buffers:
        identity = buffer._check()
        known = regions.get(buffer._base)
        if known is None:
            regions[buffer._base] = _Region(buffer, buffer._offset, buffer._nbytes, identity)
        elif (known.offset, known.nbytes) != (buffer._offset, buffer._nbytes):
            if buffer._base.freed:
                raise LaunchError(f"{buffer!r} and {known.buffer!r} are views of memory whose buffer was freed")
            regions[buffer._base] = _Region(buffer, 0, buffer._base.nbytes, buffer._base.id)
    return regions


def jit(function: Callable[P, None]) -> Jitted[P]:
    """Record what a function issues at its first call for given shapes and dtypes, and replay it at later ones.

    Buffers among its arguments, and views, may be others each time. Anything else belongs to the shape: another value
    is recorded anew. The function writes its results into its arguments and returns nothing; buffers that it uses
    without being given them stay those of the recording.

    Example:
        @wsgrad.jit
        def step(y, x):
            double(y, x)
            add(x, y)
    """
    return Jitted(function)
