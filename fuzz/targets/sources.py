"""What is read of programs' sources: WGSL's declarations and the signature that C suggests; any text is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fuzz.choices import Choices
from fuzz.shared import TESTS
from wsgrad.client.signature import c_probe, guess_c_signature
from wsgrad.devices.compiler import full_source
from wsgrad.errors import CompileError
from wsgrad.graph import wgsl

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 200

WORDS = (
    "@group(0)", "@binding(0)", "@binding(1)", "@", "group", "(", ")", "0", "1u", "0x1", "var", "<", ">", "storage",
    "uniform", ",", "read", "read_write", "name", ":", "array<f32>", ";", "fn", "main", "{", "}", "@compute",
    "@workgroup_size(64)", "override", "=", "@id(1)", "/*", "*/", "//", "\n", "\r", "\x85", "\u2028", "é", "struct",
    "1e+3", ".5", "const", "if", "[", "]", "alias", "@workgroup_size(", "f32",
)  # fmt: skip
_C_WORDS = (
    "void ", "entry", "(", ")", "*", "const ", "restrict ", "float ", "int ", "unsigned ", "long ", "double ", ",",
    " a", " b", "{", "}", "/*", "*/", "//", "\n", '"', "\\", "uint32_t ", "size_t ", "char ", "[4]", "struct x ", "...",
    "__attribute__((x))", "#define X\n", "half ", "signed ",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    """The vectors that both readers of WGSL share, and C as the tests have it."""
    for vector in json.loads((TESTS / "wgsl_vectors.json").read_text(encoding="utf-8")):
        source = vector["source"].encode()
        if len(source) < 200:
            yield b"\0" + source
    for source in (
        "void entry(float *restrict y, const float *x, int n) { y[0] = x[n]; }",
        "static void f(void); void entry(unsigned long a, uint32_t b[4], /* , */ double) {}",
        "void entry(void){}", "#define T float\nvoid entry(T *a, T b, struct s c, ...);",
    ):  # fmt: skip
        yield b"\1" + source.encode()
    yield b"\2" + bytes(range(60))
    yield b"\3" + bytes(range(60))


def check(data: bytes) -> None:
    """Read it; only the named errors."""
    if not data:
        return
    kind, rest = data[0] % 4, data[1:]
    if kind >= 2:
        words = WORDS if kind == 2 else _C_WORDS
        choices = Choices(rest)
        text = "".join(choices.choice(words) for _ in range(min(len(rest), 200)))
    else:
        text = rest.decode("utf-8", "replace")
    if kind % 2 == 0:
        _wgsl(text)
    else:
        _c(text)


def _wgsl(text: str) -> None:
    bare = wgsl.without_comments(text)
    assert len(bare) == len(text)
    assert all(new in (old, " ") for new, old in zip(bare, text, strict=True))
    try:
        module = wgsl.parse_module(text)
    except CompileError as exc:
        place = str(exc).split(":", 2)
        if len(place) == 3 and place[0].isdigit():
            assert int(place[1]) >= 1
        else:
            assert "without gaps" in str(exc)
        return
    assert [binding.index for binding in module.bindings] == list(range(len(module.bindings)))
    again = wgsl.parse_module(bare)
    assert again == module


def _c(text: str) -> None:
    signature = guess_c_signature(text, "entry")
    assert signature is None or set(signature.replace("?", "")) <= set("piIqQfdx"), (signature, text)
    assert c_probe(text, "entry").startswith(text)
    try:
        full = full_source(text, "entry", "pi")
    except CompileError:
        return
    assert full.startswith(text)
