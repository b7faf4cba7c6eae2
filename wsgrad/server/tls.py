"""The server's side of TLS: certificate files become a context, and each mistake in them a text; it makes no files."""

from __future__ import annotations

import re
import ssl
from typing import Final

from wsgrad.errors import WsgradError
from wsgrad.transport.tls import certificate_fingerprint

_KEY: Final = re.compile(r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----")
_MAX_FILE: Final = 1 << 20


class TlsError(WsgradError):
    """There is no certificate to serve with; the message says what to do."""


def tls_context(cert: str, key: str) -> ssl.SSLContext:
    """The server's side of TLS 1.2 and up.

    Args:
        cert: a PEM file with the certificate chain.
        key: a PEM file with the private key; empty where it is in the same one.

    Raises:
        TlsError: a file can't be read, or does not hold what it should.
    """
    if ssl.PEM_HEADER not in _read("--tls-cert", cert):
        raise TlsError(f"--tls-cert: {cert} holds no certificate in PEM, which begins with {ssl.PEM_HEADER}")
    found = _KEY.search(_read("--tls-key", key) if key else _read("--tls-cert", cert))
    if found is None:
        where = f"--tls-key: {key} holds no private key" if key else f"--tls-cert: {cert} holds no private key as well"
        raise TlsError(f"{where} in PEM{'' if key else '; name its file with --tls-key'}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key or None, password="")  # an encrypted key is an error, not a prompt
    except ssl.SSLError as exc:
        raise TlsError(f"--tls-cert {cert}{f' --tls-key {key}' if key else ''}: {_what(exc, found[1])}") from exc
    context.set_alpn_protocols(["http/1.1"])
    return context


def fingerprint_of(cert: str) -> str | None:
    """The SHA-256 of the first certificate of a PEM file."""
    with open(cert, encoding="ascii", errors="replace") as file:
        text = file.read()
    begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
    start = text.find(begin)
    stop = text.find(end, start)
    if start < 0 or stop < 0:
        return None
    return certificate_fingerprint(ssl.PEM_cert_to_DER_cert(text[start : stop + len(end)]))


def _read(flag: str, path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(_MAX_FILE)
    except OSError as exc:
        raise TlsError(f"{flag}: {path} can't be read: {exc.strerror or exc}") from exc


def _what(error: ssl.SSLError, kind: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the private key does not belong to the certificate"
    if kind.startswith("ENCRYPTED") or error.reason in ("BAD_PASSWORD_READ", "BAD_DECRYPT"):
        return "the private key is encrypted; openssl pkey -in KEY -out PLAIN decrypts it"
    return f"the certificate or the private key is damaged ({error.reason or error})"
