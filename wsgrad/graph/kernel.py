"""Reads what parameters a kernel in OpenCL C, CUDA C or Metal has; compiles nothing and expands no macro.

Those languages don't convert a launch's arguments: a number has to be given in the size and kind that the source
declares. Client and node read it there, the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

KERNEL_DIALECTS: Final = ("opencl-c", "cuda-c", "hip-c", "msl")
_COMMENTS: Final = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_ATTRIBUTES: Final = re.compile(r"\[\[(.*?)\]\]|__attribute__\s*\(\(.*?\)\)", re.DOTALL)
_QUALIFIERS: Final = frozenset(
    {"const", "volatile", "restrict", "__restrict", "__restrict__", "__private", "private", "constant", "device"}
)
_WORDS: Final = {
    "char": ("i", 1), "uchar": ("I", 1), "bool": ("I", 1), "int8_t": ("i", 1), "uint8_t": ("I", 1),
    "short": ("i", 2), "ushort": ("I", 2), "int16_t": ("i", 2), "uint16_t": ("I", 2),
    "int": ("i", 4), "uint": ("I", 4), "int32_t": ("i", 4), "uint32_t": ("I", 4),
    "long": ("q", 8), "ulong": ("Q", 8), "int64_t": ("q", 8), "uint64_t": ("Q", 8), "size_t": ("Q", 8),
    "half": ("f", 2), "float": ("f", 4), "double": ("d", 8),
}  # fmt: skip
_UNSIGNED: Final = {"i": "I", "q": "Q"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its letter as in a program's signature, `p` for a buffer, and the bytes that it takes."""

    letter: str
    nbytes: int = 8


def parse_parameters(source: str, entry: str) -> tuple[Parameter | None, ...] | None:
    """The parameters of a kernel that launches have to give, None for one whose type is not understood.

    Returns:
        None where the source defines no function of this name that can be read.
    """
    text = _COMMENTS.sub(" ", source)
    for match in re.finditer(rf"\b{re.escape(entry)}\s*\(", text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if depth == 0 and text[end:].lstrip().startswith("{"):
            return _parameters(text[match.end() : end - 1])
    return None


def _parameters(text: str) -> tuple[Parameter | None, ...]:
    found = []
    # A comma inside of brackets separates no parameters.
    for part in re.split(r",(?![^(\[<]*[)\]>])", text):
        attributes = [words for words in _ATTRIBUTES.findall(part) if words]
        if part.strip() in ("", "void") or any("buffer" not in words for words in attributes):
            continue  # Metal's thread positions are no arguments
        found.append(_parameter(_ATTRIBUTES.sub(" ", part)))
    return tuple(found)


def _parameter(text: str) -> Parameter | None:
    if "*" in text or "[" in text:
        return Parameter("p")
    words = [word for word in re.findall(r"\w+", text.replace("&", " ")) if word not in _QUALIFIERS]
    if not words:
        return None
    if words[0] in ("unsigned", "signed"):
        sign, rest = words[0], [word for word in words[1:] if word in ("char", "short", "int", "long")]
        letter, nbytes = _WORDS[rest[0] if rest else "int"]
        return Parameter(_UNSIGNED[letter] if sign == "unsigned" else letter, nbytes)
    known = _WORDS.get(words[0])
    return None if known is None else Parameter(*known)
