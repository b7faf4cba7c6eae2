"""What a server decides before it runs: cpu devices where programs can't be confined, and warnings."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from edge_port import TOKENS

from wsgrad.devices.directories import NoHome
from wsgrad.server import __main__ as program
from wsgrad.server import addresses, startup
from wsgrad.server.announce import announced
from wsgrad.server.config import Config
from wsgrad.server.tokens import Role, token_directory


@pytest.fixture
def no_confinement(monkeypatch):
    """A system without what confinement needs: such a kernel can't be had here, so the probes say so."""
    monkeypatch.setattr(startup, "probe_node_confinement", lambda: ["seccomp filters"])
    monkeypatch.setattr(startup, "probe_compiler_confinement", lambda: ["user namespaces"])


def test_on_loopback_programs_run_unconfined_with_a_warning_that_names_what_is_missing(no_confinement):
    config, [warning] = startup.settle(Config())
    assert config.unconfined
    assert config.devices == ("cpu",)
    assert "node processes: seccomp filters" in warning
    assert "the compiler: user namespaces" in warning


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu-box"])
def test_on_any_other_address_cpu_is_not_offered(host, no_confinement):
    config, warnings = startup.settle(Config(host=host))
    assert config.devices == ()
    assert not config.unconfined
    assert any("--unconfined" in warning for warning in warnings)


def test_unless_it_is_asked_for(no_confinement):
    config, warnings = startup.settle(Config(host="0.0.0.0", unconfined=True))
    assert config.devices == ("cpu",)
    assert any("perhaps not at all" in warning for warning in warnings)


@pytest.mark.skipif(
    bool(startup.probe_node_confinement() or startup.probe_compiler_confinement()),
    reason="this system lacks something that confinement needs; `wsgrad doctor` says what",
)
def test_where_programs_can_be_confined_nothing_is_warned_of():
    assert startup.settle(Config()) == (Config(), [])


def test_an_address_others_can_reach_is_warned_of_unless_there_is_tls():
    assert any("in the clear" in warning for warning in startup.settle(Config(host="0.0.0.0"))[1])
    assert startup.settle(Config(host="0.0.0.0", tls_cert="c.pem", devices=())) == (
        Config(host="0.0.0.0", tls_cert="c.pem", devices=()),
        [],
    )


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("box", False), ("10.0.0.1", False)],
)
def test_loopback_is_told_from_the_rest(host, loopback):
    assert addresses.is_loopback(host) is loopback


def test_tokens_that_have_no_place_end_the_announcement_with_a_named_error(monkeypatch):
    monkeypatch.setattr("wsgrad.server.announce.token_directory", refuse_home)
    tokens = replace(TOKENS, generated=frozenset({Role.CLIENT}))
    with pytest.raises(FileNotFoundError, match="set HOME") as caught, announced(Config(), tokens, 1, []):
        raise AssertionError("it was announced")
    assert caught.value.filename == "the file of tokens"


def refuse_home(environment):
    raise NoHome("this user has no home directory: set HOME")


def test_a_file_of_tokens_goes_too_where_the_rest_of_the_announcement_fails(tmp_path):
    file = tmp_path / "ready.json"
    unwritable = os.open(os.devnull, os.O_RDONLY)
    try:
        with (
            pytest.raises(OSError, match="Bad file descriptor"),
            announced(Config(ready_file=str(file), ready_fd=unwritable), TOKENS, 1, []),
        ):
            raise AssertionError("it was announced")
    finally:
        os.close(unwritable)
    assert not file.exists()


def test_a_port_that_browsers_refuse_is_warned_of():
    _, warnings = startup.settle(Config(port=6667, unconfined=True))
    assert any("browsers connect to no port 6667" in warning for warning in warnings)
    _, warnings = startup.settle(Config(unconfined=True))
    assert not any("browsers" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("decide", "variable"),
    [
        (lambda: program._check_directories(Config()), "XDG_CACHE_HOME"),
        (lambda: program._tls(Config(self_signed=True)), "XDG_STATE_HOME"),
        (lambda: token_directory({}), "XDG_STATE_HOME"),
    ],
    ids=["caches", "certificate", "tokens"],
)
def test_a_user_without_a_home_is_told_what_to_set(decide, variable, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NoHome, match=f"this user has no home directory: set HOME, or {variable}"):
        decide()
