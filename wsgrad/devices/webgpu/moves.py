"""Writes, reads, copies and fills bytes of buffers exactly, where WebGPU itself moves only whole words; knows no ids.

What lies on whole words goes by WebGPU's own commands; ragged edges and bytes that change their place in a word go
through two small programs, in which one invocation owns each word of the target.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from wsgrad.devices.pace import Pace
from wsgrad.devices.webgpu.work import STAGING_NBYTES
from wsgrad.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wsgrad.devices.webgpu.uniforms import Uniforms
    from wsgrad.devices.webgpu.work import Work

STORAGE: Final = 0x80 | 0x40 | 0x8 | 0x4  # GPUBufferUsage STORAGE | UNIFORM | COPY_DST | COPY_SRC
_PIECE_NBYTES: Final = 16 << 20
_GROUP: Final = 64
_MAX_GROUPS: Final = 4096
_COPY: Final = """
struct Task { source: u32, start: u32, end: u32, unused: u32 }
@group(0) @binding(0) var<storage, read_write> destination: array<u32>;
@group(0) @binding(1) var<uniform> task: Task;
@group(0) @binding(2) var<storage, read> source: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    for (var word = task.start / 4u + id.x; word < (task.end + 3u) / 4u; word += groups.x * 64u) {
        var value = destination[word];
        for (var byte = 0u; byte < 4u; byte++) {
            let at = word * 4u + byte;
            if (at >= task.start && at < task.end) {
                let place = task.source + at - task.start;
                let taken = source[place / 4u] >> (8u * (place % 4u)) & 255u;
                value = value & ~(255u << (8u * byte)) | taken << (8u * byte);
            }
        }
        destination[word] = value;
    }
}
"""
_FILL: Final = """
struct Fill { pattern: vec4<u32>, length: u32, start: u32, end: u32, unused: u32 }
@group(0) @binding(0) var<storage, read_write> destination: array<u32>;
@group(0) @binding(1) var<uniform> fill: Fill;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    for (var word = fill.start / 4u + id.x; word < (fill.end + 3u) / 4u; word += groups.x * 64u) {
        var value = destination[word];
        for (var byte = 0u; byte < 4u; byte++) {
            let at = word * 4u + byte;
            if (at >= fill.start && at < fill.end) {
                let place = (at - fill.start) % fill.length;
                let taken = fill.pattern[place / 4u] >> (8u * (place % 4u)) & 255u;
                value = value & ~(255u << (8u * byte)) | taken << (8u * byte);
            }
        }
        destination[word] = value;
    }
}
"""


class Moves:
    """Moves on one device."""

    def __init__(self, work: Work, uniforms: Uniforms, limits: Mapping[str, int], alignment: int) -> None:
        self._work = work
        self._uniforms = uniforms
        self._alignment = alignment
        self._piece = min(_PIECE_NBYTES, limits["maxStorageBufferBindingSize"] // 2)
        self._kernels: dict[str, tuple[Any, Any, Pace]] = {}

    def new(self, nbytes: int) -> Any:  # noqa: ANN401
        """A zeroed buffer of at least so many bytes, in units of 16.

        Raises:
            OutOfMemory: the device has no room for it.
        """
        size = max(16, (nbytes + 15) & ~15)
        try:
            return self._work.device.create_buffer(size=size, usage=STORAGE)
        except Exception as error:
            raise OutOfMemory(
                f"the device has no room for {nbytes} bytes: {' '.join(str(error).split())[-200:]}",
                details={"nbytes": nbytes},
            ) from error

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:  # noqa: ANN401
        """Put bytes into a buffer."""
        nbytes = data.nbytes
        head = min(-offset % 4, nbytes)
        middle = (nbytes - head) & ~3
        if middle:
            self._work.write(buffer, offset + head, data[head : head + middle])
        for start, end in ((0, head), (head + middle, nbytes)):
            if end > start:
                self._fill(buffer, offset + start, end - start, bytes(data[start:end]))

    def read(self, buffer: Any, offset: int, nbytes: int, take: Callable[[int, memoryview], None]) -> None:  # noqa: ANN401
        """Pass on bytes of a buffer in pieces, each with its place in the whole."""
        done = 0
        while done < nbytes:
            at = offset + done
            first = at & ~3
            count = min(nbytes - done, STAGING_NBYTES - 8)

            def piece(view: memoryview, skip: int = at - first, count: int = count, done: int = done) -> None:
                take(done, view[skip : skip + count])

            self._work.read(buffer, first, (at + count - first + 3) & ~3, piece)
            done += count

    def copy(self, target: Any, target_at: int, source: Any, source_at: int, nbytes: int) -> None:  # noqa: ANN401
        """Copy between two ranges; those of one buffer may overlap."""
        if not nbytes:
            return
        if target is not source:
            self._copy(target, target_at, source, source_at, nbytes)
            return
        if target_at == source_at:
            return
        # A buffer can't be both ends of a copy. Pieces go in the order in which none overwrites a later one's source.
        between = self.new(min(nbytes, self._piece) + 4)
        starts = range(0, nbytes, self._piece)
        for start in starts if target_at < source_at else reversed(starts):
            count = min(self._piece, nbytes - start)
            first = (source_at + start) & ~3
            skip = source_at + start - first
            self._copy(between, 0, source, first, (skip + count + 3) & ~3)
            self._copy(target, target_at + start, between, skip, count)
        self._work.doom(between)

    def fill(self, buffer: Any, offset: int, nbytes: int, pattern: bytes) -> None:  # noqa: ANN401
        """Repeat a pattern of up to 16 bytes over a range."""
        if not nbytes:
            return
        if not offset % 4 and not nbytes % 4 and not any(pattern):
            self._work.encoder().clear_buffer(buffer, offset, nbytes)
            return
        piece = self._piece // 16 * 16
        for start in range(0, nbytes, piece):  # patterns have a power of two of bytes, so each piece begins with one
            self._fill(buffer, offset + start, min(piece, nbytes - start), pattern)

    def _copy(self, target: Any, target_at: int, source: Any, source_at: int, nbytes: int) -> None:  # noqa: ANN401
        if target_at % 4 == source_at % 4:
            head = min(-target_at % 4, nbytes)
            middle = (nbytes - head) & ~3
            self._bytes(target, target_at, source, source_at, head)
            if middle:
                self._work.encoder().copy_buffer_to_buffer(source, source_at + head, target, target_at + head, middle)
            done = head + middle
            self._bytes(target, target_at + done, source, source_at + done, nbytes - done)
            return
        for start in range(0, nbytes, self._piece):
            count = min(self._piece, nbytes - start)
            self._bytes(target, target_at + start, source, source_at + start, count)

    def _bytes(self, target: Any, target_at: int, source: Any, source_at: int, nbytes: int) -> None:  # noqa: ANN401
        if nbytes:
            window, start = self._window(target, target_at, nbytes)
            taken, skip = self._window(source, source_at, nbytes)
            self._run(_COPY, struct.pack("<4I", skip, start, start + nbytes, 0), nbytes, window, taken)

    def _fill(self, buffer: Any, offset: int, nbytes: int, pattern: bytes) -> None:  # noqa: ANN401
        window, start = self._window(buffer, offset, nbytes)
        values = struct.pack("<16s4I", pattern, len(pattern), start, start + nbytes, 0)
        self._run(_FILL, values, nbytes, window)

    def _window(self, buffer: Any, offset: int, nbytes: int) -> tuple[dict[str, object], int]:  # noqa: ANN401
        """What to bind to reach a range, and where it begins in that."""
        first = offset // self._alignment * self._alignment
        return {"buffer": buffer, "offset": first, "size": (offset + nbytes - first + 3) & ~3}, offset - first

    def _run(self, source: str, values: bytes, nbytes: int, *windows: dict[str, object]) -> None:
        device = self._work.device
        if source not in self._kernels:
            types = ("storage", "uniform", "read-only-storage")[: 1 + len(windows)]
            entries = [{"binding": k, "visibility": 4, "buffer": {"type": kind}} for k, kind in enumerate(types)]
            layout = device.create_bind_group_layout(entries=entries)
            pipeline = device.create_compute_pipeline(
                layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": device.create_shader_module(code=source), "entry_point": "main"},
            )
            self._kernels[source] = layout, pipeline, Pace()
        layout, pipeline, pace = self._kernels[source]
        groups = nbytes // (4 * _GROUP) + 1
        self._work.begin(pace, groups)
        uniform, at = self._uniforms.place(values)
        bound = [windows[0], {"buffer": uniform, "offset": at, "size": len(values)}, *windows[1:]]
        group = device.create_bind_group(
            layout=layout, entries=[{"binding": k, "resource": resource} for k, resource in enumerate(bound)]
        )
        opened = self._work.compute()
        self._work.pipeline = pipeline
        opened.set_pipeline(pipeline)
        opened.set_bind_group(0, group)
        opened.dispatch_workgroups(min(groups, _MAX_GROUPS), 1, 1)
        self._work.end(pace, groups, self._work.now)
