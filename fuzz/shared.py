"""What targets share: modules of the tests by their path, and programs compiled once in a directory that goes again."""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"


def load_test_module(path: str) -> Any:  # noqa: ANN401  (a module of the tests has no types)
    """The module of the tests with this path, `folder/name`; its neighbours can be imported by it as under pytest."""
    folder = TESTS / Path(path).parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(Path(path).name)


@cache
def toolbox(*flags: str) -> Any:  # noqa: ANN401
    """The tests' compiler of programs, with more flags for it."""
    from wsgrad.devices import toolchain

    toolchain._FLAGS.extend(flags)
    folder = tempfile.mkdtemp(prefix="wsgrad-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return load_test_module("devices/device_rigs").Toolbox(Path(folder))
