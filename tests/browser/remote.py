"""Speaks the JSON of a browser's debugging WebSocket (CDP and BiDi are alike in it); knows no browser."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from websockets.sync.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class RemoteError(Exception):
    """The browser refused a call, or a script in it threw."""


class Remote:
    """One debugging connection: calls and their answers; events go to `on_event`. Any thread may call."""

    def __init__(self, url: str, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._stack = contextlib.ExitStack()
        self._socket = self._stack.enter_context(connect(url, max_size=None, ping_interval=None, compression=None))
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._on_event = on_event

    def call(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a call and wait for its answer; raises `RemoteError` and `TimeoutError`."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, **message}))
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if number in self._answers:
                    answer = self._answers.pop(number)
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer to {message['method']} within {timeout} s")
                # Short, so that another thread which waits for the lock gets its answer.
                self._take(min(left, 0.05))
        if "error" in answer:
            raise RemoteError(f"{message['method']}: {answer['error']} {answer.get('message', '')}")
        result: dict[str, Any] = answer["result"]
        return result

    def drain(self) -> None:
        """Take the events that have come."""
        with self._lock:
            while self._take(0):
                pass

    def close(self) -> None:
        self._stack.close()

    def _take(self, timeout: float) -> bool:
        try:
            message = json.loads(self._socket.recv(timeout=timeout))
        except TimeoutError:
            return False
        if "id" in message and message["id"] is not None:
            self._answers[message["id"]] = message
        else:
            self._on_event(message)
        return True


def wait_for_file(path: Path, process: subprocess.Popen[bytes], timeout: float = 60) -> str:
    """The text of a file that a starting browser writes when it listens."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RemoteError(f"the browser ended with {process.returncode} while it started")
        text = path.read_text() if path.exists() else ""
        if text.strip():
            return text
        time.sleep(0.05)
    raise TimeoutError(f"the browser wrote no {path.name} within {timeout} s")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a browser with all its helper processes; it was started as a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def as_json(expression: str) -> str:
    """An expression, which may be a promise, as one whose value is JSON text."""
    return f"(async () => JSON.stringify(await ({expression})) ?? 'null')()"


def polled(expression: str) -> str:
    """An expression as a promise that settles once it is true."""
    return (
        "new Promise((settle, fail) => { const look = async () => { try { const value = await ("
        + expression
        + "); if (value) settle(value); else setTimeout(look, 20); } catch (error) { fail(error); } }; look(); })"
    )
