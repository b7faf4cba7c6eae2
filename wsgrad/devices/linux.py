"""The few Linux calls that Python does not offer, through ctypes; decides nothing about who is confined and how.

Numbers and structures are those of the kernel's own headers (`asm/unistd_64.h`, `linux/landlock.h`, `linux/seccomp.h`);
x86-64 and aarch64 share every number below from 400 up, the older ones are in `seccomp.py`'s tables.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MACHINE: Final = platform.machine()
PAGE: Final = 4096

PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
MADV_DONTNEED, MADV_HUGEPAGE = 4, 14

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
CLONE_NEWIPC, CLONE_NEWUTS, CLONE_NEWCGROUP = 0x08000000, 0x04000000, 0x02000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 0x1000
MS_REC, MS_PRIVATE = 0x4000, 0x40000

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION_3, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 0x20080522, 1, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_SYS_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.syscall.restype = ctypes.c_long
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def mmap(address: int, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Map memory and return its address; raises `OSError` as mmap(2) fails."""
    result = _libc.mmap(address or None, nbytes, protection, flags, fd, offset)
    if result is None or result == (1 << 64) - 1:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(result)


def munmap(address: int, nbytes: int) -> None:
    _check(_libc.munmap(address, nbytes), f"munmap of {nbytes} bytes")


def mprotect(address: int, nbytes: int, protection: int) -> None:
    _check(_libc.mprotect(address, nbytes, protection), f"mprotect of {nbytes} bytes")


def madvise(address: int, nbytes: int, advice: int) -> bool:
    """Advise the kernel; whether it took the advice (it may know no huge pages, which harms nothing)."""
    return int(_libc.madvise(address, nbytes, advice)) == 0


def die_with_parent() -> None:
    """End this process with SIGKILL when the thread that created it ends; fork clears this, so each child calls it."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def drop_capabilities() -> None:
    """Give up what a process of root may do beyond others, but for the files whose owners it is not; for good."""
    kept = 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    had = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, had), "capget")
    effective, permitted = (number & kept for number in struct.unpack_from("<II", had))
    _check(_libc.capset(header, struct.pack("<6I", effective, permitted, 0, 0, 0, 0)), "capset")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, kind, data)]
    _check(_libc.mount(encoded[0], os.fsencode(target), encoded[1], flags, encoded[2]), f"mount at {target}")


# Landlock (linux/landlock.h). File rights by ABI version: 1 has bits 0–12, 2 adds REFER, 3 TRUNCATE, 5 IOCTL_DEV.
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR = 1, 2, 4, 8
_FS_FILE_ONLY = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | 1 << 14 | 1 << 15
_FS_MAKE_CHAR, _FS_MAKE_BLOCK = 1 << 6, 1 << 11
_FS_BY_ABI = ((5, (1 << 16) - 1), (3, (1 << 15) - 1), (2, (1 << 14) - 1), (1, (1 << 13) - 1))


def landlock_version() -> int:
    """The kernel's Landlock ABI version; 0 where it has none or it is switched off."""
    if _libc is None:
        return 0
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock(
    *,
    readable: Iterable[str] = (),
    executable: Iterable[str] = (),
    writable: Iterable[str] = (),
    listed: Iterable[str] = (),
) -> None:
    """Restrict this thread (and what it starts) to the given paths for good; no path means no file at all.

    Everything the kernel's version can handle is handled: all file rights, from version 4 TCP, from version 6 abstract
    Unix sockets and signals to the outside. Of a directory that is `listed` only names may be read.
    """
    version = landlock_version()
    if version == 0:
        raise OSError(0, "this kernel has no Landlock")
    handled = next(rights for least, rights in _FS_BY_ABI if version >= least)
    # The kernel refuses a longer structure than it knows unless the rest is zero: give each version its own length.
    attributes = struct.pack("<QQQ", handled, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, buffer, ctypes.c_size_t(len(attributes)), 0), "landlock ruleset")
    try:
        read = FS_READ_FILE | FS_READ_DIR
        write = handled & ~(FS_EXECUTE | _FS_MAKE_CHAR | _FS_MAKE_BLOCK)
        executed, names = read | FS_EXECUTE, FS_READ_DIR
        for paths, rights in ((readable, read), (executable, executed), (writable, write), (listed, names)):
            for path in paths:
                _add_rule(ruleset, path, rights & handled)
        _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = rights if os.path.isdir(path) else rights & _FS_FILE_ONLY
        rule = struct.pack("<Qi", allowed, fd)
        buffer = ctypes.create_string_buffer(rule, len(rule))
        _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, buffer, 0), f"landlock rule for {path}")
    finally:
        os.close(fd)


def load_filter(program: bytes, *, all_threads: bool = False) -> None:
    """Give a seccomp filter to this thread, or to every thread of the process, for good."""
    buffer = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(descriptor, len(descriptor))
    number = _SYS_SECCOMP[MACHINE]
    flags = _SECCOMP_FILTER_FLAG_TSYNC if all_threads else 0
    result = int(_libc.syscall(number, _SECCOMP_SET_MODE_FILTER, flags, pointer))
    if result > 0:
        raise OSError(0, f"seccomp could not reach thread {result}")
    _check(result, "seccomp")
