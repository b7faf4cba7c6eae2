"""The status document in Prometheus's text format, version 0.0.4; it counts nothing, and sessions get no series."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from wsgrad.server.http import Response

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_Table: TypeAlias = tuple[tuple[str, str, str], ...]
# name, help, key. Names that end in _total are counters, the others gauges.
_SERVER: Final[_Table] = (
    ("wsgrad_uptime_seconds", "Time since the server began", "uptime_seconds"),
    ("wsgrad_node_processes", "Processes of local devices", "processes"),
    ("wsgrad_programs_compiled_total", "Programs that were compiled", "compiled"),
    ("wsgrad_programs_compiled_cached_total", "Programs found in the cache of compiled ones", "compiled_from_cache"),
)
_PORT: Final[_Table] = (
    ("wsgrad_connections", "Open connections", "connections"),
    ("wsgrad_connections_accepted_total", "Connections since the start", "accepted"),
    ("wsgrad_connections_refused_total", "Requests and connections that were refused", "refused"),
    ("wsgrad_wrong_tokens_total", "Requests with a wrong token", "wrong_tokens"),
    ("wsgrad_http_requests_total", "Requests answered over HTTP", "http_requests"),
)
_STATISTICS: Final[_Table] = (
    ("wsgrad_sessions_opened_total", "Sessions since the start", "sessions"),
    ("wsgrad_websockets_opened_total", "Connections of clients, nodes and servers since the start", "connections"),
    ("wsgrad_resumes_total", "Connections that went on with a session", "resumes"),
    ("wsgrad_node_resumes_total", "Connections over which a node came back", "node_resumes"),
    ("wsgrad_received_bytes_total", "Bytes of clients' messages", "received"),
    ("wsgrad_uploaded_bytes_total", "Bytes of chunks from clients", "uploaded"),
    ("wsgrad_downloaded_bytes_total", "Bytes of chunks to clients", "downloaded"),
    ("wsgrad_transferred_bytes_total", "Bytes of chunks between devices", "transferred"),
    ("wsgrad_relayed_bytes_total", "Bytes from other servers that came through clients", "relayed"),
    ("wsgrad_launches_total", "Launches", "launches"),
    ("wsgrad_commands_refused_total", "Commands that sessions refused", "refused"),
    ("wsgrad_commands_failed_total", "Commands that failed on a device", "errors"),
    ("wsgrad_devices_lost_total", "Devices that were lost in a session", "lost"),
    ("wsgrad_cache_hits_total", "Uploads that the cache brought", "cache_hits"),
    ("wsgrad_cache_misses_total", "Uploads that the cache could not bring", "cache_misses"),
    ("wsgrad_cache_bytes_total", "Bytes that the cache brought", "cache_nbytes"),
    ("wsgrad_known_programs_total", "Programs whose source did not travel again", "known_programs"),
    ("wsgrad_protocol_errors_total", "Connections closed for what their peer sent", "protocol_errors"),
)
_DEVICE: Final[_Table] = (
    ("wsgrad_device_memory_limit_bytes", "Bytes that the device has to give", "memory"),
    ("wsgrad_device_paused", "Whether its owner has paused it", "paused"),
)
_TOTALS: Final[_Table] = (
    ("wsgrad_device_memory_bytes", "Bytes of buffers on the device", "memory"),
    ("wsgrad_device_buffers", "Buffers and views on the device", "buffers"),
    ("wsgrad_device_programs", "Programs on the device", "programs"),
    ("wsgrad_device_sessions", "Sessions that use the device", "sessions"),
    ("wsgrad_device_launches_total", "Launches on the device", "launches"),
    ("wsgrad_device_received_bytes_total", "Bytes that were sent to the device", "bytes_in"),
    ("wsgrad_device_sent_bytes_total", "Bytes that the device sent", "bytes_out"),
    ("wsgrad_device_errors_total", "Commands that failed on the device, and its losses", "errors"),
)


def answer(document: Mapping[str, object]) -> Response:
    """The answer to a request for metrics."""
    return Response(200, render(document).encode(), CONTENT_TYPE)


def render(document: Mapping[str, object]) -> str:
    """All metrics of a status document."""
    lines: list[str] = []
    devices, nodes, sessions = (_list(document, key) for key in ("devices", "nodes", "sessions"))
    info = {"version": str(document["server"]).removeprefix("wsgrad "), "name": str(document["name"])}
    _metric(lines, "wsgrad_info", "The server", [(info, 1)])
    for name, text, key in _SERVER:
        _metric(lines, name, text, [({}, document[key])])
    for part, table in (("port", _PORT), ("statistics", _STATISTICS)):
        values = document[part]
        assert isinstance(values, dict)
        for name, text, key in table:
            _metric(lines, name, text, [({}, values[key])])
    connected = sum(bool(session["connected"]) for session in sessions)
    counts = [({"connected": "yes"}, connected), ({"connected": "no"}, len(sessions) - connected)]
    _metric(lines, "wsgrad_sessions", "Sessions there are", counts)
    _metric(lines, "wsgrad_nodes", "Nodes that have dialled in", [({}, len(nodes))])
    labels = [{"device": str(device["id"]), "kind": str(device["kind"])} for device in devices]
    totals = [device["totals"] for device in devices]
    for shown, rows in ((_DEVICE, devices), (_TOTALS, totals)):
        for name, text, key in shown:
            _metric(lines, name, text, [(label, _value(row, key)) for label, row in zip(labels, rows, strict=True)])
    return "".join(f"{line}\n" for line in lines)


def _metric(lines: list[str], name: str, text: str, samples: Iterable[tuple[Mapping[str, str], object]]) -> None:
    lines.append(f"# HELP {name} {text}")
    lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
    for labels, value in samples:
        if isinstance(value, int | float):
            shown = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            lines.append(f"{name}{{{shown}}} {float(value):.17g}" if shown else f"{name} {float(value):.17g}")


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _value(row: object, key: str) -> object:
    assert isinstance(row, dict)
    return row.get(key, False if key == "paused" else None)


def _list(document: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    value = document[key]
    assert isinstance(value, list)
    return value
