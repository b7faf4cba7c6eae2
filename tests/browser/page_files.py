"""Serves the checkout's `browser/` and the pages of these tests on loopback, so that a page has an http origin."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = Path(__file__).parent / "pages"
_SERVED = ("/browser/", "/tests/browser/pages/")


class _Handler(SimpleHTTPRequestHandler):
    def send_head(self):
        if not self.path.startswith(_SERVED):
            self.send_error(404)
            return None
        return super().send_head()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class PageFiles:
    """The server.

    Attributes:
        origin: `http://127.0.0.1:PORT`.
    """

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(ROOT)))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.origin = f"http://127.0.0.1:{self._server.server_address[1]}"

    def scripts(self, *names: str, file: bool = False) -> str:
        """The address of a page that loads scripts of `browser/` in order: its promise `ready` settles then.

        In it `inWorker(expression)` evaluates in a classic worker with the same scripts (not from a file).
        """
        base = PAGES.as_uri() if file else f"{self.origin}/tests/browser/pages"
        return f"{base}/scripts.html#{','.join(names)}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
