"""The page files and where they lie: a table made at start, so that nothing from the wire becomes a path; no checks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from wsgrad.server.http import Response, text

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMED: Final = {"/": "index.html", "/status": "status.html"}
# A page may join another server than the one it came from, and asks its /healthz why that fails.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self' ws: wss: http: https:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def directory() -> Path | None:
    """Where the pages are: inside an installed package, beside the package in a checkout, or nowhere."""
    package = Path(__file__).resolve().parent.parent
    if (package / "browser").is_dir():
        return package / "browser"
    checkout = package.parent
    # Beside an installed package may lie a stranger's `browser`.
    return checkout / "browser" if (checkout / "pyproject.toml").is_file() else None


class Pages:
    """The page files of one server. Which there are is settled at start; what they hold is read when asked for."""

    def __init__(self, where: Path | None) -> None:
        files = [] if where is None else [path for path in where.iterdir() if path.suffix in _TYPES and path.is_file()]
        self._files = {f"/{path.name}": path for path in files}
        for route, name in _NAMED.items():
            if f"/{name}" in self._files:
                self._files[route] = self._files[f"/{name}"]

    def __contains__(self, route: str) -> bool:
        return route in self._files

    def answer(self, route: str) -> Response:
        """The file of a route that is in the table."""
        path = self._files[route]
        try:
            body = path.read_bytes()
        except OSError:
            return text(404, "this file of the pages is gone")
        return Response(200, body, _TYPES[path.suffix], policy=_POLICY)
