"""The certificate of `--tls`: made for this machine's names and addresses, kept for the next start; serves nothing.

Clients know it by its fingerprint, so it is kept as long as it will do. It is no authority: trusting it trusts this
server alone.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wsgrad.server.addresses import own_addresses
from wsgrad.server.auth import own_names
from wsgrad.server.options import address_of, split_host
from wsgrad.server.tls import TlsError
from wsgrad.server.tokens import write_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cryptography import x509

    from wsgrad.server.addresses import Address
    from wsgrad.server.config import Config

VALID_DAYS: Final = 800
"""Apple's systems take no certificate for longer than 825 days."""
LEAST_DAYS: Final = 180
"""A server that starts with fewer days left makes a new one: it may run for months."""
_MAX_NAMES: Final = 100
_PAIR: Final = "tls-key-and-certificate.pem"
_CERTIFICATE: Final = "tls-certificate.pem"


@dataclass(frozen=True, slots=True)
class Kept:
    """A certificate on disk.

    Attributes:
        pair: key and certificate in one file of mode 0600, so that they always fit each other.
        certificate: the certificate alone, for clients.
        replaces: why it took the place of another one, or None.
    """

    pair: Path
    certificate: Path
    replaces: str | None


def names_of(config: Config) -> tuple[frozenset[str], frozenset[Address]]:
    """The names and the addresses by which clients may call this server."""
    names = set(own_names(config.host))
    addresses = set(own_addresses())
    for text in (config.host, *config.allow_hosts):
        host = (split_host(text) or (text, None))[0]
        address = address_of(host)
        if address is None:
            names.add(host.lower())
        elif not address.is_unspecified:
            addresses.add(address)
    return frozenset(name for name in names if _fits(name)), frozenset(addresses)


def keep_certificate(config: Config, directory: Path) -> Kept:
    """Take the kept certificate, or make another where it lacks a name, nears its end, or can't be used.

    Raises:
        TlsError: the package `cryptography` is missing, or the files can't be written.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as exc:
        raise TlsError("--tls needs the package cryptography: pip install 'wsgrad[tls]'") from exc
    pair, certificate = directory / _PAIR, directory / _CERTIFICATE
    names, addresses = names_of(config)
    try:
        with _locked(directory):
            before = _read(pair)
            replaces = None if before is None else _why_not(before, names, addresses)
            if before is None or replaces is not None:
                if before is not None:
                    # Two servers of one machine may be called differently: they need not take turns at renewing.
                    names = frozenset([*sorted(names), *sorted(_names(before))][:_MAX_NAMES])
                key_pem, certificate_pem = make(names, addresses)
                write_private(pair, key_pem + certificate_pem)
                write_private(certificate, certificate_pem)
            elif not certificate.exists():
                write_private(certificate, _pem(before))
    except OSError as exc:
        raise TlsError(
            f"--tls: {exc.filename or directory} can't be used: {exc.strerror or exc}; XDG_STATE_HOME moves it, "
            "--tls-cert takes a certificate of your own"
        ) from exc
    return Kept(pair, certificate, replaces)


def make(
    names: frozenset[str], addresses: frozenset[Address], *, now: datetime.datetime | None = None
) -> tuple[str, str]:
    """A new key and its certificate, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = now or datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    common = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "wsgrad")])
    entries: list[x509.GeneralName] = [x509.DNSName(name) for name in sorted(names)]
    entries += [x509.IPAddress(address) for address in sorted(addresses, key=lambda a: (a.version, a.packed))]
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder(issuer_name=common, subject_name=common)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(entries), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private.decode(), _pem(certificate)


def _why_not(certificate: x509.Certificate, names: frozenset[str], addresses: frozenset[Address]) -> str | None:
    """Why a certificate will not do, or None."""
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_before_utc > now:
        return "is not valid yet"
    if certificate.not_valid_after_utc - now < datetime.timedelta(days=LEAST_DAYS):
        return f"ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    missing = [*sorted(names - _names(certificate)), *sorted(map(str, addresses - _addresses(certificate)))]
    return f"lacks {', '.join(missing)}" if missing else None


def _read(pair: Path) -> x509.Certificate | None:
    """The certificate of the file, or None where it holds no certificate with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        text = pair.read_bytes()
        certificate = x509.load_pem_x509_certificate(text)
        key = serialization.load_pem_private_key(text, None)
        _names(certificate)
    except (FileNotFoundError, ValueError, TypeError, x509.ExtensionNotFound):
        return None
    return certificate if key.public_key() == certificate.public_key() else None


def _alternatives(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    from cryptography import x509

    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _names(certificate: x509.Certificate) -> frozenset[str]:
    from cryptography import x509

    return frozenset(_alternatives(certificate).get_values_for_type(x509.DNSName))


def _addresses(certificate: x509.Certificate) -> frozenset[Address]:
    from cryptography import x509

    found = _alternatives(certificate).get_values_for_type(x509.IPAddress)
    return frozenset(a for a in found if isinstance(a, ipaddress.IPv4Address | ipaddress.IPv6Address))


def _pem(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _fits(name: str) -> bool:
    """Whether a certificate can hold the name; such as underscores and long names it can't."""
    labels = name.split(".")
    return len(name) <= 253 and all(0 < len(label) <= 63 and label.isascii() for label in labels)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one server at a time look and write, where the system can."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory / ".tls-lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
