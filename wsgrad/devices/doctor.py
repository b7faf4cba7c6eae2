"""Looks at what runtimes and confinement work on this machine, by trying; changes nothing and installs nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsgrad.devices.compiler import compile_source, find_compiler, full_source
from wsgrad.devices.confine import probe_driver_confinement, probe_node_confinement
from wsgrad.devices.sandbox import Profile, probe_compiler_confinement
from wsgrad.devices.tinygrad.listing import PROBED, list_wrapped
from wsgrad.devices.webgpu.listing import list_adapters
from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCE = (
    "void probe(float *restrict y, const float *restrict x, int n) { for (int i = 0; i < n; i++) y[i] = 2 * x[i]; }"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: whether it works, what was found, and what to do where it doesn't.

    `ok` is None for something that is missing but not needed.
    """

    subject: str
    ok: bool | None
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Look at one thing after the other; takes about a second, most of it compiling and asking drivers."""
    linux = sys.platform == "linux"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("system", linux, system, "" if linux else "a server elsewhere than on Linux runs without confinement")
    version = platform.python_version()
    yield Finding("python", sys.version_info >= (3, 11), f"{version}, {os.cpu_count()} processors")
    node = probe_node_confinement()
    compiler = probe_compiler_confinement()
    yield _confinement("confinement of programs", node)
    yield _confinement("confinement of the compiler", compiler)
    yield _drivers(probe_driver_confinement())
    yield from _cpu(Profile.NONE if compiler else Profile.NAMESPACES)
    yield _webgpu()
    yield _tinygrad()
    yield _optional("ml_dtypes", "bfloat16 and fp8 arrays", "pip install ml_dtypes")


def _confinement(subject: str, missing: list[str]) -> Finding:
    if not missing:
        return Finding(subject, True, "complete, tried just now")
    return Finding(
        subject,
        False,
        "missing: " + "; ".join(missing),
        "cpu devices are offered on loopback only, with a warning; --unconfined offers them everywhere",
    )


def _drivers(missing: list[str]) -> Finding:
    subject = "confinement of drivers"
    if not missing:
        return Finding(subject, True, "as far as drivers bear it, tried just now")
    advice = "webgpu and tinygrad devices are offered all the same, with a warning"
    return Finding(subject, False, "missing: " + "; ".join(missing), advice)


def _cpu(profile: Profile) -> Iterator[Finding]:
    try:
        compiler = find_compiler()
    except WsgradError as error:
        yield Finding("cpu: compiler", False, "none", str(error))
        return
    advice = "gcc treats vector extensions that clang compiles as mere warnings; `pip install 'wsgrad[cpu]'` brings zig"
    yield Finding("cpu: compiler", True, compiler.version, advice if compiler.kind == "gcc" else "")
    try:
        program = compile_source(compiler, profile, full_source(_SOURCE, "probe", "ppi"))
    except WsgradError as error:
        yield Finding("cpu: compile a program", False, str(error), "name another compiler in WSGRAD_CC")
        return
    how = "confined" if profile is not Profile.NONE else "not confined"
    yield Finding("cpu: compile a program", True, f"{len(program):,} bytes of machine code, {how}")


def _webgpu() -> Finding:
    """What `--device webgpu` would offer; none is needed for `cpu`."""
    try:
        adapters = list_adapters()
    except WsgradError as error:
        return Finding("webgpu", None, "none", str(error))
    named = [
        f"{place} is {info['adapter']}" + " (software)" * bool(info["software"]) for place, info in enumerate(adapters)
    ]
    advice = ""
    if all(info["software"] for info in adapters):
        advice = (
            "only software computes here: a graphics card needs its Vulkan driver installed, and its device readable"
        )
    return Finding("webgpu", True, "; ".join(named), advice)


def _tinygrad() -> Finding:
    """What `--device tinygrad:NAME` would offer; none is needed."""
    if importlib.util.find_spec("tinygrad") is None:
        return Finding("tinygrad", None, "not installed: wraps its devices", "pip install 'wsgrad[tinygrad]'")
    found, reasons = [], []
    for name in PROBED:
        try:
            found += [f"{info['adapter']}" + " (software)" * bool(info["software"]) for info in list_wrapped(name)]
        except WsgradError as error:
            reasons.append(str(error))
    if found:
        return Finding("tinygrad", True, "; ".join(found))
    return Finding("tinygrad", None, "no device", "; ".join(reasons))


def _optional(module: str, purpose: str, advice: str) -> Finding:
    if importlib.util.find_spec(module) is not None:
        return Finding(module, True, f"installed: {purpose}")
    return Finding(module, None, f"not installed: {purpose}", advice)
