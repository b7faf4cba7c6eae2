"""Runs a compiler over a stranger's source in a root of its own and hands back bytes; knows nothing about compilers.

The caller forks a *warden*, which enters new namespaces and forks the compiler as their first process. The compiler
sees a tmpfs with its own files bound in read-only, no /proc, no network and no other process; Landlock, limits and a
system call filter stand behind that. The warden reads the result out of the tmpfs and sends it through a pipe, so
nothing is ever written to a disk. Without namespaces the same runs in an ordinary directory under Landlock: files then
still can't be read, but the compiler can find out whether one exists.
"""

from __future__ import annotations

import contextlib
import enum
import os
import resource
import select
import shutil
import signal
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from wsgrad.devices import linux, seccomp
from wsgrad.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MESSAGE_LIMIT: Final = 256 << 10
_WORK: Final = "/tmp"
_REPORT: Final = struct.Struct("<iBIq")
_EXIT_NO_SANDBOX: Final = 125
_MOUNT_POINTS: Final = ("/dev/shm", "/sys", "/mnt", "/srv", "/tmp")
_NAMESPACES: Final = (
    linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
)


class Profile(enum.Enum):
    """How strictly a compiler is confined."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a compiler: what to start, what it may see, what it should leave behind.

    Attributes:
        command: the program and its arguments; paths as seen inside the root.
        files: names and contents laid into its working directory.
        output: the name of the file it should write there.
        mounts: pairs of a path of this system and the path inside the root where it appears read-only.
        environment: its whole environment; the working directory is `{work}` in the values.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    output: str
    mounts: tuple[tuple[str, str], ...]
    environment: Mapping[str, str]
    memory_bytes: int = 1 << 30
    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    output_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a compiler did: exit status (negative: the signal that ended it), messages, and its output if any."""

    status: int
    timed_out: bool
    messages: bytes
    output: bytes | None


class SandboxError(DeviceError):
    """The confinement itself could not be set up; the compiler was not started."""


def detect_profile() -> Profile:
    """The strictest profile that works here, judged by trying."""
    if not probe_compiler_confinement():
        return Profile.NAMESPACES
    return Profile.LANDLOCK if linux.landlock_version() > 0 else Profile.NONE


def probe_compiler_confinement() -> list[str]:
    """What this system lacks to confine a compiler fully, in words for people; an empty list means nothing."""
    if linux.MACHINE not in seccomp.ARCHITECTURES or not hasattr(os, "memfd_create"):
        return [f"Linux on x86-64 or aarch64 (this is {os.uname().sysname} on {linux.MACHINE})"]
    missing = []
    if linux.landlock_version() == 0:
        missing.append("Landlock (Linux 5.13 or newer, with `landlock` in the kernel's `lsm=` list)")
    job = Job(command=(), files={}, output="none", mounts=(), environment={})
    try:
        run(job, Profile.NAMESPACES)
    except SandboxError as error:
        missing.append(f"unprivileged user, mount, process and network namespaces ({error})")
    return missing


def run(job: Job, profile: Profile) -> Outcome:
    """Run one job to its end; blocks, forks, and leaves no process or file behind.

    Raises:
        SandboxError: the confinement could not be set up.
    """
    reader, writer = os.pipe()
    parent = os.getpid()
    warden = os.fork()
    if warden == 0:
        os.close(reader)
        _be_warden(job, profile, writer, parent)
    os.close(writer)
    finished = False
    try:
        with open(reader, "rb") as pipe:
            data = pipe.read()
        finished = True
    finally:
        if not finished:
            # An interrupted wait must not leave the warden behind; its compiler dies with it.
            os.kill(warden, signal.SIGKILL)
        os.waitpid(warden, 0)
    if len(data) < _REPORT.size:
        raise SandboxError("the process that guards the compiler ended early")
    status, timed_out, message_bytes, output_bytes = _REPORT.unpack_from(data)
    messages = data[_REPORT.size : _REPORT.size + message_bytes]
    if status == _EXIT_NO_SANDBOX:
        raise SandboxError(messages.decode(errors="replace"))
    output = data[_REPORT.size + message_bytes :] if output_bytes >= 0 else None
    return Outcome(status=status, timed_out=bool(timed_out), messages=messages, output=output)


def _be_warden(job: Job, profile: Profile, report: int, parent: int) -> NoReturn:
    """The forked warden: never returns into the caller's code."""
    try:
        linux.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        data = _guard(job, profile)
    except BaseException as error:
        data = _pack(_EXIT_NO_SANDBOX, False, str(error).encode(), None)
    try:
        with open(report, "wb") as pipe:
            pipe.write(data)
    finally:
        os._exit(0)


def _pack(status: int, timed_out: bool, messages: bytes, output: bytes | None) -> bytes:
    size = -1 if output is None else len(output)
    return _REPORT.pack(status, timed_out, len(messages), size) + messages + (output or b"")


def _guard(job: Job, profile: Profile) -> bytes:
    if profile is Profile.NAMESPACES:
        root = _private_root(job.mounts)
        return _run_in(job, profile, root, root + _WORK)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    work = tempfile.mkdtemp(prefix="wsgrad-compile-", dir=base)
    try:
        return _run_in(job, profile, "/", work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _private_root(mounts: Sequence[tuple[str, str]]) -> str:
    """Enter new namespaces and build the compiler's root there; the path at which the warden sees it."""
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(_NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    taken = [os.path.realpath(host) + "/" for host, _ in mounts]
    point = next(p for p in _MOUNT_POINTS if os.path.isdir(p) and not any(t.startswith(p + "/") for t in taken))
    linux.mount("none", point, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=128m,nr_inodes=16384,mode=755")
    for host, inside in mounts:
        _bind(host, point + inside)
    os.makedirs(point + _WORK)
    os.makedirs(point + "/dev", exist_ok=True)
    # A device node can't be made in a user namespace: the host's is bound in.
    _bind("/dev/null", point + "/dev/null", writable=True)
    # Some compilers (zig) find their own files through this link; a real /proc would show more than that.
    if mounts:
        os.makedirs(point + "/proc/self")
        os.symlink(mounts[0][1], point + "/proc/self/exe")
    return point


def _bind(host: str, target: str, *, writable: bool = False) -> None:
    if os.path.isdir(host):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "ab"):
            pass
    linux.mount(os.path.realpath(host), target, None, linux.MS_BIND)
    if not writable:
        # Flags that the mount had outside are locked: a change that drops one is refused.
        flags = os.statvfs(target).f_flag
        kept = flags & (linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC | 1024 | 2048)
        if flags & 4096:
            kept |= 1 << 21
        linux.mount(None, target, None, linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | kept)


def _run_in(job: Job, profile: Profile, root: str, work: str) -> bytes:
    for name, content in job.files.items():
        path = f"{work}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)
    directory = os.open(work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    reader, writer = os.pipe()
    compiler = os.fork()
    if compiler == 0:
        _be_compiler(job, profile, root, work, writer)
    os.close(writer)
    messages, timed_out = _collect(compiler, reader, job.wall_seconds)
    _, status = os.waitpid(compiler, 0)
    code = os.waitstatus_to_exitcode(status)
    output = _take(directory, job.output, job.output_bytes) if code == 0 else None
    return _pack(code, timed_out, messages, output)


def _collect(compiler: int, pipe: int, wall_seconds: float) -> tuple[bytes, bool]:
    """Read the compiler's messages until it has ended, then end whatever it started."""
    deadline = time.monotonic() + wall_seconds
    messages = bytearray()
    timed_out = False
    with open(os.pidfd_open(compiler), "rb", buffering=0) as ended:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(pipe, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1000)) if left > 0 else {}
            if not ready:
                timed_out = True
                break
            if pipe in ready:
                data = os.read(pipe, 65536)
                messages += data[: _MESSAGE_LIMIT - len(messages)]
                if not data:
                    poll.unregister(pipe)
            elif ended.fileno() in ready:
                break
    # In a process namespace this ends everything; without one, at least everything that stayed in its group.
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(compiler, signal.SIGKILL)
    os.close(pipe)
    return bytes(messages), timed_out


def _take(directory: int, name: str, limit: int) -> bytes | None:
    """The compiler's output, which may be anything a hostile source made of it: only a plain, small file counts."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except OSError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        data = file.read(limit + 1)
    return data if len(data) <= limit else None


def _be_compiler(job: Job, profile: Profile, root: str, work: str, messages: int) -> NoReturn:
    """The forked compiler: confines itself, then becomes the program."""
    try:
        linux.die_with_parent()
        os.setsid()
        _confine(job, profile, root, work)
        os.dup2(messages, 1)
        messages = os.dup2(messages, 2)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if not job.command:
            os._exit(0)
        inside = _WORK if profile is Profile.NAMESPACES else work
        environment = {name: value.replace("{work}", inside) for name, value in job.environment.items()}
        os.execve(job.command[0], job.command, environment)
    except BaseException as error:
        os.write(messages, f"{error}".encode())
    finally:
        os._exit(_EXIT_NO_SANDBOX)


def _confine(job: Job, profile: Profile, root: str, work: str) -> None:
    # A pool of one thread for each of many processors would eat the address space: show it two.
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors[os.getpid() % len(processors) :][:2] or processors[:2])
    if profile is Profile.NAMESPACES:
        os.chroot(root)
        os.chdir(_WORK)
    else:
        os.chdir(work)
    for limit, value in (
        (resource.RLIMIT_CPU, job.cpu_seconds),
        (resource.RLIMIT_FSIZE, job.output_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_AS, job.memory_bytes),
    ):
        resource.setrlimit(limit, (value, value))
    if profile is Profile.NAMESPACES:
        # Counted inside the user namespace only; elsewhere it would count all of the user's processes.
        resource.setrlimit(resource.RLIMIT_NPROC, (256, 256))
    if profile is Profile.NONE:
        return
    linux.no_new_privileges()
    if linux.landlock_version() > 0:
        confined = profile is Profile.NAMESPACES
        tools = [inside if confined else host for host, inside in job.mounts]
        linux.landlock(readable=["/dev/null"], executable=tools, writable=["." if confined else work, "/dev/null"])
    linux.load_filter(seccomp.compiler_filter(seccomp.ARCHITECTURES[linux.MACHINE]))
