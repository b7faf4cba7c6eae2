"""How a client trusts a server's certificate: by an authority or by its fingerprint; the sockets are the drivers'."""

from __future__ import annotations

import hashlib
import ssl

from wsgrad.errors import Unauthorized
from wsgrad.transport.url import normal_fingerprint


def client_ssl_context(*, fingerprint: str | None = None, cafile: str | None = None) -> ssl.SSLContext:
    """Returns the context for a client's TLS.

    Args:
        fingerprint: the SHA-256 of the server's certificate. It replaces names and authorities, so the caller must give
            the peer's certificate to `check_fingerprint` after the TLS handshake and before it sends anything.
        cafile: a PEM file of authorities to trust instead of the system's.
    """
    context = ssl.create_default_context(cafile=cafile)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if fingerprint is not None:
        # A self-signed certificate has no name worth checking; the fingerprint says more than any authority could.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def certificate_fingerprint(der: bytes) -> str:
    """Returns the SHA-256 of a certificate in DER form, as 64 lower-case hex digits."""
    return hashlib.sha256(der).hexdigest()


def check_fingerprint(der: bytes | None, sha256: str) -> None:
    """Checks that the peer's certificate, `SSLSocket.getpeercert(binary_form=True)`, is the expected one.

    Raises:
        Unauthorized: it is another, or there is none.
    """
    expected = normal_fingerprint(sha256)
    actual = certificate_fingerprint(der) if der else "none"
    if actual != expected:
        raise Unauthorized(
            f"the server's certificate has the SHA-256 fingerprint {actual}, not {expected}: it was renewed, or this "
            "is another server; compare with what the server printed and correct #sha256=…",
            details={"expected": expected, "actual": actual},
        )
