"""The command `wsgrad-serve`, also `python -m wsgrad.server`: settings, tokens, the zygote, then the server itself."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from wsgrad.devices import program_cache
from wsgrad.devices.directories import user_directory
from wsgrad.errors import DeviceError, WsgradError
from wsgrad.server import audit, blobs, lending, lifetime, logs
from wsgrad.server.announce import check_ready_fd, check_ready_file
from wsgrad.server.config import PROGRAM, fail, parse
from wsgrad.server.machine import start_zygote
from wsgrad.server.selfsigned import keep_certificate
from wsgrad.server.startup import settle
from wsgrad.server.tls import Certificate
from wsgrad.server.tokens import VARIABLES, Role, load_tokens
from wsgrad.transport.url import parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wsgrad.server.config import Config
    from wsgrad.server.tokens import Tokens
    from wsgrad.transport.url import Endpoint

_OPEN_FILES = 1 << 16

_log = logging.getLogger("wsgrad.server")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server to its end.

    Returns:
        0 after a signal or when the reader of `--ready-fd` is gone; 1 where it could not listen, found no compiler,
            or could not write a file of tokens.

    Raises:
        SystemExit: status 2 for a wrong setting.
    """
    config = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    logs.set_up(config.log_level, config.log_format)
    try:
        audit.set_up(config.audit_log)
    except OSError as exc:
        fail(f"--audit-log: {config.audit_log} can't be written: {exc.strerror or exc}")
    check_ready_fd(config.ready_fd)
    check_ready_file(config.ready_file)
    try:
        tokens, warnings = load_tokens(config.token_file, os.environ)
        config, tls = _tls(config)
        _check_directories(config)
    except WsgradError as exc:
        fail(str(exc))
    # Node processes inherit the environment, and what runs there is a stranger's.
    for variable in (*VARIABLES.values(), "WSGRAD_JOIN"):
        os.environ.pop(variable, None)
    logs.hide(*(tokens.of(role) for role in Role))
    hub, hub_token = _hub(config, tokens) if config.join else (None, "")
    config, more = settle(config)
    for warning in (*warnings, *more):
        _log.warning("%s", warning)
    _raise_file_limit()
    if hub is not None and not config.devices:
        print(f"{PROGRAM}: --join needs a device to lend, and there is none", file=sys.stderr)
        return 1
    try:
        zygote = start_zygote(config)
    except DeviceError as exc:
        print(f"{PROGRAM}: {exc}; --device none serves without devices of its own", file=sys.stderr)
        return 1
    try:
        if hub is not None:
            assert zygote is not None  # it comes with the devices
            trio.run(lending.lend, config, hub, hub_token, zygote)
        else:
            trio.run(lifetime.serve, config, tokens, zygote, tls)
    except KeyboardInterrupt:
        return 130
    except WsgradError as exc:
        print(f"{PROGRAM}: {exc}", file=sys.stderr)
        return 1
    except OSError as exc:
        where = exc.filename2 or exc.filename or f"{config.host} port {config.port}"
        print(f"{PROGRAM}: {where}: {exc.strerror or exc}", file=sys.stderr)
        return 1
    finally:
        if zygote is not None:
            zygote.stop()
    return 0


def _hub(config: Config, tokens: Tokens) -> tuple[Endpoint, str]:
    """The server to join, and the node token for it; ends the process where there is none."""
    endpoint = parse_endpoint(config.join)
    given = "" if Role.NODE in tokens.generated else tokens.node
    token = endpoint.token or given
    if not token:
        fail(
            f"--join {endpoint.url}: its node token is missing; set WSGRAD_NODE_TOKEN, or write #token=… behind the URL"
        )
    logs.hide(token)
    return endpoint, token


def _tls(config: Config) -> tuple[Config, Certificate | None]:
    """The settings with the certificate to use, and what shows it.

    Raises:
        WsgradError: there is none, or it can't be used.
    """
    renewed = not config.self_signed
    if config.self_signed:
        kept = keep_certificate(config, user_directory("XDG_STATE_HOME", ".local/state", os.environ))
        if kept.replaces is not None:
            _log.warning(
                "made a new certificate, because the old one %s; clients know it by the sha256 of the new URL",
                kept.replaces,
            )
        _log.info("clients may trust this server by its certificate %s", kept.certificate)
        config = replace(config, self_signed=False, tls_cert=str(kept.pair))
    return config, Certificate(config.tls_cert, config.tls_key, renewed=renewed) if config.tls else None


def _check_directories(config: Config) -> None:
    """Raises `WsgradError` where what is kept between starts has no place."""
    if config.devices:
        program_cache.default_directory()
    if config.cache_size and not config.cache_dir:
        blobs.default_directory()


def _raise_file_limit() -> None:
    """Each session holds several descriptors; the usual soft limit of 1,024 is there for programs that use select."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
