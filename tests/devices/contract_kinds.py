"""The kinds of device that one contract holds for: how to get each, and the same programs in each dialect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import wsgrad
from wsgrad.devices.tinygrad.listing import list_wrapped
from wsgrad.devices.webgpu.listing import list_adapters
from wsgrad.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TESTS = Path(__file__).parent.parent
PATIENCE_SECONDS = 90.0


class Dialect:
    """Programs with the same names and meanings in one language. The last argument of each is what `n` needs."""

    name: str
    sources: dict[str, str]
    written: dict[str, tuple[int, ...]]

    def program(self, device: wsgrad.Device, name: str, *, alias: bool = False) -> wsgrad.Program:
        return device.program(self.sources[name], name, writes=self.written.get(name), alias=alias)

    def launch(self, program, *arguments, n: int) -> None:
        """One call for each index below n."""
        raise NotImplementedError

    def all_of(self, n: int) -> tuple[tuple[object, ...], dict[str, int]]:
        """What a launch for each index below n, a multiple of 64, gives beside the other arguments."""
        return (n,), {"grid": n // 64}


class C(Dialect):
    name = "c"
    sources = {  # noqa: RUF012
        "axpy": "void axpy(float *restrict y, const float *restrict x, float k, int i) { y[i] += k * x[i]; }",
        "add": "void add(int *restrict x, int by, int i) { x[i] += by; }",
        "shift": "void shift(unsigned *restrict y, const unsigned *restrict x, int i) { y[i] = x[i]; }",
        "both": "void both(int *restrict a, int *restrict b, int i) { a[i] = i; b[i] = -i; }",
        "bad": "void bad(float *x, int i) {\n    x[i] = y;\n}",
        "slow": "void slow(float *x, int i) { for (;;) x[i] += 1; }",
    }
    written = {"axpy": (0,), "add": (0,), "shift": (0,), "both": (0, 1), "slow": (0,)}  # noqa: RUF012
    error_place = r"2:\d+"

    def launch(self, program, *arguments, n):
        program(*arguments, wsgrad.INDEX, grid=n)

    def all_of(self, n):
        return (wsgrad.INDEX,), {"grid": n}


def _kernel(name: str, parameters: str, body: str) -> str:
    head = f"__kernel void {name}({parameters}, uint n)"
    return f"{head} {{ size_t i = get_global_id(0); if (i < n) {{ {body} }} }}"


class OpenClC(Dialect):
    name = "opencl-c"
    sources = {  # noqa: RUF012
        "axpy": _kernel("axpy", "__global float *y, __global const float *x, float k", "y[i] += k * x[i];"),
        "add": _kernel("add", "__global int *x, int by", "x[i] += by;"),
        "shift": _kernel("shift", "__global uint *y, __global const uint *x", "y[i] = x[i];"),
        "both": _kernel("both", "__global int *a, __global int *b", "a[i] = i; b[i] = -(int)i;"),
        "bad": "__kernel void bad(__global float *x, uint n) {\n    x[0] = y;\n}",
        "slow": _kernel("slow", "__global volatile float *x", "for (;;) x[i] += 1;"),
    }
    written = C.written
    error_place = r"2:\d+"

    def launch(self, program, *arguments, n):
        program(*arguments, n, grid=(n + 63) // 64, block=64)

    def all_of(self, n):
        return (n,), {"grid": n // 64, "block": 64}


def _wgsl(name: str, bindings: str, body: str) -> str:
    lines = [f"@group(0) @binding({place}) var<{text.strip()};" for place, text in enumerate(bindings.split("|"))]
    last = f"@group(0) @binding({len(lines)}) var<uniform> n: u32;"
    head = f"@compute @workgroup_size(64) fn {name}(@builtin(global_invocation_id) id: vec3<u32>)"
    return "\n".join([*lines, last, f"{head} {{ let i = id.x; if (i < n) {{ {body} }} }}"])


_LOOP = "for (var {0} = 0u; {0} < 60000u; {0}++) {{"
_SLOW = "".join(_LOOP.format(c) for c in "abc") + " x[i] = sin(x[i] + f32(a * b + c)); } } }"


class Wgsl(Dialect):
    name = "wgsl"
    sources = {  # noqa: RUF012
        "axpy": _wgsl(
            "axpy", "storage, read_write> y: array<f32>|storage> x: array<f32>|uniform> k: f32", "y[i] += k * x[i];"
        ),
        "add": _wgsl("add", "storage, read_write> x: array<i32>|uniform> by: i32", "x[i] += by;"),
        "shift": _wgsl("shift", "storage, read_write> y: array<u32>|storage> x: array<u32>", "y[i] = x[i];"),
        "both": _wgsl(
            "both",
            "storage, read_write> a: array<i32>|storage, read_write> b: array<i32>",
            "a[i] = i32(i); b[i] = -i32(i);",
        ),
        "bad": "@group(0) @binding(0) var<storage, read_write> x: array<f32>;\n"
        "@compute @workgroup_size(1) fn bad() { x[0] = y; }",
        "slow": _wgsl("slow", "storage, read_write> x: array<f32>", _SLOW),
    }
    written = {}  # noqa: RUF012
    error_place = r"2:\d+"

    def launch(self, program, *arguments, n):
        program(*arguments, n, grid=(n + 63) // 64)


@dataclass(frozen=True)
class Offer:
    """A server that offers a device of one kind.

    Attributes:
        device: what to ask `server.devices` for.
        recovers: whether a device whose launch did not end can be opened again at once. In a browser the launch goes
            on, in a process that no page can end.
    """

    url: str
    device: str
    dialect: Dialect = field(compare=False)
    recovers: bool = True

    @contextmanager
    def connected(self) -> Iterator[wsgrad.Device]:
        with wsgrad.connect(self.url) as server:
            yield server.wait_for_device(self.device, timeout=PATIENCE_SECONDS)


@contextmanager
def _server(*arguments: str) -> Iterator[dict[str, object]]:
    """A server process; gives what it says when it is ready."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--log-level", "warning", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")}
    process = subprocess.Popen(
        [*command, "--ready-fd", str(writer)], pass_fds=(writer,), stdin=subprocess.DEVNULL, env=environment
    )
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as lines:
            line = lines.readline()
            assert line, f"the server ended with {process.wait(10)}"
            yield json.loads(line)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _cpu(*arguments: str) -> Iterator[Offer]:
    with _server("--device", "cpu", "--cpu-threads", "2", *arguments) as ready:
        yield Offer(str(ready["url"]), "cpu", C())


@contextmanager
def _webgpu(*arguments: str) -> Iterator[Offer]:
    try:
        list_adapters()
    except DeviceError as error:
        _missing("WSGRAD_REQUIRE_WEBGPU", str(error))
    with _server("--device", "webgpu:0", *arguments) as ready:
        yield Offer(str(ready["url"]), "webgpu", Wgsl())


@contextmanager
def _tinygrad(name: str, dialect: Dialect, *arguments: str) -> Iterator[Offer]:
    try:
        list_wrapped(name)
    except DeviceError as error:
        _missing("WSGRAD_REQUIRE_TINYGRAD", str(error))
    with _server("--device", f"tinygrad:{name}:0", *arguments) as ready:
        yield Offer(str(ready["url"]), "tinygrad", dialect)


@contextmanager
def _tinygrad_cpu(*arguments: str) -> Iterator[Offer]:
    with _tinygrad("CPU", C(), *arguments) as offer:
        yield offer


@contextmanager
def _tinygrad_cl(*arguments: str) -> Iterator[Offer]:
    with _tinygrad("CL", OpenClC(), *arguments) as offer:
        yield offer


@contextmanager
def _tab(browser: str, *arguments: str) -> Iterator[Offer]:
    # Last in the path: these directories have a conftest of their own.
    sys.path += [str(_TESTS / name) for name in ("browser", "server") if str(_TESTS / name) not in sys.path]
    module = import_module(browser)
    if not module.find():
        _missing("WSGRAD_REQUIRE_BROWSERS", f"{browser} is not installed")
    with _server("--device", "none", *arguments) as ready:
        opened = getattr(module, browser.capitalize())()
        try:
            import_module("joined").JoinedTab(opened, str(ready["url"]), token=ready["node_token"])
            yield Offer(str(ready["url"]), "browser", Wgsl(), recovers=False)
        finally:
            opened.close()


@contextmanager
def _chromium(*arguments: str) -> Iterator[Offer]:
    with _tab("chromium", *arguments) as offer:
        yield offer


@contextmanager
def _firefox(*arguments: str) -> Iterator[Offer]:
    with _tab("firefox", *arguments) as offer:
        yield offer


def _missing(variable: str, reason: str) -> None:
    if os.environ.get(variable) == "1":
        pytest.fail(f"{reason}, and {variable}=1 asks for it", pytrace=False)
    pytest.skip(reason)


KINDS: dict[str, Callable[..., object]] = {
    "cpu": _cpu,
    "webgpu": _webgpu,
    "chromium": _chromium,
    "firefox": _firefox,
    "tinygrad-cpu": _tinygrad_cpu,
    "tinygrad-cl": _tinygrad_cl,
}
LAUNCH_SECONDS = {"tinygrad-cl": 10}
"""Where the driver compiles within a launch, a limit that leaves room for that."""
WGSL_KINDS = ["webgpu", "chromium", "firefox"]
