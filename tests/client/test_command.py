"""The command `wsgrad`: tables for people, JSON for programs, and one line for whatever goes wrong."""

import json
import socket

import pytest

from wsgrad import cli
from wsgrad.client.embedded import EmbeddedServer


def run(capsys, *arguments):
    """Run the command; gives its status, and what it wrote to standard output and standard error."""
    status = cli.main(arguments)
    written = capsys.readouterr()
    return status, written.out, written.err


def test_devices_are_listed_for_people_and_for_programs(url, capsys):
    status, table, _ = run(capsys, "devices", url)
    assert status == 0
    assert "cpu" in table
    status, text, _ = run(capsys, "devices", url, "--json")
    [device] = json.loads(text)
    assert (status, device["kind"], device["dialects"]) == (0, "cpu", ["c"])
    assert url.partition("#token=")[2] not in table + text


def test_bench_measures_what_it_says(url, capsys, tmp_path):
    file = tmp_path / "figures.json"
    status, _, _ = run(capsys, "bench", url, "--max-size", "1", "--json", str(file))
    figures = json.loads(file.read_text())["figures"]
    assert status == 0
    assert {figure["name"] for figure in figures} == {
        "open a session and a device",
        "round trip",
        "launches",
        "upload",
        "download",
    }
    assert {figure["nbytes"] for figure in figures if figure["name"] == "upload"} == {4, 1 << 10, 32 << 10, 1 << 20}
    assert all(figure["value"] > 0 for figure in figures)


def test_doctor_says_what_works_and_its_status_whether_all_of_it_does(capsys):
    status, text, _ = run(capsys, "doctor", "--json", "-")
    findings = json.loads(text)
    assert {"system", "python", "confinement of programs", "cpu: compiler"} <= {f["subject"] for f in findings}
    assert status == (1 if any(finding["ok"] is False for finding in findings) else 0)


def test_what_goes_wrong_is_one_line_and_status_1(url, capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"ws://127.0.0.1:{listener.getsockname()[1]}"
    for arguments, said in (
        (["devices", nobody], "refused"),
        (["devices", "http://localhost"], "ws://"),
        (["devices", url.partition("#")[0]], "token"),
        (["devices", url, "--json", str(tmp_path / "no" / "such.json")], "No such file"),
        (["bench", url, "--device", "gpu"], "no device 'gpu'"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out, err.count("\n")) == (1, "", 1), (arguments, err)
        assert err.startswith("wsgrad: ")
        assert said in err


def test_a_server_that_never_answers_is_one_line_too(capsys, monkeypatch):
    connect = cli.wsgrad.connect
    monkeypatch.setattr(cli.wsgrad, "connect", lambda url: connect(url, timeout=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status, _, err = run(capsys, "devices", f"ws://127.0.0.1:{silent.getsockname()[1]}")
    assert (status, err.count("\n")) == (1, 1)


def test_a_server_without_devices_has_nothing_to_measure(capsys, monkeypatch):
    monkeypatch.setenv("WSGRAD_DEVICE", "none")
    server = EmbeddedServer(timeout=30)
    try:
        assert run(capsys, "devices", server.url, "--json", "-")[:2] == (0, "[]\n")
        status, _, err = run(capsys, "bench", server.url)
        assert status == 1
        assert "nothing to measure" in err
    finally:
        server.stop()


@pytest.mark.parametrize("size", ["-1", "0", "x", "100000", "1.5", "1" * 5000])
def test_a_size_that_bench_can_not_measure_is_named(size, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", f"--max-size={size}"])
    assert caught.value.code == 2
    assert "is not a number of MiB from 1 to 256" in capsys.readouterr().err
