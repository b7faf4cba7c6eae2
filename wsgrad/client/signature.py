"""Arguments of launches: their letters by type, the signature that C source suggests, and packing them into words.

Nothing here knows a queue or sends anything. A signature has one letter an argument: `p` a buffer; `i I q Q f d` int32,
uint32, int64, uint64, float32, float64; `x` the grid's index.
"""

from __future__ import annotations

import enum
import re
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


class Index(enum.Enum):
    """The type of `INDEX`."""

    INDEX = "INDEX"

    def __repr__(self) -> str:
        return "wsgrad.INDEX"


INDEX: Final = Index.INDEX
"""Stands among a launch's arguments where each call of a grid gets its own index."""

MAX_ARGUMENTS = 64

_LETTERS: dict[type, str] = {
    int: "i",
    bool: "i",
    float: "f",
    Index: "x",
    np.bool_: "i",
    np.byte: "i",
    np.short: "i",
    np.intc: "i",
    np.ubyte: "I",
    np.ushort: "I",
    np.uintc: "I",
    np.float16: "f",
    np.float32: "f",
    np.float64: "d",
}
for _type in (np.int_, np.longlong, np.uint, np.ulonglong):
    _LETTERS[_type] = {("i", 4): "i", ("i", 8): "q", ("u", 4): "I", ("u", 8): "Q"}[
        np.dtype(_type).kind, np.dtype(_type).itemsize
    ]
_NAMES = {"i": "int32", "I": "uint32", "q": "int64", "Q": "uint64", "f": "float32", "d": "float64"}
_FORMATS = {"p": "I", "i": "i", "I": "I", "q": "q", "Q": "Q", "f": "f", "d": "d", "x": ""}


def letter_of(value: object) -> str | None:
    """The letter of a scalar or of `INDEX` by its type, or None."""
    letter = _LETTERS.get(type(value))
    if letter is not None:
        return letter
    if isinstance(value, np.generic):
        # Scalars of ml_dtypes (bfloat16, fp8) call themselves void.
        return "f" if hasattr(value, "__float__") and type(value).__module__.startswith("ml_dtypes") else None
    if isinstance(value, int):
        return "i"
    return "f" if isinstance(value, float) else None


def plain_scalar(letter: str, value: Any) -> int | float:  # noqa: ANN401
    """The value as a Python number that fits the letter.

    Raises:
        ValueError: it does not fit.
    """
    if letter in "fd":
        number = float(value)
        if letter == "f":
            try:
                Struct("<f").pack(number)
            except OverflowError:
                raise ValueError(f"{value!r} does not fit float32; pass numpy.float64({value!r})") from None
        return number
    integer = int(value)
    try:
        Struct("<" + _FORMATS[letter]).pack(integer)
    except Exception:
        wider = "; pass numpy.int64 or numpy.uint64 for larger integers" if letter == "i" else ""
        raise ValueError(f"{integer} does not fit {_NAMES[letter]}{wider}") from None
    return integer


def words_of(signature: str) -> Struct:
    """How a packed launch is laid out: the program, the grid or 0, and the arguments but for the index."""
    return Struct("<II" + "".join(_FORMATS[letter] for letter in signature))


def make_packer(signature: str, program: int, life: object, types: tuple[type, ...]) -> Callable[..., bytes]:
    """Make a function `pack(grid, *arguments)` that returns the words of one launch.

    It is compiled for the signature: a loop over arguments would cost more than everything else a launch does. It
    raises (anything) where an argument does not fit, is freed, or belongs to another life of the device, where that
    life is over, and where an index has no grid; the caller finds out which.
    """
    names = [f"a{i}" for i in range(len(signature))]
    buffers = [name for name, letter in zip(names, signature, strict=True) if letter == "p"]
    values = []
    for name, letter, kind in zip(names, signature, types, strict=True):
        if letter == "p":
            values.append(f"{name}._id")
        elif letter != "x":
            # struct takes NumPy's numbers by __index__ and __float__, but its booleans have neither.
            values.append(f"int({name})" if kind is np.bool_ else name)
    checks = ["life.dead", *(f"{name}._life is not life" for name in buffers)]
    if "x" in signature:
        checks.append("not grid")
    source = (
        f"def pack({', '.join(['grid', *names])}):\n"
        f"    if {' or '.join(checks)}:\n"
        "        raise ValueError\n"
        f"    return words({', '.join([str(program), 'grid', *values])})\n"
    )
    scope: dict[str, Any] = {"words": words_of(signature).pack, "life": life}
    exec(source, scope)  # made of letters and numbers only
    pack: Callable[..., bytes] = scope["pack"]
    return pack


PROBE_ENTRY = "wsgrad_probe"


def c_probe(source: str, entry: str) -> str:
    """A C source with a function, `PROBE_ENTRY`, that compiles only where the source defines the function `entry`."""
    return (
        f'{source}\n#line 1 "the launch\'s arguments"\n'
        f"void {PROBE_ENTRY}(void) {{ __typeof__(*{entry}) *volatile wsgrad_entry = {entry}; (void)wsgrad_entry; }}\n"
    )


_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_QUALIFIERS = frozenset(
    {"const", "volatile", "restrict", "__restrict", "__restrict__", "register", "static", "inline", "extern"}
)
_INTEGER_WORDS = frozenset(
    {
        "int",
        "signed",
        "unsigned",
        "short",
        "char",
        "long",
        "_Bool",
        "bool",
        "size_t",
        "ssize_t",
        "ptrdiff_t",
        "intptr_t",
        "uintptr_t",
        "int8_t",
        "int16_t",
        "int32_t",
        "int64_t",
        "uint8_t",
        "uint16_t",
        "uint32_t",
        "uint64_t",
    }
)
_FLOAT_WORDS = frozenset({"float", "double", "_Float16", "__fp16", "__bf16"})
_INDEX_NAMES = frozenset({"i", "idx", "index", "gid", "tid", "row", "item", "unit"})


def guess_c_signature(source: str, entry: str) -> str | None:
    """Guess how a C function will be called, from its parameters, so that it can be compiled before its first launch.

    Scalars are taken for Python's int and float, which is what most callers pass. None where the parameters are not
    understood; a wrong guess costs one more compilation.
    """
    text = _COMMENTS.sub(" ", source)
    for match in re.finditer(rf"\b{re.escape(entry)}\s*\(", text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if depth == 0 and text[end:].lstrip().startswith("{"):
            return _guess_parameters(text[match.end() : end - 1])
    return None


def _guess_parameters(text: str) -> str | None:
    if text.strip() in ("", "void"):
        return ""
    letters = [_guess_parameter(parameter) for parameter in text.split(",")]
    if None in letters or len(letters) > MAX_ARGUMENTS:
        return None
    return "".join(letter for letter in letters if letter is not None)


def _guess_parameter(text: str) -> str | None:
    if "(" in text:
        return None
    if "*" in text or "[" in text:
        return "p"
    words = [word for word in re.findall(r"\w+", text) if word not in _QUALIFIERS]
    known = [word for word in words if word in _INTEGER_WORDS or word in _FLOAT_WORDS]
    names = [word for word in words if word not in known]
    if not known or len(names) > 1:
        return None
    if any(word in _FLOAT_WORDS for word in known):
        return "f"
    return "x" if names and names[0] in _INDEX_NAMES else "i"
