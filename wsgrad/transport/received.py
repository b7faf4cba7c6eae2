"""One message as a connection hands it out; apart from the connection for processes that need no sockets or NumPy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Received:
    """One whole message.

    Attributes:
        head: the decoded array; its first element is the kind, an integer.
        bulk: the payload where the kind carries one: the destination's memory, or fresh memory of the receiver's own.
        nbytes: size of the whole message in bytes, without WebSocket framing.
        raw: the encoded head, for handing it on as it came.
        express: the same message in short, where the connection's `shortcut` has made it.
    """

    head: list[object]
    bulk: memoryview | None
    nbytes: int
    raw: bytes
    express: object = None
