"""Gives a running server new tokens: in its memory and in the files that hold them; who may ask for it is `auth`'s."""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from wsgrad.server import logs
from wsgrad.server.tokens import NAMES, Role, TokenError, Tokens, read_text, write_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_log = logging.getLogger("wsgrad.server.rotation")


class Rotation:
    """Of one server. `token_file` is what `--token-file` named, or empty."""

    def __init__(self, tokens: Tokens, token_file: str) -> None:
        self._tokens = tokens
        self._path = Path(token_file) if token_file else None
        self._one_at_a_time = trio.Lock()  # the file and the memory must end with the same tokens

    async def rotate(self, roles: Iterable[Role]) -> None:
        """From now on only new tokens let in for these roles; connections that are open stay.

        Raises:
            TokenError: a file that holds the old ones can't be rewritten; nothing was changed then.
        """
        async with self._one_at_a_time:
            new = {role: secrets.token_urlsafe(32) for role in roles}
            logs.hide(*new.values())
            # A thread that is abandoned would still write: the change is made as a whole or not at all.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._keep, new)
                self._tokens.replace(new)
                await trio.to_thread.run_sync(self._show)

    def _keep(self, new: Mapping[Role, str]) -> None:
        if self._path is not None:
            path = self._path.resolve()  # where it is a link, the file that it leads to is the one to replace
            try:
                write_private(path, rewritten(read_text(str(path))[0], new))
            except OSError as exc:
                raise TokenError(
                    f"{self._path} can't be rewritten: {exc.strerror or exc}; no token was changed"
                ) from exc

    def _show(self) -> None:
        for keep in list(self._tokens.keepers):
            try:
                keep()
            except OSError as exc:
                _log.warning("%s can't be rewritten and holds old tokens: %s", exc.filename, exc.strerror or exc)


def rewritten(text: str, new: Mapping[Role, str]) -> str:
    """The text of a token file with new tokens for the roles that it names; the rest of it as it was."""
    if text.lstrip().startswith("{"):
        values = json.loads(text)
        return json.dumps(values | {role.value: token for role, token in new.items() if role.value in values}) + "\n"
    lines = []
    for line in text.splitlines():
        name, equals, _ = line.partition("=")
        role = NAMES.get(name.strip().lower()) if equals else None
        lines.append(line if role is None or role not in new else f"{name}={new[role]}")
    return "\n".join(lines) + "\n"
