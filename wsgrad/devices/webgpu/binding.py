"""Turns a launch's arguments into a bind group, with copies for what WebGPU can't bind as it is; launches nothing.

One buffer can't be bound for reading and for writing at once, offsets have to be aligned and sizes whole words: such
arguments go through copies, taken before the launch and, where they are written, put back byte for byte behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from wsgrad.devices.webgpu.programs import binding_name
from wsgrad.errors import LaunchError, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wsgrad.devices.webgpu.moves import Moves
    from wsgrad.devices.webgpu.programs import Pipeline
    from wsgrad.devices.webgpu.uniforms import Uniforms
    from wsgrad.devices.webgpu.work import Work

_MOST_GROUPS: Final = 8192
_SCALAR_NBYTES: Final = 16


@dataclass(slots=True, eq=False)
class Memory:
    """A buffer of a client.

    Attributes:
        nbytes: what was asked for; the buffer itself has whole units of 16 bytes.
        keys: of the bind groups that it is in.
    """

    number: int
    buffer: Any
    nbytes: int
    keys: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def size(self) -> int:
        return max(16, (self.nbytes + 15) & ~15)


Range: TypeAlias = tuple[Memory, int, int]
Value: TypeAlias = Range | bytes
"""A range, or the four bytes of a number."""


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A launch but for its grid.

    Attributes:
        copies: (temporary, range, whether it is written): what is copied before, and back behind.
        lasts: whether it may be used again: it has no temporaries.
    """

    pipeline: Any
    group: Any
    copies: tuple[tuple[Any, Range, bool], ...]

    @property
    def lasts(self) -> bool:
        return not self.copies


class Binder:
    """The bind groups of one device, kept for launches with the same arguments."""

    def __init__(self, work: Work, uniforms: Uniforms, moves: Moves, limits: Mapping[str, int], alignment: int) -> None:
        self._work = work
        self._uniforms = uniforms
        self._moves = moves
        self._limits = limits
        self._alignment = alignment
        self._groups: dict[tuple[object, ...], Any] = {}
        self._members: dict[tuple[object, ...], list[Memory]] = {}
        self._valid: set[tuple[object, ...]] = set()

    def bind(self, pipeline: Pipeline, name: str, values: Sequence[Value], *, alias: bool) -> Bound:
        """Bind arguments, one for each binding.

        Raises:
            LaunchError: two written arguments share bytes, or one does not fit what the source declares.
            LimitExceeded: one is larger than the device can bind.
            OutOfMemory: there is no room for a copy.
        """
        copied = self._copied(pipeline, name, values, alias=alias)
        resources: list[tuple[Any, int, int]] = []
        key: list[object] = [pipeline.number]
        copies: list[tuple[Any, Range, bool]] = []
        members: list[Memory] = []
        for index, (binding, value) in enumerate(zip(pipeline.bindings, values, strict=True)):
            if isinstance(value, bytes):
                buffer, at = self._uniforms.place(value)
                resources.append((buffer, at, _SCALAR_NBYTES))
                key += (self._uniforms.generation, at)
                continue
            memory, offset, nbytes = value
            if index in copied:
                temporary = self._moves.new(nbytes)
                copies.append((temporary, value, index in pipeline.written))
                buffer, offset, size = temporary, 0, self._size(binding.space, 0, nbytes, max(16, (nbytes + 15) & ~15))
            else:
                room = memory.size - offset if offset + nbytes == memory.nbytes else 0
                buffer, size = memory.buffer, self._size(binding.space, offset, nbytes, room)
                key += (memory.number, offset, size)
                members.append(memory)
            limit = "maxStorageBufferBindingSize" if binding.space == "storage" else "maxUniformBufferBindingSize"
            if size > self._limits[limit]:
                raise LimitExceeded(
                    f"{binding_name(binding)} of {name!r} has {nbytes} bytes, more than the device's {limit} of "
                    f"{self._limits[limit]}",
                    details={"nbytes": nbytes, "limit": self._limits[limit]},
                )
            resources.append((buffer, offset, size))
        if copies:
            return Bound(pipeline.pipeline, self._make(pipeline, name, resources), tuple(copies))
        whole = tuple(key)
        group = self._groups.get(whole)
        if group is None:
            group = self._make(pipeline, name, resources)
            self._keep(whole, group, members)
        return Bound(pipeline.pipeline, group, ())

    def before(self, bound: Bound) -> None:
        """Encode what comes before the launch."""
        for temporary, (memory, offset, nbytes), _ in bound.copies:
            self._moves.copy(temporary, 0, memory.buffer, offset, nbytes)

    def dispatch(self, opened: Any, bound: Bound, grid: tuple[int, int, int]) -> None:  # noqa: ANN401
        """Encode the launch itself into the open pass."""
        work = self._work
        if work.pipeline is not bound.pipeline:
            work.pipeline = bound.pipeline
            opened.set_pipeline(bound.pipeline)
        opened.set_bind_group(0, bound.group)
        opened.dispatch_workgroups(*grid)

    def after(self, bound: Bound) -> None:
        """Encode what comes behind the launch; the temporaries go."""
        for temporary, (memory, offset, nbytes), written in bound.copies:
            if written:
                self._moves.copy(memory.buffer, offset, temporary, 0, nbytes)
            self._work.doom(temporary)

    def forget(self, memory: Memory) -> None:
        """Memory goes, and what it was bound in."""
        for key in memory.keys:
            self._groups.pop(key, None)
            for member in self._members.pop(key, ()):
                if member is not memory:
                    member.keys.discard(key)

    def close(self) -> None:
        """Forget everything."""
        self._groups.clear()
        self._members.clear()

    def _size(self, space: str, offset: int, nbytes: int, room: int) -> int:
        """The bytes to bind: whole words, and for a uniform units of 16 where they are there."""
        if space == "uniform":
            wanted = max(16, (nbytes + 15) & ~15)
            if wanted <= room:
                return wanted
        return max(4, (nbytes + 3) & ~3)

    def _copied(self, pipeline: Pipeline, name: str, values: Sequence[Value], *, alias: bool) -> set[int]:
        """The arguments that have to go through copies."""
        ranges = {k: value for k, value in enumerate(values) if not isinstance(value, bytes)}
        copied = {k for k, range_ in ranges.items() if not self._fits(*range_)}
        by_memory: dict[int, list[int]] = {}
        for k, (memory, _, _) in ranges.items():
            by_memory.setdefault(memory.number, []).append(k)
        for together in by_memory.values():
            if len(together) == 1:
                continue
            written = [k for k in together if k in pipeline.written]
            for k in together:
                shared = [w for w in written if w != k and _share(ranges[w], ranges[k])]
                if k in pipeline.written:
                    if shared:
                        raise _both_written(
                            name, *sorted((k, shared[0])), same=ranges[k] == ranges[shared[0]], alias=alias
                        )
                elif shared:
                    copied.add(k)
            # What is left may be bound for writing where the source says so; no other may see the same buffer then.
            opened = [k for k in together if k not in copied and pipeline.bindings[k].access == "read_write"]
            if opened:
                copied.update(k for k in together if pipeline.bindings[k].access == "read")
            for place, k in enumerate(opened):
                if any(_share(ranges[k], ranges[other]) for other in opened[:place]):
                    copied.add(k)  # none of them is written
        return copied

    def _fits(self, memory: Memory, offset: int, nbytes: int) -> bool:
        """Whether a range can be bound as it is. What lies behind a buffer's last byte in its last word is nobody's."""
        whole = offset + nbytes == memory.nbytes
        return not offset % self._alignment and (whole or not nbytes % 4) and (nbytes > 0 or memory.nbytes == 0)

    def _make(self, pipeline: Pipeline, name: str, resources: Sequence[tuple[Any, int, int]]) -> Any:  # noqa: ANN401
        device = self._work.device
        entries = [
            {"binding": k, "resource": {"buffer": buffer, "offset": offset, "size": size}}
            for k, (buffer, offset, size) in enumerate(resources)
        ]
        try:
            group = device.create_bind_group(layout=pipeline.layout, entries=entries)
            sizes = (pipeline.number, *(size for _, _, size in resources))
            if sizes not in self._valid:
                # Whether sizes are enough for the source's types is found out when a launch is encoded, and then all
                # that was gathered with it would fail: try it once alone. Nothing of this is ever submitted.
                encoder = device.create_command_encoder()
                opened = encoder.begin_compute_pass()
                opened.set_pipeline(pipeline.pipeline)
                opened.set_bind_group(0, group)
                opened.dispatch_workgroups(0, 1, 1)
                opened.end()
                encoder.finish()
                if len(self._valid) >= _MOST_GROUPS:
                    self._valid.clear()
                self._valid.add(sizes)
        except Exception as error:
            reason = self._work.translated(error)
            raise LaunchError(f"a launch of {name!r} is refused by the device: {reason}") from error
        return group

    def _keep(self, key: tuple[object, ...], group: Any, members: list[Memory]) -> None:  # noqa: ANN401
        if len(self._groups) >= _MOST_GROUPS:
            for known in self._members.values():
                for member in known:
                    member.keys.clear()
            self._groups.clear()
            self._members.clear()
        self._groups[key] = group
        self._members[key] = members
        for member in members:
            member.keys.add(key)


def _share(a: Range, b: Range) -> bool:
    return a[2] > 0 and b[2] > 0 and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]


def _both_written(name: str, first: int, second: int, *, same: bool, alias: bool) -> LaunchError:
    if same and alias:
        why = "WebGPU can't bind the same bytes for writing twice, so alias=True does not help in WGSL: give them once"
    else:
        why = "declare what is only read as var<storage, read>, or name what is written with writes="
    return LaunchError(
        f"arguments {first} and {second} of {name!r} are both written and share bytes; {why}",
        details={"arguments": [first, second]},
    )
