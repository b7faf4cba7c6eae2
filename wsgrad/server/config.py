"""The server's settings from flags and `WSGRAD_*` variables, each checked once; it opens no file and no socket."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NoReturn

from wsgrad.server import options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROGRAM = "wsgrad-serve"


def _default_session_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return 4 << 30


def _default_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _default_name() -> str:
    name = re.sub(r"[^a-z0-9-]+", "-", platform.node().partition(".")[0].lower()).strip("-")
    return name or "server"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `wsgrad-serve` can be told. Sizes are bytes, times are seconds.

    Attributes:
        devices: the kind of each device to offer, such as `("cpu", "cpu", "webgpu:1")`, where `webgpu` stands for
            every adapter; empty for none.
        idle_seconds: 0 stands for no limit, as for `upload_rate`.
        cpu_threads: threads of each cpu device.
        ready_fd: -1 for none.
    """

    host: str = "127.0.0.1"
    port: int = 7667
    devices: tuple[str, ...] = ("cpu",)
    name: str = field(default_factory=_default_name)
    cpu_threads: int = field(default_factory=_default_threads)
    unconfined: bool = False
    join: str = field(default="", repr=False)
    token_file: str = ""
    self_signed: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    allow_peers: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    max_sessions: int = 64
    max_session_memory: int = field(default_factory=_default_session_memory)
    max_buffers: int = 60_000
    max_programs: int = 4096
    max_graphs: int = 1024
    max_graphs_size: int = 64 << 20
    max_queue_size: int = 32 << 20
    max_queue_commands: int = 1 << 20
    upload_rate: int = 0
    max_message_size: int = 2 << 20
    max_program_size: int = 1 << 20
    max_connections_per_address: int = 64
    cache_dir: str = ""
    cache_size: int = 4 << 30
    compile_seconds: float = 5.0
    launch_seconds: float = 30.0
    idle_seconds: float = 86_400.0
    resume_grace: float = 60.0
    node_grace: float = 15.0
    handshake_seconds: float = 10.0
    log_level: str = "info"
    log_format: str = "text"
    audit_log: str = ""
    ready_fd: int = -1
    ready_file: str = ""

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.self_signed or bool(self.tls_cert)


@dataclass(frozen=True, slots=True)
class _Option:
    flag: str
    attribute: str
    metavar: str
    convert: Callable[[str], object]
    help: str
    many: bool = False

    @property
    def variable(self) -> str:
        return "WSGRAD_" + self.flag.removeprefix("--").replace("-", "_").upper()


_CHUNK_MESSAGE = (1 << 20) + (1 << 16)  # a chunk of a transfer must fit

_GROUPS: tuple[tuple[str, tuple[_Option, ...]], ...] = (
    (
        "where to listen",
        (
            _Option("--host", "host", "ADDRESS", options.listen_host, "address or name to listen on"),
            _Option("--port", "port", "N", options.integer(0, 65535), "port to listen on; 0 takes a free one"),
            _Option(
                "--tls",
                "self_signed",
                "",
                options.boolean,
                "serve wss:// and https:// with a certificate of this machine's own, made and kept by itself",
            ),
            _Option(
                "--tls-cert", "tls_cert", "FILE", options.word, "certificate chain in PEM: serve wss:// and https://"
            ),
            _Option("--tls-key", "tls_key", "FILE", options.word, "its private key, where it is not in the same file"),
        ),
    ),
    (
        "what to offer",
        (
            _Option(
                "--device",
                "devices",
                "KIND",
                options.device,
                "cpu, cpu*4 for four, webgpu, webgpu:1, tinygrad:CL, none",
                many=True,
            ),
            _Option("--name", "name", "NAME", options.word, "this machine's name in device ids"),
            _Option("--cpu-threads", "cpu_threads", "N", options.integer(1, 1024), "threads of each cpu device"),
            _Option(
                "--unconfined",
                "unconfined",
                "",
                options.boolean,
                "offer cpu although this system can't confine programs",
            ),
            _Option(
                "--join",
                "join",
                "URL",
                options.hub,
                "lend the devices to the server there instead of listening; its node token stands in "
                "WSGRAD_NODE_TOKEN, or behind the URL as #token=",
            ),
        ),
    ),
    (
        "who may come in",
        (
            _Option(
                "--token-file",
                "token_file",
                "FILE",
                options.word,
                "tokens `client`, `node`, `admin`: JSON or NAME=VALUE lines",
            ),
            _Option(
                "--allow-host", "allow_hosts", "HOST[:PORT]", options.allowed_host, "further Host to accept", many=True
            ),
            _Option(
                "--allow-origin", "allow_origins", "ORIGIN", options.allowed_origin, "web origin to accept", many=True
            ),
            _Option(
                "--allow-peer",
                "allow_peers",
                "HOST[:PORT]",
                options.allowed_host,
                "server to send to directly for a client that uses both; without it those of this machine, "
                "where this one listens on loopback",
                many=True,
            ),
            _Option(
                "--trusted-proxy",
                "trusted_proxies",
                "ADDRESS",
                options.network,
                "reverse proxy (or network of them) whose X-Forwarded-For, -Proto and -Host headers count",
                many=True,
            ),
            _Option(
                "--max-connections-per-address",
                "max_connections_per_address",
                "N",
                options.integer(1),
                "connections of one address at a time",
            ),
            _Option(
                "--handshake-seconds",
                "handshake_seconds",
                "S",
                options.seconds(0.1),
                "time from connecting to the end of the opening handshake",
            ),
        ),
    ),
    (
        "limits",
        (
            _Option("--max-sessions", "max_sessions", "N", options.integer(1), "sessions at a time"),
            _Option("--max-session-memory", "max_session_memory", "SIZE", options.size(1), "buffers of one session"),
            _Option(
                "--max-buffers",
                "max_buffers",
                "N",
                options.integer(1, 1 << 31),
                "buffers and views of a session's device",
            ),
            _Option(
                "--max-programs", "max_programs", "N", options.integer(1, 1 << 31), "programs of a session's device"
            ),
            _Option("--max-graphs", "max_graphs", "N", options.integer(1, 1 << 20), "graphs of one session"),
            _Option("--max-graphs-size", "max_graphs_size", "SIZE", options.size(1), "what they take together"),
            _Option(
                "--max-queue-size",
                "max_queue_size",
                "SIZE",
                options.size(1),
                "commands for a session's device that wait to be run",
            ),
            _Option("--max-queue-commands", "max_queue_commands", "N", options.integer(1), "how many of them"),
            _Option(
                "--upload-rate",
                "upload_rate",
                "SIZE",
                options.size(0),
                "uploads of one session each second, as chunks; 0 for no limit",
            ),
            _Option(
                "--max-message-size", "max_message_size", "SIZE", options.size(_CHUNK_MESSAGE), "one message of a peer"
            ),
            _Option("--max-program-size", "max_program_size", "SIZE", options.size(1), "source of one program"),
            _Option(
                "--cache-size", "cache_size", "SIZE", options.size(0), "uploads kept for clients that ask; 0 for none"
            ),
            _Option("--cache-dir", "cache_dir", "DIR", options.word, "where [~/.cache/wsgrad/blobs]"),
            _Option("--compile-seconds", "compile_seconds", "S", options.seconds(0.1), "compiling one program"),
            _Option("--launch-seconds", "launch_seconds", "S", options.seconds(0.01), "one launch of a program"),
            _Option(
                "--idle-seconds", "idle_seconds", "S", options.seconds(0), "a session that does nothing; 0 for no limit"
            ),
            _Option(
                "--resume-grace", "resume_grace", "S", options.seconds(0), "a session that has lost its connection"
            ),
            _Option("--node-grace", "node_grace", "S", options.seconds(0), "a node that has lost its connection"),
        ),
    ),
    (
        "logs and scripts",
        (
            _Option(
                "--log-level",
                "log_level",
                "LEVEL",
                options.choice("debug", "info", "warning", "error"),
                "debug to error",
            ),
            _Option("--log-format", "log_format", "FORMAT", options.choice("text", "json"), "text or json"),
            _Option(
                "--audit-log",
                "audit_log",
                "FILE",
                options.word,
                "append who connected, as what and until when, and who was refused, as lines of JSON (mode 0600)",
            ),
            _Option(
                "--ready-fd",
                "ready_fd",
                "N",
                options.integer(0, 1 << 20),
                "when accepting connections, write a line of JSON (URL, tokens, pid) to this descriptor; "
                "end when its other end is closed",
            ),
            _Option("--ready-file", "ready_file", "FILE", options.word, "write the same line to a file of mode 0600"),
        ),
    ),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def fail(message: str) -> NoReturn:
    """End the process with status 2: a setting is wrong."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """The settings. A flag wins over its variable; an empty variable counts as not set.

    Raises:
        SystemExit: status 2 and one line on standard error that names the flag or variable and its value; status 0
            after `--help` or `--version`.
    """
    flags = vars(_parser().parse_args(arguments))
    values: dict[str, object] = {}
    for _, group in _GROUPS:
        for option in group:
            given = flags[option.attribute]
            source = option.flag
            if given is None and environment.get(option.variable):
                given = [environment[option.variable]]
                source = option.variable
            if given is not None:
                values[option.attribute] = _convert(option, source, given)
    config = Config(**values)  # type: ignore[arg-type]
    if config.self_signed and config.tls_cert:
        fail("--tls makes a certificate, and --tls-cert gives one: use one of them")
    if config.tls_key and not config.tls_cert:
        fail("--tls-key needs --tls-cert")
    return config


def _convert(option: _Option, source: str, given: list[str]) -> object:
    try:
        if not option.many:
            return option.convert(given[-1])
        texts = [item.strip() for text in given for item in text.split(",") if item.strip()]
        if not texts:
            fail(f"{source}: {given[-1]!r} names nothing")
        if option.convert is options.device:
            return _devices(source, texts)
        return tuple(option.convert(text) for text in texts)
    except options.BadValue as exc:
        fail(f"{source}: {exc}")


def _devices(source: str, texts: list[str]) -> tuple[str, ...]:
    counted = [options.device(text) for text in texts]
    if ("none", 0) in counted and len(counted) > 1:
        fail(f"{source}: none can't stand beside other devices")
    devices = tuple(kind for kind, count in counted for _ in range(count))
    if len(devices) > options.MAX_DEVICES:
        fail(f"{source}: {len(devices)} devices are more than {options.MAX_DEVICES}")
    return devices


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options]",
        description="Offer this machine's devices over one WebSocket.",
        epilog="Every flag has a variable: --max-sessions is WSGRAD_MAX_SESSIONS; a flag wins. The tokens can stand in "
        "WSGRAD_TOKEN, WSGRAD_NODE_TOKEN and WSGRAD_ADMIN_TOKEN. Sizes: 65536, 64MiB, 2GiB. Lists: repeat the flag, or "
        "separate by commas. Ctrl-C stops it after running commands have ended, a second one at once.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
        add_help=False,
    )
    defaults = Config()
    for title, group in _GROUPS:
        section = parser.add_argument_group(title)
        for option in group:
            if option.convert is options.boolean:
                section.add_argument(
                    option.flag, dest=option.attribute, action="append_const", const="1", help=option.help
                )
                continue
            shown = _shown(getattr(defaults, option.attribute))
            section.add_argument(
                option.flag,
                dest=option.attribute,
                metavar=option.metavar,
                action="append",
                help=option.help + (f" [{shown}]" if shown else ""),
            )
    about = parser.add_argument_group("about")
    about.add_argument("--help", "-h", action="help", help="show this page")
    about.add_argument("--version", action="version", version=f"{PROGRAM} {version()}", help="show the version")
    return parser


def _shown(value: object) -> str:
    """A default as a user would write it."""
    if value in ("", -1, ()):
        return ""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    if type(value) is int and value >= 1 << 20:
        return f"{value / (1 << 30):.1f}GiB" if value >= 1 << 30 else f"{value >> 20}MiB"
    return str(value)


@cache
def version() -> str:
    """The installed version of wsgrad."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("wsgrad")
    except PackageNotFoundError:
        return "unknown"
