"""Compiles one program with the compiler of one of tinygrad's devices, and hands it arguments; launches no two at once.

In C a function is made callable once for every index, by a call that is added to its source. A kernel gets its
arguments in the sizes that its source declares.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from wsgrad.devices import diagnostics
from wsgrad.devices.tinygrad.library import dialect_of
from wsgrad.errors import CompileError, LaunchError, WsgradError
from wsgrad.graph.kernel import Parameter, parse_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wsgrad.devices.base import ProgramSpec

_MAX_MESSAGE: Final = 16 << 10
_MOST_C_ARGUMENTS: Final = 62
"""Beside the number of calls, of the 63 that tinygrad's CPU device passes."""
_DIRECTORY: Final = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.+-])")
_SUMMARY: Final = re.compile(r"^Device .* failed to build the program$", re.MULTILINE)
_TEMPORARY: Final = re.compile(r"\btempfile_\w+\.cl\b|<stdin>|<null>")
_TYPES: Final = {"i": "int", "I": "unsigned", "q": "long long", "Q": "unsigned long long", "f": "float", "d": "double"}
_BYTES: Final = {"i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}
# The jump is the first code of the object, which is what tinygrad calls.
_JUMPS: Final = {"x86_64": "jmp", "arm64": "b", "riscv64": "j"}
_C_FLAGS: Final = ("-fno-semantic-interposition", "-fno-zero-initialized-in-bss", "-Wno-unused-command-line-argument")


class Compiled:
    """A program that is ready.

    Attributes:
        buffers: positions of the arguments that are buffers, in the order in which tinygrad takes them.
        numbers: positions of the others.
    """

    def __init__(self, device: Any, spec: ProgramSpec, source: str) -> None:  # noqa: ANN401  # tinygrad's classes are its own
        """Compile it.

        Raises:
            CompileError: with the compiler's messages, and no path of this machine.
        """
        self.spec = spec
        self.in_c = dialect_of(device) == "c"
        self.letters = spec.signature.replace("x", "")
        self.buffers = [at for at, letter in enumerate(self.letters) if letter == "p"]
        self.numbers = [at for at, letter in enumerate(self.letters) if letter != "p"]
        if self.in_c:
            self._parameters = [Parameter(letter, _BYTES.get(letter, 8)) for letter in self.letters]
            if len(self.letters) > _MOST_C_ARGUMENTS:
                raise CompileError(f"{spec.name!r} has more than {_MOST_C_ARGUMENTS} arguments")
            source = _called(source, spec, device)
        else:
            self._parameters = self._declared(device, source)
        self._program = _compile(device, spec, source, self._signature())

    def bits(self, at: int, value: object) -> int:
        """A number as the bits that its parameter takes.

        Raises:
            LaunchError: it does not fit.
        """
        parameter, name = self._parameters[at], self.spec.name
        try:
            if parameter.letter in "fd":
                if not isinstance(value, int | float):
                    raise TypeError
                data = struct.pack("<" + {2: "e", 4: "f", 8: "d"}[parameter.nbytes], value)
            else:
                if not isinstance(value, int):
                    raise TypeError
                data = value.to_bytes(parameter.nbytes, "little", signed=parameter.letter in "iq")
        except (TypeError, OverflowError, struct.error):
            raise LaunchError(f"argument {at} of {name!r} is {value!r:.40}, which does not fit its type") from None
        return int.from_bytes(data, "little")

    def sizes(
        self, grid: Sequence[int] | None, block: Sequence[int] | None
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid and block in three dimensions, checked."""
        most = 1 if self.in_c else 3
        for what, sizes in (("grid", grid), ("block", block)):
            if sizes is not None and (not 1 <= len(sizes) <= most or min(sizes) < 1):
                raise LaunchError(
                    f"the {what} {list(sizes)!r:.80} of {self.spec.name!r} is not one to {most} numbers of at least 1"
                )
        if block is not None and self.in_c:
            raise LaunchError(f"a launch of {self.spec.name!r} has a block; programs in C take only a grid")
        x, y, z = (*(grid or ()), 1, 1, 1)[:3]
        i, j, k = (*(block or ()), 1, 1, 1)[:3]
        return (x, y, z), (i, j, k)

    def run(
        self,
        buffers: Sequence[Any],
        numbers: Sequence[int],
        sizes: tuple[tuple[int, int, int], tuple[int, int, int]],
        *,
        wait: bool,
    ) -> float:
        """Start it, and where it is waited for, return the seconds that it took.

        Raises:
            LaunchError: the driver refuses the launch.
        """
        grid, block = sizes
        try:
            if self.in_c:
                seconds = self._program(*buffers, vals=(*numbers, grid[0]), wait=wait)
            else:
                seconds = self._program(*buffers, global_size=grid, local_size=block, vals=tuple(numbers), wait=wait)
        except Exception as error:
            raise LaunchError(
                f"a launch of {self.spec.name!r} with grid={list(grid)} and block={list(block)} is refused: {error}"
            ) from error
        return float(seconds or 0.0)

    def _declared(self, device: Any, source: str) -> list[Parameter]:  # noqa: ANN401
        """The parameters, as the source says or, where it can't be read, as the launch's arguments suggest."""
        name, given = self.spec.name, [Parameter(letter, _BYTES.get(letter, 8)) for letter in self.letters]
        if "x" in self.spec.signature:
            raise CompileError(f"{name!r} is launched with INDEX; a kernel asks for its own index")
        if not device.device.startswith("CL") and self.buffers and self.buffers[-1] != len(self.buffers) - 1:
            raise CompileError(f"{name!r} has a buffer behind a number; tinygrad's {device.device} takes buffers first")
        declared = parse_parameters(source, self.spec.entry)
        if declared is None:
            return given
        if len(declared) != len(given):
            raise CompileError(f"{name!r} has {len(declared)} parameters and is launched with {len(given)} arguments")
        for at, (parameter, argument) in enumerate(zip(declared, given, strict=True)):
            if parameter is None:
                raise CompileError(f"parameter {at} of {name!r} is of a type that can't be given to a launch")
            if (parameter.letter == "p") is not (argument.letter == "p"):
                raise CompileError(
                    f"argument {at} of {name!r} does not fit its parameter: only one of them is a buffer"
                )
            if argument.letter in "fd" and parameter.letter not in "fd":
                raise CompileError(f"argument {at} of {name!r} does not fit its parameter, which is an integer")
        return [parameter for parameter in declared if parameter is not None]

    def _signature(self) -> tuple[tuple[None, int, Any, tuple[int, ...]], ...]:
        """The parameters in order, as tinygrad describes them: which of buffers and numbers, and its size."""
        from tinygrad.dtype import dtypes

        unsigned = {1: dtypes.uint8, 2: dtypes.uint16, 4: dtypes.uint32, 8: dtypes.uint64}
        order = {at: slot for slot, at in enumerate([*self.buffers, *self.numbers])}
        return tuple(
            (None, order[at], unsigned[parameter.nbytes], (1,) if parameter.letter == "p" else ())
            for at, parameter in enumerate(self._parameters)
        )


def _called(source: str, spec: ProgramSpec, device: Any) -> str:  # noqa: ANN401
    """C with a call of the entry for each index, which takes buffers, then numbers, then how many calls."""
    jump = _JUMPS[str(device.arch).partition(",")[0]]
    places = {at: place for place, at in enumerate(_in_order(spec.signature.replace("x", "")))}
    given, at = [], 0
    for letter in spec.signature:
        if letter == "x":
            given.append("(long long)i")
            continue
        word = f"a{places[at]}"
        given.append(
            f"(void *){word}"
            if letter == "p"
            else f"((union {{ unsigned long long word; {_TYPES[letter]} value; }}){{{word}}}).value"
        )
        at += 1
    words = "".join(f"unsigned long long a{place}, " for place in range(len(places)))
    before = "#define restrict\n#define __restrict\n#define __restrict__\n" if spec.alias else ""
    return (
        f'__asm__(".text\\n\\t{jump} {diagnostics.CALLER}\\n");\n{before}#line 1 "source.c"\n{source}\n'
        f'#line 1 "{diagnostics.SHIM_FILE}"\n'
        f"static __attribute__((used)) void {diagnostics.CALLER}({words}unsigned long long n) "
        f"{{ for (unsigned long long i = 0; i < n; i++) {spec.entry}({', '.join(given)}); }}\n"
    )


def _in_order(letters: str) -> list[int]:
    return sorted(range(len(letters)), key=lambda at: letters[at] != "p")


def _compile(device: Any, spec: ProgramSpec, source: str, signature: Any) -> Any:  # noqa: ANN401
    from tinygrad.device import TinyELF

    compiler = device.compiler
    if dialect_of(device) == "c":
        compiler.args += [flag for flag in _C_FLAGS if flag not in compiler.args]
    said: list[str] = []
    try:
        with _heard(said):
            code = compiler.compile(source)
            return device.runtime(TinyELF(code, spec.entry, device.renderer.target, signature))
    except WsgradError:
        raise
    except Exception as error:
        words = "".join(said) if isinstance(error, subprocess.CalledProcessError) else f"{error}\n{''.join(said)}"
        raise CompileError(_readable(words, spec.entry)) from error


def _readable(words: str, entry: str) -> str:
    """What a compiler says, without paths of this machine."""
    if "CL_INVALID_KERNEL_NAME" in words:
        return f"the source defines no kernel {entry!r}"
    if "unknown relocation" in words:
        return f"the source has data that other files could see, which can't be linked here: make it static ({words})"
    text = _TEMPORARY.sub("source", _DIRECTORY.sub("", words).replace("OpenCL Compile Error", ""))
    text = _SUMMARY.sub("", text)
    text = diagnostics.readable(text.strip(), entry) or "the compiler gave up without a word"
    return (
        text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}\n… ({len(text) - _MAX_MESSAGE} more characters)"
    )


@contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Catch what compilers write to standard error."""
    kept, caught = os.dup(2), os.memfd_create("wsgrad-compiler", os.MFD_CLOEXEC)
    os.dup2(caught, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        said.append(os.pread(caught, _MAX_MESSAGE * 2, 0).decode(errors="replace"))
        os.close(kept)
        os.close(caught)
