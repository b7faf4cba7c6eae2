"""What both opening handshakes share: where an HTTP head ends, and how a refusal becomes an error; it does no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from wsgrad.errors import ConnectionLost, LimitExceeded, ProtocolError, Unauthorized, WsgradError

MAX_HEAD_NBYTES = 16 * 1024
MAX_REFUSAL_NBYTES = 4096
"""So much of a refusal's body is read for its first line."""
HANDSHAKE_SECONDS = 10.0

_REFUSALS_OF_US = frozenset({401, 403, 407, 421})


class HeadBuffer:
    """Collects bytes until an HTTP head, with the empty line that ends it, is whole."""

    def __init__(self, *, limit: int = MAX_HEAD_NBYTES) -> None:
        self._data = bytearray()
        self._limit = limit

    def feed(self, data: bytes | bytearray) -> tuple[bytes, bytes] | None:
        """Takes more bytes.

        Returns:
            The head and what follows it, or None while the head is not whole.

        Raises:
            ConnectionLost: `data` is empty: the peer's bytes have ended.
            LimitExceeded: the head is over the limit.
        """
        if not data:
            raise ConnectionLost(f"the peer left after {len(self._data)} bytes of its HTTP head")
        start = max(0, len(self._data) - 3)
        self._data += data
        end = self._data.find(b"\r\n\r\n", start)
        if end < 0:
            if len(self._data) > self._limit:
                raise self._too_long()
            return None
        end += 4
        if end > self._limit:
            raise self._too_long()
        return bytes(self._data[:end]), bytes(self._data[end:])

    def _too_long(self) -> LimitExceeded:
        return LimitExceeded(f"an HTTP head is over the limit of {self._limit} bytes", details={"limit": self._limit})


@dataclass(frozen=True, slots=True)
class Answer:
    """The status of a server's answer to a handshake, and how many bytes of body it announces (None: until it ends)."""

    status: int
    reason: str
    content_length: int | None


def parse_answer(head: bytes) -> Answer:
    """Reads the status line and the length of a server's answer.

    Raises:
        ConnectionLost: it is not HTTP.
    """
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or len(words[1]) != 3:
        raise ConnectionLost(f"the server does not speak HTTP: it answered {_readable(lines[0])!r}")
    content_length = None
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        value = value.strip()
        if name.strip().lower() == b"content-length" and value.isdigit() and len(value) < 16:
            content_length = int(value)
    return Answer(int(words[1]), _readable(words[2]) if len(words) > 2 else "", content_length)


def missing_body(answer: Answer, body: bytes | bytearray) -> int:
    """Returns how many more bytes of a refusal's body are worth reading."""
    wanted = MAX_REFUSAL_NBYTES if answer.content_length is None else min(answer.content_length, MAX_REFUSAL_NBYTES)
    return max(0, wanted - len(body))


def refusal(answer: Answer, body: bytes | bytearray) -> WsgradError:
    """Returns the error for a server that answered a handshake with anything but 101."""
    lines = body.strip().splitlines()
    why = _readable(lines[0]) if lines else answer.reason
    details: dict[str, object] = {"status": answer.status}
    text = f"the server refused the connection with status {answer.status}: {why}".rstrip(": ")
    if answer.status in _REFUSALS_OF_US:
        return Unauthorized(text, details=details)
    return ConnectionLost(text, details=details)


def wrong_subprotocol(got: str | None) -> ProtocolError:
    """Returns the error for a server that upgraded, but to nothing we asked for."""
    return ProtocolError(f"the server speaks WebSocket, but not wsgrad's protocol: it chose {got!r}")


def bad_answer(why: object) -> ProtocolError:
    """Returns the error for an answer 101 that breaks the rules of the handshake."""
    return ProtocolError(f"the server's answer to the WebSocket handshake is invalid: {why}")


def _readable(line: bytes | bytearray) -> str:
    """A line of a stranger, safe to print in a terminal."""
    text = line[:300].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
