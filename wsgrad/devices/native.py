"""Drives the native loop (`native.c`): owns its tables of programs and buffers; decides nothing about what is launched.

The tables are sparse private memory, so an id costs memory only when it is used. A process has one loop, because the
loop's thread pool is part of the image.
"""

from __future__ import annotations

import _thread
import ctypes
import enum
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wsgrad.devices import elf, linux, mathlib

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_BUFFERS: Final = 1 << 20
"""Buffer ids that a client may use; ids for the slots of graphs, then the loop's own temporaries, lie above."""
MAX_SLOTS: Final = 1 << 16
MAX_PROGRAMS: Final = 1 << 16
TEMPORARIES: Final = 64

_SOURCE: Final = Path(__file__).with_name("native.c")
_PROGRAM: Final = struct.Struct("<QQQIBBBB64s32x")
_BUFFER: Final = struct.Struct("<QQ")
_STATE: Final = struct.Struct("<QQQQQQQQ")
_KINDS: Final = {"p": 0, "i": 1, "I": 1, "f": 1, "q": 2, "Q": 2, "d": 2, "x": 3}
_WORDS: Final = (1, 1, 2, 0)
_START_SECONDS: Final = 10.0


class Stop(enum.IntEnum):
    """Why the loop returned."""

    DONE = 0
    TRUNCATED = 1
    BAD_PROGRAM = 2
    PROGRAM_FAILED = 3
    BAD_BUFFER = 4
    OVERLAP = 5
    NO_ROOM = 6


@dataclass(frozen=True, slots=True)
class Ran:
    """How far a call of the loop came.

    Attributes:
        at: the word where the launch starts that stopped it.
        word: the word that was wrong.
        launches: how many were run before.
    """

    stop: Stop
    at: int
    word: int
    launches: int


def source() -> str:
    """The loop's C source, to be compiled like a program's."""
    return _SOURCE.read_text(encoding="utf-8")


def argument_words(signature: str) -> int:
    """How many 32-bit words the arguments of a packed launch take."""
    return sum(_WORDS[_KINDS[letter]] for letter in signature)


class Table:
    """The buffers of one stream of launches by id, with `TEMPORARIES` more ids behind them, and how the loop runs it.

    Attributes:
        count: ids from here on are temporaries.
    """

    def __init__(self, loop: Native, count: int, progress_address: int = 0) -> None:
        self.count = count
        self._loop = loop
        self._nbytes = (count + TEMPORARIES) * _BUFFER.size
        access, flags = linux.PROT_READ | linux.PROT_WRITE, linux.MAP_PRIVATE | linux.MAP_ANONYMOUS
        self._address = linux.mmap(0, self._nbytes, access, flags | linux.MAP_NORESERVE)
        # Writing through one view is several times faster than a ctypes object per entry.
        self._view = memoryview((ctypes.c_char * self._nbytes).from_address(self._address)).cast("B")
        self._own_progress = ctypes.c_uint64()
        self._state = ctypes.create_string_buffer(_STATE.size)
        self._state_address = ctypes.addressof(self._state)
        self.report_to(progress_address or ctypes.addressof(self._own_progress))

    def report_to(self, progress_address: int) -> None:
        """Where the loop writes the number of the launch that it starts, before it starts it."""
        programs, buffers = self._loop.programs_address, self.count + TEMPORARIES
        _STATE.pack_into(self._state, 0, programs, MAX_PROGRAMS, self._address, buffers, progress_address, 0, 0, 0)

    def set_buffer(self, buffer: int, address: int, nbytes: int) -> None:
        """Fill in a buffer; an address of 0 takes it out."""
        _BUFFER.pack_into(self._view, buffer * 16, address, nbytes)

    def buffer(self, buffer: int) -> tuple[int, int]:
        """A buffer's address and size."""
        address, nbytes = _BUFFER.unpack_from(self._view, buffer * 16)
        return address, nbytes

    def run(self, words_address: int, count: int, start: int, number: int, trace_address: int = 0) -> Ran:
        """Run packed launches from word `start` up to word `count`; the first one's number is `number`.

        With the address of a `struct trace` each launch leaves a span there.
        """
        if trace_address:
            stop = self._loop.run_traced(self._state_address, words_address, count, start, number, trace_address)
        else:
            stop = self._loop.run_launches(self._state_address, words_address, count, start, number)
        _, _, _, _, _, at, word, launches = _STATE.unpack_from(self._state)
        return Ran(Stop(stop), at, word, launches)

    def close(self) -> None:
        """Give the memory back; nothing may be launched any more."""
        self._view.release()
        linux.munmap(self._address, self._nbytes)


class Native:
    """The loop in this process, mapped from a descriptor that holds its shared object.

    Attributes:
        programs_address: where the table of programs is, which all streams share.
        table: the buffers of the stream that packed launches make.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._image = elf.load(fd, nbytes, mathlib.addresses())
        symbols = self._image.symbols
        words, state = ctypes.c_void_p, ctypes.c_void_p
        counts = [ctypes.c_uint64] * 3
        self.run_launches = ctypes.CFUNCTYPE(ctypes.c_int, state, words, *counts)(symbols["run"])
        self.run_traced = ctypes.CFUNCTYPE(ctypes.c_int, state, words, *counts, ctypes.c_void_p)(symbols["run_traced"])
        self._patch = ctypes.CFUNCTYPE(None, words, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p)(symbols["patch"])
        self._worker = ctypes.CFUNCTYPE(None)(symbols["worker"])
        self._workers = ctypes.CFUNCTYPE(ctypes.c_uint32)(symbols["workers"])
        self._set_threads = ctypes.CFUNCTYPE(None, ctypes.c_uint32)(symbols["set_threads"])
        self._stop = ctypes.CFUNCTYPE(None)(symbols["stop"])
        self._start = ctypes.CFUNCTYPE(None)(symbols["start"])
        self._program_bytes = MAX_PROGRAMS * _PROGRAM.size
        flags = linux.MAP_PRIVATE | linux.MAP_ANONYMOUS | linux.MAP_NORESERVE
        self.programs_address = linux.mmap(0, self._program_bytes, linux.PROT_READ | linux.PROT_WRITE, flags)
        self._program_view = memoryview((ctypes.c_char * self._program_bytes).from_address(self.programs_address)).cast(
            "B"
        )
        self.table = Table(self, MAX_BUFFERS + MAX_SLOTS)

    def start_threads(self, count: int) -> None:
        """Spread grids over `count` threads, the caller's included; returns when all of them wait for work."""
        self._start()
        wanted = count - 1
        for _ in range(wanted):
            _thread.start_new_thread(self._worker, ())
        deadline = time.monotonic() + _START_SECONDS
        while self._workers() < wanted:
            if time.monotonic() > deadline:
                raise OSError(0, f"only {self._workers()} of {wanted} worker threads started")
            time.sleep(0.0001)
        self._set_threads(count)

    def stop_threads(self) -> None:
        """End the workers; only needed where the process goes on."""
        self._set_threads(1)
        deadline = time.monotonic() + _START_SECONDS
        self._stop()
        while self._workers() and time.monotonic() < deadline:
            time.sleep(0.0001)

    def set_program(
        self, program: int, address: int, signature: str, writes: Iterable[int] | None, *, alias: bool
    ) -> None:
        """Fill in a program: `address` is its shim, 0 if it failed to compile; `writes` None means every buffer."""
        kinds = bytes(_KINDS[letter] for letter in signature)
        pointers = {index for index, letter in enumerate(signature) if letter == "p"}
        written = pointers if writes is None else pointers & set(writes)
        _PROGRAM.pack_into(
            self._program_view,
            program * _PROGRAM.size,
            address,
            sum(1 << index for index in written),
            sum(1 << index for index, letter in enumerate(signature) if letter == "x"),
            argument_words(signature),
            1 if address else 2,
            len(signature),
            alias,
            len(pointers),
            kinds,
        )

    def drop_program(self, program: int) -> None:
        self._program_view[program * _PROGRAM.size : (program + 1) * _PROGRAM.size] = bytes(_PROGRAM.size)

    def patch(self, words_address: int, patches: bytes, count: int, values: bytes) -> None:
        """Put values, 64-bit integers, into words as the records of a patch table say."""
        self._patch(words_address, patches, count, values)

    def close(self) -> None:
        """End the threads and give the memory back; nothing may be launched any more."""
        self.stop_threads()
        self.table.close()
        self._program_view.release()
        linux.munmap(self.programs_address, self._program_bytes)
        elf.unload(self._image)
