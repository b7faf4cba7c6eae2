"""How a server that is ready says so: a banner for people, a line of JSON for programs; tokens only where they may be.

A banner shows tokens to a terminal and nowhere else. Logs get none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wsgrad.devices.directories import NoHome
from wsgrad.server.addresses import is_loopback
from wsgrad.server.config import fail, version
from wsgrad.server.invitation import join_url, page_address, terminal_code
from wsgrad.server.options import address_of
from wsgrad.server.tls import fingerprint_of
from wsgrad.server.tokens import VARIABLES, Role, token_directory, write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TextIO

    from wsgrad.server.config import Config
    from wsgrad.server.tokens import Tokens

_log = logging.getLogger("wsgrad.server")


@dataclass(frozen=True, slots=True, repr=False)
class Announcement:
    """A listening server. `host` is one that clients can use."""

    config: Config
    tokens: Tokens
    host: str
    port: int
    sha256: str | None
    devices: Sequence[Mapping[str, object]]

    @property
    def address(self) -> str:
        """The URL without its fragment."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'wss' if self.config.tls else 'ws'}://{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL with token and fingerprint."""
        fingerprint = f"&sha256={self.sha256}" if self.sha256 else ""
        return f"{self.address}/#token={self.tokens.client}{fingerprint}"

    def to_json(self) -> str:
        """One line for `--ready-fd` and `--ready-file`."""
        value = {
            "url": self.url,
            "host": self.host,
            "port": self.port,
            "token": self.tokens.client,
            "node_token": self.tokens.node,
            "admin_token": self.tokens.admin,
            "pid": os.getpid(),
        }
        return json.dumps(value) + "\n"

    def tokens_json(self) -> str:
        """What the file of generated tokens holds."""
        return json.dumps({"url": self.url, **{role.value: self.tokens.of(role) for role in Role}}) + "\n"


def reachable_host(host: str, *, local: bool) -> str:
    """A name for an address: the wildcard ones can't be connected to everywhere."""
    address = address_of(host)
    if address is None or not address.is_unspecified:
        return host
    if local:
        return "127.0.0.1" if address.version == 4 else "::1"
    return socket.gethostname()


@contextlib.contextmanager
def announced(config: Config, tokens: Tokens, port: int, devices: Sequence[Mapping[str, object]]) -> Iterator[None]:
    """Tell whoever should know, and take the files with tokens away at the end.

    Raises:
        OSError: a file can't be written.
    """
    scripted = config.ready_fd >= 0 or bool(config.ready_file)
    host = reachable_host(config.host, local=scripted)
    sha256 = fingerprint_of(config.tls_cert) if config.tls else None
    announcement = Announcement(config, tokens, host, port, sha256, devices)
    written: dict[Path, Callable[[], str]] = {}
    terminal = next((stream for stream in (sys.stdout, sys.stderr) if stream is not None and stream.isatty()), None)
    banner = not scripted and (terminal is not None or config.log_format == "text")
    level = logging.DEBUG if banner else logging.INFO
    _log.log(level, "listening on %s", announcement.address)
    for device in devices:
        _log.log(level, "device %s: %s", device.get("id"), describe(device))
    try:
        if config.ready_file:
            write_private(Path(config.ready_file), announcement.to_json())
            written[Path(config.ready_file)] = announcement.to_json
        if not scripted and terminal is None and tokens.generated:
            written[_keep(announcement)] = announcement.tokens_json
        if banner:
            _show(announcement, terminal)
        if config.ready_fd >= 0:
            write_ready(config.ready_fd, announcement.to_json())
        with _kept_up_to_date(tokens, written):
            yield
    finally:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _kept_up_to_date(tokens: Tokens, written: Mapping[Path, Callable[[], str]]) -> Iterator[None]:
    """Write the files again whenever there are new tokens."""

    def keep() -> None:
        for path, text in written.items():
            write_private(path, text())

    tokens.keepers.append(keep)
    try:
        yield
    finally:
        tokens.keepers.remove(keep)


def _keep(announcement: Announcement) -> Path:
    try:
        path = token_directory(os.environ) / f"wsgrad-tokens-{announcement.port}.json"
    except NoHome as exc:  # as any other file that can't be written
        raise FileNotFoundError(errno.ENOENT, str(exc), "the file of tokens") from exc
    write_private(path, announcement.tokens_json())
    _log.warning("the tokens of this server are in %s", path)
    return path


def write_ready(fd: int, line: str) -> None:
    """Write the line that a program waits for which started this one."""
    data = line.encode()
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        _log.info("nobody reads --ready-fd any more")


def _show(announcement: Announcement, terminal: TextIO | None) -> None:
    lines = [f"wsgrad {version()} on {announcement.address}"]
    for device in announcement.devices:
        lines.append(f"  device {device.get('id')}  {describe(device)}")
    if not announcement.devices:
        lines.append("  no devices of its own; nodes may bring some")
    with contextlib.suppress(OSError):
        print("\n".join(lines), flush=True)
    if terminal is None:
        return
    lines = [f"  connect with {announcement.url}"]
    for role in (Role.NODE, Role.ADMIN):
        if role in announcement.tokens.generated:
            lines.append(f"  {VARIABLES[role]}={announcement.tokens.of(role)}")
    lines += _invite(announcement, terminal)
    with contextlib.suppress(OSError):
        print("\n".join(lines), file=terminal, flush=True)


def _invite(announcement: Announcement, terminal: TextIO) -> list[str]:
    """How a browser's tab becomes a device: the page's URL, and where another device can open it, its QR code."""
    config = announcement.config
    page = join_url(page_address(config, announcement.port), announcement.tokens.node)
    lines = [f"  a browser tab becomes a device at {page}"]
    if is_loopback(config.host):
        return lines
    if not config.tls:
        return [*lines, "  phones and other machines offer WebGPU to https only: start with --tls"]
    try:
        columns = os.get_terminal_size(terminal.fileno()).columns
    except OSError:
        columns = 0
    code = terminal_code(page, columns) if (terminal.encoding or "").lower().replace("-", "") == "utf8" else None
    return lines if code is None else [*lines, "", code]


def describe(device: Mapping[str, object]) -> str:
    """A device in one line."""
    parts = [str(device.get("cpu") or device.get("label") or device.get("kind"))]
    if threads := device.get("threads"):
        parts.append(f"{threads} thread{'s' if threads != 1 else ''}")
    if compiler := device.get("compiler"):
        parts.append(str(compiler))
    if device.get("confined") is False:
        parts.append("NOT CONFINED")
    return ", ".join(parts)


def check_ready_fd(fd: int) -> None:
    """End with status 2 where the descriptor of `--ready-fd` is not open; keep it from child processes."""
    if fd < 0:
        return
    try:
        os.fstat(fd)
        os.set_inheritable(fd, False)
    except OSError:
        fail(f"--ready-fd: {fd} is not an open descriptor")


def check_ready_file(path: str) -> None:
    """End with status 2 where the directory of `--ready-file` is not there: nobody would look into one made by us."""
    if path and not (directory := Path(path).absolute().parent).is_dir():
        fail(f"--ready-file: {path}: there is no directory {directory}")
