"""Names the functions that a compiled program may call and finds their addresses; nothing else can be linked to."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

_MATH: Final = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "copysign",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "fabs",
    "fdim",
    "floor",
    "fma",
    "fmax",
    "fmin",
    "fmod",
    "frexp",
    "hypot",
    "ilogb",
    "ldexp",
    "lgamma",
    "llrint",
    "llround",
    "log",
    "log10",
    "log1p",
    "log2",
    "logb",
    "lrint",
    "lround",
    "modf",
    "nearbyint",
    "nextafter",
    "pow",
    "remainder",
    "rint",
    "round",
    "roundeven",
    "scalbn",
    "sin",
    "sincos",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "tgamma",
    "trunc",
]
MEMORY: Final = ("memcmp", "memcpy", "memmove", "memset")
ALLOWED: Final = frozenset([*_MATH, *(f"{name}f" for name in _MATH), *MEMORY])


@cache
def addresses() -> dict[str, int]:
    """The address of every allowed function that this system's C library has."""
    libraries = []
    for name in ("libm.so.6", None):
        try:
            libraries.append(ctypes.CDLL(name))
        except OSError:
            continue
    found = {}
    for name in ALLOWED:
        for library in libraries:
            try:
                function = library[name]
            except AttributeError:
                continue
            found[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
            break
    return found
