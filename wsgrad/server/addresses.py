"""The machine's own addresses, and the one by which others most likely reach it; it listens on none of them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING, Final, TypeAlias

from wsgrad.server.options import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# rtnetlink(7): a dump of all addresses, and what its messages and attributes look like.
_GET_ADDRESSES: Final = struct.pack("=IHHIIBxxxI", 24, 22, 0x301, 1, 0, socket.AF_UNSPEC, 0)
_MESSAGE: Final = struct.Struct("=IHHII")
_ADDRESS: Final = struct.Struct("=BBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")
_NEW_ADDRESS: Final = 20
_DONE: Final = 3
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_TEMPORARY: Final = 0x01

# RFC 5737 and RFC 3849 keep these for documentation: only the way to them is asked for, nothing is sent.
_ELSEWHERE: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def own_addresses() -> frozenset[Address]:
    """Every address of the machine, loopback included.

    Left out are link-local ones of IPv6, which mean nothing without an interface, and its temporary ones (RFC 8981),
    which change daily.
    """
    found = {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
    try:
        found.update(_interface_addresses())
    except (OSError, AttributeError):  # no netlink: not Linux, or forbidden
        with contextlib.suppress(OSError):
            found.update(
                ipaddress.ip_address(str(info[4][0]).partition("%")[0])
                for info in socket.getaddrinfo(socket.gethostname(), None)
            )
        if (outward := outward_address()) is not None:
            found.add(outward)
    return frozenset(
        address
        for address in found
        if not address.is_unspecified and not (address.version == 6 and address.is_link_local)
    )


def outward_address() -> Address | None:
    """The address with which this machine goes out to others, IPv4 if it has one; None where it goes nowhere."""
    for family, elsewhere in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((elsewhere, 9))
            address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
            if not address.is_loopback and not address.is_unspecified:
                return address
    return None


def reachable_address(host: str) -> str:
    """An address by which others reach a server that listens on the host, which may stand for all addresses.

    Where this machine reaches nobody it is one of loopback.
    """
    address = address_of(host)
    if address is None or not address.is_unspecified:
        return host
    outward = outward_address()
    if outward is None:
        addresses = sorted(own_addresses(), key=lambda own: (own.is_loopback, own.version, own.packed))
        outward = addresses[0]
    return str(outward)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; names other than localhost count as reachable."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def _interface_addresses() -> Iterator[Address]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(1.0)
        sock.send(_GET_ADDRESSES)
        while True:
            data = sock.recv(1 << 16)
            while len(data) >= _MESSAGE.size:
                length, kind, *_ = _MESSAGE.unpack_from(data)
                if kind == _DONE:
                    return
                if kind != _NEW_ADDRESS or length < _MESSAGE.size + _ADDRESS.size:
                    raise OSError(errno.EPROTO, "no list of addresses")
                if (address := _address(data[_MESSAGE.size : length])) is not None:
                    yield address
                data = data[(length + 3) & ~3 :]


def _address(body: bytes) -> Address | None:
    _, _, flags, *_ = _ADDRESS.unpack_from(body)
    if flags & _TEMPORARY and body[0] == socket.AF_INET6:
        return None
    attributes = {}
    rest = body[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[(length + 3) & ~3 :]
    # On a point-to-point interface IFA_ADDRESS is the other end's.
    packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    return ipaddress.ip_address(packed) if packed and len(packed) in (4, 16) else None
