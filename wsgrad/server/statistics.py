"""What the server's heart counts since its start; shown by the status page, never reset."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Statistics:
    """Counters.

    Attributes:
        sessions: sessions opened.
        resumes: connections that went on with a session.
        node_resumes: connections over which a node came back.
        received: bytes of clients' messages.
        uploaded: bytes of chunks that clients sent.
        downloaded: bytes of chunks that went to clients.
        transferred: bytes of chunks that went from one device to another.
        relayed: bytes of chunks from other servers that came through clients.
        launches: launches that came packed.
        refused: commands that the session refused.
        errors: commands that failed on a device.
        cache_hits: uploads that the cache brought, whole.
        cache_misses: uploads that it was asked for and could not bring, or not to their end.
        cache_nbytes: bytes that the cache brought instead of clients.
        known_programs: programs whose source did not travel again.
        lost: devices that were lost in a session.
        protocol_errors: connections closed for what their peer sent.
    """

    sessions: int = 0
    connections: int = 0
    resumes: int = 0
    node_resumes: int = 0
    received: int = 0
    uploaded: int = 0
    downloaded: int = 0
    transferred: int = 0
    relayed: int = 0
    launches: int = 0
    refused: int = 0
    errors: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_nbytes: int = 0
    known_programs: int = 0
    lost: int = 0
    protocol_errors: int = 0

    def describe(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)
