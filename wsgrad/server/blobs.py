"""Keeps what clients have uploaded, on disk, by its BLAKE3; knows no session, queue or message, and trusts no file.

One file a blob, named by the whole hash, which appears by rename and is checked in full whenever it is used. The
directory is its user's alone, since whoever knows a hash may ask for its blob. The least recently used leave first.
Failing to keep or to find one is never an error: then the bytes come from the client. Files are read and written in
threads; `blake3` is imported when the first blob is looked for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import stat
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import trio

from wsgrad.devices.directories import user_directory
from wsgrad.transport.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from blake3 import blake3

_log = logging.getLogger(__name__)
DIGEST_BYTES: Final = 32
_STEP_BYTES: Final = 8 << 20
"""Bytes that are checked before others, or a cancellation, get a turn."""
_AHEAD: Final = 4
"""Pieces of a blob that are read before somebody takes them."""
_MAX_BACKLOG: Final = 64 << 20
"""Bytes of all uploads together that wait to be written. A disk that is so far behind the network isn't waited for."""
_STALE_SECONDS: Final = 3600.0
_TEMPORARY: Final = ".new-"


def default_directory() -> Path:
    """`$XDG_CACHE_HOME/wsgrad/blobs`, by default under `~/.cache`.

    Raises:
        NoHome: the user has neither.
    """
    return user_directory("XDG_CACHE_HOME", ".cache", os.environ) / "blobs"


class Reading:
    """A blob that is looked for, checked, and then read piece by piece once somebody starts it.

    Attributes:
        found: whether it is there and whole; None while it is looked for.
        missing: the offset from which on the bytes can't be had here, or None.
        pieces: of `CHUNK_BYTES`, the last may be shorter, in order.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        """Make one; `tell` is called whenever an attribute has changed, but not once it was stopped."""
        self.found: bool | None = None
        self.missing: int | None = None
        self.pieces: deque[bytes] = deque()
        self._tell = tell
        self._scope = trio.CancelScope()
        self._started = trio.Event()
        self._taken = trio.Event()

    def start(self) -> None:
        """Begin to read."""
        self._started.set()

    def take(self) -> bytes:
        """The next piece."""
        piece = self.pieces.popleft()
        self._taken.set()
        return piece

    def stop(self) -> None:
        """Nobody wants it any more."""
        self._tell = lambda: None
        self._scope.cancel()

    async def _run(self, cache: BlobCache, digest: bytes, nbytes: int) -> None:
        with self._scope:
            try:
                fd = await cache._open(digest, nbytes)
            except Exception:
                # Such as a damaged installation of blake3: it must not end the server.
                _log.exception("looking for a cached upload failed")
                fd = -1
            try:
                self.found = fd >= 0
                if fd < 0:
                    self.missing = 0
                self._tell()
                if fd >= 0:
                    await self._started.wait()
                    await self._read(fd, nbytes)
            finally:
                if fd >= 0:
                    os.close(fd)

    async def _read(self, fd: int, nbytes: int) -> None:
        for offset in range(0, nbytes, CHUNK_BYTES):
            while len(self.pieces) >= _AHEAD:
                self._taken = trio.Event()
                await self._taken.wait()
            wanted = min(CHUNK_BYTES, nbytes - offset)
            try:
                piece = await trio.to_thread.run_sync(os.pread, fd, wanted, offset)
            except OSError as error:
                _log.warning("a cached upload can't be read: %s", error)
                piece = b""
            if len(piece) != wanted:
                self.missing = offset
                self._tell()
                return
            self.pieces.append(piece)
            self._tell()


class Keeping:
    """An upload that is written down while it comes. Whoever has it calls `add` in order, then nothing or `stop`."""

    def __init__(self, cache: BlobCache, digest: bytes, nbytes: int) -> None:
        self.digest = digest
        self.nbytes = nbytes
        self.stopped = False
        self._cache = cache
        self._came = 0
        self._waiting: deque[memoryview] = deque()
        self._news = trio.Event()

    def add(self, data: memoryview) -> None:
        """The next bytes; they are referred to, not copied, and may not change."""
        if self.stopped:
            return
        self._cache._backlog += len(data)
        self._came += len(data)
        self._waiting.append(data)
        if self._cache._backlog > _MAX_BACKLOG:
            _log.info("an upload of %d bytes is not cached: the disk is slower than the network", self.nbytes)
            self.stop()
        self._news.set()

    def stop(self) -> None:
        """The rest will not come."""
        self.stopped = True
        self._cache._backlog -= sum(map(len, self._waiting))
        self._waiting.clear()
        self._news.set()

    async def _run(self) -> None:
        cache = self._cache
        path = cache.directory / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            fd = await trio.to_thread.run_sync(cache._create, path)
            if fd < 0:
                return
            try:
                if await self._write(fd):
                    await trio.to_thread.run_sync(os.replace, path, cache.path(self.digest))
                    cache.kept += 1
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("an upload of %d bytes can't be cached in %s: %s", self.nbytes, cache.directory, error)
        except Exception:
            _log.exception("an upload of %d bytes can't be cached", self.nbytes)
        finally:
            self.stop()
            cache._keeping.pop(self.digest, None)

    async def _write(self, fd: int) -> bool:
        hasher = _hasher()

        def write(pieces: list[memoryview]) -> None:
            for piece in pieces:
                hasher.update(piece)
                rest = piece
                while rest:
                    rest = rest[os.write(fd, rest) :]

        written = 0
        while written < self.nbytes:
            while not self._waiting and not self.stopped:
                self._news = trio.Event()
                await self._news.wait()
            if self.stopped:
                return False
            pieces = list(self._waiting)
            self._waiting.clear()
            try:
                await trio.to_thread.run_sync(write, pieces)
            finally:
                nbytes = sum(map(len, pieces))
                self._cache._backlog -= nbytes
            written += nbytes
        if hasher.digest() != self.digest:
            _log.info("an upload of %d bytes is not cached: its hash is not the one it came with", self.nbytes)
            return False
        return True


class BlobCache:
    """The blobs of a server, in files that other servers of the same user may share. Tasks live in the given nursery.

    Attributes:
        directory: where they are.
        kept: uploads that were written down.
        damaged: files that were removed since they weren't what their name says.
    """

    def __init__(self, nursery: trio.Nursery, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.kept = 0
        self.damaged = 0
        self._nursery = nursery
        self._max_bytes = max_bytes
        self._at_once = trio.CapacityLimiter(2)
        self._usable: bool | None = None
        self._keeping: dict[bytes, Keeping] = {}
        self._backlog = 0

    @property
    def available(self) -> bool:
        """Whether it is switched on and what it needs is installed."""
        return self._max_bytes > 0 and importlib.util.find_spec("blake3") is not None

    def path(self, digest: bytes) -> Path:
        """The file of a blob, whether or not it is there."""
        return self.directory / digest.hex()

    def find(self, digest: bytes, nbytes: int, tell: Callable[[], None]) -> Reading:
        """Look for a blob.

        Args:
            digest: the whole BLAKE3 of it.
            nbytes: its size.
            tell: called, never from here, when more is known.
        """
        reading = Reading(tell)
        self._nursery.start_soon(reading._run, self, digest, nbytes)
        return reading

    def keep(self, digest: bytes, nbytes: int) -> Keeping | None:
        """Write an upload down while it comes; None where it would not fit, or somebody else's is being written."""
        if not self.available or digest in self._keeping or self._reserved + nbytes > self._max_bytes:
            return None
        keeping = self._keeping[digest] = Keeping(self, digest, nbytes)
        self._nursery.start_soon(keeping._run)
        return keeping

    @property
    def _reserved(self) -> int:
        return sum(keeping.nbytes for keeping in self._keeping.values())

    async def _open(self, digest: bytes, nbytes: int) -> int:
        """A descriptor of the blob, checked from its first to its last byte; -1 where there is none."""
        if not self.available:
            return -1
        async with self._at_once:
            fd, size = await trio.to_thread.run_sync(self._open_file, digest)
            if fd < 0:
                return -1
            try:
                whole = await self._check(fd, digest, size)
                if whole and size == nbytes:
                    with contextlib.suppress(OSError):
                        os.utime(fd)
                    checked, fd = fd, -1
                    return checked
            finally:
                if fd >= 0:
                    os.close(fd)
            if not whole:
                self.damaged += 1
                _log.warning("%s was damaged and is removed", self.path(digest))
                with contextlib.suppress(OSError):
                    await trio.to_thread.run_sync(os.unlink, self.path(digest))
        return -1

    def _open_file(self, digest: bytes) -> tuple[int, int]:
        """A descriptor, -1 where there is no such file, and the size; in a thread."""
        if not self._prepare():
            return -1, 0
        try:
            fd = os.open(self.path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return -1, 0
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            return fd, status.st_size
        os.close(fd)
        return -1, 0

    async def _check(self, fd: int, digest: bytes, nbytes: int) -> bool:
        hasher = _hasher()
        buffer = memoryview(bytearray(min(_STEP_BYTES, nbytes)))

        def step(offset: int) -> int:
            n = os.preadv(fd, [buffer[: nbytes - offset]], offset)
            hasher.update(buffer[:n])
            return n

        offset = 0
        while offset < nbytes:
            try:
                n = await trio.to_thread.run_sync(step, offset)
            except OSError as error:
                _log.warning("%s can't be read: %s", self.path(digest), error)
                return False
            if not n:
                return False
            offset += n
        return hasher.digest() == digest

    def _prepare(self) -> bool:
        """Whether the directory is there and its user's alone; in a thread."""
        if self._usable is None:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                status = os.lstat(self.directory)
                problem = "" if stat.S_ISDIR(status.st_mode) else "it is no directory"
                if status.st_uid != os.getuid() or status.st_mode & 0o077:
                    problem = "others may use it; make it yours alone (chmod 700)"
            except OSError as error:
                problem = error.strerror or str(error)
            if problem:
                _log.warning("nothing is cached in %s: %s", self.directory, problem)
            self._usable = not problem
        return self._usable

    def _create(self, path: Path) -> int:
        """A new file to write to, -1 where there can be none; in a thread."""
        if not self._prepare():
            return -1
        self._make_room()
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _make_room(self) -> None:
        """Let the least recently used go until everything that is being written fits."""
        now = time.time()
        entries = []
        with os.scandir(self.directory) as listing:
            for entry in listing:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not entry.name.startswith(_TEMPORARY):
                        entries.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif status.st_mtime < now - _STALE_SECONDS:
                        os.unlink(entry.path)  # of a server that was killed
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total + self._reserved <= self._max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def _hasher() -> blake3:
    # Imported here: a server nobody asks to cache anything never loads it.
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO)
