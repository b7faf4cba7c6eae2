"""Builds seccomp filters (classic BPF) for x86-64 and aarch64; loading one is `linux.load_filter`'s work.

Two shapes exist: an allow-list that kills on anything else, for processes that run a user's machine code, and
deny-lists that answer with an error, for the compiler and for processes that load a driver. All of them kill calls of
another architecture, and on x86-64 the x32 calls.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _ECONNREFUSED = 1, 38, 111
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000

_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_NEW_NAMESPACES = 0x7E020000
_CLONE_THREAD = 0x10000
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPES = 1, 1, 5, 0xF
_F_SETOWN, _F_SETOWN_EX = 8, 15
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902

# fmt: off
_X86_64 = {
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "close": 3, "mremap": 25, "madvise": 28, "sendto": 44,
    "recvfrom": 45, "recvmsg": 47, "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231,
    "shmget": 29, "socket": 41, "connect": 42, "bind": 49, "socketpair": 53, "clone": 56, "msgget": 68, "ptrace": 101,
    "pivot_root": 155, "mount": 165, "add_key": 248, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "userfaultfd": 323,
    "ioctl": 16, "shmat": 30, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "semget": 64, "fcntl": 72,
    "syslog": 103, "rt_sigqueueinfo": 129, "personality": 135, "setpriority": 141, "sched_setparam": 142,
    "sched_setscheduler": 144, "modify_ldt": 154, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164,
    "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171,
    "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "tkill": 200,
    "sched_setaffinity": 203, "clock_settime": 227, "tgkill": 234, "mq_open": 240, "kexec_load": 246,
    "request_key": 249, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279, "rt_tgsigqueueinfo": 297,
    "prlimit64": 302, "open_by_handle_at": 304, "clock_adjtime": 305, "kcmp": 312, "finit_module": 313,
    "sched_setattr": 314, "kexec_file_load": 320, "execveat": 322,
}
_AARCH64 = {
    "mmap": 222, "mprotect": 226, "munmap": 215, "brk": 214, "close": 57, "mremap": 216, "madvise": 233,
    "sendto": 206, "recvfrom": 207, "recvmsg": 212, "futex": 98, "restart_syscall": 128, "clock_gettime": 113,
    "exit_group": 94, "shmget": 194, "socket": 198, "connect": 203, "bind": 200, "socketpair": 199, "clone": 220,
    "msgget": 186, "ptrace": 117, "pivot_root": 41, "mount": 40, "add_key": 217, "keyctl": 219, "unshare": 97,
    "perf_event_open": 241, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280,
    "userfaultfd": 282,
    "ioctl": 29, "shmat": 196, "execve": 221, "kill": 129, "semget": 190, "fcntl": 25, "syslog": 116,
    "rt_sigqueueinfo": 138, "personality": 92, "setpriority": 140, "sched_setparam": 118, "sched_setscheduler": 119,
    "adjtimex": 171, "chroot": 51, "acct": 89, "settimeofday": 170, "umount2": 39, "swapon": 224, "swapoff": 225,
    "reboot": 142, "sethostname": 161, "setdomainname": 162, "init_module": 105, "delete_module": 106,
    "quotactl": 60, "tkill": 130, "sched_setaffinity": 122, "clock_settime": 112, "tgkill": 131, "mq_open": 180,
    "kexec_load": 104, "request_key": 218, "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239,
    "rt_tgsigqueueinfo": 240, "prlimit64": 261, "open_by_handle_at": 265, "clock_adjtime": 266, "kcmp": 272,
    "finit_module": 273, "sched_setattr": 274, "kexec_file_load": 294, "execveat": 281,
}
_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "process_mrelease": 448,
}
_NODE_CALLS = ("recvmsg", "recvfrom", "sendto", "munmap", "mremap", "madvise", "brk", "close", "futex",
               "clock_gettime", "restart_syscall", "exit_group")
_COMPILER_DENIED = ("socket", "connect", "bind", "socketpair", "ptrace", "process_vm_readv", "process_vm_writev",
                    "io_uring_setup", "bpf", "unshare", "setns", "mount", "pivot_root", "keyctl", "add_key",
                    "perf_event_open", "userfaultfd", "shmget", "msgget", "open_tree", "move_mount", "fsopen",
                    "fsmount", "pidfd_open", "pidfd_getfd", "mount_setattr")
_DRIVER_DENIED = ("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp",
                  "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo",
                  "io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd",
                  "keyctl", "add_key", "request_key", "unshare", "setns", "mount", "umount2", "pivot_root", "chroot",
                  "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
                  "open_by_handle_at", "shmget", "shmat", "semget", "msgget", "mq_open", "bind", "execveat", "syslog",
                  "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon",
                  "swapoff", "acct", "quotactl", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime",
                  "sethostname", "setdomainname", "iopl", "ioperm", "modify_ldt", "personality", "setpriority",
                  "ioprio_set")
# What takes the number of a process or thread: only this one's own, or 0 where that means the caller.
_OWN_PROCESS = ("kill", "tgkill")
_CALLER = ("prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr", "migrate_pages",
           "move_pages")
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


def driver_filter(architecture: Architecture, *, process: int, starts_programs: bool) -> bytes:
    """The deny-list of a process that loads a driver: it keeps files, devices and threads, and reaches nobody else.

    It can signal, trace, read, limit and slow down no other process, connect to nothing, and use none of the parts of
    the kernel that no driver needs. A refused call answers with an error, as drivers try much and go on without.

    Args:
        process: its own id, the only one that it may send signals to.
        starts_programs: whether it may start other programs, which are under the same filter; without that it can make
            threads and no process.
    """
    number = architecture.numbers
    denied = _DRIVER_DENIED if starts_programs else (*_DRIVER_DENIED, "execve", "fork", "vfork")
    program = _prologue(architecture)
    for name in denied:
        if name in number:  # some exist on one machine only
            program += [(_EQUAL, 0, 1, number[name]), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # What a driver gets from a service that does not run, which it is prepared for.
    program += [(_EQUAL, 0, 1, number["connect"]), (_RETURN, 0, 0, _ERRNO | _ECONNREFUSED)]
    program += [(_EQUAL, 0, 1, number["clone3"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for name in _OWN_PROCESS:
        program += _only(number[name], 0, (process,))
    for name in _CALLER:
        program += _only(number[name], 0, (0, process))
    for name in ("socket", "socketpair"):
        program += _only_stream_sockets(number[name])
    program += _all_but(number["fcntl"], 1, (_F_SETOWN, _F_SETOWN_EX))
    program += _all_but(number["ioctl"], 1, (_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP))
    program += [
        (_EQUAL, 0, 4, number["clone"]),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES) if starts_programs else (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return _assemble(program)


def _only(number: int, argument: int, values: Sequence[int]) -> list[_Instruction]:
    """A call whose argument may have these values only; each is compared as 32 bits."""
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests]
    body += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]


def _all_but(number: int, argument: int, values: Sequence[int]) -> list[_Instruction]:
    """A call whose argument may have any but these values; each is compared as 32 bits."""
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests]
    body += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return [(_EQUAL, 0, len(body), number), *body]


def _only_stream_sockets(number: int) -> list[_Instruction]:
    """Unix sockets that reach nobody unless they are connected; datagrams could name whom they go to."""
    body = [
        (_LOAD, 0, 0, _ARGUMENTS),
        (_EQUAL, 0, 4, _AF_UNIX),
        (_LOAD, 0, 0, _ARGUMENTS + 8),
        (_AND, 0, 0, _SOCK_TYPES),
        (_EQUAL, 2, 0, _SOCK_STREAM),
        (_EQUAL, 1, 0, _SOCK_SEQPACKET),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return [(_EQUAL, 0, len(body), number), *body]
