"""The server's side of TLS: certificate files become a context, and each mistake in them a text; it makes no files.

Files that were replaced while the server runs are taken anew for the connections that come then.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from typing import Final

from wsgrad.errors import WsgradError
from wsgrad.transport.tls import certificate_fingerprint

_KEY: Final = re.compile(r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----")
_MAX_FILE: Final = 1 << 20
_log = logging.getLogger("wsgrad.server.tls")


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


class Certificate:
    """What a server shows to whoever connects."""

    def __init__(self, cert: str, key: str, *, renewed: bool) -> None:
        """Read the files, which are those of `tls_context`.

        Args:
            cert: the certificate chain.
            key: the private key.
            renewed: whether files that were replaced count; not where clients know the certificate by its fingerprint.

        Raises:
            TlsError: a file can't be read, or does not hold what it should.
        """
        self._cert = cert
        self._key = key
        self._renewed = renewed
        self._seen = self._looks()
        self._context = tls_context(cert, key)

    def context(self) -> ssl.SSLContext:
        """For one more connection. Where the files are broken now, the certificate that was read last."""
        if self._renewed and (looks := self._looks()) != self._seen:
            # Noted before they are read: what changes meanwhile is seen the next time.
            self._seen = looks
            try:
                self._context = tls_context(self._cert, self._key)
                sha256 = fingerprint_of(self._cert)
            except (TlsError, OSError) as exc:  # OSError: a file that goes while it is read
                _log.error("%s; the certificate that was read before stays in use", exc)
            else:
                _log.info("the certificate %s was renewed; its sha256 is %s", self._cert, sha256)
        return self._context

    def _looks(self) -> list[tuple[int, ...] | None]:
        """What tells files that were written or replaced from those before, through links."""
        return [_look(path) for path in (self._cert, self._key) if path]


def _look(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
