"""What a peer is told that speaks another version of the protocol: both versions, both programs, and what to do.

The first message of any version begins with its kind and the version, so it is looked at before the rest is read.
"""

from __future__ import annotations

from wsgrad.errors import ProtocolError
from wsgrad.server.config import version
from wsgrad.server.nodes import clean_label
from wsgrad.transport.messages import VERSION


class OtherVersion(ProtocolError):
    """The peer speaks another version of the protocol. It is told so by `Refused`, which all versions understand."""


def check_version(head: list[object], kind: int) -> None:
    """Look at a peer's first message.

    Raises:
        OtherVersion: it is of this kind and of another version; with a text for whoever runs the peer.
    """
    if len(head) < 2 or head[0] != kind or type(head[1]) is not int or head[1] == VERSION:
        return
    agent = clean_label(head[2]) if len(head) > 2 and isinstance(head[2], str) else ""
    raise OtherVersion(
        f"this server (wsgrad {version()}) speaks version {VERSION} of the protocol, {agent or 'the peer'} speaks "
        f"version {head[1]}: {_remedy(agent, newer=head[1] > VERSION)}"
    )


def _remedy(agent: str, *, newer: bool) -> str:
    if newer:
        return "update the server, or use a release of its version"
    if agent.startswith("wsgrad"):
        return "update it: pip install --upgrade wsgrad"
    return "reload its page, or update it"  # a tab calls itself after its browser
