"""What tinygrad's PROFILE and VIZ show of wsgrad devices: a timeline of its own, read into tinygrad's events."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from tinygrad.device import Compiled, ProfileDeviceEvent
from tinygrad.helpers import ProfileRangeEvent

if TYPE_CHECKING:
    import wsgrad


class DeviceProfile:
    """Measures from the first device's opening to the program's end."""

    def __init__(self, servers: wsgrad.Servers) -> None:
        self._names: dict[str, str] = {}
        self._timeline = ExitStack()
        self._path = Path(self._timeline.enter_context(tempfile.TemporaryDirectory(prefix="wsgrad-")), "timeline.json")
        self._measured = self._timeline.enter_context(ExitStack())
        self._measured.enter_context(servers.trace(self._path))

    def add(self, name: str, identity: str) -> None:
        """A device is called so by tinygrad; `identity` is its id."""
        self._names[identity] = name
        Compiled.profile_events.append(ProfileDeviceEvent(name))

    def finish(self) -> None:
        """Give tinygrad what was measured, once."""
        if not self._names:
            return
        self._measured.close()
        timeline = json.loads(self._path.read_text(encoding="utf-8"))
        self._timeline.close()
        start = Decimal(timeline["metadata"]["start_ns"]) / 1000
        processes: dict[int, str] = {}
        for event in timeline["traceEvents"]:
            if event["name"] == "process_name":
                kind, _, rest = event["args"]["name"].partition(" ")
                name = self._names.get(rest.partition(" (queue ")[0])
                if kind == "device" and name is not None:
                    processes[event["pid"]] = name
        self._names.clear()
        for event in timeline["traceEvents"]:
            if event["ph"] != "X" or event["pid"] not in processes or event["cat"] not in ("kernel", "copy"):
                continue
            began = start + Decimal(repr(event["ts"]))
            device = processes[event["pid"]] + (":COPY" if event["cat"] == "copy" else "")
            name = event["args"].get("of", event["name"])
            Compiled.profile_events.append(ProfileRangeEvent(device, name, began, began + Decimal(repr(event["dur"]))))
