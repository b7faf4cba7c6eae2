"""Checks of the project as a whole: formatting, lint, types, the shape of modules, the browser's scripts, the setup."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NODE_IS_REQUIRED = os.environ.get("WSGRAD_REQUIRE_NODE") == "1" or os.environ.get("CI") == "true"
MODULES = sorted(path for path in (ROOT / "wsgrad").rglob("*.py") if path.stat().st_size)  # a package may be empty


def check(*command: str) -> None:
    """Run a command in the checkout; its whole output is the failure's message."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.fail(f"{' '.join(command)}\n{result.stdout}{result.stderr}", pytrace=False)


def test_python_is_formatted():
    check(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_python_has_no_lint():
    check(sys.executable, "-m", "ruff", "check", ".")


def test_types_are_complete_and_right():
    check(sys.executable, "-m", "mypy", "--strict", "wsgrad")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_for_and_holds_one_idea(path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), "the first line of a module says what it is for"
    assert len(source.splitlines()) <= 500, "a second idea hides in a module of this length: give it its own"


def test_browser_scripts_have_right_types():
    if not shutil.which("node"):
        if NODE_IS_REQUIRED:
            pytest.fail("Node is missing, and CI or WSGRAD_REQUIRE_NODE=1 asks for it; install nodejs and npm")
        pytest.skip("Node is missing: JavaScript checks need nodejs and npm")
    tsc = ROOT / "node_modules" / "typescript" / "bin" / "tsc"
    if not tsc.exists():
        if NODE_IS_REQUIRED:
            pytest.fail("TypeScript is missing; scripts/test installs it with npm")
        pytest.skip("TypeScript is missing: scripts/test installs it with npm where Node, npm and a network are")
    check("node", str(tsc), "--project", "browser")


def test_scripts_have_no_syntax_errors():
    for name in ("scripts/_setup", "scripts/demo", "scripts/test", ".ci/run"):
        check("bash", "-n", name)


def test_setup_names_what_is_missing_where_python_is_too_old(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    script = f"set -e; . '{ROOT}/scripts/_setup'; _find_python"
    result = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PYTHON": str(old)}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "needs Python 3.11 or newer" in result.stderr
    assert str(old) in result.stderr
