"""Reads from WGSL source what a launch needs to know: bindings, entry points, overrides; it checks no other syntax.

`browser/wgsl.js` is its twin; `tests/wgsl_vectors.json` holds both to the same answers and the same messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from wsgrad.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator

# WGSL's blanks and line breaks, which are not Python's or JavaScript's.
_BLANKS: Final = " \t\n\v\f\r\x85\u200e\u200f\u2028\u2029"
_LINE_BREAK: Final = re.compile("\r\n|[\n\v\f\r\x85\u2028\u2029]")
_COMMENT: Final = re.compile(r"/\*|//")
_BLOCK_PART: Final = re.compile(r"/\*|\*/")
_TOKEN: Final = re.compile(rf"[{_BLANKS}]+|([^\W\d]\w*|[.]?[0-9](?:[eEpP][+-]|[\w.])*|.)", re.DOTALL)
_INTEGER: Final = re.compile(r"(0|[1-9][0-9]{0,9}|0[xX][0-9a-fA-F]{1,8})[iu]?\Z")
_OPEN: Final = {"(": ")", "[": "]", "{": "}"}
_STAGES: Final = ("compute", "vertex", "fragment")


@dataclass(frozen=True, slots=True)
class Binding:
    """A buffer of `@group(0)`.

    Attributes:
        index: its `@binding`, which is the argument's place.
        space: `storage` or `uniform`.
        access: `read` or `read_write`; a uniform is `read`.
        type_text: its type as written, without blanks: `array<vec4<f32>,16>`.
        name: its name.
    """

    index: int
    space: str
    access: str
    type_text: str
    name: str


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function with a stage; `workgroup_size` as written, one text a dimension."""

    name: str
    stage: str
    workgroup_size: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Override:
    """A constant that a pipeline may set, by its name or, where it has an `@id`, by that."""

    name: str
    id: int | None
    type_text: str | None
    has_default: bool


@dataclass(frozen=True, slots=True)
class Module:
    """What was read of a source. `bindings` are in the order of their index, without gaps."""

    bindings: tuple[Binding, ...]
    entry_points: tuple[EntryPoint, ...]
    overrides: tuple[Override, ...]


def parse_bindings(source: str) -> tuple[Binding, ...]:
    """The bindings of a source, by index.

    Raises:
        CompileError: one is none that a program can have; the message begins with its line and column.
    """
    return parse_module(source).bindings


def entry_points(source: str) -> tuple[EntryPoint, ...]:
    """The functions that can be launched, in order; raises as `parse_bindings` does."""
    return parse_module(source).entry_points


def overrides(source: str) -> tuple[Override, ...]:
    """The `override` constants, in order; raises as `parse_bindings` does."""
    return parse_module(source).overrides


def parse_module(source: str) -> Module:
    """All of it at once; raises as `parse_bindings` does."""
    return _Reader(source).module()


def without_comments(source: str) -> str:
    """The source with blanks for its comments, every other character and line in its place.

    Block comments nest. One that is not closed reaches to the end; the compiler will say so.
    """
    pieces: list[str] = []
    at = 0
    while (opened := _COMMENT.search(source, at)) is not None:
        start = opened.start()
        if opened[0] == "//":
            line_end = _LINE_BREAK.search(source, start)
            end = len(source) if line_end is None else line_end.start()
        else:
            end = _block_end(source, opened.end())
        pieces.append(source[at:start])
        pieces.append("".join(c if c in "\n\v\f\r\x85\u2028\u2029" else " " for c in source[start:end]))
        at = end
    return "".join((*pieces, source[at:]))


def _block_end(source: str, at: int) -> int:
    depth = 1
    while depth:
        part = _BLOCK_PART.search(source, at)
        if part is None:
            return len(source)
        at = part.end()
        depth += 1 if part[0] == "/*" else -1
    return at


class _Token(NamedTuple):
    text: str
    start: int


class _Reader:
    """Goes once over the declarations of a module; what it does not know it skips."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = list(_tokens(without_comments(source)))
        self._at = 0
        self._attributes: dict[str, tuple[_Token, list[_Token]]] = {}
        self._bindings: dict[int, Binding] = {}
        self._entry_points: list[EntryPoint] = []
        self._overrides: list[Override] = []

    def module(self) -> Module:
        while (token := self._next()) is not None:
            if token.text == "@":
                self._attribute()
                continue
            if token.text == "var":
                self._var(token)
            elif token.text == "fn":
                self._fn()
            elif token.text == "override":
                self._override()
            elif token.text != ";":
                self._skip_declaration(token)
            self._attributes = {}
        for expected, index in enumerate(sorted(self._bindings)):
            if index != expected:
                raise CompileError(
                    f"there is a @binding({index}) but no @binding({expected}): argument i is @binding(i), without gaps"
                )
        bindings = tuple(self._bindings[index] for index in sorted(self._bindings))
        return Module(bindings, tuple(self._entry_points), tuple(self._overrides))

    # -- declarations

    def _attribute(self) -> None:
        name = self._next()
        if name is None:
            return
        arguments: list[_Token] = []
        if self._peek() == "(":
            self._next()
            arguments = self._until(")")
        self._attributes[name.text] = name, arguments

    def _var(self, var: _Token) -> None:
        template: list[str] = []
        if self._peek() == "<":
            self._next()
            template = [token.text for token in self._until(">") if token.text != ","]
        name = self._next()
        rest = self._until(";")
        if name is None:
            return
        space = template[0] if template else "handle"
        if not self._attributes.keys() & {"group", "binding"}:
            if space in ("storage", "uniform"):
                self._refuse(name, f"var<{space}> {name.text:.60} has neither @group nor @binding")
            return
        group, index = (self._number(key, name) for key in ("group", "binding"))
        if group != 0:
            self._refuse(name, f"{name.text:.60} is in @group({group}); a program's arguments are all in @group(0)")
        if space not in ("storage", "uniform"):
            self._refuse(
                name,
                f"{name.text:.60} is neither var<storage> nor var<uniform>; a program takes only buffers and scalars",
            )
        access = template[1] if len(template) > 1 else "read"
        if access not in (("read", "read_write") if space == "storage" else ("read",)):
            self._refuse(name, f"var<{space:.60}, {access:.60}> {name.text:.60}: there is no such access")
        if index in self._bindings:
            other = self._bindings[index].name
            self._refuse(name, f"{name.text:.60} has @binding({index}), which {other:.60} has already")
        type_text = "".join(token.text for token in rest[1:]) if rest and rest[0].text == ":" else ""
        self._bindings[index] = Binding(index, space, access, type_text, name.text)

    def _number(self, key: str, name: _Token) -> int:
        if key not in self._attributes:
            other = "binding" if key == "group" else "group"
            self._refuse(name, f"{name.text:.60} has @{other} but no @{key}")
        attribute, arguments = self._attributes[key]
        text = "".join(token.text for token in arguments).removesuffix(",")
        if not _INTEGER.match(text):
            self._refuse(attribute, f"@{key}({text:.60}) of {name.text:.60} is not written as a whole number")
        return int(text.rstrip("iu"), 0)

    def _fn(self) -> None:
        name = self._next()
        while (token := self._next()) is not None and token.text != "{":
            if token.text in ("(", "["):
                self._until(_OPEN[token.text])
        if token is not None:
            self._until("}")
        stage = next((stage for stage in _STAGES if stage in self._attributes), None)
        if name is not None and stage is not None:
            _, size = self._attributes.get("workgroup_size", (name, []))
            self._entry_points.append(EntryPoint(name.text, stage, _split(size)))

    def _override(self) -> None:
        name = self._next()
        rest = [token.text for token in self._until(";")]
        if name is None:
            return
        equals = rest.index("=") if "=" in rest else len(rest)
        type_text = "".join(rest[1:equals]) if rest and rest[0] == ":" else None
        number = self._number("id", name) if "id" in self._attributes else None
        self._overrides.append(Override(name.text, number, type_text, equals < len(rest)))

    def _skip_declaration(self, token: _Token | None) -> None:
        while token is not None and token.text != ";":
            if token.text in _OPEN:
                self._until(_OPEN[token.text])
                if token.text == "{":
                    return
            token = self._next()

    # -- tokens

    def _next(self) -> _Token | None:
        if self._at == len(self._tokens):
            return None
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str | None:
        return self._tokens[self._at].text if self._at < len(self._tokens) else None

    def _until(self, end: str) -> list[_Token]:
        """What comes before the token `end` outside of inner brackets, which is taken too."""
        found: list[_Token] = []
        inner: list[str] = []
        while (token := self._next()) is not None:
            if not inner and token.text == end:
                break
            if inner and token.text == inner[-1]:
                inner.pop()
            elif token.text in _OPEN:
                inner.append(_OPEN[token.text])
            found.append(token)
        return found

    def _refuse(self, token: _Token, message: str) -> NoReturn:
        line, start = 1, 0
        for line_break in _LINE_BREAK.finditer(self._source, 0, token.start):
            line, start = line + 1, line_break.end()
        raise CompileError(f"{line}:{token.start - start + 1}: {message}")


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        if match[1] is not None:
            yield _Token(match[1], match.start())


def _split(tokens: list[_Token]) -> tuple[str, ...]:
    """The texts between the commas that are outside of brackets."""
    parts = [""]
    depth = 0
    for token in tokens:
        depth += (token.text in _OPEN) - (token.text in _OPEN.values())
        if token.text == "," and not depth:
            parts.append("")
        else:
            parts[-1] += token.text
    return tuple(part for part in parts if part)
