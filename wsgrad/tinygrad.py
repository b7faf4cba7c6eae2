"""tinygrad's device "WS": tinygrad programs run on the devices of wsgrad servers. Made for tinygrad 0.14.

tinygrad finds it by name (`DEV=WS`) through `wsgrad_tinygrad.pth`. `WS` is the first device of `WSGRAD_URL`, `WS:1` the
second and so on, over all servers of the list; without a URL it is a server of our own on this machine's CPU. Kernels
are rendered here, in the dialect of the device, and compiled where they run.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tinygrad.device import BufferSpec, Compiled, Compiler, Device, LRUAllocator, Program, TinyELF
from tinygrad.engine.jit import MultiGraphRunner
from tinygrad.helpers import BEAM, JIT_BATCH_SIZE, PROFILE, Target, getenv, is_image_shape
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.renderer.wgsl import WGSLRenderer
from tinygrad.schedule.rangeify import DEVICE_MAX_BUFS
from tinygrad.uop import Ops
from tinygrad.uop.ops import UOp, sym_infer

import wsgrad
from wsgrad.client.jit import Jitted
from wsgrad.tinygrad_kernels import KERNEL_RENDERERS, noted
from wsgrad.tinygrad_profile import DeviceProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BUFFERS: Final = 31
"""Buffers of a kernel in C: with the scalars they stay below what a launch takes."""
TRIAL_SECONDS: Final = 10.0
"""How long the first kernel of a search may take."""
COMPILE_SECONDS: Final = 60.0
"""How long a kernel that is tried may take to compile: it is not the kernel that is slow then."""
WAITED_BYTES: Final = 16 << 20
"""Buffers from this size on are waited for, so that too little memory is an error of the allocation."""
_WRITES: Final = re.compile(r"// writes ([0-9,]*)\n")


@functools.cache
def servers() -> wsgrad.Servers:
    """The servers whose devices `WS`, `WS:1` … are, in this process."""
    with warnings.catch_warnings():
        # A server without a cache is no reason to warn a program that never asked for one.
        warnings.simplefilter("ignore", RuntimeWarning)
        return wsgrad.connect_all(cache=True, wait=10.0)


@functools.cache
def _profile() -> DeviceProfile:
    return DeviceProfile(servers())


# -- renderers: source only, the device compiles it


class WSClangRenderer(ClangRenderer):
    """C, for devices whose compiler is clang or zig. The target's arch ends with the device's threads."""

    def __init__(self, target: Target) -> None:
        Renderer.__init__(self, target)
        self.compiler = Compiler()

    @property
    def global_max(self) -> tuple[int, int, int]:  # type: ignore[override]
        return int(self.target.arch.rpartition("threads=")[2] or 1), 0, 0

    def render_kernel(
        self,
        function_name: str,
        kernel: list[str],
        bufs: list[tuple[str, tuple[UOp, bool]]],
        uops: list[UOp],
        prefix: list[str] | None = None,
    ) -> str:
        return noted(super().render_kernel(function_name, kernel, bufs, uops, prefix), bufs)


class WSWGSLRenderer(WGSLRenderer):
    """WGSL, for browser tabs and native WebGPU."""

    def render_kernel(
        self,
        function_name: str,
        kernel: list[str],
        bufs: list[tuple[str, tuple[UOp, bool]]],
        uops: list[UOp],
        prefix: list[str] | None = None,
    ) -> str:
        # Binding 0 is tinygrad's infinity.
        return noted(super().render_kernel(function_name, kernel, bufs, uops, prefix), bufs, first=1)


# -- memory


class WSAllocator(LRUAllocator["WSDevice"]):
    """Buffers of bytes. Small ones are not waited for: if they do not fit, the next call that waits says so."""

    _held: Counter[wsgrad.Server] = Counter()  # noqa: RUF012  (of all devices: a session's limit is for all of its own)

    def alloc(self, size: int, options: BufferSpec | None = None) -> wsgrad.Buffer:
        """Memory, some that was given back where that fits.

        Raises:
            MemoryError: there is none, even without what was kept for reuse.
        """
        self.dev.revive()
        buffer: wsgrad.Buffer = super().alloc(size, options)
        return buffer

    def _alloc(self, size: int, options: BufferSpec) -> wsgrad.Buffer:
        server = self.dev.device_handle.server
        limits: Any = server.info.get("limits")
        limit, held = limits.get("max_session_memory"), self._held[server]
        if isinstance(limit, int) and held + size > limit:
            raise MemoryError(
                f"{size} bytes more do not fit: this session holds {held} of the {limit} that {server!r} allows"
            )
        buffer: wsgrad.Buffer = self.dev.device_handle.empty(size, np.uint8)
        if size >= WAITED_BYTES:
            self.dev.synchronize()
        self._held[server] += size
        return buffer

    def free(self, opaque: wsgrad.Buffer, size: int, options: BufferSpec | None = None) -> None:
        """Keep it for reuse, unless it went with its device."""
        if opaque._life.dead is None:
            super().free(opaque, size, options)
        else:
            self._free(opaque, options or self.default_buffer_spec)

    def _free(self, opaque: wsgrad.Buffer, options: BufferSpec) -> None:
        # The memory itself goes with its last reference: a graph may still have one.
        self._held[self.dev.device_handle.server] -= opaque.nbytes

    def _copyin(self, dest: wsgrad.Buffer, src: memoryview) -> None:
        dest.copy_from(np.frombuffer(src, np.uint8))

    def _copyout(self, dest: memoryview, src: wsgrad.Buffer) -> None:
        src.copy_to(np.frombuffer(dest, np.uint8))

    def _offset(self, buf: wsgrad.Buffer, size: int, offset: int) -> wsgrad.Buffer:
        view: wsgrad.Buffer = buf[offset : offset + size]
        return view

    def _transfer(
        self, dest: wsgrad.Buffer, src: wsgrad.Buffer, sz: int, src_dev: WSDevice, dest_dev: WSDevice
    ) -> None:
        dest.copy_from(src)


# -- programs


@functools.cache
def _trials() -> wsgrad.Servers:
    """Sessions of their own, for kernels that a search only tries: what they break is only there."""
    return wsgrad.connect_all([server.url for server in servers().servers], wait=10.0)


def _end_trials() -> None:
    """Leave the kernel that runs there behind, with its session; the next one to try gets a new one."""
    for server in _trials().servers:
        server._end()
    _trials.cache_clear()


class _Trial:
    """A kernel that BEAM tries, on memory of the same sizes that nobody else uses."""

    def __init__(self, index: int, source: str, entry: str, *, dialect: str, writes: list[int] | None) -> None:
        self._device = _trials().devices[index]
        self._program = self._device.program(source, entry, dialect=dialect, writes=writes)
        self._memory: dict[tuple[int, int], wsgrad.Buffer] = {}

    def run(self, arguments: Sequence[Any], sizes: dict[str, Any], seconds: float) -> float:
        """Seconds that a launch takes.

        Raises:
            RuntimeError: it does not compile, failed, crashed, or took too long: the search goes on to the next.
        """
        given = [
            self._copy(at, value) if isinstance(value, wsgrad.Buffer) else value for at, value in enumerate(arguments)
        ]
        try:
            self._program.ready(timeout=COMPILE_SECONDS)
            return self._program.timed(*given, **sizes, timeout=seconds)
        except (wsgrad.DeviceLost, wsgrad.Timeout, TimeoutError) as error:
            _end_trials()
            raise RuntimeError(f"the kernel was given up: {error}") from error
        except wsgrad.WsgradError as error:
            raise RuntimeError(str(error)) from error

    def _copy(self, at: int, buffer: wsgrad.Buffer) -> wsgrad.Buffer:
        key = at, buffer.nbytes
        if key not in self._memory:
            self._memory[key] = self._device.empty(buffer.nbytes, np.uint8)
        return self._memory[key]


class WSProgram(Program["WSDevice"]):
    """A kernel on one device."""

    def __init__(self, dev: WSDevice, obj: TinyELF) -> None:
        self.dev = dev
        self.name = obj.name
        if any(is_image_shape(shape) for *_, shape in obj.signature):  # type: ignore[no-untyped-call]
            raise RuntimeError(f"the kernel {obj.name} takes an image; {dev.device} has buffers only: run with IMAGE=0")
        source = obj.lib.decode()
        noted = _WRITES.match(source)
        writes = None if noted is None else [int(place) for place in noted[1].split(",") if place]
        self._source, self._writes = source, writes
        self._trial: _Trial | None = None
        self._wide = [dtype.itemsize == 8 for _, _, dtype, _ in obj.signature]
        self._core = next((slot for name, slot, *_ in obj.signature if name == "core_id"), None)

    @functools.cached_property
    def program(self) -> wsgrad.Program:
        """It on the device."""
        name = self.name
        made: wsgrad.Program = self.dev.device_handle.program(
            self._source, name, dialect=self.dev.dialect, writes=self._writes, name=name[:64]
        )
        return made

    def arguments(self, bufs: Sequence[Any], vals: Sequence[Any]) -> list[Any]:
        """The arguments of a launch."""
        if self.dev.dialect == "wgsl":
            return [np.float32(np.inf), *bufs, *vals]
        if not vals:
            return [*bufs]
        return [
            *bufs,
            *(
                wsgrad.INDEX if value is None else np.int64(value) if wide and isinstance(value, int) else value
                for value, wide in zip(vals, self._wide[len(bufs) :], strict=True)
            ),
        ]

    def sizes(self, global_size: Sequence[Any], local_size: Sequence[int] | None) -> dict[str, Any]:
        """The grid of a launch, and the size of a work-group where it is not in the source."""
        if self.dev.dialect in KERNEL_RENDERERS:
            # Without local sizes each work-item is a group of its own.
            return {"grid": tuple(global_size), "block": tuple(map(int, local_size or (1, 1, 1)))}
        if self.dev.dialect == "wgsl":
            # One number travels packed.
            return {"grid": tuple(global_size) if tuple(global_size[1:]) != (1, 1) else global_size[0]}
        return {"grid": global_size[0] if self._core is not None else None}

    def __call__(
        self,
        *bufs: Any,  # noqa: ANN401
        global_size: tuple[int, int, int] = (1, 1, 1),
        local_size: tuple[int, int, int] | None = (1, 1, 1),
        vals: tuple[int | None, ...] = (),
        wait: bool = False,
        timeout: int | None = None,
    ) -> float | None:
        arguments, sizes = self.arguments(bufs, vals), self.sizes(global_size, local_size)
        if wait and self._is_trial(timeout):
            if self._trial is None:
                options = {"dialect": self.dev.dialect, "writes": self._writes}
                self._trial = _Trial(self.dev.index, self._source, self.name, **options)  # type: ignore[arg-type]
            return self._trial.run(arguments, sizes, TRIAL_SECONDS if timeout is None else 1 + timeout / 1000)
        if wait:
            return self.program.timed(*arguments, **sizes)
        self.program(*arguments, **sizes)
        return None

    def _is_trial(self, timeout: int | None) -> bool:
        # What BEAM tries is called so, and nothing else tells it from a launch that somebody times.
        return self.name == "test" and (timeout is not None or bool(BEAM.value) or bool(getenv("JITBEAM")))


# -- graphs


def _handle(name: str) -> wsgrad.Device:
    device = Device[name]
    assert isinstance(device, WSDevice)
    return device.device_handle


class WSGraph(MultiGraphRunner):
    """A batch of the JIT as a graph: recorded once, and run with one message a server."""

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()) -> None:
        super().__init__(linear, input_uops)
        self._inputs = sorted(
            {(slot, call[0]) for call, places in zip(self.calls, self.uop_replace, strict=True) for _, slot in places}
        )
        devices = dict.fromkeys(buffer.device for _, _, bufs, _ in self.calls for buffer in bufs)
        self._jit = Jitted(self._record, [_handle(device) for device in devices])
        self._dims: list[tuple[UOp, wsgrad.Var]] = []
        self._variables = {name: wsgrad.Var(f"v{at}", *self._bounds(name)) for at, name in enumerate(self.vars)}

    def _bounds(self, name: str) -> tuple[int, int]:
        for _, ast, _, _ in self.calls:
            if ast.op is Ops.PROGRAM:
                for variable in ast.arg.vars:
                    if variable.expr == name:
                        return int(variable.vmin), int(variable.vmax)
        raise AssertionError(name)

    def _size(self, size: Any) -> Any:  # noqa: ANN401
        """A size of a grid: a number, or a variable for what depends on tinygrad's."""
        if not isinstance(size, UOp):
            return int(size)
        for known, variable in self._dims:
            if known is size:
                return variable
        variable = wsgrad.Var(f"d{len(self._dims)}", max(1, int(size.vmin)), int(size.vmax))
        self._dims.append((size, variable))
        return variable

    def _record(self, *inputs: wsgrad.Buffer) -> None:
        given = dict(zip(self._inputs, inputs, strict=True))
        for (place, ast, bufs, fixed), runtime, replaced in zip(
            self.calls, self.runtimes, self.uop_replace, strict=True
        ):
            handles = [buffer._buf for buffer in bufs]
            for position, slot in replaced:
                handles[position] = given[slot, place]
            if ast.op is Ops.COPY:
                handles[0].copy_from(handles[1])
                continue
            info = ast.arg
            vals = [
                None if v.expr in info.runtimevars else fixed[v.expr] if v.expr in fixed else self._variables[v.expr]
                for v in info.vars
            ]
            assert runtime is not None
            sizes = runtime.sizes([self._size(size) for size in info.global_size], info.local_size)
            runtime.program(*runtime.arguments([handles[index] for index in info.globals], vals), **sizes)

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        buffers = []
        for slot, place in self._inputs:
            known: Any = input_uops[slot].buffer
            bufs: Any = known.bufs[place] if hasattr(known, "bufs") else known
            buffers.append(bufs.ensure_allocated()._buf)
        values = {variable.name: var_vals[name] for name, variable in self._variables.items()}
        started = time.perf_counter()
        graph = self._jit.replay(
            buffers,
            lambda: values | {variable.name: int(sym_infer(size, var_vals)) for size, variable in self._dims},
        )
        if not wait:
            return None
        graph.wait()  # type: ignore[attr-defined]
        return time.perf_counter() - started


# -- the device


class WSDevice(Compiled):
    """One device of the servers."""

    def __init__(self, device: str) -> None:
        self.index = index = int(device.partition(":")[2] or 0)
        devices = servers().devices
        if index >= len(devices):
            offered = ", ".join(d.id for d in devices) or "none"
            raise RuntimeError(f"there is no device {device}: the servers offer {offered}")
        self.device_handle: wsgrad.Device = devices[index]
        dialects = self.device_handle.dialects
        properties = self.device_handle.properties
        renderer: type[Renderer]
        if "c" in dialects:
            self.dialect = "c"
            compiler = str(properties.get("compiler", ""))
            if "gcc" in compiler.lower():
                raise RuntimeError(
                    f"{self.device_handle.id} compiles with {compiler}, which silently miscompiles tinygrad's vector "
                    "types; install clang there, or pip install ziglang"
                )
            renderer, most = WSClangRenderer, MAX_BUFFERS
            arch = f"{properties.get('arch')},native,threads={properties.get('threads', 1)}"
        elif "wgsl" in dialects:
            self.dialect = "wgsl"
            renderer = WSWGSLRenderer
            limits = properties.get("limits")
            most = int(limits.get("maxStorageBuffersPerShaderStage", 8)) if isinstance(limits, dict) else 8
            arch = "shader-f16" if properties.get("f16") else ""
        elif kernels := [dialect for dialect in dialects if dialect in KERNEL_RENDERERS]:
            self.dialect = kernels[0]
            renderer, most = KERNEL_RENDERERS[self.dialect], MAX_BUFFERS
            arch = str(properties.get("arch", ""))
        else:
            raise RuntimeError(f"tinygrad has no renderer for the dialects of {self.device_handle.id}: {dialects}")
        name = device.partition(":")[0]
        DEVICE_MAX_BUFS[name] = min(most, DEVICE_MAX_BUFS.setdefault(name, most))
        DEVICE_MAX_BUFS[device] = most
        if not getenv("JIT_BATCH_SIZE"):
            # A graph costs one message, however long it is.
            JIT_BATCH_SIZE.value = 0
        if PROFILE:
            _profile().add(device, self.device_handle.id)
        super().__init__(device, WSAllocator(self), [renderer], WSProgram, WSGraph, arch=arch)

    def synchronize(self) -> None:
        self.device_handle.synchronize()

    def revive(self) -> None:
        """Go on with a new process where the device was lost and somebody was told: only what was in it is gone."""
        queue = self.device_handle._queue
        if queue is not None and queue.life.dead is not None and queue.unraised is None and not queue.over:
            self.allocator.free_cache()  # type: ignore[attr-defined]
            self.device_handle.reopen()

    def _at_profile_finalize(self) -> None:
        _profile().finish()
