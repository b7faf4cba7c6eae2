"""Server processes of a test's own, with the command line that it gives; ended when it leaves, by their process id."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def running(*arguments, **variables):
    """A server on a free port of this machine; gives its address with the token."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--log-level", "warning", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")}
    environment |= variables
    process = subprocess.Popen(
        [*command, "--ready-fd", str(writer)], pass_fds=(writer,), stdin=subprocess.DEVNULL, env=environment
    )
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as lines:
            line = lines.readline()
            assert line, f"the server ended with {process.wait(10)}"
            yield json.loads(line)["url"]
    finally:
        process.kill()
        process.wait()
