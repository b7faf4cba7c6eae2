"""Makes pipelines of WGSL, with layouts read from the source, and says what is wrong by line and column; runs none."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final

from wsgrad.errors import CompileError
from wsgrad.graph.wgsl import parse_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wsgrad.devices.base import ProgramSpec
    from wsgrad.graph.wgsl import Binding, Module

_NUMBERS: Final = itertools.count(1)
_COMPUTE: Final = 4  # GPUShaderStage.COMPUTE
_LAYOUTS: Final = {
    ("storage", "read_write"): "storage",
    ("storage", "read"): "read-only-storage",
    ("uniform", "read"): "uniform",
}
_PLACE: Final = re.compile(r"┌─ \w*:(\d+):(\d+)")
_LEAD: Final = re.compile(r"Shader '[^']*' parsing error: ")


class Pipeline:
    """A program that compiled.

    Attributes:
        number: its own, among all.
        bindings: what its source declares, one an argument.
        layout: of its bind group.
        written: the arguments that launches write.
    """

    def __init__(self, device: Any, limits: Mapping[str, int], spec: ProgramSpec, source: str) -> None:  # noqa: ANN401
        """Compile it.

        Raises:
            CompileError: with line and column where the compiler knows them.
        """
        module = parse_module(source)
        self.number = next(_NUMBERS)
        self.bindings = module.bindings
        self.written = _check(spec, module, limits)
        entries = [
            {"binding": b.index, "visibility": _COMPUTE, "buffer": {"type": _LAYOUTS[b.space, b.access]}}
            for b in self.bindings
        ]
        try:
            shader = device.create_shader_module(code=source)
            self.layout = device.create_bind_group_layout(entries=entries)
            self.pipeline = device.create_compute_pipeline(
                layout=device.create_pipeline_layout(bind_group_layouts=[self.layout]),
                compute={"module": shader, "entry_point": spec.entry, "constants": _constants(spec, module)},
            )
        except Exception as error:
            raise CompileError(_words(str(error))) from error


def _check(spec: ProgramSpec, module: Module, limits: Mapping[str, int]) -> frozenset[int]:
    bindings = module.bindings
    names = {point.name: point.stage for point in module.entry_points}
    if names.get(spec.entry) != "compute":
        others = ", ".join(name for name, stage in names.items() if stage == "compute") or "none"
        raise CompileError(f"there is no @compute function {spec.entry!r} in the source; those it has: {others:.200}")
    if len(spec.signature) != len(bindings):
        raise CompileError(
            f"{spec.name!r} is given {len(spec.signature)} arguments but its source has {len(bindings)} bindings; "
            "argument i is @binding(i), used or not"
        )
    for letter, binding in zip(spec.signature, bindings, strict=True):
        if letter in "iIf":
            if binding.space != "uniform":
                raise CompileError(f"argument {binding.index} of {spec.name!r} is a number; {binding.name:.60} is none")
        elif letter != "p":
            raise CompileError(
                f"argument {binding.index} of {spec.name!r} is of a type that WGSL does not have, or the grid's index"
            )
    for space, limit in (
        ("storage", "maxStorageBuffersPerShaderStage"),
        ("uniform", "maxUniformBuffersPerShaderStage"),
    ):
        count = sum(binding.space == space for binding in bindings)
        if count > limits[limit]:
            raise CompileError(
                f"{spec.name!r} binds {count} {space} buffers, more than the device's {limit} of {limits[limit]}"
            )
    written = frozenset(binding.index for binding in bindings if binding.access == "read_write")
    if spec.writes is None:
        return written
    for index in spec.writes:
        if index not in written:
            raise CompileError(f"writes= names argument {index} of {spec.name!r}, which its source only reads")
    return written & frozenset(spec.writes)


def _constants(spec: ProgramSpec, module: Module) -> dict[str, float]:
    known = {override.name: override for override in module.overrides}
    values: dict[str, float] = {}
    for name, value in spec.constants.items():
        override = known.get(name)
        if override is None:
            raise CompileError(f"{spec.name!r} has no override constant {name!r}; its source has: {_list(known)}")
        assert isinstance(value, int | float)
        # One with an @id goes by that alone.
        values[name if override.id is None else str(override.id)] = float(value)
    missing = [name for name, override in known.items() if not override.has_default and name not in spec.constants]
    if missing:
        raise CompileError(
            f"{spec.name!r} needs values for its override constants {_list(missing)}: give them by keyword"
        )
    return values


def _list(names: Mapping[str, object] | list[str]) -> str:
    return f"{', '.join(names) or 'none':.200}"


def _words(message: str) -> str:
    """The compiler's message from its first place on, without the names of the calls around it."""
    lines = [line for line in message.splitlines() if line.strip()]
    while lines and (lines[0].strip() in ("Validation Error", "Caused by:") or lines[0].strip().startswith("In wgpu")):
        del lines[0]
    if not lines:
        return message
    text = "\n".join([_LEAD.sub("", lines[0].strip()), *lines[1:]])
    place = _PLACE.search(text)
    return f"{place[1]}:{place[2]}: {text}" if place else text


def binding_name(binding: Binding) -> str:
    """An argument in words."""
    return f"argument {binding.index} ({binding.name:.60})"
