"""The program loader on real shared objects with anything changed: refused by name, or mapped inside its own pages."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from fuzz.choices import Choices
from fuzz.shared import toolbox
from wsgrad.devices import elf, linux, mathlib
from wsgrad.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 64

_SOURCE = """
#include <math.h>
static int numbers[3] = {1, 2, 3};
static int zeros[5000];
static int *volatile pointer = &numbers[1];
static float (*volatile function)(float) = &sinf;
static const char *const names[] = {"a", "bc", "def"};
void entry(float *out) {
    out[0] = *pointer + zeros[4999]++ + names[2][1];
    out[1] = function(0.5f) + cosf(0.5f);
}
"""
_objects = [
    bytes(toolbox().program(_SOURCE, "entry", "p")),
    bytes(toolbox().program("void entry(int *a, int n) { a[0] += n; }", "entry", "pi")),
]
_reserved = (0, 0)
_mmap = linux.mmap


def _checked_mmap(address: int, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """What the loader maps at a fixed place lies in what it has reserved, and nothing is writable and executable."""
    global _reserved
    assert not (protection & linux.PROT_WRITE and protection & linux.PROT_EXEC)
    assert nbytes > 0
    if flags & linux.MAP_FIXED:
        start, end = _reserved
        assert start <= address, (address, _reserved)
        assert address + nbytes <= end, (address, nbytes, _reserved)
        assert address % linux.PAGE == 0
        return _mmap(address, nbytes, protection, flags, fd, offset)
    mapped = _mmap(address, nbytes, protection, flags, fd, offset)
    if protection == 0:
        _reserved = mapped, mapped + nbytes
    return mapped


elf.linux.mmap = _checked_mmap  # type: ignore[attr-defined]


def _places(data: bytes) -> list[tuple[int, int]]:
    """Offset and size of every field that the loader reads: headers, tags, symbols, relocations."""
    headers, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    places = [(16, 2), (18, 2), (32, 8), (54, 2), (56, 2), (4, 1)]
    sections: list[tuple[int, int, int]] = []
    for index in range(count):
        at = headers + 56 * index
        places += [(at, 4), (at + 4, 4), *((at + k, 8) for k in range(8, 56, 8))]
        kind, _, offset, address, _, file_bytes = struct.unpack_from("<IIQQQQ", data, at)
        if kind == 1:
            sections.append((address, offset, file_bytes))
        elif kind == 2:
            dynamic, dynamic_bytes = offset, file_bytes

    def find(address: int) -> int:
        return next(offset + address - base for base, offset, size in sections if base <= address < base + size)

    tags = dict(struct.iter_unpack("<QQ", data[dynamic : dynamic + dynamic_bytes]))
    places += [(dynamic + k, 8) for k in range(0, dynamic_bytes, 8)]
    places += [(find(tags[4]) + k, 4) for k in range(0, 8, 4)]
    symbols = struct.unpack_from("<I", data, find(tags[4]) + 4)[0]
    for index in range(symbols):
        at = find(tags[6]) + 24 * index
        places += [(at, 4), (at + 4, 1), (at + 6, 2), (at + 8, 8), (at + 16, 8)]
    for table, size in ((7, 8), (23, 2)):
        if table in tags:
            places += [(find(tags[table]) + k, 8) for k in range(0, tags[size], 8)]
    places += [(find(tags[5]) + k, 1) for k in range(tags[10])]
    return places


_fields = [_places(data) for data in _objects]


def seeds() -> Iterator[bytes]:
    """No change, one in each of the first fields, and cuts."""
    yield b""
    yield b"\1"
    for index in range(0, 220, 5):
        yield bytes((index & 1, 0, index, 0, index % 7, 1, 1, 8))
    yield bytes((0, 3, 200, 3, 3))
    yield bytes((0, 4, 7, 1, 7))


def check(data: bytes) -> None:
    """Change fields, load, unload."""
    choices = Choices(data)
    which = choices._randbelow(len(_objects))
    changed = bytearray(_objects[which])
    for _ in range(choices.some(5) if choices.left else 0):
        _change(choices, changed, _fields[which])
    fd = elf.memfd(bytes(changed))
    try:
        try:
            program = elf.parse(bytes(changed))
        except CompileError as exc:
            assert len(str(exc)) < 600, exc
            program = None
        try:
            image = elf.load(fd, len(changed), mathlib.addresses())
        except CompileError:
            return
        assert program is not None
        _check_program(program)
        assert set(image.symbols) == set(program.functions)
        for address in image.symbols.values():
            assert image.base <= address < image.base + image.span
        for segment in program.segments:
            if segment.flags & 4:
                assert len(ctypes.string_at(image.base + segment.address, min(segment.memory_bytes, 4096)))
        elf.unload(image)
    finally:
        elf.os.close(fd)  # type: ignore[attr-defined]


def _change(choices: Choices, data: bytearray, fields: list[tuple[int, int]]) -> None:
    match choices.some(6):
        case 0 | 1 | 2:
            at, size = fields[choices._randbelow(len(fields))]
        case 3:
            at, size = choices._randbelow(len(data) or 1), choices.choice((1, 2, 4, 8))
        case 4:
            del data[choices._randbelow(len(data) or 1) :]
            return
        case 5:
            data += bytes(choices.choice((1, 16, 4096)))
            return
        case _:
            (at, size), (other, _) = (fields[choices._randbelow(len(fields))] for _ in range(2))
            data[at : at + size] = data[other : other + size]
            return
    if at + size > len(data):
        return
    old = int.from_bytes(data[at : at + size], "little")
    near = (
        old + choices.choice((-4096, -8, -1, 1, 8, 24, 4096)),
        0,
        len(data),
        len(data) - 1,
        1 << 12,
        1 << 30,
        -1,
        -8,
    )
    value = choices.choice(near) if choices.some(3) else choices.getrandbits(8 * size)
    data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _check_program(program: elf.Program) -> None:
    end = 0
    for segment in program.segments:
        assert segment.address >= end
        assert not (segment.flags & 2 and segment.flags & 1)
        end = segment.address + segment.memory_bytes
    assert end <= program.span <= 1 << 30
    writable = [s for s in program.segments if s.flags & 2]
    for relocation in program.relocations:
        place = relocation.address
        assert any(s.address <= place and place + 8 <= s.address + s.memory_bytes for s in writable)
