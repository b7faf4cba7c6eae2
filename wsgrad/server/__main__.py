"""The command `wsgrad-serve`, also `python -m wsgrad.server`: settings, tokens, the zygote, then the server itself."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import trio

from wsgrad.errors import DeviceError
from wsgrad.server import lifetime, logs
from wsgrad.server.announce import check_ready_fd
from wsgrad.server.config import PROGRAM, fail, parse
from wsgrad.server.hub import start_zygote
from wsgrad.server.listener import tls_context
from wsgrad.server.startup import settle
from wsgrad.server.tokens import VARIABLES, Role, TokenError, load_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    check_ready_fd(config.ready_fd)
    try:
        tokens, warnings = load_tokens(config.token_file, os.environ)
        tls = tls_context(config.tls_cert, config.tls_key) if config.tls else None
    except TokenError as exc:
        fail(str(exc))
    except OSError as exc:
        fail(f"--tls-cert {config.tls_cert} --tls-key {config.tls_key or '(none)'}: {exc.strerror or exc}")
    # Node processes inherit the environment, and what runs there is a stranger's.
    for variable in VARIABLES.values():
        os.environ.pop(variable, None)
    logs.hide(*(tokens.of(role) for role in Role))
    config, more = settle(config)
    for warning in (*warnings, *more):
        _log.warning("%s", warning)
    _raise_file_limit()
    try:
        zygote = start_zygote(config)
    except DeviceError as exc:
        print(f"{PROGRAM}: {exc}; --device none serves without devices of its own", file=sys.stderr)
        return 1
    try:
        trio.run(lifetime.serve, config, tokens, zygote, tls)
    except KeyboardInterrupt:
        return 130
    except OSError as exc:
        where = exc.filename2 or exc.filename or f"{config.host} port {config.port}"
        print(f"{PROGRAM}: {where}: {exc.strerror or exc}", file=sys.stderr)
        return 1
    finally:
        if zygote is not None:
            zygote.stop()
    return 0


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
