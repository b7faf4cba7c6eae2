"""Maps a `-nostdlib` shared object from a descriptor into this process without opening a file; runs none of it.

`dlopen` opens files, which a confined process can't, and returns the previous library when a descriptor number
repeats. A program comes from a compiler that a stranger's source may have taken over, so every field is checked before
it is used: what does not fit raises `CompileError`, and nothing outside the image's own pages is ever written.
The format is that of the System V ABI (gABI 4.1) with the x86-64 and AArch64 supplements.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wsgrad.devices import linux
from wsgrad.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAX_SPAN: Final = 1 << 30
_MAX_HEADERS: Final = 64
_MAX_DYNAMIC: Final = 256
_MAX_SYMBOLS: Final = 1 << 16
_MAX_NAME: Final = 255
_PAGE: Final = linux.PAGE

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_TLS = 1, 2, 3, 7
_EXECUTE, _WRITE, _READ = 1, 2, 4
_HASH, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ, _JMPREL, _PLTRELSZ = 4, 5, 6, 7, 8, 10, 23, 2
_REFUSED_TAGS: Final = {
    1: "needs another library",
    12: "has an initialiser",
    13: "has a finaliser",
    17: "has relocations of a kind that is not supported (REL)",
    22: "has relocations in its code",
    25: "has constructors",
    26: "has destructors",
    36: "has packed relocations",
}
# Relocation numbers by e_machine: what adds the base, what takes a symbol's address, what adds an addend to it.
_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
_RELOCATIONS: Final = {62: ({8}, {6, 7}, {1}), 183: ({1027}, {1025, 1026}, {257})}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the file and where it goes: addresses are relative to the image's base."""

    flags: int
    offset: int
    address: int
    file_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Relocation:
    """One word to fill in: `base + addend`, or a symbol's address plus `addend`."""

    address: int
    symbol: str | None
    addend: int


@dataclass(frozen=True, slots=True)
class Program:
    """A checked shared object that is not mapped yet.

    Attributes:
        functions: defined global functions and their addresses relative to the base.
        undefined: names that it expects from outside.
    """

    segments: tuple[Segment, ...]
    span: int
    functions: dict[str, int]
    undefined: frozenset[str]
    relocations: tuple[Relocation, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """A mapped program: `symbols` are addresses that can be called."""

    base: int
    span: int
    symbols: dict[str, int]


def _fail(what: str) -> CompileError:
    return CompileError(f"the compiled program is not usable: it {what}")


def parse(data: bytes) -> Program:
    """Check a whole shared object; raises `CompileError` saying what is wrong with it."""
    if len(data) < 64 or data[:7] != b"\x7fELF\x02\x01\x01":
        raise _fail("is not a 64-bit little-endian ELF file")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != 3 or machine != _MACHINES.get(linux.MACHINE):
        raise _fail(f"is of type {kind} for machine {machine}, not a shared object for {linux.MACHINE}")
    headers, header_bytes, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
    if header_bytes != 56 or not 0 < count <= _MAX_HEADERS or headers + 56 * count > len(data):
        raise _fail("has program headers outside the file")
    segments: list[Segment] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, flags, offset, address, _, file_bytes, memory_bytes, _ = struct.unpack_from(
            "<IIQQQQQQ", data, headers + 56 * index
        )
        if kind == _PT_LOAD and memory_bytes > 0:
            segments.append(_segment(data, segments, flags, offset, address, file_bytes, memory_bytes))
        elif kind == _PT_DYNAMIC:
            dynamic = (address, file_bytes)
        elif kind in (_PT_TLS, _PT_INTERP):
            raise _fail("has thread-local variables" if kind == _PT_TLS else "asks for an interpreter")
    if not segments or dynamic is None:
        raise _fail("has no loadable part or no dynamic section")
    return _Reader(data, tuple(segments)).program(*dynamic)


def _segment(
    data: bytes, before: list[Segment], flags: int, offset: int, address: int, file_bytes: int, memory_bytes: int
) -> Segment:
    if file_bytes > memory_bytes or offset + file_bytes > len(data):
        raise _fail("has a part outside the file")
    if address + memory_bytes > _MAX_SPAN:
        raise _fail(f"needs more than {_MAX_SPAN >> 20} MiB of static memory")
    if (offset - address) % _PAGE:
        raise _fail("has a part that is not aligned to a page")
    if flags & _WRITE and flags & _EXECUTE:
        raise _fail("has a part that is both writable and executable")
    if memory_bytes > file_bytes and not flags & _WRITE:
        raise _fail("has a read-only part that is not in the file")
    if before and address // _PAGE * _PAGE < before[-1].address + before[-1].memory_bytes:
        raise _fail("has parts that overlap or are out of order")
    return Segment(flags, offset, address, file_bytes, memory_bytes)


class _Reader:
    """Reads the tables of one file by the addresses that its dynamic section gives."""

    def __init__(self, data: bytes, segments: tuple[Segment, ...]) -> None:
        self._data = data
        self._segments = segments
        self._tags: dict[int, int] = {}
        self._symbols: list[tuple[str, int, int, int]] = []

    def program(self, dynamic: int, dynamic_bytes: int) -> Program:
        self._read_tags(dynamic, dynamic_bytes)
        self._read_symbols()
        relocations = tuple(self._relocations())
        functions = {}
        for name, info, section, value in self._symbols:
            if section and info & 15 == 2 and info >> 4 and self._inside(value, 1, _EXECUTE):
                functions[name] = value
        last = self._segments[-1]
        return Program(
            segments=self._segments,
            span=-(-(last.address + last.memory_bytes) // _PAGE) * _PAGE,
            functions=functions,
            undefined=frozenset(name for name, _, section, _ in self._symbols if name and not section),
            relocations=relocations,
        )

    def _inside(self, address: int, nbytes: int, flag: int) -> bool:
        return any(
            s.flags & flag and s.address <= address and address + nbytes <= s.address + s.memory_bytes
            for s in self._segments
        )

    def _offset(self, address: int, nbytes: int, what: str) -> int:
        """The file offset of a table that lies wholly in one part's file bytes."""
        for s in self._segments:
            if s.address <= address and address + nbytes <= s.address + s.file_bytes:
                return address - s.address + s.offset
        raise _fail(f"has a {what} outside its parts")

    def _read_tags(self, dynamic: int, dynamic_bytes: int) -> None:
        count = dynamic_bytes // 16
        if count > _MAX_DYNAMIC:
            raise _fail("has too large a dynamic section")
        offset = self._offset(dynamic, count * 16, "dynamic section")
        for index in range(count):
            tag, value = struct.unpack_from("<QQ", self._data, offset + 16 * index)
            if tag == 0:
                break
            if tag in _REFUSED_TAGS:
                raise _fail(_REFUSED_TAGS[tag])
            self._tags.setdefault(tag, value)

    def _read_symbols(self) -> None:
        if not {_HASH, _STRTAB, _STRSZ, _SYMTAB} <= self._tags.keys():
            raise _fail("has no symbol table")
        hash_table = self._offset(self._tags[_HASH], 8, "hash table")
        (count,) = struct.unpack_from("<I", self._data, hash_table + 4)
        if count > _MAX_SYMBOLS:
            raise _fail(f"has {count} symbols, more than {_MAX_SYMBOLS}")
        symbols = self._offset(self._tags[_SYMTAB], 24 * count, "symbol table")
        nbytes = self._tags[_STRSZ]
        strings = self._offset(self._tags[_STRTAB], nbytes, "string table")
        for index in range(count):
            name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", self._data, symbols + 24 * index)
            if name >= nbytes:
                raise _fail("has a symbol name outside its string table")
            end = self._data.find(b"\0", strings + name, min(strings + nbytes, strings + name + _MAX_NAME + 1))
            if end < 0:
                raise _fail(f"has a symbol name longer than {_MAX_NAME} bytes")
            text = self._data[strings + name : end].decode("ascii", "backslashreplace")
            if section and section < 0xFF00 and value > _MAX_SPAN:
                raise _fail(f"has the symbol {text!r} outside its parts")
            self._symbols.append((text, info, section, value))

    def _relocations(self) -> Iterator[Relocation]:
        add_base, take_symbol, take_symbol_and_add = _RELOCATIONS[_MACHINES[linux.MACHINE]]
        for table, size in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
            if table not in self._tags:
                continue
            nbytes = self._tags.get(size, 0) // 24 * 24
            offset = self._offset(self._tags[table], nbytes, "relocation table")
            for address, info, addend in struct.iter_unpack("<QQq", self._data[offset : offset + nbytes]):
                if not self._inside(address, 8, _WRITE):
                    raise _fail("has a relocation outside its writable parts")
                kind, index = info & 0xFFFFFFFF, info >> 32
                if kind in add_base:
                    yield Relocation(address, None, addend)
                    continue
                if kind not in take_symbol and kind not in take_symbol_and_add:
                    raise _fail(f"has a relocation of type {kind}, which is not supported")
                if index >= len(self._symbols):
                    raise _fail("has a relocation for a symbol that does not exist")
                name, _, section, value = self._symbols[index]
                extra = addend if kind in take_symbol_and_add else 0
                if section == 0 and not name:
                    raise _fail("has a relocation for a symbol without a name")
                if section == 0:
                    yield Relocation(address, name, extra)
                elif section >= 0xFF00:
                    raise _fail(f"has the absolute symbol {name!r}")
                else:
                    yield Relocation(address, None, value + extra)


def load(fd: int, nbytes: int, externs: Mapping[str, int]) -> Image:
    """Map the shared object of `nbytes` bytes behind `fd`; the descriptor can be closed afterwards.

    Args:
        externs: the address of everything that it may call outside itself.

    Raises:
        CompileError: the file is not usable, or needs a symbol that is not in `externs` (the message names it).
        OSError: the system has no room for the mapping.
    """
    header = linux.mmap(0, nbytes, linux.PROT_READ, linux.MAP_PRIVATE, fd) if nbytes > 0 else 0
    try:
        data = ctypes.string_at(header, nbytes)
    finally:
        if header:
            linux.munmap(header, nbytes)
    program = parse(data)
    check_externs(program, externs)
    base = linux.mmap(0, program.span, 0, linux.MAP_PRIVATE | linux.MAP_ANONYMOUS)
    try:
        for segment in program.segments:
            _map(segment, base, fd)
        for relocation in program.relocations:
            target = base if relocation.symbol is None else externs[relocation.symbol]
            value = (target + relocation.addend) & ((1 << 64) - 1)
            ctypes.c_uint64.from_address(base + relocation.address).value = value
    except BaseException:
        linux.munmap(base, program.span)
        raise
    return Image(base, program.span, {name: base + address for name, address in program.functions.items()})


def load_bytes(data: bytes, externs: Mapping[str, int]) -> Image:
    """Like `load`, for a process that may still make a memfd."""
    fd = memfd(data)
    try:
        return load(fd, len(data), externs)
    finally:
        os.close(fd)


def memfd(data: bytes) -> int:
    """A sealed memfd that holds `data`: whoever maps it can't be surprised by a later change."""
    fd = os.memfd_create("wsgrad-program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_externs(program: Program, externs: Mapping[str, int] | frozenset[str]) -> None:
    """Raise `CompileError` if the program calls something that is not among `externs`."""
    missing = sorted(program.undefined - set(externs))
    if missing:
        names = ", ".join(missing[:8])
        raise CompileError(
            f"the program uses {names}, which nothing defines; a program can call its own functions and those of "
            f"<math.h> and <string.h>"
        )


def unload(image: Image) -> None:
    """Take an image out of memory; nothing may call into it any more."""
    linux.munmap(image.base, image.span)


def _map(segment: Segment, base: int, fd: int) -> None:
    start = segment.address // _PAGE * _PAGE
    lead = segment.address - start
    in_file = lead + segment.file_bytes if segment.file_bytes else 0
    in_memory = lead + segment.memory_bytes
    protection = (segment.flags >> 2 & 1) | (segment.flags & _WRITE) | (segment.flags & _EXECUTE) << 2
    mapped = -(-in_file // _PAGE) * _PAGE
    if in_file:
        flags = linux.MAP_PRIVATE | linux.MAP_FIXED
        linux.mmap(base + start, in_file, protection, flags, fd, segment.offset - lead)
        if segment.flags & _WRITE and mapped > in_file:
            ctypes.memset(base + start + in_file, 0, mapped - in_file)
    if in_memory > mapped:
        flags = linux.MAP_PRIVATE | linux.MAP_FIXED | linux.MAP_ANONYMOUS
        linux.mmap(base + start + mapped, -(-(in_memory - mapped) // _PAGE) * _PAGE, protection, flags)
