"""What an executor knows of the upload and the download that it is working on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Upload:
    """Bytes that come as chunks, in order."""

    number: int
    transfer: int
    target: tuple[int, int] | None
    """Where they go; None if they are thrown away behind an error."""
    nbytes: int
    received: int = 0


@dataclass(slots=True)
class Download:
    """Bytes that go as chunks, in order."""

    number: int
    transfer: int
    memory: int
    offset: int
    nbytes: int
    sent: int = 0
