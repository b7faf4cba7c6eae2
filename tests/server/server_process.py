"""A real server process for tests: started with `--ready-fd`, ended by its process id."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO


@dataclass
class Server:
    process: subprocess.Popen
    ready: dict
    reader: BinaryIO
    errors: str

    def stop(self, number=signal.SIGTERM, timeout=15):
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def log(self):
        with open(self.errors, encoding="utf-8") as file:
            return file.read()


def environment(**variables):
    """Ours without any setting or token of a server."""
    return {key: value for key, value in os.environ.items() if not key.startswith("WSGRAD_")} | variables


@contextmanager
def running_server(directory, *arguments, variables=(), port="0"):
    """Start, wait until it is ready, and make sure that it ends."""
    reader, writer = os.pipe()
    errors = str(directory / "server.log")
    command = [sys.executable, "-m", "wsgrad.server", "--port", port, "--ready-fd", str(writer), *arguments]
    with open(errors, "wb") as log:
        process = subprocess.Popen(
            command,
            pass_fds=(writer,),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment(**dict(variables)),
        )
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as lines:
            if not (line := lines.readline()):
                raise RuntimeError(f"the server ended with {process.wait(10)}; see {errors}")
            yield Server(process, json.loads(line), lines, errors)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
