"""A real `wsgrad-serve --join` in a process of its own, for tests that need a node which runs programs."""

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def joined(gate, name, *arguments, token, state, stderr=None, **variables):
    """A machine that has joined; gives what it says once it is ready, and the process."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--join", f"ws://127.0.0.1:{gate}", "--name", name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WSGRAD_")}
    process = await trio.lowlevel.open_process(
        [*command, "--ready-fd", str(writer), "--log-level", "warning", "--cpu-threads", "1", *arguments],
        env=environment | {"WSGRAD_NODE_TOKEN": token, "XDG_STATE_HOME": str(state)} | variables,
        pass_fds=(writer,),
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )
    os.close(writer)
    try:
        with trio.fail_after(30):
            async with trio.lowlevel.FdStream(reader) as stream:
                line = await stream.receive_some(4096)
                assert line, f"it ended with {await process.wait()}"
                yield json.loads(line), process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
