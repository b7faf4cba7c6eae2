"""Turns the text of one flag or variable into a checked value; knows no flag by name and reads no environment."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from wsgrad.transport.url import InvalidUrl, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_NUMBER = re.compile(r"\s*\d+\s*", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?", re.ASCII)
_ADAPTER = re.compile(r"webgpu(:(0|[1-9]\d?))?|tinygrad:[A-Z]{1,16}(:(0|[1-9]\d?))?", re.ASCII)
_MAX = 1 << 53
MAX_DEVICES = 64
"""The most devices of one node, and so of this server's own."""
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


class BadValue(ValueError):
    """The text is no value of its option; the message says what is expected and begins with the text."""


def integer(low: int, high: int = _MAX) -> Callable[[str], int]:
    """A whole number from `low` to `high`."""

    def convert(text: str) -> int:
        if not _NUMBER.fullmatch(text) or not low <= int(text) <= high:
            upto = f"from {low} to {high}" if high != _MAX else f"of at least {low}"
            raise BadValue(f"{text!r} is not a whole number {upto}")
        return int(text)

    return convert


def seconds(low: float) -> Callable[[str], float]:
    """A finite number of seconds, at least `low`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not low <= value < float(_MAX):
            raise BadValue(f"{text!r} is not a number of seconds of at least {low:g}")
        return value

    return convert


def size(low: int) -> Callable[[str], int]:
    """A number of bytes, at least `low`: `65536`, `64KiB`, `1.5GiB`, `2GB`."""

    def convert(text: str) -> int:
        match = _SIZE.fullmatch(text)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or float(match[1]) * unit >= _MAX:
            raise BadValue(f"{text!r} is not a size such as 65536, 64MiB or 2GiB")
        value = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
        if value < low:
            raise BadValue(f"{text!r} is less than {low} bytes")
        return value

    return convert


def choice(*names: str) -> Callable[[str], str]:
    """One of the names, in any case."""

    def convert(text: str) -> str:
        if text.lower() not in names:
            raise BadValue(f"{text!r} is not one of {', '.join(names)}")
        return text.lower()

    return convert


def boolean(text: str) -> bool:
    """On or off, as variables say it."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise BadValue(f"{text!r} is neither 1 nor 0")


def word(text: str) -> str:
    """Any text but an empty one."""
    if not text.strip() or "\0" in text:
        raise BadValue(f"{text!r} is empty or holds a NUL")
    return text


def hub(text: str) -> str:
    """The address of a server to join, as `wsgrad.transport.url` reads it."""
    try:
        endpoint = parse_endpoint(text)
    except InvalidUrl as exc:
        raise BadValue(str(exc)) from exc
    if endpoint.count is not None:
        raise BadValue(f"{endpoint.url}: a number of devices behind '*' means nothing here")
    return text


def listen_host(text: str) -> str:
    """An address or a host name to listen on; IPv6 with or without brackets."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if address_of(host.partition("%")[0]) is None and not _HOST_NAME.fullmatch(host):
        raise BadValue(f"{text!r} is neither an address nor a host name (the port is an option of its own)")
    return host


def device(text: str) -> tuple[str, int]:
    """A kind of device and how many: `cpu`, `cpu*4`; `webgpu`, `tinygrad:CL`, both with `:N`; `none` for none."""
    if match := _ADAPTER.fullmatch(text.strip()):
        return match[0], 1
    kind, star, count = text.strip().partition("*")
    number = int(count) if _NUMBER.fullmatch(count) else 0 if star else 1
    if kind.strip() == "none" and not star:
        return "none", 0
    if kind.strip() != "cpu":
        raise BadValue(
            f"{text!r} names no device: cpu, cpu*4, webgpu for every adapter, webgpu:0, tinygrad:CL, or none"
        )
    if not 1 <= number <= MAX_DEVICES:
        raise BadValue(f"{text!r} does not say how many from 1 to {MAX_DEVICES}, as cpu*4 does")
    return "cpu", number


def allowed_host(text: str) -> str:
    """A Host header's value to accept: `name` with any port, or `name:port`; in lower case, IPv6 in brackets."""
    split = split_host(text)
    if split is None:
        raise BadValue(f"{text!r} is not a host name or address, with or without a port")
    host, port = split
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


def allowed_origin(text: str) -> str:
    """An Origin header's value to accept: `https://name` or with a port; in lower case, without the default port."""
    origin = normal_origin(text)
    if origin is None:
        raise BadValue(f"{text!r} is not an origin such as https://example.org or http://localhost:8000")
    return origin


def network(text: str) -> str:
    """An address or a network: `10.0.0.5`, `10.0.0.0/8`, `::1`."""
    try:
        return str(ipaddress.ip_network(text.strip(), strict=False))
    except ValueError as exc:
        raise BadValue(f"{text!r} is not an address or network such as 10.0.0.5 or 10.0.0.0/8") from exc


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that the text is, or None."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def split_host(text: str) -> tuple[str, int | None] | None:
    """Host (lower case, no brackets, no final dot) and port of a `Host` header's value, or None where it is none."""
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        address = address_of(host)
        if not bracket or address is None or address.version != 6 or (rest and not rest.startswith(":")):
            return None
        port = rest[1:]
        if rest == ":":
            return None
    elif ":" in text:
        host, _, port = text.rpartition(":")
        if not port:
            return None
    if not text.startswith("[") and not _HOST_NAME.fullmatch(host):
        return None
    if not port:
        return host.lower().removesuffix("."), None
    if not port.isascii() or not port.isdigit() or len(port) > 5 or not 1 <= int(port) <= 65535:
        return None
    return host.lower().removesuffix("."), int(port)


def normal_origin(text: str) -> str | None:
    """An http or https origin in lower case and without its scheme's default port, or None where the text is none."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or parts.fragment:
        return None
    return own_origin(parts.scheme, parts.netloc)


def own_origin(scheme: str, host_header: str) -> str | None:
    """The origin of pages that a server behind this `Host` serves, without its scheme's default port."""
    split = split_host(host_header)
    if split is None:
        return None
    host, port = split
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}" if port in (None, 80 if scheme == "http" else 443) else f"{scheme}://{shown}:{port}"
