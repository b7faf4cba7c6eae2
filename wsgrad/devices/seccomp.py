"""Builds seccomp filters (classic BPF) for x86-64 and aarch64; loading one is `linux.load_filter`'s work.

Two shapes exist: an allow-list that kills on anything else, for processes that run a user's machine code, and a
deny-list that answers EPERM, for the compiler. Both kill calls of another architecture, and on x86-64 the x32 calls.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000

_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_NEW_NAMESPACES = 0x7E020000

# fmt: off
_X86_64 = {
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "close": 3, "mremap": 25, "madvise": 28, "sendto": 44,
    "recvfrom": 45, "recvmsg": 47, "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231,
    "shmget": 29, "socket": 41, "connect": 42, "bind": 49, "socketpair": 53, "clone": 56, "msgget": 68, "ptrace": 101,
    "pivot_root": 155, "mount": 165, "add_key": 248, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "userfaultfd": 323,
}
_AARCH64 = {
    "mmap": 222, "mprotect": 226, "munmap": 215, "brk": 214, "close": 57, "mremap": 216, "madvise": 233,
    "sendto": 206, "recvfrom": 207, "recvmsg": 212, "futex": 98, "restart_syscall": 128, "clock_gettime": 113,
    "exit_group": 94, "shmget": 194, "socket": 198, "connect": 203, "bind": 200, "socketpair": 199, "clone": 220,
    "msgget": 186, "ptrace": 117, "pivot_root": 41, "mount": 40, "add_key": 217, "keyctl": 219, "unshare": 97,
    "perf_event_open": 241, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280,
    "userfaultfd": 282,
}
_COMMON = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "pidfd_open": 434,
    "clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442,
}
_NODE_CALLS = ("recvmsg", "recvfrom", "sendto", "munmap", "mremap", "madvise", "brk", "close", "futex",
               "clock_gettime", "restart_syscall", "exit_group")
_COMPILER_DENIED = ("socket", "connect", "bind", "socketpair", "ptrace", "process_vm_readv", "process_vm_writev",
                    "io_uring_setup", "bpf", "unshare", "setns", "mount", "pivot_root", "keyctl", "add_key",
                    "perf_event_open", "userfaultfd", "shmget", "msgget", "open_tree", "move_mount", "fsopen",
                    "fsmount", "pidfd_open", "pidfd_getfd", "mount_setattr")
# fmt: on


@dataclass(frozen=True, slots=True)
class Architecture:
    """One machine's audit number and system call table."""

    audit: int
    numbers: dict[str, int] = field(repr=False)
    has_x32: bool


ARCHITECTURES: Final = {
    "x86_64": Architecture(audit=0xC000003E, numbers=_X86_64 | _COMMON, has_x32=True),
    "aarch64": Architecture(audit=0xC00000B7, numbers=_AARCH64 | _COMMON, has_x32=False),
}

_Instruction = tuple[int, int, int, int]


def _assemble(program: Iterable[_Instruction]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _prologue(architecture: Architecture) -> list[_Instruction]:
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if architecture.has_x32:
        program += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    return program


def node_filter(architecture: Architecture) -> bytes:
    """The allow-list of a node process that runs a user's machine code: no file, no process, no new executable memory.

    Executable mappings are allowed from a file and read-only (a program's memfd), never anonymous or writable.
    """
    number = architecture.numbers
    program = _prologue(architecture)
    program += [
        (_EQUAL, 0, 8, number["mmap"]),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 2),
        (_ANY_BIT, 1, 0, _PROT_EXEC),
        (_RETURN, 0, 0, _ALLOW),
        (_ANY_BIT, 3, 0, _PROT_WRITE),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 3),
        (_ANY_BIT, 1, 0, _MAP_ANONYMOUS),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 4, number["mprotect"]),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 2),
        (_ANY_BIT, 1, 0, _PROT_EXEC),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _KILL),
    ]
    for name in _NODE_CALLS:
        program += [(_EQUAL, 0, 1, number[name]), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _KILL))
    return _assemble(program)


def compiler_filter(architecture: Architecture) -> bytes:
    """The deny-list of a compiler: it may start processes and use files (Landlock says which), but no sockets, no
    namespaces, no other process's memory."""
    number = architecture.numbers
    program = _prologue(architecture)
    for name in _COMPILER_DENIED:
        program += [(_EQUAL, 0, 1, number[name]), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # clone3 hides its flags behind a pointer, which a filter can't read: ENOSYS makes libraries use clone instead.
    program += [
        (_EQUAL, 0, 1, number["clone3"]),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        (_EQUAL, 0, 4, number["clone"]),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return _assemble(program)
