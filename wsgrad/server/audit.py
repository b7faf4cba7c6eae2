"""Who came in, as what, until when, and who was refused: one JSON object a line on the logger `wsgrad.audit`.

Nothing here is a secret: no token, no ticket, no key of a session. What happens inside of a session is not told.
"""

from __future__ import annotations

import json
import logging
import os
import time
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING, Final

from wsgrad.server.logs import Hidden

if TYPE_CHECKING:
    from io import TextIOWrapper

_REFUSALS_PER_SECOND: Final = 50
"""Strangers could fill the disk with what they are refused; what is left out is counted in the next such line."""
_LEVEL: Final = logging.INFO
_audit = logging.getLogger("wsgrad.audit")
_log = logging.getLogger("wsgrad.server.audit")


def note(event: str, **fields: object) -> None:
    """Write down that something happened; `fields` say to whom and why."""
    _audit.log(_LEVEL, event, extra={"audit": fields})


class AuditFormatter(Hidden):
    """`{"time": "2026-01-31T12:00:00.123Z", "event": "connected", "peer": "10.0.0.5:50000", …}`."""

    def line(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{stamp}.{int(record.msecs):03d}Z", "event": record.getMessage()}
        return json.dumps(head | vars(record).get("audit", {}), default=str)


class AuditFile(WatchedFileHandler):
    """Appends to a file of mode 0600, and to a new one as soon as somebody has moved the old one away."""

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(AuditFormatter())
        self.addFilter(_Flood())
        self._failed = False

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        return open(fd, "a", encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. Where that fails the server goes on, and says so once in its own log."""
        try:
            super().emit(record)
        except OSError as exc:  # of opening anew; what fails in writing comes to handleError
            self._lost(exc)

    def handleError(self, record: logging.LogRecord) -> None:
        self._lost(None)

    def _lost(self, exc: OSError | None) -> None:
        if not self._failed:
            self._failed = True
            why = "" if exc is None else f": {exc.strerror or exc}"
            _log.error("--audit-log: %s can't be written%s; what happens now is missing there", self.baseFilename, why)


class _Flood(logging.Filter):
    """Lets so many refusals through in a second."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._count = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage() != "refused":
            return True
        if (second := int(record.created)) != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count > _REFUSALS_PER_SECOND:
            self._left_out += 1
            return False
        if self._left_out:
            record.audit = vars(record)["audit"] | {"left_out_before": self._left_out}
            self._left_out = 0
        return True


def set_up(path: str) -> None:
    """Write what happens to this file, or, where the path is empty, only to handlers that somebody else has added.

    Raises:
        OSError: it can't be opened.
    """
    _audit.propagate = False  # the server's own log tells of the same in its own words
    _audit.setLevel(_LEVEL)
    if path:
        _audit.addHandler(AuditFile(path))
