"""What a dialect makes of a launch's arguments: their letters, and what its source says of them; sends nothing.

In C every scalar has the letter of its own type. A kernel's source and WGSL's say what each argument is, so a number
takes the type declared there; in WGSL a scalar with fields, or of 16 bits, becomes a small buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from wsgrad.client.buffer import BaseBuffer
from wsgrad.client.signature import INDEX, MAX_ARGUMENTS, guess_c_signature, letter_of
from wsgrad.errors import CompileError
from wsgrad.graph.items import Affine, Var
from wsgrad.graph.kernel import KERNEL_DIALECTS, parse_parameters
from wsgrad.graph.wgsl import parse_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.graph.wgsl import Binding

STRUCT_ALIGNMENT: Final = 16
"""A uniform buffer's size is a multiple of this in WGSL."""
_LETTERS: Final = {"i32": "i", "u32": "I", "f32": "f"}
_DECLARED: Final = {"i": "i32", "I": "u32", "f": "f32"}


class Arguments:
    """The arguments of programs in C, and of every dialect that says nothing of them in its source.

    Attributes:
        writes: positions of what the source says is written; None where it does not say.
        dimensions: how many a grid may have.
        blocks: whether a launch says how large a work-group is.
    """

    writes: list[int] | None = None
    dimensions: int = 1
    blocks: bool = False

    def __init__(self, source: str, entry: str) -> None:
        self._source = source
        self._entry = entry

    def guess(self) -> str | None:
        """The signature that launches will probably have."""
        return guess_c_signature(self._source, self._entry)

    def letter(self, position: int, argument: object) -> str:
        """The letter of an argument.

        Raises:
            ValueError: it can't be one; says why.
        """
        if isinstance(argument, BaseBuffer):
            return "p"
        letter = letter_of(argument)
        if letter is None:
            hint = "; copy it with device.array(…) first" if isinstance(argument, np.ndarray) else ""
            raise ValueError(f"is a {type(argument).__name__}, not a buffer or number{hint}")
        return letter

    def dressed(self, arguments: tuple[object, ...], struct: Callable[[bytes], BaseBuffer]) -> tuple[object, ...]:
        """The arguments with a buffer, which `struct` makes, in place of what can't travel as a number."""
        return arguments


class KernelArguments(Arguments):
    """The arguments of a kernel in OpenCL C, CUDA C, HIP or Metal: its parameters in order, which convert nothing."""

    dimensions = 3
    blocks = True

    def __init__(self, source: str, entry: str) -> None:
        super().__init__(source, entry)
        self._parameters = parse_parameters(source, entry)

    def guess(self) -> str | None:
        # Where nothing is found, compiling it tells what is wrong.
        letters = ["p" if parameter is None else parameter.letter for parameter in self._parameters or ()]
        return "".join(letters) if len(letters) <= MAX_ARGUMENTS else None

    def letter(self, position: int, argument: object) -> str:
        if argument is INDEX:
            raise ValueError("is INDEX; a kernel asks for its own index")
        letter = super().letter(position, argument)
        if self._parameters is None:
            return letter
        if position >= len(self._parameters):
            raise ValueError(f"is one too many: {self._entry} has {len(self._parameters)} parameters")
        parameter = self._parameters[position]
        if parameter is None:
            raise ValueError("stands for a parameter whose type can't be given: only pointers and plain numbers can")
        if (letter == "p") is not (parameter.letter == "p"):
            raise ValueError(f"is {argument!r:.40}, but the parameter is {'a' if letter != 'p' else 'no'} pointer")
        if letter in "fd" and parameter.letter not in "fd":
            raise ValueError(f"is {argument!r:.40}, but the parameter is an integer")
        return parameter.letter


class WgslArguments(Arguments):
    """The arguments of a program in WGSL: argument i is `@binding(i)` of `@group(0)`."""

    dimensions = 3

    def __init__(self, source: str, entry: str) -> None:
        """Read the bindings.

        A source that can't be read is the compiler's to complain of, with line and column.
        """
        super().__init__(source, entry)
        try:
            module = parse_module(source)
        except CompileError:
            self._bindings: tuple[Binding, ...] | None = None
        else:
            self._bindings = module.bindings
            self._complete = all(override.has_default for override in module.overrides)
            if len(module.bindings) <= MAX_ARGUMENTS:  # else no message may say it: the server refuses the signature
                self.writes = [b.index for b in module.bindings if b.access == "read_write"]

    def guess(self) -> str | None:
        if self._bindings is None or not self._complete:
            return None
        return "".join(self._declared(binding) or "p" for binding in self._bindings)

    def letter(self, position: int, argument: object) -> str:
        if argument is INDEX:
            raise ValueError("is INDEX; in WGSL a call gets its index from @builtin(global_invocation_id)")
        letter = super().letter(position, argument)
        if letter == "p" or self._bindings is None:
            return letter
        if position >= len(self._bindings):
            raise ValueError(f"is {argument!r:.40}, but the source has no @binding({position})")
        binding = self._bindings[position]
        if binding.space != "uniform":
            raise ValueError(f"is {argument!r:.40}, but @binding({position}) is a storage buffer")
        declared = self._declared(binding)
        if declared is None:
            raise ValueError(
                f"is {argument!r:.40}, but @binding({position}) is a {binding.type_text}: pass a NumPy scalar of a "
                "structured dtype with its fields, or a buffer"
            )
        if letter in "fd" and declared in "iI":
            raise ValueError(f"is {argument!r:.40}, but @binding({position}) is a {_DECLARED[declared]}")
        return declared

    def dressed(self, arguments: tuple[object, ...], struct: Callable[[bytes], BaseBuffer]) -> tuple[object, ...]:
        if not any(self._needs_buffer(position, argument) for position, argument in enumerate(arguments)):
            return arguments
        return tuple(
            struct(self._bytes(position, argument)) if self._needs_buffer(position, argument) else argument
            for position, argument in enumerate(arguments)
        )

    def _needs_buffer(self, position: int, argument: object) -> bool:
        if isinstance(argument, np.void):
            return argument.dtype.names is not None
        if isinstance(argument, BaseBuffer | np.ndarray | Var | Affine) or self._bindings is None:
            return False
        binding = self._bindings[position] if position < len(self._bindings) else None
        return binding is not None and binding.space == "uniform" and binding.type_text == "f16"

    def _bytes(self, position: int, argument: object) -> bytes:
        if isinstance(argument, np.void):
            return argument.tobytes()
        try:
            return np.float16(argument).tobytes()  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ValueError(f"argument {position} is a {type(argument).__name__}, not a number") from None

    @staticmethod
    def _declared(binding: Binding) -> str | None:
        return _LETTERS.get(binding.type_text) if binding.space == "uniform" else None


def arguments_of(dialect: str, source: str, entry: str) -> Arguments:
    """What a dialect makes of a source's arguments."""
    if dialect in KERNEL_DIALECTS:
        return KernelArguments(source, entry)
    return WgslArguments(source, entry) if dialect == "wgsl" else Arguments(source, entry)
