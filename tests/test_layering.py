"""Holds the source to the layers of the house: who may import whom, and where trio, cbor2 and sockets may appear."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "wsgrad"

# A layer may import itself and these. An entry with a dot allows that one module of a layer.
LAYERS = {
    "errors": set(),
    "_version": set(),
    "transport": {"errors"},
    "graph": {"errors"},
    # The messages fill five modules of transport; frames, connections and drivers are not for devices.
    "devices": {
        "graph",
        "errors",
        *(f"transport.{name}" for name in ("messages", "commands", "express", "fields", "tracing", "cbor")),
    },
    "server": {"transport", "graph", "devices", "errors"},
    "client": {"transport", "graph", "errors"},
    "cli": {"client", "server", "devices", "errors"},
    "tinygrad": {"client", "tinygrad_kernels", "tinygrad_profile"},
    "tinygrad_kernels": set(),
    "tinygrad_profile": {"client"},
    "__init__": {"client", "errors"},
}
# A node that dials in holds a socket of its own, so this one module of devices drives the transport.
EXTRA: dict[str, set[str]] = {}

# Modules that may import a library, by prefix; everything else in wsgrad may not.
LIBRARIES = {
    "cbor2": ("transport.cbor",),
    "trio_websocket": ("transport.handshake_trio",),
    "trio": ("transport.trio_driver", "transport.handshake_trio", "server", "client"),
    "wsproto": ("transport.handshake_blocking",),
    "asyncio": (),
    "blake3": ("client.blobs", "server.blobs"),
    "cryptography": ("server.selfsigned",),
    "segno": ("server.invitation",),
}
# The protocol does no I/O: bytes in, events out.
SANS_IO = ("transport.cbor", "transport.frames", "transport.connection", "transport.link")
SANS_IO += (
    "transport.messages",
    "transport.commands",
    "transport.fields",
    "transport.tracing",
    "graph",
    "client.core",
    "client.queue",
    "devices.executor",
    "server.tables",
)
IO_LIBRARIES = {"socket", "ssl", "select", "selectors", "subprocess", "trio"}


def module_name(path: Path) -> str:
    """Name a file by its dotted path below wsgrad; a package's __init__ by the package, wsgrad's own by "__init__"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import: in functions, under TYPE_CHECKING and by import_module too."""
    package = ["wsgrad"] + ([] if module == "__init__" else module.split(".") if is_package else module.split(".")[:-1])
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=target, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                start = ".".join(base + ([target] if target else []))
                for alias in names:
                    yield node.lineno, f"{start}.{alias.name}"
            case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """List what a module imports against the rules, as "line: reason"."""
    layer = module.split(".")[0]
    allowed = LAYERS[layer] | {layer, "_version"} | EXTRA.get(module, set())
    found = []
    for line, name in imports(source, module, is_package=is_package):
        top, _, inner = name.partition(".")
        if top == "wsgrad":
            # A public name of wsgrad itself comes from the client, whoever asks for it.
            target = inner if inner.split(".")[0] in LAYERS else "_version" if inner == "__version__" else "client"
            if not any(target == rule or target.startswith(f"{rule}.") for rule in allowed):
                found.append(f"{line}: {layer} may not import {name}")
        elif top in LIBRARIES and not within(module, LIBRARIES[top]):
            found.append(f"{line}: {top} may be imported by {', '.join(LIBRARIES[top]) or 'nobody'}")
        elif top in IO_LIBRARIES and within(module, SANS_IO):
            found.append(f"{line}: {module} does no I/O, so it may not import {top}")
    return found


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_module_imports_only_what_its_layer_may(path):
    module = module_name(path)
    assert module.split(".")[0] in LAYERS, f"{module} has no layer: add it to LAYERS with what it may import"
    assert violations(path.read_text(), module, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("client.core", "from wsgrad.server import hub"),
        ("client.core", "from wsgrad import server"),
        ("client.core", "def f():\n    import wsgrad.devices.cpu"),
        ("client.core", "from ..server.hub import Hub"),
        ("client.core", "import importlib\nimportlib.import_module('wsgrad.server')"),
        ("client.core", "import socket"),
        ("server.hub", "from wsgrad import Device"),
        ("devices.cpu", "from wsgrad.transport import link"),
        ("devices.cpu", "from wsgrad.transport.frames import mask"),
        ("devices.cpu", "import trio"),
        ("transport.frames", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import trio"),
        ("transport.url", "from wsgrad.graph import plan"),
        ("transport.messages", "import cbor2"),
        ("errors", "from .transport import messages"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("devices.cpu", "from wsgrad.transport import messages\nfrom wsgrad.transport.cbor import encode"),
        ("devices.cpu", "from ..transport.messages import Ack\nfrom . import memory"),
        ("client.device", "import numpy, trio\nfrom wsgrad import errors, __version__"),
        ("cli", "from wsgrad.client import bench\nimport wsgrad.server.config"),
    ],
)
def test_an_allowed_import_is_not_reported(module, source):
    assert violations(source, module) == []


def loaded_after(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter and return the names of all modules it left loaded."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["wsgrad", "wsgrad.errors", "wsgrad.devices", "wsgrad.devices.zygote"])
def test_a_node_process_loads_neither_numpy_nor_trio(module):
    assert loaded_after(f"import {module}") & {"numpy", "trio", "wsgrad.client", "wsgrad.server"} == set()
