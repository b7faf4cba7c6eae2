"""The three tokens: given in a file or by variables, or made; where they are kept, and who may read that."""

import hmac
import json
import os
import stat

import pytest

from wsgrad.server import nodes
from wsgrad.server.tickets import Tickets, ticket_text
from wsgrad.server.tokens import Role, TokenError, Tokens, load_tokens, token_directory, write_private

CLIENT, NODE, ADMIN = "client-token-123456", "node-token-12345678", "admin-token-1234567"


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_without_anything_given_all_three_are_made_long_and_different():
    tokens, warnings = load_tokens("", {})
    assert tokens.generated == set(Role)
    assert len({tokens.client, tokens.node, tokens.admin, load_tokens("", {})[0].client}) == 4
    assert all(len(tokens.of(role)) >= 43 for role in Role)
    assert warnings == []


def test_each_variable_gives_its_token():
    tokens, warnings = load_tokens("", {"WSGRAD_TOKEN": CLIENT, "WSGRAD_ADMIN_TOKEN": ADMIN})
    assert (tokens.client, tokens.admin, tokens.generated) == (CLIENT, ADMIN, {Role.NODE})
    assert warnings == []


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"client": CLIENT, "node": NODE, "admin": ADMIN, "url": "ws://x"}),
        f"client={CLIENT}\nnode={NODE}\nadmin={ADMIN}\n",
        f"# tokens\n\n WSGRAD_TOKEN = '{CLIENT}'\nWSGRAD_NODE_TOKEN={NODE}\nWSGRAD_ADMIN_TOKEN=\"{ADMIN}\"\n",
    ],
    ids=["json", "lines", "variables"],
)
def test_a_token_file_is_json_or_lines_and_wins_over_variables(text, tmp_path):
    tokens, warnings = load_tokens(write(tmp_path / "tokens", text), {"WSGRAD_TOKEN": "another-token-1234"})
    assert (tokens.client, tokens.node, tokens.admin) == (CLIENT, NODE, ADMIN)
    assert tokens.generated == set()
    assert warnings == []


def test_a_token_file_others_can_read_is_warned_of(tmp_path):
    path = write(tmp_path / "tokens", f"client={CLIENT}", 0o644)
    _, [warning] = load_tokens(path, {})
    assert "chmod 600" in warning
    assert "0644" in warning


def test_a_short_token_is_warned_of_and_not_shown():
    _, [warning] = load_tokens("", {"WSGRAD_TOKEN": "hunter2"})
    assert "WSGRAD_TOKEN" in warning
    assert "hunter2" not in warning


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client: x", "line 1"),
        ("\ngpu=x", "line 2"),
        ("{", "is not JSON"),
        ("[" * 100_000, "over 65536 bytes"),
        ('{"client": 5}', "client is not a string"),
        ("client=with space", "client: a token is"),
        ("client=t\xe4glich", "client: a token is"),
        (f"client={CLIENT}\nadmin={CLIENT}", "must differ"),
    ],
)
def test_a_bad_token_file_is_named_and_its_tokens_are_not_shown(text, message, tmp_path):
    path = write(tmp_path / "tokens", text)
    with pytest.raises(TokenError) as caught:
        load_tokens(path, {})
    assert message in str(caught.value)
    assert CLIENT not in str(caught.value)


def test_a_missing_or_binary_token_file_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary"):
        with pytest.raises(TokenError, match=name):
            load_tokens(str(tmp_path / name), {})


def test_a_token_is_known_by_all_of_its_characters():
    tokens = Tokens(CLIENT, NODE, ADMIN)
    assert [tokens.role_of(token) for token in (CLIENT, NODE, ADMIN)] == list(Role)
    for wrong in ("", CLIENT[:-1], CLIENT + "x", CLIENT.upper(), "\xe9", "\udcff"):
        assert tokens.role_of(wrong) is None


class Watched(bytes):
    """Bytes that may be compared in constant time only."""

    def refuse(self, *_):
        raise AssertionError("a secret was compared with something else than compare_digest, or looked into")

    __eq__ = __ne__ = __lt__ = __gt__ = __contains__ = __getitem__ = __hash__ = refuse
    startswith = endswith = find = index = refuse


class WatchedText(str):
    """Text that is turned into such bytes before anybody looks at it."""

    __slots__ = ()
    __eq__ = __ne__ = __lt__ = __gt__ = __contains__ = __getitem__ = __hash__ = Watched.refuse
    startswith = endswith = find = index = Watched.refuse

    def encode(self, *arguments):
        return Watched(str.encode(self, *arguments))


def test_tokens_and_tickets_are_compared_in_constant_time_only():
    tokens, tickets, route = Tokens(CLIENT, NODE, ADMIN), Tickets(), object()
    ticket = ticket_text(tickets.make(route))
    tickets.make(object())
    for wrong in ("x", CLIENT[:-1], ticket[:-1]):
        assert tokens.role_of(WatchedText(wrong)) is None
        assert tickets.take(WatchedText(wrong)) is None
    assert [tokens.role_of(WatchedText(token)) for token in (CLIENT, NODE, ADMIN)] == list(Role)
    assert tickets.take(WatchedText(ticket)) is route


def test_secrets_of_nodes_are_kept_and_compared_as_digests(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(nodes.secrets, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    registry = nodes.Registry()
    name, secret = registry.join("tab", None)
    registry.join("other", None)
    assert registry.name_of(secret[:-1]) is None
    assert registry.name_of(WatchedText(secret)) == name
    # Each of them every time, whichever it is: the time taken does not tell how far one came.
    assert len(compared) == 4
    assert all(len(given) == len(kept) == 32 for given, kept in compared)
    assert secret not in repr(registry)


def test_generated_tokens_are_kept_where_only_their_owner_looks(tmp_path):
    assert token_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path
    state = {"XDG_RUNTIME_DIR": str(tmp_path / "missing"), "XDG_STATE_HOME": str(tmp_path / "state")}
    directory = token_directory(state)
    assert directory == tmp_path / "state" / "wsgrad"
    assert token_directory({"XDG_STATE_HOME": "relative"}).is_absolute()
    old_mask = os.umask(0)
    try:
        write_private(directory / "tokens.json", "{}")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "tokens.json").stat().st_mode) == 0o600


def test_a_private_file_takes_the_place_of_a_link_and_leaves_its_target_alone(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "tokens").symlink_to(target)
    write_private(tmp_path / "tokens", "secret")
    assert target.read_text() == "mine"
    assert (tmp_path / "tokens").read_text() == "secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "tokens"]
