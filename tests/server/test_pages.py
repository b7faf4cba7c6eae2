"""The pages over HTTP: which files there are, what guards them, and that wheel and sdist bring them along."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
from edge_port import serving
from server_process import environment, running_server

from wsgrad.server import pages

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {".html", ".js", ".css", ".svg"}


def page_files():
    return sorted(path for path in (ROOT / "browser").iterdir() if path.suffix in SHIPPED)


async def test_every_page_file_is_served_as_it_is_without_a_token():
    async with serving() as edge:
        assert page_files()
        for path in page_files():
            answer = await edge.ask(f"/{path.name}")
            assert (answer.status, answer.body) == (200, path.read_bytes())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.html", "text/html"), ("a.js", "text/javascript"), ("a.css", "text/css"), ("a.svg", "image/svg+xml")],
)
def test_each_kind_of_file_has_its_content_type(name, kind, tmp_path):
    (tmp_path / name).write_text("é")
    answer = pages.Pages(tmp_path).answer(f"/{name}")
    assert answer.content_type.partition(";")[0] == kind
    assert answer.body == "é".encode()


def test_the_two_pages_have_short_names(tmp_path):
    (tmp_path / "index.html").write_text("the page")
    (tmp_path / "status.html").write_text("the status")
    table = pages.Pages(tmp_path)
    assert table.answer("/").body == table.answer("/index.html").body == b"the page"
    assert table.answer("/status").body == b"the status"


def test_only_page_files_of_the_directory_itself_are_in_the_table(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("secret.json", "globals.d.ts", ".js", "below/a.js"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder.js").mkdir()
    table = pages.Pages(tmp_path)
    for route in ("/", "/status", "/secret.json", "/globals.d.ts", "/.js", "/below/a.js", "/a.js", "/folder.js"):
        assert route not in table


def test_a_file_that_vanished_is_a_404(tmp_path):
    (tmp_path / "a.js").write_text("")
    table = pages.Pages(tmp_path)
    (tmp_path / "a.js").unlink()
    assert table.answer("/a.js").status == 404


@pytest.mark.parametrize(
    "path",
    ["/tsconfig.json", "/globals.d.ts", "/..%2fpyproject.toml", "/../pyproject.toml", "/browser/cbor.js", "//cbor.js"],
)
async def test_nothing_from_the_wire_becomes_a_path(path):
    async with serving() as edge:
        assert (await edge.ask(path)).status == 404


async def test_page_files_ask_for_our_host_and_a_reading_method():
    async with serving() as edge:
        assert (await edge.ask("/cbor.js", host="attacker.example")).status == 421
        assert (await edge.ask("/cbor.js", method="POST")).status == 405
        head = await edge.ask("/cbor.js", method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == str((ROOT / "browser" / "cbor.js").stat().st_size)


async def test_pages_run_their_own_scripts_only_and_are_neither_framed_nor_kept():
    async with serving() as edge:
        headers = (await edge.ask("/cbor.js")).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["worker-src"] == policy["style-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert {"ws:", "wss:"} <= set(policy["connect-src"].split())
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        # What is no page may load nothing at all.
        assert "script-src" not in (await edge.ask("/healthz")).headers["content-security-policy"]


def build(what, source, target):
    """Build with the installed setuptools, so that no network is needed."""
    program = f"import setuptools.build_meta as b; print(b.build_{what}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        env=environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Made from a copy, because setuptools writes into the tree it builds."""
    directory = tmp_path_factory.mktemp("sdist")
    copy = directory / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("wsgrad", "browser"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return build("sdist", copy, directory)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Made from the sdist, as installers do where there is no wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    return build("wheel", directory / sdist.name.removesuffix(".tar.gz"), directory)


def test_the_wheel_holds_every_page_file_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = sorted(name.removeprefix("wsgrad/browser/") for name in names if name.startswith("wsgrad/browser/"))
    assert inside == [path.name for path in page_files()]
    assert not [name for name in names if name.startswith("browser/")]


def test_an_installed_package_serves_its_own_pages(wheel, tmp_path):
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    [site] = place.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)  # what installing a pure wheel does
    # The libraries it needs come from here; its own code must not.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(others))
    python = place / "bin" / "python"
    shown = subprocess.run(
        [python, "-P", "-c", "import wsgrad.server.pages as p; print(p.directory())"],
        env=environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert Path(shown.stdout.strip()) == (site / "wsgrad" / "browser").resolve()
    reader, writer = os.pipe()
    arguments = ["--port", "0", "--device", "none", "--ready-fd", str(writer)]
    process = subprocess.Popen(
        [python, "-P", "-m", "wsgrad.server", *arguments],
        pass_fds=(writer,),
        env=environment(PYTHONPATH=""),
        cwd=tmp_path,
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            url = f"http://127.0.0.1:{json.loads(lines.readline())['port']}"
            for path in page_files():
                with urllib.request.urlopen(f"{url}/{path.name}", timeout=10) as answer:
                    assert answer.read() == path.read_bytes()
            for route, name in (("/", "index.html"), ("/status", "status.html")):
                with urllib.request.urlopen(url + route, timeout=10) as answer:
                    assert answer.read() == (ROOT / "browser" / name).read_bytes()
    finally:
        process.terminate()
        process.wait(20)


def test_a_checkout_serves_its_pages(tmp_path):
    assert pages.directory() == ROOT / "browser"
    with (
        running_server(tmp_path, "--device", "none") as server,
        urllib.request.urlopen(f"http://127.0.0.1:{server.ready['port']}/cbor.js", timeout=10) as answer,
    ):
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
        assert answer.read() == (ROOT / "browser" / "cbor.js").read_bytes()
