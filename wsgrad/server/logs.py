"""The server's logs on standard error, as text for people or JSON for programs; what is logged is each module's affair.

A line never holds a token: modules don't log them, and what is registered with `hide` is blotted out all the same.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Hidden(logging.Formatter):
    """Blots out what `hide` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: list[str] = []

    def format(self, record: logging.LogRecord) -> str:
        line = self.line(record)
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line

    def line(self, record: logging.LogRecord) -> str:
        raise NotImplementedError

    @staticmethod
    def fields(record: logging.LogRecord) -> dict[str, object]:
        """What the call gave as `extra`."""
        return {key: value for key, value in vars(record).items() if key not in _STANDARD}

    @staticmethod
    def trace(record: logging.LogRecord) -> str:
        return "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""


class TextFormatter(Hidden):
    """`2026-01-31 12:00:00.123 INFO  session: opened peer=127.0.0.1:50000`."""

    def line(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={value}" for key, value in self.fields(record).items())
        name = record.name.removeprefix("wsgrad.").removeprefix("server.")
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {name}: {record.getMessage()}{fields}"
        # A peer's words are in some messages: they must not forge lines or drive a terminal.
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        return line + "".join(f"\n    {part}" for part in self.trace(record).splitlines())


class JsonFormatter(Hidden):
    """One JSON object a line: time (seconds since 1970), level, logger, message, the call's `extra`, error."""

    def line(self, record: logging.LogRecord) -> str:
        value: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if record.exc_info:
            value["error"] = self.trace(record)
        return json.dumps(value, default=str)


def set_up(level: str, form: str) -> None:
    """Log what wsgrad says from this level up, and warnings of everybody else, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("wsgrad").setLevel(level.upper())
    logging.raiseExceptions = False  # a closed standard error must not end the server


def hide(*secrets: str) -> None:
    """Blot these texts out of every line from now on."""
    for handler in (*logging.getLogger().handlers, *logging.getLogger("wsgrad.audit").handlers):
        if isinstance(handler.formatter, Hidden):
            handler.formatter.secrets.extend(secrets)
