"""A directory for what one process writes, gone with it; whoever comes next clears up after one that crashed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

_PREFIX: Final = "wsgrad-driver-"
_LOCK: Final = "lock"
_NEW_SECONDS: Final = 60.0


class Scratch:
    """The directory; `close` removes it."""

    def __init__(self) -> None:
        _sweep()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        # Held as long as this process lives, however it ends.
        self._lock = os.open(os.path.join(self.path, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def descriptor(self) -> int:
        """What has to stay open."""
        return self._lock

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            if not (path / _LOCK).exists():
                # Just made, or left by a process that was ended while it cleared up.
                if time.time() - path.stat().st_mtime > _NEW_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: somebody uses it
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
