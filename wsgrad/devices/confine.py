"""Confines a node process before it runs a user's machine code, and tells by trying what this system lacks for that.

Two steps, because worker threads have to exist before the filter forbids making them: `prepare_node`, then
`seal_node`. After both, the process holds its control socket, its memory and nothing else: it can open no file, make
no process and no socket, and any other call ends it with SIGSYS. The compiler's confinement is `sandbox.py`'s.
"""

from __future__ import annotations

import glob
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Final

from wsgrad.devices import linux, seccomp

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_OPEN_FILES: Final = 64
_EXIT_FAILED: Final = 3
_DRIVER_FILES: Final = ("/usr", "/lib", "/lib32", "/lib64", "/opt", "/sys", "/proc", "/run/opengl-driver")
# Of the system's settings and devices only what drivers and loaders ask for: a server that runs as root could read all.
_DRIVER_SETTINGS: Final = (
    "/etc/ld.so.*",
    "/etc/alternatives",
    "/etc/vulkan",
    "/etc/glvnd",
    "/etc/egl",
    "/etc/OpenCL",
    "/etc/drirc",
    "/etc/nvidia",
    "/etc/amd",
    "/etc/pocl",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/etc/localtime",
    "/etc/machine-id",
    "/etc/os-release",
    "/etc/debian_version",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
_DRIVER_DIRECTORIES: Final = ("/dev", "/etc")
_DRIVER_FILE_BYTES: Final = 64 << 20
_DRIVER_DEVICES: Final = (
    "/dev/dri",
    "/dev/nvidia*",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/mali*",
    "/dev/kgsl-3d0",
    "/dev/null",
)


def prepare_node(*, keep: Collection[int], memory_bytes: int | None, required: bool = True) -> None:
    """Close descriptors, set limits, give up new privileges and all files; threads may still be started afterwards.

    Args:
        keep: descriptors that stay open; 0, 1 and 2 become /dev/null unless kept.
        memory_bytes: the address space this process may use from here on, on top of what it maps already.
        required: whether a step that this system can't do raises `OSError`; otherwise it is left out.
    """
    _close_all_but(keep)
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_MEMLOCK, 0)]
    limits.append((resource.RLIMIT_NOFILE, max(_OPEN_FILES, *(fd + 1 for fd in keep), 0)))
    if memory_bytes is not None:
        limits.append((resource.RLIMIT_AS, _mapped_bytes() + memory_bytes))
    for limit, value in limits:
        _, hard = resource.getrlimit(limit)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (least, least))
    _step(linux.no_new_privileges, required=required)
    # Landlock is the second wall behind a filter that knows no open: a kernel without it is reported, not refused.
    if linux.landlock_version() > 0:
        _step(linux.landlock, required=required)


def confine_driver(*, keep: Collection[int], scratch: str | None = None) -> None:
    """Confine a process that will load a graphics driver, as far as those bear it and this system can.

    It can start no program, connect to nothing, signal, trace or slow down no other process, write to no file but the
    devices of graphics cards, and read only what the system's drivers, this Python and this package consist of.
    Threads that are started later are under the same rules. What it keeps: its memory, which may be made executable,
    its descriptors, and the devices of graphics cards with all that their drivers in the kernel offer.

    Args:
        keep: descriptors that stay open.
        scratch: a directory to write to, for drivers that compile with programs: they may start the system's.

    Raises:
        OSError: a step that this system knows failed, or there are threads already, which Landlock does not reach.
    """
    if sys.platform != "linux":
        return  # `probe_driver_confinement` tells
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError(0, "threads were started before the process was confined")
    _close_all_but(keep)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_DRIVER_FILE_BYTES, _DRIVER_FILE_BYTES))  # of memfds, as it has no other
    linux.no_new_privileges()
    linux.drop_capabilities()
    if linux.landlock_version() > 0:
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        own = {*sys.path, sys.prefix, sys.base_prefix, package}
        readable = [path for path in (*_DRIVER_FILES, *sorted(own)) if path and os.path.exists(path)]
        settings = [path for pattern in _DRIVER_SETTINGS for path in glob.glob(pattern)]
        listed = [path for path in _DRIVER_DIRECTORIES if os.path.isdir(path)]
        devices = [path for pattern in _DRIVER_DEVICES for path in glob.glob(pattern)]
        if scratch is None:
            linux.landlock(readable=[*readable, *settings], listed=listed, writable=devices)
        else:
            linux.landlock(executable=readable, readable=settings, listed=listed, writable=[*devices, scratch])
    architecture = seccomp.ARCHITECTURES.get(linux.MACHINE)
    if architecture is not None:
        filter_ = seccomp.driver_filter(architecture, process=os.getpid(), starts_programs=scratch is not None)
        linux.load_filter(filter_, all_threads=True)


def seal_node(*, required: bool = True) -> None:
    """Load the system call filter into every thread of this process."""
    architecture = seccomp.ARCHITECTURES.get(linux.MACHINE)
    if architecture is None:
        if required:
            raise OSError(0, f"no system call filter for the machine {linux.MACHINE!r}")
        return
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    _step(lambda: linux.load_filter(seccomp.node_filter(architecture), all_threads=True), required=required)


def probe_node_confinement() -> list[str]:
    """What this system lacks to confine a node process, in words for people; an empty list means nothing."""
    if linux.MACHINE not in seccomp.ARCHITECTURES or not hasattr(os, "memfd_create"):
        return [f"Linux on x86-64 or aarch64 (this is {os.uname().sysname} on {linux.MACHINE})"]
    missing = []
    if linux.landlock_version() == 0:
        missing.append("Landlock (Linux 5.13 or newer, with `landlock` in the kernel's `lsm=` list)")
    status, words = _in_child(_confine_and_leave)
    if status != 0:
        missing.append(f"seccomp filters ({words or f'the confined process ended with status {status}'})")
        return missing
    status, _ = _in_child(_confine_and_open)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS):
        missing.append(f"seccomp filters that are enforced (a forbidden call ended with status {status})")
    return missing


def probe_driver_confinement() -> list[str]:
    """What this system lacks to confine a process that loads a driver, in words; an empty list means nothing."""
    if sys.platform != "linux":
        return [f"Linux (this is {os.uname().sysname if hasattr(os, 'uname') else sys.platform})"]
    missing = []
    if linux.landlock_version() == 0:
        missing.append("Landlock, without which it can read this user's files (Linux 5.13 or newer)")
    if linux.MACHINE not in seccomp.ARCHITECTURES:
        missing.append(f"a filter of system calls for the machine {linux.MACHINE}")
        return missing
    status, words = _in_child(lambda report: confine_driver(keep=(report,)))
    if status != 0:
        missing.append(f"seccomp filters ({words or f'the confined process ended with status {status}'})")
    return missing


def _confine_and_leave(report: int) -> None:
    prepare_node(keep=(report,), memory_bytes=None)
    seal_node()


def _confine_and_open(report: int) -> None:
    _confine_and_leave(report)
    os.open("/dev/null", os.O_RDONLY)


def _in_child(action: Callable[[int], None]) -> tuple[int, str]:
    """Run `action` in a forked child; its wait status, and the words of the error that stopped it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action(writer)
            os._exit(0)
        except BaseException as error:
            # A filter that is already loaded kills this write, which the status then tells.
            os.write(writer, str(error).encode())
            os._exit(_EXIT_FAILED)
    os.close(writer)
    with open(reader, "rb") as pipe:
        words = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return status, words


def _step(action: Callable[[], None], *, required: bool) -> None:
    try:
        action()
    except OSError:
        if required:
            raise


def _close_all_but(keep: Collection[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        if fd not in keep:
            os.dup2(null, fd)
    low = 3
    for fd in sorted(fd for fd in keep if fd >= low):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
