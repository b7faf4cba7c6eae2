"""The command itself, as a real process: what it says, how it stops, what it leaves behind."""

import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.request

import pytest
from server_process import environment, running_server

NO_DEVICE = ("--device", "none")
COMMAND = (sys.executable, "-m", "wsgrad.server")


def run(*arguments, **variables):
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(**variables), capture_output=True, text=True, timeout=30
    )


def ask(ready, path, token):
    request = urllib.request.Request(
        f"http://127.0.0.1:{ready['port']}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_it_serves_its_device_until_a_signal_and_exits_with_0(tmp_path):
    with running_server(tmp_path, "--name", "box", "--log-level", "debug") as server:
        ready = server.ready
        assert ready["url"] == f"ws://127.0.0.1:{ready['port']}/#token={ready['token']}"
        assert ready["pid"] == server.process.pid
        assert len({ready["token"], ready["node_token"], ready["admin_token"]}) == 3
        document = ask(ready, "/status.json", ready["token"])
        assert [device["id"] for device in document["devices"]] == ["box/cpu/0"]
        assert server.stop(signal.SIGTERM) == 0
        assert "stopping: SIGTERM" in server.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_its_port_can_be_bound_again_at_once_after_a_signal(number, tmp_path):
    with running_server(tmp_path, *NO_DEVICE) as server:
        port = server.ready["port"]
        with socket.create_connection(("127.0.0.1", port)):
            assert server.stop(number) == 0
        with running_server(tmp_path, *NO_DEVICE, port=str(port)) as again:
            assert again.ready["port"] == port
            assert again.stop() == 0


def test_it_ends_when_the_reader_of_its_ready_pipe_is_gone(tmp_path):
    with running_server(tmp_path, *NO_DEVICE) as server:
        server.reader.close()
        assert server.process.wait(10) == 0
        assert "the reader of --ready-fd is gone" in server.log()


def test_a_file_of_tokens_that_cannot_be_written_is_named_in_one_line(tmp_path):
    done = run("--port", "0", *NO_DEVICE, "--ready-file", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"wsgrad-serve: {tmp_path}: Is a directory"
    done = run("--port", "0", *NO_DEVICE, HOME="/proc/nobody", XDG_RUNTIME_DIR="", XDG_STATE_HOME="")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("wsgrad-serve: /proc/nobody")
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_it_ends_with_its_parent_even_on_kill_9(tmp_path):
    parent = f"""
import os, subprocess, sys, time
reader, writer = os.pipe()
arguments = ["--port", "0", "--device", "none", "--ready-fd", str(writer)]
child = subprocess.Popen([*{COMMAND!r}, *arguments], pass_fds=(writer,))
os.close(writer)
print(os.read(reader, 65536).decode(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment()) as process:
        ready = json.loads(process.stdout.readline())
        watched = os.pidfd_open(ready["pid"])
        process.kill()
    import select

    poll = select.poll()
    poll.register(watched, select.POLLIN)
    try:
        assert poll.poll(10_000), "the server still runs"
    finally:
        os.close(watched)


def test_a_ready_file_is_private_and_goes_with_the_server(tmp_path):
    path = tmp_path / "ready.json"
    with running_server(tmp_path, *NO_DEVICE, "--ready-file", str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == server.ready
        server.stop()
    assert not path.exists()


def test_without_a_terminal_generated_tokens_go_to_a_private_file_and_nowhere_else(tmp_path):
    with subprocess.Popen(
        [*COMMAND, "--port", "0", *NO_DEVICE],
        env=environment(XDG_RUNTIME_DIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        path = re.search(r"the tokens of this server are in (\S+)", "".join(lines))[1]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with open(path) as file:
            tokens = json.load(file)
        process.send_signal(signal.SIGTERM)
        output = "".join(lines) + process.stdout.read()
        assert process.wait(10) == 0
    assert re.search(r"^wsgrad \S+ on ws://127\.0\.0\.1:\d+$", output, re.MULTILINE)
    for token in (tokens["client"], tokens["node"], tokens["admin"]):
        assert token not in output
    assert not os.path.exists(path)


def test_a_terminal_is_shown_the_url_with_its_token(tmp_path):
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "--port", "0", *NO_DEVICE],
        env=environment(XDG_RUNTIME_DIR=str(tmp_path)),
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    ) as process:
        os.close(secondary)
        output = ""
        while "ADMIN_TOKEN" not in output:
            output += os.read(primary, 4096).decode()
        port, token = re.search(r"connect with ws://127\.0\.0\.1:(\d+)/#token=([\w-]+)", output).groups()
        assert ask({"port": port}, "/status.json", token)["devices"] == []
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    os.close(primary)
    assert list(tmp_path.iterdir()) == []


def test_given_tokens_are_used_and_leave_the_environment_of_child_processes(tmp_path):
    given = {"WSGRAD_TOKEN": "c" * 20, "WSGRAD_NODE_TOKEN": "n" * 20, "WSGRAD_ADMIN_TOKEN": "a" * 20}
    with running_server(tmp_path, variables=given) as server:
        assert server.ready["token"] == "c" * 20
        assert server.ready["node_token"] == "n" * 20
        assert ask(server.ready, "/status.json", "a" * 20)["processes"] == 0
        pid = server.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
        assert children
        for child in children:
            with open(f"/proc/{child}/environ", "rb") as file:
                variables = file.read()
            assert b"TOKEN" not in variables
        server.stop()
    for child in children:
        assert not os.path.exists(f"/proc/{child}")


def test_a_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port), *NO_DEVICE)
    assert result.returncode == 1
    assert f"wsgrad-serve: 127.0.0.1 port {port}: " in result.stderr
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("--port", "x"), {}, "--port: 'x'"),
        ((), {"WSGRAD_MAX_SESSIONS": "none"}, "WSGRAD_MAX_SESSIONS: 'none'"),
        ((), {"WSGRAD_TOKEN": "with space"}, "WSGRAD_TOKEN: a token is"),
        ((), {"WSGRAD_TOKEN": "same-token-twice-1", "WSGRAD_NODE_TOKEN": "same-token-twice-1"}, "must differ"),
        (("--token-file", "/nonexistent"), {}, "/nonexistent can't be read"),
        (("--tls-cert", "/nonexistent"), {}, "--tls-cert: /nonexistent can't be read"),
        (("--ready-fd", "777"), {}, "--ready-fd: 777 is not an open descriptor"),
        (("--ready-file", "/nonexistent/typo/x"), {}, "there is no directory /nonexistent/typo"),
        (("--tls-cert", __file__), {}, f"--tls-cert: {__file__} holds no certificate in PEM"),
        (("--tls", "--tls-cert", "c.pem"), {}, "use one of them"),
    ],
)
def test_a_wrong_setting_ends_with_status_2_and_names_it(arguments, variables, message):
    result = run(*arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_beyond_loopback_without_tls_it_warns(tmp_path):
    with running_server(tmp_path, *NO_DEVICE, "--host", "0.0.0.0") as server:
        assert server.ready["host"] == "127.0.0.1"
        server.stop()
        assert "WARNING" in server.log()
        assert "in the clear" in server.log()
