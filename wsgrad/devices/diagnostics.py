"""Puts what a compiler says about one program into what its user should read; starts no compiler, knows no machine.

What is said about the call that was added to the source becomes a sentence about the function; names of temporary files
and the compiler's summaries go; all about the user's own text stays, with line and column.
"""

from __future__ import annotations

import re
from typing import Final

SHIM_FILE: Final = "the launch's arguments"
"""What the added call is said to stand in."""
CALLER: Final = "wsgrad_call"
_HEADER: Final = re.compile(
    r"(?P<file>[^\n]*?)(?::\d+)+: (?P<kind>(?:fatal )?error|warning|note): (?P<text>[^\n]*)", re.IGNORECASE
)
_BOILERPLATE: Final = re.compile(
    r"""\d+\ (?:errors?|warnings?)(?:\ and\ \d+\ errors?)?\ generated\.
    | cc1:\ .*treated\ as\ errors
    | compilation\ terminated.*
    | [^\n]*:\ Assembler\ messages:
    | the\ launch's\ arguments:\ (?:In|At)\ [^\n]*:
    | [^\n]*note:\ each\ undeclared\ identifier\ is\ reported\ only\ once[^\n]*
    | (?:collect2|clang|gcc|cc|zig)(?:-\d+)?:\ (?:fatal\ )?error:\ (?:ld|linker|clang\ frontend)[^\n]*
    | PLEASE\ submit\ a\ (?:full\ )?bug\ report[^\n]*""",
    re.VERBOSE,
)
_STACK: Final = re.compile(r"^Stack dump:\n(?:.*\n?)*", re.MULTILINE)
_TEMPORARY: Final = re.compile(r"(?:/[\w.+-]+)*/?\b(?:cc[A-Za-z0-9]{6}|source-[0-9a-f]{4,})\.(?:s|o|ltrans\d*\.o)\b")
_NO_FUNCTION: Final = re.compile(r"undeclared|implicit declaration|called object|indirection|unary '?\*")
_OPTION: Final = re.compile(r" \[-W[\w=+-]*\]$")


def readable(text: str, entry: str) -> str:
    """A compiler's messages about a program.

    Args:
        text: as it wrote them, without any path of this machine.
        entry: the function that a launch calls.
    """
    text = _TEMPORARY.sub("the assembler's input", _STACK.sub("", text))
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if _BOILERPLATE.fullmatch(line):
            continue
        if not blocks or _HEADER.match(line) or line.endswith(":"):
            blocks.append([])
        blocks[-1].append(line)
    own = any(_kind(block) in ("error", "fatal error") and not _added(block) for block in blocks)
    said: dict[str, None] = {}
    silent = False
    for block in blocks:
        # A note belongs to what stands before it.
        silent = silent if _kind(block) == "note" else _added(block) and (own or _kind(block) == "warning")
        if not silent:
            said["\n".join(_reworded(block, entry))] = None
    return "\n".join(said).strip()


def _kind(block: list[str]) -> str:
    found = _HEADER.match(block[0])
    return "" if found is None else found["kind"].lower()


def _added(block: list[str]) -> bool:
    """Whether it is about the call that was added to the source."""
    return block[0].startswith(SHIM_FILE)


def _reworded(block: list[str], entry: str) -> list[str]:
    found = _HEADER.match(block[0])
    if found is None or not _added(block):
        return block
    said = _OPTION.sub("", found["text"])
    if f"'{CALLER}'" in said:
        return [f"the source may not use the name {CALLER}, which the call of the program has"]
    if _NO_FUNCTION.search(said):
        return [f"the source defines no function {entry!r}"]
    return [f"{entry!r} can't be called with these arguments: {said}"]
