"""The named errors of wsgrad and their codes on the wire; it raises none of them itself and knows nothing of messages.

Everything wsgrad raises on purpose is a `WsgradError`. Where Python's users already expect a built-in error for the
same trouble (`MemoryError`, `ConnectionError`, `TimeoutError`, `PermissionError`), the class is that one too. An
error's code on the wire is the name of its class, so it never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class WsgradError(Exception):
    """The root of everything wsgrad raises on purpose.

    Attributes:
        details: the values behind the message, by name; they travel over the wire with it.
    """

    def __init__(self, message: str = "", *, details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, object] = dict(details) if details else {}


class ProtocolError(WsgradError):
    """The peer sent something that the protocol does not allow.

    Attributes:
        close_code: the WebSocket close code (RFC 6455 section 7.4.1) that answers it.
    """

    def __init__(
        self, message: str = "", *, close_code: int = 1002, details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message, details=details)
        self.close_code = close_code


class ConnectionLost(WsgradError, ConnectionError):
    """The connection could not be made, or ended while something still waited for it."""


class DeviceError(WsgradError):
    """Something failed on a device; also stands for an error whose code this version does not know."""


class OutOfMemory(DeviceError, MemoryError):
    """A device, or the session's share of it, has no room for what was asked."""


class CompileError(DeviceError):
    """A program's source does not compile; the message holds the compiler's own words."""


class LaunchError(DeviceError):
    """A launch was refused or failed: wrong arguments, overlapping writes, a fault the device reported."""


class DeviceLost(DeviceError):
    """The process or machine behind a device ended; its buffers and graphs are gone, `device.reopen()` starts anew."""


class Timeout(DeviceError, TimeoutError):
    """A launch ran past its time limit (an expired `timeout=` of a waiting call raises the plain `TimeoutError`)."""


class LimitExceeded(WsgradError):
    """A limit of the server or of this client was reached; the message names it and the flag that raises it."""


class Unauthorized(WsgradError, PermissionError):
    """The peer refused who we are or where we come from: token, Origin, Host, fingerprint."""


class InvalidUrl(WsgradError, ValueError):
    """An address cannot be read; the message says which part of it, and what it should look like."""


_BY_CODE: dict[str, type[WsgradError]] = {
    kind.__name__: kind
    for kind in (
        WsgradError,
        ProtocolError,
        ConnectionLost,
        DeviceError,
        OutOfMemory,
        CompileError,
        LaunchError,
        DeviceLost,
        Timeout,
        LimitExceeded,
        Unauthorized,
    )
}


def error_code(exc: BaseException) -> str:
    """Returns an error's wire code: the name of its nearest class in this module, `DeviceError` for a foreign one."""
    for kind in type(exc).__mro__:
        if _BY_CODE.get(kind.__name__) is kind:
            return kind.__name__
    return DeviceError.__name__


def error_from_wire(code: str, message: str, details: Mapping[str, object]) -> WsgradError:
    """Builds the error a peer reported; a code this version does not know gives a `DeviceError` that names it.

    Its words may come from a stranger's node and end on a terminal, which they can't command: other characters than
    printable ones, tabs and ends of lines become spaces.
    """
    kind, code, message = _BY_CODE.get(code), _readable(code), _readable(message)
    if kind is None:
        return DeviceError(f"{code}: {message}", details=details)
    if issubclass(kind, ProtocolError):
        close_code = details.get("close_code")
        return kind(message, close_code=close_code if isinstance(close_code, int) else 1002, details=details)
    return kind(message, details=details)


def _readable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
