"""Settings: flags, variables, sizes, and one clear line for each bad value."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.server import options
from wsgrad.server.config import _GROUPS, Config, parse

OPTIONS = [option for _, group in _GROUPS for option in group]

GOOD = {
    "--host": ("::1", "::1"),
    "--port": ("7000", 7000),
    "--device": ("cpu*3", ("cpu", "cpu", "cpu")),
    "--name": ("box", "box"),
    "--cpu-threads": ("3", 3),
    "--unconfined": ("1", True),
    "--join": ("wss://hub:7667#token=t", "wss://hub:7667#token=t"),
    "--token-file": ("/etc/tokens", "/etc/tokens"),
    "--tls": ("1", True),
    "--tls-cert": ("c.pem", "c.pem"),
    "--tls-key": ("k.pem", "k.pem"),
    "--allow-host": ("Box.example:7000", ("box.example:7000",)),
    "--allow-peer": ("box:7667", ("box:7667",)),
    "--allow-origin": ("https://App.example:443", ("https://app.example",)),
    "--trusted-proxy": ("10.0.0.0/8", ("10.0.0.0/8",)),
    "--max-sessions": ("5", 5),
    "--max-session-memory": ("64MiB", 64 << 20),
    "--max-buffers": ("10", 10),
    "--max-programs": ("11", 11),
    "--max-graphs": ("12", 12),
    "--max-graphs-size": ("1MiB", 1 << 20),
    "--max-queue-size": ("2MiB", 2 << 20),
    "--max-queue-commands": ("13", 13),
    "--upload-rate": ("3MiB", 3 << 20),
    "--max-message-size": ("4MiB", 4 << 20),
    "--max-program-size": ("64 KiB", 64 << 10),
    "--cache-dir": ("/tmp/kept", "/tmp/kept"),
    "--cache-size": ("0", 0),
    "--max-connections-per-address": ("3", 3),
    "--compile-seconds": ("2.5", 2.5),
    "--launch-seconds": ("1", 1.0),
    "--idle-seconds": ("0", 0.0),
    "--resume-grace": ("5", 5.0),
    "--node-grace": ("5", 5.0),
    "--handshake-seconds": ("3", 3.0),
    "--log-level": ("DEBUG", "debug"),
    "--log-format": ("json", "json"),
    "--audit-log": ("/var/log/wsgrad.jsonl", "/var/log/wsgrad.jsonl"),
    "--ready-fd": ("7", 7),
    "--ready-file": ("/run/ready", "/run/ready"),
}
BAD = {
    "--host": "127.0.0.1:7667",
    "--port": "65536",
    "--device": "gpu*2",
    "--name": " ",
    "--cpu-threads": "0",
    "--allow-host": "http://box",
    "--allow-peer": "ws://box",
    "--allow-origin": "*",
    "--trusted-proxy": "proxy.example",
    "--max-sessions": "many",
    "--max-session-memory": "64 pounds",
    "--max-buffers": "-1",
    "--max-programs": "1.5",
    "--max-graphs": "0",
    "--max-graphs-size": "0",
    "--max-queue-size": "x",
    "--max-queue-commands": "0",
    "--upload-rate": "-1",
    "--max-message-size": "64KiB",
    "--max-program-size": "0",
    "--cache-size": "much",
    "--max-connections-per-address": "0",
    "--compile-seconds": "0",
    "--launch-seconds": "soon",
    "--idle-seconds": "nan",
    "--resume-grace": "-1",
    "--node-grace": "-1",
    "--handshake-seconds": "inf",
    "--log-level": "loud",
    "--log-format": "xml",
    "--ready-fd": "-2",
}


def extra(flag):
    return ["--tls-cert", "c.pem"] if flag == "--tls-key" else []


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_a_flag_and_its_variable_set_the_same(option):
    text, value = GOOD[option.flag]
    flag = [option.flag] if option.metavar == "" else [option.flag, text]
    by_flag = parse(flag + extra(option.flag), {})
    by_variable = parse(extra(option.flag), {option.variable: text})
    assert getattr(by_flag, option.attribute) == getattr(by_variable, option.attribute) == value
    assert getattr(Config(), option.attribute) != value


def test_a_flag_wins_over_its_variable_and_an_empty_variable_counts_as_unset():
    assert parse(["--port", "1"], {"WSGRAD_PORT": "2", "WSGRAD_HOST": ""}) == parse(["--port", "1"], {})


@pytest.mark.parametrize("flag", BAD)
@pytest.mark.parametrize("from_variable", [False, True], ids=["flag", "variable"])
def test_a_bad_value_ends_with_status_2_and_one_line_that_names_it(flag, from_variable, capsys):
    variable = next(option.variable for option in OPTIONS if option.flag == flag)
    arguments = [] if from_variable else [f"{flag}={BAD[flag]}"]
    environment = {variable: BAD[flag]} if from_variable else {}
    with pytest.raises(SystemExit) as caught:
        parse(arguments, environment)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"wsgrad-serve: {variable if from_variable else flag}: {BAD[flag]!r}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu"], "unrecognized arguments: --gpu"),
        (["--max-session", "3"], "unrecognized arguments"),
        (["--port"], "expected one argument"),
        (["--tls-key", "k.pem"], "--tls-key needs --tls-cert"),
        (["--device", "none,cpu"], "none can't stand beside other devices"),
        (["--device", "cpu*64,cpu"], "--device: 65 devices are more than 64"),
    ],
)
def test_wrong_use_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(arguments, {})
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_devices_add_up():
    assert parse(["--device", "cpu*2", "--device", "cpu, cpu"], {}).devices == ("cpu",) * 4
    assert parse(["--device", "none"], {}).devices == ()


def test_help_names_every_flag_in_groups(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in OPTIONS:
        assert f"  {option.flag}" in text
    for title, _ in _GROUPS:
        assert f"\n{title}:\n" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("65536", 65536), ("64MiB", 64 << 20), ("2gib", 2 << 30), ("1.5 KiB", 1536), ("3GB", 3 * 10**9)],
)
def test_sizes(text, nbytes):
    assert options.size(0)(text) == nbytes


@given(st.text(max_size=40))
@settings(max_examples=300)
def test_any_text_is_a_value_or_a_named_error(text):
    for option in OPTIONS:
        try:
            option.convert(text)
        except options.BadValue as exc:
            if option.flag != "--join":  # behind whose '#' a token stands
                assert repr(text) in str(exc)  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("localhost", ("localhost", None)),
        ("Box.Example.:80", ("box.example", 80)),
        ("[::1]:7667", ("::1", 7667)),
        ("[::1]", ("::1", None)),
        ("::1", None),
        ("a:b:1", None),
        ("box:", None),
        ("box:0", None),
        ("box:65536", None),
        ("box:٣", None),
        ("[::1", None),
        ("[box]:1", None),
        ("user@box", None),
        ("box/path", None),
        ("", None),
    ],
)
def test_host_headers_are_split_strictly(text, split):
    assert options.split_host(text) == split
