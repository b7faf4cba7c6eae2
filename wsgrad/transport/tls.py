"""How a client trusts a server's certificate: by an authority or by its fingerprint; the sockets are the drivers'."""

from __future__ import annotations

import hashlib
import ssl
from typing import Final

from wsgrad.errors import Unauthorized
from wsgrad.transport.url import normal_fingerprint

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})


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


def why_no_tls(error: BaseException | None) -> str:
    """What a handshake's failure means: a port without TLS hangs up, or answers what is none."""
    reason = getattr(error, "reason", None)
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError) or reason in _NO_TLS:
        return "it does not speak TLS there; a server without --tls is reached by ws://"
    return str(error)


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
