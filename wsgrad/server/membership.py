"""What a machine remembers of a hub that it joins: its name there and the secret that brings it back; no connection.

A file of mode 0600 for each hub and wanted name. Two processes that want the same don't share it: the second is new.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import TYPE_CHECKING, Final

from wsgrad.server.nodes import clean_label, reduce_name
from wsgrad.server.tokens import write_private

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from wsgrad.transport.url import Endpoint

_MAX_NBYTES: Final = 1 << 12


class Membership:
    """For `with`: nobody else uses the file meanwhile.

    Attributes:
        path: the file; None while another process has it.
        secret: from an earlier joining, or None.
        label: what the machine is called there; empty for its name.
        paused: whether it takes no work.
    """

    def __init__(self, directory: Path, hub: Endpoint, wanted: str) -> None:
        known = hashlib.sha256(f"{hub.url} {wanted}".encode()).hexdigest()[:16]
        self.path: Path | None = directory / "joined" / f"{reduce_name(wanted)}-{known}.json"
        self.secret: str | None = None
        self.label = ""
        self.paused = False
        self._lock = -1

    def __enter__(self) -> Self:
        assert self.path is not None
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The lock is a file of its own: the other one is replaced whenever it is written.
        self._lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(self._lock):
            self.path = None
            return self
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(self.path.read_bytes()[:_MAX_NBYTES])
            if isinstance(values, dict):
                secret, label = values.get("secret"), values.get("label")
                self.secret = secret if isinstance(secret, str) and secret else None
                self.label = clean_label(label) if isinstance(label, str) else ""
                self.paused = values.get("paused") is True
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def keep(self) -> None:
        """Write the file.

        Raises:
            OSError: it can't be written.
        """
        if self.path is not None:
            values = {"secret": self.secret, "label": self.label, "paused": self.paused}
            write_private(self.path, json.dumps(values) + "\n")

    def forget(self) -> None:
        """The secret is no longer good."""
        self.secret = None
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _lock(descriptor: int) -> bool:
    """Lock a file; False where another process has done so. Ends with the descriptor."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
