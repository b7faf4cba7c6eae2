"""The server's three tokens: given or made, compared in constant time, kept in files that only their owner reads.

It decides nothing about routes; that is `auth`.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from wsgrad.devices.directories import user_directory
from wsgrad.errors import WsgradError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,256}", re.ASCII)
_SHORT = 16
_MAX_FILE = 1 << 16


class TokenError(WsgradError):
    """A given token or the token file can't be used."""


class Role(enum.Enum):
    """Whom a token lets in."""

    CLIENT = "client"
    NODE = "node"
    ADMIN = "admin"


VARIABLES = {Role.CLIENT: "WSGRAD_TOKEN", Role.NODE: "WSGRAD_NODE_TOKEN", Role.ADMIN: "WSGRAD_ADMIN_TOKEN"}
NAMES = {role.value: role for role in Role} | {variable.lower(): role for role, variable in VARIABLES.items()}
"""What may stand before the `=` in a line of a token file, in any case."""


@dataclass(slots=True, repr=False, eq=False)
class Tokens:
    """A token for each role, and which of them this server made itself. Everybody who holds this sees new ones at once.

    Attributes:
        keepers: called when there are new ones; they belong to those who show them somewhere, and may raise OSError.
    """

    client: str
    node: str
    admin: str
    generated: frozenset[Role] = frozenset()
    keepers: list[Callable[[], None]] = field(default_factory=list)

    def __repr__(self) -> str:
        return "<Tokens>"

    def of(self, role: Role) -> str:
        """The token of a role."""
        return {Role.CLIENT: self.client, Role.NODE: self.node, Role.ADMIN: self.admin}[role]

    def replace(self, new: Mapping[Role, str]) -> None:
        """From now on these are the tokens of their roles."""
        self.client = new.get(Role.CLIENT, self.client)
        self.node = new.get(Role.NODE, self.node)
        self.admin = new.get(Role.ADMIN, self.admin)

    def role_of(self, token: str) -> Role | None:
        """Whose token it is. The time taken tells nothing about how much of it is right."""
        given = token.encode("utf-8", "surrogateescape")
        found = None
        for role in Role:
            if hmac.compare_digest(given, self.of(role).encode()):
                found = role
        return found


def load_tokens(token_file: str, environment: Mapping[str, str]) -> tuple[Tokens, list[str]]:
    """Take each token from the file, else from its variable, else make it.

    Returns:
        The tokens, and warnings for whoever runs the server.

    Raises:
        TokenError: the file can't be read or understood, a token holds other characters than base64url's, or two roles
            share one.
    """
    warnings: list[str] = []
    given = _read(token_file, warnings) if token_file else {}
    values: dict[Role, str] = {}
    generated = set()
    for role, variable in VARIABLES.items():
        source = f"{token_file}: {role.value}" if role in given else variable
        token = given.get(role) or environment.get(variable, "")
        if not token:
            token = secrets.token_urlsafe(32)
            generated.add(role)
        elif not _TOKEN.fullmatch(token):
            raise TokenError(
                f"{source}: a token is 1 to 256 of the characters A-Z a-z 0-9 - _; "
                "python3 -c 'import secrets; print(secrets.token_urlsafe())' makes one"
            )
        elif len(token) < _SHORT:
            warnings.append(f"{source}: a token of {len(token)} characters can be guessed; use {_SHORT} or more")
        values[role] = token
    if len(set(values.values())) < len(values):
        raise TokenError("the client, node and admin tokens must differ: a node's token must not open a session")
    tokens = Tokens(values[Role.CLIENT], values[Role.NODE], values[Role.ADMIN], frozenset(generated))
    return tokens, warnings


def read_text(path: str) -> tuple[str, int]:
    """A token file's text and mode.

    Raises:
        TokenError: it can't be read, or is no text of a sane size.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE + 1)
        text = data.decode()
    except OSError as exc:
        raise TokenError(f"--token-file: {path} can't be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise TokenError(f"--token-file: {path} is not UTF-8 text") from exc
    if len(data) > _MAX_FILE:
        raise TokenError(f"--token-file: {path} is over {_MAX_FILE} bytes")
    return text, mode


def _read(path: str, warnings: list[str]) -> dict[Role, str]:
    text, mode = read_text(path)
    if stat.S_ISREG(mode) and mode & 0o077:
        warnings.append(f"{path} can be read by others (mode {mode & 0o777:04o}); chmod 600 {path}")
    return _parse_json(path, text) if text.lstrip().startswith("{") else _parse_lines(path, text)


def _parse_json(path: str, text: str) -> dict[Role, str]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise TokenError(f"--token-file: {path} is not JSON and does not consist of NAME=VALUE lines") from exc
    roles = {role.value: role for role in Role}
    if bad := [key for key, value in values.items() if key in roles and not isinstance(value, str)]:
        raise TokenError(f"--token-file: {path}: {bad[0]} is not a string")
    return {roles[key]: value for key, value in values.items() if key in roles}


def _parse_lines(path: str, text: str) -> dict[Role, str]:
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        role = NAMES.get(name.strip().lower())
        if not equals or role is None:
            raise TokenError(f"--token-file: line {number} of {path} is not client=…, node=… or admin=…")
        found[role] = value.strip().strip("\"'")
    return found


def token_directory(environment: Mapping[str, str]) -> Path:
    """Where generated tokens are kept: the user's runtime directory, else wsgrad's own below the state directory.

    Raises:
        NoHome: the user has none of them.
    """
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and os.path.isdir(runtime):
        return Path(runtime)
    return user_directory("XDG_STATE_HOME", ".local/state", environment)


def write_private(path: Path, text: str) -> None:
    """Put a whole file of mode 0600 in the place of whatever was there.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
