"""Finds the C compiler of this machine and says how to run it confined; starts it only to ask for its version.

`WSGRAD_CC` names a compiler; otherwise clang is taken, else the one in the wheel `ziglang`, else gcc (which treats
vector extensions that others compile as mere warnings).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from wsgrad.devices import linux
from wsgrad.devices.sandbox import Job, Profile
from wsgrad.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE: Final = "source.c"
OUTPUT: Final = "program.so"
_HEADERS: Final = Path(__file__).parent / "include"
_FLAGS: Final = [
    "-nostdlib",
    "-shared",
    "-fPIC",
    "-O3",
    "-march=native",
    "-ffreestanding",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fdiagnostics-color=never",
    "-Wl,--hash-style=sysv",
    "-Werror=implicit-function-declaration",
    "-Werror=int-conversion",
    "-Werror=incompatible-pointer-types",
    "-std=gnu17",
    "-isystem",
    "include",
]
_EXTRA_FLAGS: Final = {
    "zig": ("-nostdlibinc", "-ferror-limit=20"),
    "clang": ("-nostdlibinc", "-ferror-limit=20"),
    "gcc": ("-fmax-errors=20", *(("-mno-outline-atomics",) if linux.MACHINE == "aarch64" else ())),
}


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler and what it needs to run.

    Attributes:
        kind: `clang`, `zig` or `gcc`.
        version: what it says about itself, for people.
        identity: changes whenever what it would produce may change.
        command: how to start it on this system; `mounts` say where its files appear in a private root.
    """

    kind: str
    version: str
    identity: str
    command: tuple[str, ...]
    mounts: tuple[tuple[str, str], ...]

    def job(self, source: bytes, profile: Profile, *, cpu_seconds: int = 5, wall_seconds: float = 20.0) -> Job:
        """How to compile `source` in the given profile."""
        command = list(self.command)
        if profile is Profile.NAMESPACES:
            command[0] = self.inside(command[0])
        flags = [*_FLAGS, *_EXTRA_FLAGS[self.kind], SOURCE, "-o", OUTPUT]
        files = {SOURCE: source}
        for header in sorted(_HEADERS.glob("*.h")):
            files[f"include/{header.name}"] = header.read_bytes()
        environment = {"PATH": os.defpath, "LC_ALL": "C", "HOME": "{work}", "TMPDIR": "{work}"}
        environment |= {f"ZIG_{scope}_CACHE_DIR": "{work}/cache-" + scope.lower() for scope in ("GLOBAL", "LOCAL")}
        return Job(
            command=(*command, *flags),
            files=files,
            output=OUTPUT,
            mounts=self.mounts,
            environment=environment,
            cpu_seconds=cpu_seconds,
            wall_seconds=wall_seconds,
        )

    def to_map(self) -> dict[str, object]:
        """This compiler in plain types, for another process."""
        return {
            "kind": self.kind,
            "version": self.version,
            "identity": self.identity,
            "command": list(self.command),
            "mounts": [list(mount) for mount in self.mounts],
        }

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> Compiler:
        """The compiler that `to_map` described; only ever read from a process of our own."""
        return cls(
            kind=values["kind"],
            version=values["version"],
            identity=values["identity"],
            command=tuple(values["command"]),
            mounts=tuple((host, inside) for host, inside in values["mounts"]),
        )

    def inside(self, path: str) -> str:
        """Where a path of this system appears in the private root."""
        for host, inside in self.mounts:
            if path == host or path.startswith(host + "/"):
                return inside + path[len(host) :]
        return path

    def clean(self, messages: bytes) -> str:
        """The compiler's messages without any path of this machine; names of the user's files, lines, columns stay."""
        text = messages.decode(errors="replace")
        for host, inside in sorted(self.mounts, key=lambda mount: -len(mount[0])):
            for path in (host, inside):
                text = re.sub(re.escape(path) + r"(?:/[\w.+-]+)*/", "", text)
                text = text.replace(path, os.path.basename(path))
        # Without a private root it runs in a directory of its own, whose name means nothing to anybody.
        return re.sub(r"(?:/[\w.+-]+)*/wsgrad-compile-[^/\s:]*/", "", text).strip()


def find_compiler(environment: dict[str, str] | None = None) -> Compiler:
    """The compiler to use on this machine.

    Raises:
        DeviceError: there is none, or the one that `WSGRAD_CC` names does not work; says what to install.
    """
    values = os.environ if environment is None else environment
    wanted = values.get("WSGRAD_CC", "").strip()
    if wanted:
        command = shlex.split(wanted)
        path = shutil.which(command[0])
        if path is None:
            raise DeviceError(f"WSGRAD_CC is {wanted!r}, but there is no such program")
        return _describe(path)
    for name in ("clang", "zig", "gcc", "cc"):
        path = _zig_of_wheel() or shutil.which(name) if name == "zig" else shutil.which(name)
        if path is not None:
            return _describe(path)
    raise DeviceError(
        "the cpu device needs a C compiler and found none; install one with `pip install wsgrad[cpu]` (it brings zig), "
        "install clang, or name one in WSGRAD_CC"
    )


def _zig_of_wheel() -> str | None:
    # find_spec runs nothing of the package, so that a zygote stays small.
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    path = os.path.join(os.path.dirname(spec.origin), "zig")
    return path if os.access(path, os.X_OK) else None


def _describe(path: str) -> Compiler:
    real = os.path.realpath(path)
    if os.path.basename(real).startswith("zig"):
        version = "zig " + _ask(path, "version")
        home = os.path.dirname(real)
        mounts = ((real, "/zig/zig"), *((f"{home}/{name}", f"/zig/{name}") for name in ("lib",)))
        library = os.path.join(home, "lib")
        if not os.path.isdir(library):
            # Distributions split it: the program asks for ../lib/zig.
            mounts = ((real, "/zig/zig"), (os.path.join(os.path.dirname(home), "lib", "zig"), "/zig/lib"))
        return Compiler("zig", version, _identity(real, version), (real, "cc"), mounts)
    version = _ask(path, "--version").splitlines()[0]
    if "clang" in version:
        folders = [_ask(path, "-print-resource-dir")]
        tools = [real, _ask(path, "-print-prog-name=ld")]
        kind = "clang"
    elif "Free Software Foundation" in _ask(path, "--version") and _ask(path, "-dumpmachine"):
        folders = [os.path.dirname(_ask(path, "-print-libgcc-file-name"))]
        tools = [real, *(_ask(path, f"-print-prog-name={tool}") for tool in ("cc1", "collect2", "as", "ld"))]
        plugin = _ask(path, "-print-prog-name=liblto_plugin.so")
        tools += [plugin] if os.path.isabs(plugin) else []
        kind = "gcc"
    else:
        raise DeviceError(f"{path} is neither clang, gcc nor zig: it calls itself {version!r}")
    tools = [found for tool in tools if (found := shutil.which(tool) or tool) and os.path.exists(found)]
    paths = {os.path.abspath(p): None for p in [*tools, *folders, *_libraries(tools)]}
    return Compiler(kind, version, _identity(real, version), (real,), tuple((p, p) for p in paths))


def _libraries(tools: list[str]) -> list[str]:
    """The shared libraries that the tools load, by their absolute paths (`ldd`, which comes with the C library)."""
    listing = subprocess.run(["ldd", *tools], capture_output=True, text=True, check=False, env={"PATH": os.defpath})
    return sorted(set(re.findall(r"(/\S+) \(0x", listing.stdout)))


def _ask(path: str, *arguments: str) -> str:
    try:
        answer = subprocess.run(
            [path, *arguments], capture_output=True, text=True, check=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"the compiler {path} does not work: {error}") from error
    return answer.stdout.strip()


def _identity(path: str, version: str) -> str:
    status = os.stat(path)
    parts = (path, version, status.st_size, status.st_mtime_ns, _FLAGS, sorted(_EXTRA_FLAGS.items()))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
