"""Dispatches a second of a replayed graph on `webgpu`, beside a loop by hand: `python -m benchmarks.webgpu --json -`.

Both do the same 1,000 dispatches a time, over two pipelines and as many bind groups as there are dispatches, and wait
for the end of each thousand. They take turns, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

import wsgrad
from benchmarks.processes import server_process
from benchmarks.report import Figure, Report
from wsgrad.devices.webgpu.adapters import find_adapters, open_device

_ITEMS = 1000
_WARM_UP = 3
_SOURCE = """
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> k: f32;
@compute @workgroup_size(64) fn add(@builtin(global_invocation_id) id: vec3<u32>) { y[id.x] += k * x[id.x]; }
@compute @workgroup_size(64) fn scale(@builtin(global_invocation_id) id: vec3<u32>) { y[id.x] *= k * x[id.x]; }
"""


class ByHand:
    """What somebody would write who knows the graph: everything made before, one pass a replay."""

    def __init__(self) -> None:
        import wgpu

        self._device: Any = open_device(find_adapters()[0])
        device = self._device
        types = ("storage", "read-only-storage", "uniform")
        entries = [{"binding": k, "visibility": 4, "buffer": {"type": kind}} for k, kind in enumerate(types)]
        layout = device.create_bind_group_layout(entries=entries)
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
        usage |= wgpu.BufferUsage.COPY_SRC
        self._y, x = (device.create_buffer(size=256, usage=usage) for _ in range(2))
        scalars = device.create_buffer(size=256 * _ITEMS, usage=usage)
        module = device.create_shader_module(code=_SOURCE)
        pipelines = [
            device.create_compute_pipeline(
                layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": entry},
            )
            for entry in ("add", "scale")
        ]
        self._calls = []
        for item in range(_ITEMS):
            places = ((self._y, 0, 256), (x, 0, 256), (scalars, 256 * item, 16))
            resources = [
                {"binding": k, "resource": {"buffer": buffer, "offset": offset, "size": size}}
                for k, (buffer, offset, size) in enumerate(places)
            ]
            group = device.create_bind_group(layout=layout, entries=resources)
            self._calls.append((pipelines[item % 2], group))

    def __call__(self) -> None:
        device = self._device
        encoder = device.create_command_encoder()
        opened = encoder.begin_compute_pass()
        for pipeline, group in self._calls:
            opened.set_pipeline(pipeline)
            opened.set_bind_group(0, group)
            opened.dispatch_workgroups(1)
        opened.end()
        device.queue.submit([encoder.finish()])
        device.queue.read_buffer(self._y, 0, 4)


def measure(report: Report, *, rounds: int) -> None:
    """The medians of both, and their ratio."""
    with server_process(["--device", "webgpu:0"]) as process, wsgrad.connect(process.url) as server:
        device = server.devices[0]
        add, scale = (device.program(_SOURCE, entry) for entry in ("add", "scale"))
        x, y = device.array(np.zeros(64, np.float32)), device.zeros(64)
        with wsgrad.record(device) as graph:
            for item in range(_ITEMS):
                (scale if item % 2 else add)(y, x, float(item), grid=1)
        ways = (lambda: graph.run(wait=True)), ByHand()
        seconds: list[list[float]] = [[], []]
        for round_ in range(rounds + _WARM_UP):
            for run, times in zip(ways, seconds, strict=True):
                start = time.perf_counter()
                run()
                if round_ >= _WARM_UP:
                    times.append(time.perf_counter() - start)
    replay, by_hand = (_ITEMS / statistics.median(times) for times in seconds)
    report.add(Figure("replay of 1,000 dispatches on webgpu", replay, "dispatches/s"))
    report.add(Figure("the same by hand in wgpu-py", by_hand, "dispatches/s"))
    report.add(Figure("replay beside the loop by hand", replay / by_hand, "×", target=0.8))


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON; - for standard output")
    parser.add_argument("--rounds", type=int, default=50, help="replays of which the median counts")
    options = parser.parse_args()
    report = Report("webgpu")
    measure(report, rounds=options.rounds)
    report.show(options.json)


if __name__ == "__main__":
    main()
