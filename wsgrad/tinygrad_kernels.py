"""Renders tinygrad's kernels as OpenCL C, CUDA C, HIP or Metal source without the vendor's compiler; compiles nothing.

The renderers are tinygrad's own; only their constructors, which load a compiler, are gone round. What a kernel writes
stands in its first line, as in the other dialects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from tinygrad.codegen.opt import tc
from tinygrad.device import Compiler
from tinygrad.dtype import AddrSpace
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import CStyleLanguage, CUDARenderer, HIPRenderer, MetalRenderer, OpenCLRenderer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinygrad.helpers import Target
    from tinygrad.uop.ops import UOp


def noted(text: str, bufs: Sequence[tuple[str, tuple[UOp, bool]]], *, first: int = 0) -> str:
    """The source with the positions of the arguments that it writes, which `WSProgram` reads."""
    written = ",".join(
        str(place)
        for place, (_, (param, mutable)) in enumerate(bufs, first)
        if mutable and param.addrspace != AddrSpace.ALU
    )
    return f"// writes {written}\n{text}"


class _Noted(CStyleLanguage):
    def render_kernel(self, function_name: str, kernel: Any, bufs: Any, uops: Any, prefix: Any = None) -> str:  # noqa: ANN401
        return noted(super().render_kernel(function_name, kernel, bufs, uops, prefix), bufs)


class WSOpenCLRenderer(_Noted, OpenCLRenderer):
    """OpenCL C; the target's arch is the list of extensions."""

    def __init__(self, target: Target) -> None:
        Renderer.__init__(self, target)
        self.compiler = Compiler()


class WSCUDARenderer(_Noted, CUDARenderer):
    """CUDA C for an arch such as `sm_89`."""

    def __init__(self, target: Target) -> None:
        Renderer.__init__(self, target)
        self.compiler = Compiler()
        self.tensor_cores = tc.get_cuda(target.arch)  # type: ignore[no-untyped-call]


class WSHIPRenderer(_Noted, HIPRenderer):
    """HIP for an arch such as `gfx1100`."""

    def __init__(self, target: Target) -> None:
        with patch("tinygrad.runtime.support.compiler_amd.HIPCompiler", lambda arch: Compiler()):
            super().__init__(target)


class WSMetalRenderer(_Noted, MetalRenderer):
    """Metal for an arch such as `Apple9`."""

    def __init__(self, target: Target) -> None:
        Renderer.__init__(self, target)
        self.compiler = Compiler()
        recent = target.arch.startswith("Apple") and int(target.arch[5:]) >= 7
        self.tensor_cores = tc.metal if recent else []


KERNEL_RENDERERS: Final[dict[str, type[Renderer]]] = {
    "opencl-c": WSOpenCLRenderer,
    "cuda-c": WSCUDARenderer,
    "hip-c": WSHIPRenderer,
    "msl": WSMetalRenderer,
}
"""By dialect, those whose launches have work-groups."""
