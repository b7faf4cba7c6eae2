"""`wsgrad nodes` and `wsgrad tokens`: the administrator's commands, against a real server."""

import json
import secrets
import subprocess

import pytest
from real_servers import running
from small_node import SmallNode
from test_command import run

from wsgrad.transport import messages as m

NODE, ADMIN, CLIENT = secrets.token_urlsafe(), secrets.token_urlsafe(), secrets.token_urlsafe()


@pytest.fixture(scope="module")
def hub():
    with running("--device", "none", WSGRAD_NODE_TOKEN=NODE, WSGRAD_ADMIN_TOKEN=ADMIN, WSGRAD_TOKEN=CLIENT) as url:
        yield url.partition("/#")[0]


@pytest.fixture
def admin(monkeypatch):
    monkeypatch.setenv("WSGRAD_ADMIN_TOKEN", ADMIN)


def test_nodes_are_listed_for_people_and_for_programs(hub, admin, capsys, monkeypatch):
    with SmallNode(hub, NODE, "phone", label="Mi Phone"):
        status, table, _ = run(capsys, "nodes", "list", hub)
        assert status == 0
        assert "Mi Phone" in table
        monkeypatch.setenv("WSGRAD_URL", f"{hub}#token=a-clients-token")
        assert run(capsys, "nodes")[1] == table
        [node] = json.loads(run(capsys, "nodes", "list", "--json", "-")[1])
        assert (node["name"], node["devices"]) == ("phone", ["phone/browser/0"])


HOSTILE = "[/red] [link=file:///x]y :smile: \x1b[2J\u202e end"
"""What a tab's owner may call it: what rich takes for markup, a terminal for commands, and text that runs backwards."""


@pytest.mark.parametrize("command", ["nodes", "devices"])
def test_what_a_node_calls_itself_is_shown_as_plain_text(hub, admin, capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("WSGRAD_URL", f"{hub}#token={CLIENT}")
    with SmallNode(hub, NODE, "odd", label=HOSTILE, adapter=HOSTILE):
        status, table, errors = run(capsys, command)
    assert (status, errors) == (0, "")
    assert "[/red] [link=file:///x]y :smile: [2J end" in table


def test_a_node_is_renamed_paused_resumed_and_kicked(hub, admin, capsys):
    with SmallNode(hub, NODE, "tab") as node:
        assert run(capsys, "nodes", "rename", "tab", "Big one", hub)[:2] == (0, "tab is called 'Big one'\n")
        assert node.hear(m.Present) == m.Present("Big one", False, 0)
        for action, paused in (("pause", True), ("resume", False)):
            assert run(capsys, "nodes", action, "tab", hub)[0] == 0
            assert node.hear(m.Present).paused is paused
        assert run(capsys, "nodes", "kick", "tab", hub)[0] == 0
        assert node.hear(m.Refused).code == "Kicked"


def test_a_node_is_revoked_and_tokens_are_changed(hub, capsys):
    with SmallNode(hub, NODE, "old") as node:
        status, text, _ = run(capsys, "nodes", "revoke", "old", f"{hub}#token={ADMIN}")
        assert (status, node.hear(m.Refused).code) == (0, "Unauthorized")
        token = text.splitlines()[-1]
        with SmallNode(hub, token, "old") as again:
            assert again.joined.name == "old"
    # Last: it changes the tokens for the tests behind it, those of nodes only.
    status, text, _ = run(capsys, "tokens", "rotate", f"{hub}#token={ADMIN}", "--json", "-")
    new = json.loads(text)
    assert (status, new["admin"]) == (0, ADMIN)
    with SmallNode(hub, new["node"], "newer"):
        pass


def test_what_goes_wrong_is_one_line(hub, admin, capsys, monkeypatch):
    for arguments, said in (
        (["nodes", "kick", "no/bo dy", hub], "nothing here"),
        (["nodes", "kick", "nobody", hub], "no node nobody has dialled in"),
        (["nodes", "list", f"{hub}#token=wrong"], "the token is wrong"),
        (["nodes", "list", "ws://127.0.0.1:1"], "refused"),
        (["nodes", "list"], "no server is named"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out, err.count("\n")) == (1, "", 1), arguments
        assert said in err
        assert ADMIN not in err
    monkeypatch.delenv("WSGRAD_ADMIN_TOKEN")
    assert "the administrator's token is needed" in run(capsys, "nodes", "list", hub)[2]


def test_a_pinned_certificate_is_checked_before_the_token_is_sent(admin, capsys, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    with running("--device", "none", *tls, WSGRAD_ADMIN_TOKEN=ADMIN) as url:
        address, _, fragment = url.partition("/#")
        pin = fragment.partition("sha256=")[2]
        assert run(capsys, "nodes", "list", f"{address}#sha256={pin}", "--json", "-")[:2] == (0, "[]\n")
        wrong = "0" * 64
        status, _, err = run(capsys, "nodes", "list", f"{address}#sha256={wrong}")
        assert (status, "fingerprint" in err) == (1, True)
        assert "is not trusted" in run(capsys, "nodes", "list", address)[2]
