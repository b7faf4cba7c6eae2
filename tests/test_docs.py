"""Runs what the documentation shows, and the example, against real servers; checks links and generated parts."""

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import wsgrad

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "examples" / "train_digits.py"
RING = ROOT / "examples" / "ring_allreduce.py"
BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runnable(page: str) -> str:
    """Return the page's Python blocks as one script, each line at the number it has on the page."""
    lines = [""] * (page.count("\n") + 1)
    for match in BLOCK.finditer(page):
        if match[1] == "python" and "no-run" not in match[2]:
            first = page.count("\n", 0, match.start(3))
            code = match[3].splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines).rstrip()


def run(*command: str, cwd: Path = ROOT, timeout: float = 120) -> str:
    """Run a command without the caller's wsgrad settings and return its output; a failure shows all of it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WSGRAD_")}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    if result.returncode:
        pytest.fail(f"{' '.join(command)}\n{result.stdout}{result.stderr}", pytrace=False)
    return result.stdout


# The tutorial is the example, which has a test of its own.
@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "tutorial.md"], ids=name)
def test_python_on_a_page_runs(path, tmp_path):
    script = runnable(path.read_text())
    if not script:
        assert "```python" not in path.read_text()
        return
    file = tmp_path / f"page_{path.stem}.py"  # a page may have the name of a library
    file.write_text(script)
    run(sys.executable, "-W", "error", str(file))


def test_tutorial_is_the_whole_example_in_order():
    blocks = BLOCK.finditer((ROOT / "docs" / "tutorial.md").read_text())
    code = "\n".join(match[3] for match in blocks if match[1] in ("python", "c"))
    shown = [line for line in code.splitlines() if line]
    assert shown == [line for line in EXAMPLE.read_text().splitlines() if line]


def test_protocol_tables_are_those_of_the_message_classes():
    run(sys.executable, "scripts/update-docs", "--check")


def test_protocol_page_has_each_message_and_command_of_the_schema_and_no_other():
    schema = (ROOT / "wsgrad" / "transport" / "protocol.cddl").read_text()
    page = (ROOT / "docs" / "protocol.md").read_text()
    for what in ("message", "command"):
        defined = re.findall(rf"^([a-z-]+)-{what} = \[ (\d+)", schema, re.MULTILINE)
        table = page.split(f"<!-- {what}s: ")[1].split(f"<!-- end of {what}s")[0]
        shown = re.findall(r"^\| (\d+)(?: \*bulk\*)? \| (\w+) \|", table, re.MULTILINE)
        assert len(defined) > 10
        assert sorted((int(kind), name.replace("-", "")) for name, kind in defined) == sorted(
            (int(kind), name.lower()) for kind, name in shown
        )


def test_server_page_has_the_flags_of_the_help_page():
    shown = re.findall(r"^  (--[a-z-]+)", run(sys.executable, "-m", "wsgrad.server", "--help"), re.MULTILINE)
    page = (ROOT / "docs" / "server.md").read_text()
    assert len(shown) > 20
    assert set(re.findall(r"`(--[a-z-]+)[ `]", page)) == set(shown)


def test_client_page_has_every_public_name():
    page = (ROOT / "docs" / "client.md").read_text()
    faces = (wsgrad.Server, wsgrad.Device, wsgrad.Buffer, wsgrad.Program, wsgrad.Graph)
    names = {attribute for face in faces for attribute in dir(face) if not attribute.startswith("_")}
    names |= {attribute for attribute in dir(wsgrad) if attribute != "__version__"}
    assert not {attribute for attribute in names if not re.search(rf"\b{attribute}\b", page)}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        if "://" in file:
            continue
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_case_names_tests_that_exist():
    rows = (ROOT / "docs" / "cases.md").read_text().split("|---|---|---|---|\n")[1].splitlines()
    assert len(rows) >= 21
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit(" | ", 1)[1]) for row in rows]
    assert all(named), "a case without a test"
    for file, test in itertools.chain(*named):
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"


def accuracy(output: str) -> float:
    """Find the line `accuracy NN.N %`, which stands after the training and before the table."""
    match = re.search(r"^accuracy (\d+\.\d) %$", output, re.MULTILINE)
    assert match, output
    for figure in ("round trip", "upload", "download", "launches"):
        assert figure in output[match.end() :]
    return float(match[1])


def test_example_learns_the_digits_through_an_embedded_server():
    assert accuracy(run(sys.executable, str(EXAMPLE))) >= 95


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "ws://127.0.0.1:1"], r"ConnectionLost: no server at ws://127\.0\.0\.1:1.*wsgrad-serve"),
        (["--url", "http://x"], "InvalidUrl: .*ws://"),
        (["--device", "nosuch"], "DeviceError: there is no device 'nosuch'; .* offers "),
    ],
)
def test_example_says_in_a_line_what_is_wrong(arguments, said):
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 1
    assert re.fullmatch(said + ".*\n", ended.stderr), ended.stderr


def test_example_ends_on_ctrl_c_without_a_word():
    terminal, theirs = os.openpty()
    command = [sys.executable, str(EXAMPLE), "--epochs", "1000000"]
    with open(terminal, "rb", buffering=0) as shown, open(theirs, "wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, process_group=0)
        try:
            text = b""
            while b"loss" not in text:
                text += shown.read(1000)
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert (process.wait(60), said) == (130, b"")
        finally:
            process.kill()
            process.communicate()


def test_ring_of_two_servers_reaches_the_weights_of_one_device():
    output = run(sys.executable, "-W", "error", str(RING), "--steps", "6")
    assert "6 steps on 4 devices of 2 servers" in output
    assert "copies through this client: 0" in output
    assert "the same weights on all of them, and as on one device" in output


@pytest.fixture
def demo() -> str:
    if not (ROOT / ".venv" / ".setup").exists():
        pytest.skip("scripts/demo would set up .venv here; run scripts/test, which has done it by then")
    return str(ROOT / "scripts" / "demo")


def server_process(line: str) -> Path:
    match = re.fullmatch(r"server ws://127\.0\.0\.1:\d+\S* \(process (\d+)\)", line.rstrip())
    assert match, line
    return Path("/proc", match[1])


def test_demo_learns_the_digits_and_leaves_no_server_behind(demo):
    output = run(demo, "--epochs", "10")
    assert accuracy(output) >= 95
    assert not server_process(output.splitlines()[0]).exists()


def test_demo_ends_its_server_on_ctrl_c(demo):
    command = [demo, "--epochs", "1000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            server = server_process(process.stdout.readline())
            assert server.exists()
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=30)
    assert process.returncode == 130
    assert not server.exists()
