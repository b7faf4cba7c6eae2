"""What an administrator may do over HTTP: rename, pause, resume, kick and revoke nodes, and give out new tokens.

Who may ask is `auth`'s business, reading requests and sending answers `door`'s. Tokens stand in answers, never in logs.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from wsgrad.errors import ProtocolError
from wsgrad.server import audit, http
from wsgrad.server.nodes import clean_label
from wsgrad.server.rotation import Rotation
from wsgrad.server.tokens import Role, TokenError, Tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wsgrad.server.http import Response
    from wsgrad.server.remote import RemoteNode

ROTATE: Final = "/admin/tokens/rotate"
_NODE: Final = re.compile(r"/admin/nodes/([a-z0-9-]{1,64})/(rename|pause|resume|kick|revoke)", re.ASCII)
_log = logging.getLogger("wsgrad.server.admin")


class Nodes(Protocol):
    """What the server's heart knows of nodes that dialled in."""

    def node(self, name: str) -> RemoteNode | None:
        """The node of that name, if it is here."""

    def forget_node(self, name: str) -> bool:
        """End the secret of that name; whether there was one."""


def is_admin_path(path: str) -> bool:
    """Whether a path is one of this module's."""
    return path == ROTATE or _NODE.fullmatch(path) is not None


class Admin:
    """The administrator's requests to one server."""

    def __init__(self, nodes: Nodes, tokens: Tokens, token_file: str) -> None:
        self._nodes = nodes
        self._tokens = tokens
        self._rotation = Rotation(tokens, token_file)

    async def answer(self, path: str, body: bytes, peer: str) -> Response:
        """Do what is asked and say how it went."""
        try:
            asked = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            return http.text(400, "the body is not JSON")
        if not isinstance(asked, dict):
            return http.text(400, "the body is no JSON object")
        try:
            if path == ROTATE:
                return await self._rotate(asked, peer)
            match = _NODE.fullmatch(path)
            assert match is not None
            name, action = match.groups()
            if action == "revoke":
                return await self._revoke(name, peer)
            return self._act(name, action, asked, peer)
        except TokenError as exc:
            _log.error("%s: %s", peer, exc)
            return http.text(500, str(exc))

    def _act(self, name: str, action: str, asked: Mapping[str, object], peer: str) -> Response:
        node = self._nodes.node(name)
        if node is None:
            return _unknown(name)
        shown = node.shown
        match action:
            case "rename":
                label = asked.get("label")
                if not isinstance(label, str) or (label and not clean_label(label)):
                    return http.text(400, 'renaming a node takes {"label": "its new label"}; "" is its name again')
                shown = replace(shown, label=clean_label(label))
                _log.info("%s renames node %s to %r", peer, name, shown.label)
                audit.note("admin", action=action, peer=peer, node=name, label=shown.label)
            case "kick":
                _log.info("%s kicks node %s", peer, name)
                audit.note("admin", action=action, peer=peer, node=name)
                node.refuse("Kicked", "an administrator of the server has sent this node away")
                return http.document(200, {"name": name})
            case _:
                shown = replace(shown, paused=action == "pause")
                _log.info("%s %ss node %s", peer, action, name)
                audit.note("admin", action=action, peer=peer, node=name)
        try:
            node.present(shown)
        except ProtocolError as exc:
            return http.text(409, str(exc))
        node.tell(shown)
        return http.document(200, node.describe())

    async def _revoke(self, name: str, peer: str) -> Response:
        """First the token, so that a node which is sent away can't come back in between."""
        node = self._nodes.node(name)
        if node is None and not self._nodes.forget_node(name):
            return _unknown(name)
        await self._rotation.rotate((Role.NODE,))
        self._nodes.forget_node(name)
        if node is not None:
            node.refuse("Unauthorized", "an administrator of the server has revoked this node")
        _log.info("%s revokes node %s; there is a new node token", peer, name)
        audit.note("admin", action="revoke", peer=peer, node=name)
        return http.document(200, {"name": name, "node": self._tokens.of(Role.NODE)})

    async def _rotate(self, asked: Mapping[str, object], peer: str) -> Response:
        named = asked.get("roles", [Role.CLIENT.value, Role.NODE.value])
        known = {role.value: role for role in Role}
        if not isinstance(named, list) or not named or not all(isinstance(n, str) and n in known for n in named):
            return http.text(400, f'"roles" is a list of {", ".join(known)}')
        roles = [known[name] for name in named]
        await self._rotation.rotate(roles)
        _log.info("%s gives out new tokens: %s", peer, ", ".join(sorted(set(named))))
        audit.note("admin", action="rotate", peer=peer, roles=sorted(set(named)))
        return http.document(200, {role.value: self._tokens.of(role) for role in Role})


def _unknown(name: str) -> Response:
    return http.text(404, f"no node {name} has dialled in; devices of the server itself are none")
