"""Keeps compiled programs on disk by what they were made of; compiles nothing and trusts no file it can't check.

One file an entry: a digest of the rest, then the program. Files appear by rename, so a reader sees a whole one or none;
a damaged one counts as absent. The directory is the user's alone (0700): whoever may write it could run code anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from functools import cache
from typing import TYPE_CHECKING, Final

from wsgrad.devices.directories import user_directory

if TYPE_CHECKING:
    from pathlib import Path

_DIGEST_BYTES: Final = 32
_MAX_BYTES: Final = 256 << 20
_MAX_ENTRY_BYTES: Final = 64 << 20


def default_directory() -> Path:
    """`$XDG_CACHE_HOME/wsgrad/programs`, by default under `~/.cache`.

    Raises:
        NoHome: the user has neither.
    """
    return user_directory("XDG_CACHE_HOME", ".cache", os.environ) / "programs"


class ProgramCache:
    """A directory of programs, the least recently used leaving first. Failing to keep one is never an error."""

    def __init__(self, directory: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._usable = self._prepare()

    def _prepare(self) -> bool:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(self._directory)
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022

    def get(self, key: str) -> bytes | None:
        """The program kept under `key`, if it is there and whole."""
        if not self._usable:
            return None
        path = self._directory / key
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                content = file.read(_MAX_ENTRY_BYTES + 1)
        except OSError:
            return None
        program = content[_DIGEST_BYTES:]
        if len(content) > _MAX_ENTRY_BYTES or content[:_DIGEST_BYTES] != _digest(program):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return program

    def put(self, key: str, program: bytes) -> None:
        """Keep a program under `key`, a name of hexadecimal digits."""
        if not self._usable or len(program) + _DIGEST_BYTES > _MAX_ENTRY_BYTES:
            return
        temporary = self._directory / f".{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(fd, "wb") as file:
                    file.write(_digest(program) + program)
                os.replace(temporary, self._directory / key)
            except OSError:
                temporary.unlink(missing_ok=True)
            self._trim()

    def _trim(self) -> None:
        entries = []
        with os.scandir(self._directory) as listing:
            for entry in listing:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    entries.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


@cache
def processor() -> str:
    """What `-march=native` depends on: this processor's model and features."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file.read().partition("\n\n")[0].splitlines() if line.startswith(wanted)]
    except OSError:
        lines = []
    return "\n".join(lines) or repr(os.uname())


def _digest(program: bytes) -> bytes:
    return hashlib.blake2b(program, digest_size=_DIGEST_BYTES).digest()
