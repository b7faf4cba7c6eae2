"""Packed launches: the native loop, built with traps for undefined behaviour, against a model of it in Python.

The words end where an unmapped page begins, so that a word read too many ends the process.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from fuzz.choices import Choices
from fuzz.shared import load_test_module, toolbox
from wsgrad.devices import elf, linux, native
from wsgrad.devices.base import ProgramSpec
from wsgrad.devices.cpu import CpuRuntime
from wsgrad.devices.native import MAX_BUFFERS, MAX_PROGRAMS, MAX_SLOTS, TEMPORARIES, Native, Stop
from wsgrad.devices.toolchain import find_compiler
from wsgrad.errors import DeviceError, LaunchError, WsgradError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 160
_TRAPS = {"gcc": ("-fsanitize-undefined-trap-on-error",)}
_SANITIZED = (
    "-fsanitize=undefined",
    # Without the check of called functions' types: it reads what stands before them, which gcc's programs lack.
    *_TRAPS.get(find_compiler().kind, ("-fsanitize-trap=undefined", "-fno-sanitize=function")),
)
_MAX_GRID = 40
_PAGE = 4096
_IDS = MAX_BUFFERS + MAX_SLOTS + TEMPORARIES
_words_of = {"p": 1, "i": 1, "q": 2, "d": 2, "f": 1, "x": 0}


class _Spec(NamedTuple):
    program: int
    signature: str
    writes: tuple[int, ...] | None
    alias: bool
    compiled: bool = True


_SPECS = (
    _Spec(0, "pi", None, False),
    _Spec(1, "pp", (0,), False),
    _Spec(2, "ppp", None, True),
    _Spec(3, "pxqdf", (0,), False),
    _Spec(4, "", None, False),
    _Spec(5, "xpx", (), False),
    _Spec(6, "pi", None, False, compiled=False),
    _Spec(MAX_PROGRAMS - 1, "p" * 8, (0, 7), True),
)
_BUFFERS = {0: (0, 64), 1: (64, 64), 2: (32, 64), 3: (64, 64), 4: (0, 0), 5: (512, 8), MAX_BUFFERS - 1: (512, 64)}
"""Id: place in one memory, and size."""
_C = {"p": "unsigned char *", "i": "int ", "q": "long ", "d": "double ", "f": "float ", "x": "long "}


def _source(spec: _Spec) -> str:
    parameters = ", ".join(f"{_C[letter]}a{index}" for index, letter in enumerate(spec.signature)) or "void"
    return f'void entry({parameters}) {{ __asm__ volatile(""); }}'


_toolbox = toolbox(*_SANITIZED)
_binary = _toolbox.build(native.source())
with load_test_module("devices/device_rigs").memfd(_binary) as _fd:
    _loop = Native(_fd, len(_binary))
_memory = ctypes.create_string_buffer(1024)
_runtime = CpuRuntime(_loop, memory_bytes=1 << 20, threads=1)
_images: list[elf.Image] = []
for _spec in _SPECS:
    _made = ProgramSpec(f"p{_spec.program}", "entry", _spec.signature, _spec.writes, _spec.alias, {})
    _code = elf.memfd(_toolbox.program(_source(_spec), "entry", _spec.signature)) if _spec.compiled else -1
    _runtime.load(_spec.program, _made, (_code, linux.os.fstat(_code).st_size) if _spec.compiled else None)  # type: ignore[attr-defined]
for _buffer, (_offset, _nbytes) in _BUFFERS.items():
    _runtime.bind(_buffer, ctypes.addressof(_memory), _offset, _nbytes)
_guarded = linux.mmap(0, 2 * _PAGE, linux.PROT_READ | linux.PROT_WRITE, linux.MAP_PRIVATE | linux.MAP_ANONYMOUS)
linux.mprotect(_guarded + _PAGE, _PAGE, 0)


def seeds() -> Iterator[bytes]:
    """Launches of each program as clients pack them."""
    yield b"\0" + struct.pack("<8I", 0, 0, 0, 5, 0, 3, 1, 7)
    yield b"\0" + struct.pack("<4I", 1, 1, 0, 1)
    yield b"\0" + struct.pack("<5I", 2, 0, 0, 1, 5)
    yield b"\0" + struct.pack("<2IIqdf", 3, 4, 0, -1, 2.5, 1.0)
    yield b"\0" + struct.pack("<4I", 4, 0, 4, 0)
    yield b"\0" + struct.pack("<4I", 6, 0, 0, 1)
    yield b"\0" + struct.pack("<10I", MAX_PROGRAMS - 1, 0, *range(6), 0, 0)
    for index in range(6):
        yield b"\1" + bytes(range(index, index + 40))


def _made_words(choices: Choices) -> list[int]:
    words: list[int] = []
    while choices.left and len(words) < 200:
        spec = choices.choice(_SPECS)
        words += [spec.program, choices.choice((0, 0, 1, 2, 7))]
        for letter in spec.signature:
            if letter == "p":
                words.append(choices.choice((*_BUFFERS, 0, 1, 5)))
            else:
                words += [choices.getrandbits(32) for _ in range(_words_of[letter])]
        if choices.some(7) == 0:
            words[choices._randbelow(len(words))] = choices.choice((0, 9, MAX_PROGRAMS, MAX_BUFFERS, _IDS, 0xFFFFFFFF))
        if choices.some(15) == 0:
            del words[choices._randbelow(len(words)) :]
    return words


def check(data: bytes) -> None:
    """The loop stops where the model does, having run as many; then the runtime does all that the loop would not."""
    if not data:
        return
    if data[0] & 1:
        words = _made_words(Choices(data[1:]))
    else:
        words = list(struct.unpack(f"<{len(data[1:]) // 4}I", data[1 : 1 + len(data[1:]) // 4 * 4]))
    words = words[: _PAGE // 4]
    _bound_grids(words)
    expected = _model(words)
    packed = struct.pack(f"<{len(words)}I", *words)
    address = _guarded + _PAGE - len(packed)
    ctypes.memmove(address, packed, len(packed))
    ran = _loop.table.run(address, len(words), 0, 1)
    assert (ran.stop, ran.at, ran.launches) == expected[:3], (words, ran, expected)
    if ran.stop is not Stop.DONE:
        assert ran.word == expected[3], (words, ran, expected)
    failure = _runtime.launch_packed(memoryview(bytearray(packed)), 1)
    if ran.stop is Stop.DONE:
        assert failure is None, failure
    elif ran.stop is not Stop.OVERLAP:
        assert failure is not None
        assert failure.number == 1 + ran.launches
        assert isinstance(failure.error, WsgradError)
        assert len(str(failure.error)) < 300
    assert _loop.table.buffer(MAX_BUFFERS + MAX_SLOTS) == (0, 0), "a temporary was left"
    first = words[:20]
    for spec in _SPECS:
        with suppress(LaunchError, DeviceError, WsgradError):
            _runtime.launch(spec.program, [len(first) % 3 + 1], None, first, 1)
            break


def _bound_grids(words: list[int]) -> None:
    """A launch of billions of calls is no fault, but takes long; the runtime goes on behind one that overlaps."""
    programs = {spec.program: spec for spec in _SPECS}
    at = 0
    while at + 1 < len(words) and (spec := programs.get(words[at])) is not None:
        words[at + 1] = min(words[at + 1], _MAX_GRID)
        at += 2 + sum(_words_of[letter] for letter in spec.signature)


def _model(words: list[int]) -> tuple[Stop, int, int, int]:
    """Why the loop stops, where its launch began, how many it ran, and the wrong word."""
    programs = {spec.program: spec for spec in _SPECS}
    at = launches = 0
    while at < len(words):
        if len(words) - at < 2:
            return Stop.TRUNCATED, at, launches, at
        spec = programs.get(words[at])
        if spec is None:
            return Stop.BAD_PROGRAM, at, launches, at
        nwords = sum(_words_of[letter] for letter in spec.signature)
        if len(words) - at - 2 < nwords:
            return Stop.TRUNCATED, at, launches, at
        place, ranges = at + 2, {}
        for index, letter in enumerate(spec.signature):
            if letter == "p":
                if words[place] not in _BUFFERS:
                    return Stop.BAD_BUFFER, at, launches, place
                ranges[index] = _BUFFERS[words[place]]
            place += _words_of[letter]
        if not spec.compiled:
            return Stop.PROGRAM_FAILED, at, launches, at
        if _overlap(spec, ranges):
            return Stop.OVERLAP, at, launches, at
        launches += 1
        at += 2 + nwords
    return Stop.DONE, at, launches, at


def _overlap(spec: _Spec, ranges: dict[int, tuple[int, int]]) -> bool:
    written = set(ranges) if spec.writes is None else set(ranges) & set(spec.writes)
    for a in ranges:
        for b in ranges:
            (low, nbytes), (other, size) = ranges[a], ranges[b]
            if b >= a or not written & {a, b} or not (nbytes and size):
                continue
            same = ranges[a] == ranges[b] and {a, b} <= written and spec.alias
            if low < other + size and other < low + nbytes and not same:
                return True
    return False
