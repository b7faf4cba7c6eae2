"""The page's URL as a person opens it on another device, and its QR code; prints nothing."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from wsgrad.server.addresses import is_loopback, reachable_address
from wsgrad.server.options import split_host

if TYPE_CHECKING:
    from wsgrad.server.config import Config

_BORDER: Final = 2
_COLOURS: Final = "\x1b[97;40m"
_PLAIN: Final = "\x1b[0m"


def page_address(config: Config, port: int, *, scheme: str | None = None, asked: str | None = None) -> str:
    """The page's URL without a token.

    Args:
        config: the server's.
        port: where it listens.
        scheme: the one it was asked with, where that is known; a proxy may add TLS.
        asked: the `Host` it was asked with, which whoever asks can reach.
    """
    scheme = scheme or ("https" if config.tls else "http")
    split = split_host(asked) if asked else None
    # Whoever sits at the machine itself wants the address for others.
    if split is not None and (is_loopback(config.host) or not is_loopback(split[0])):
        host, shown = split[0], split[1]
        return f"{scheme}://{_bracketed(host)}{'' if shown is None else f':{shown}'}/"
    return f"{scheme}://{_bracketed(reachable_address(config.host))}:{port}/"


def join_url(page: str, node_token: str) -> str:
    """The page's URL with which it joins by itself."""
    return f"{page}#token={node_token}"


def terminal_code(url: str, columns: int) -> str | None:
    """A QR code in half blocks, white on black; None where the package is missing or the terminal too narrow."""
    code = _code(url)
    if code is None or code.symbol_size(border=_BORDER)[0] > columns:
        return None
    out = io.StringIO()
    code.terminal(out, compact=True, border=_BORDER)
    return "".join(f"{_COLOURS}{line}{_PLAIN}\n" for line in out.getvalue().splitlines() if line)


def svg_code(url: str) -> str | None:
    """A QR code as the data URI of an SVG image, dark on white; None where the package is missing."""
    code = _code(url)
    if code is None:
        return None
    image: str = code.svg_data_uri(scale=4, light="#fff")
    return image


def _code(url: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    try:
        import segno
    except ImportError:
        return None
    return segno.make(url, error="l", micro=False)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
