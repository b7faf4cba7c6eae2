"""What the server's heart counts since its start; shown by the status page, never reset."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Statistics:
    """Counters.

    Attributes:
        sessions: sessions opened.
        resumes: connections that went on with a session.
        received: bytes of clients' messages.
        uploaded: bytes of chunks that clients sent.
        downloaded: bytes of chunks that went to clients.
        transferred: bytes of chunks that went from one device to another.
        launches: launches that came packed.
        refused: commands that the session refused.
        errors: commands that failed on a device.
        lost: devices that were lost in a session.
        protocol_errors: connections closed for what their peer sent.
    """

    sessions: int = 0
    connections: int = 0
    resumes: int = 0
    received: int = 0
    uploaded: int = 0
    downloaded: int = 0
    transferred: int = 0
    launches: int = 0
    refused: int = 0
    errors: int = 0
    lost: int = 0
    protocol_errors: int = 0

    def describe(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)
