"""Any accelerator behind one WebSocket, used from Python as if it were local: the public names, loaded when used.

Importing `wsgrad`, or one of its server's modules, imports neither NumPy nor trio: a name is looked up in its own
module the first time that it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgrad.client.async_face import AsyncBuffer as AsyncBuffer
    from wsgrad.client.async_face import AsyncDevice as AsyncDevice
    from wsgrad.client.async_face import AsyncEvent as AsyncEvent
    from wsgrad.client.async_face import AsyncProgram as AsyncProgram
    from wsgrad.client.async_face import AsyncServer as AsyncServer
    from wsgrad.client.async_face import open_server as open_server
    from wsgrad.client.blocking import Buffer as Buffer
    from wsgrad.client.blocking import Device as Device
    from wsgrad.client.blocking import Event as Event
    from wsgrad.client.blocking import Program as Program
    from wsgrad.client.blocking import Server as Server
    from wsgrad.client.blocking import connect as connect
    from wsgrad.client.graph import AsyncGraph as AsyncGraph
    from wsgrad.client.graph import Graph as Graph
    from wsgrad.client.graph import record as record
    from wsgrad.client.jit import jit as jit
    from wsgrad.client.many import AsyncServers as AsyncServers
    from wsgrad.client.many import Servers as Servers
    from wsgrad.client.many import connect_all as connect_all
    from wsgrad.client.many import open_all as open_all
    from wsgrad.client.recording import Var as Var
    from wsgrad.client.signature import INDEX as INDEX
    from wsgrad.errors import CompileError as CompileError
    from wsgrad.errors import ConnectionLost as ConnectionLost
    from wsgrad.errors import DeviceError as DeviceError
    from wsgrad.errors import DeviceLost as DeviceLost
    from wsgrad.errors import InvalidUrl as InvalidUrl
    from wsgrad.errors import LaunchError as LaunchError
    from wsgrad.errors import LimitExceeded as LimitExceeded
    from wsgrad.errors import OutOfMemory as OutOfMemory
    from wsgrad.errors import ProtocolError as ProtocolError
    from wsgrad.errors import Timeout as Timeout
    from wsgrad.errors import Unauthorized as Unauthorized
    from wsgrad.errors import WsgradError as WsgradError

__version__ = "0.1.0"

_MODULES = {
    "wsgrad.client.async_face": (
        "AsyncBuffer",
        "AsyncDevice",
        "AsyncEvent",
        "AsyncProgram",
        "AsyncServer",
        "open_server",
    ),
    "wsgrad.client.blocking": ("Buffer", "Device", "Event", "Program", "Server", "connect"),
    "wsgrad.client.graph": ("AsyncGraph", "Graph", "record"),
    "wsgrad.client.jit": ("jit",),
    "wsgrad.client.many": ("AsyncServers", "Servers", "connect_all", "open_all"),
    "wsgrad.client.recording": ("Var",),
    "wsgrad.client.signature": ("INDEX",),
    "wsgrad.errors": (
        "CompileError",
        "ConnectionLost",
        "DeviceError",
        "DeviceLost",
        "InvalidUrl",
        "LaunchError",
        "LimitExceeded",
        "OutOfMemory",
        "ProtocolError",
        "Timeout",
        "Unauthorized",
        "WsgradError",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'wsgrad' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
