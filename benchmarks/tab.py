"""A browser tab as a device beside what the same tab does by hand: `python -m benchmarks.tab --json -`.

Headless Chromium with SwiftShader, driven over its debugging pipe; the Network domain, which slows WebSockets, stays
off. Each pair takes turns in one tab, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import wsgrad
from benchmarks.bare_tab import bare_peer
from benchmarks.processes import server_process
from benchmarks.report import Figure, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ITEMS = 1000
_WARM_UP = 2
_SOURCE = """
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> k: f32;
@compute @workgroup_size(64) fn add(@builtin(global_invocation_id) id: vec3<u32>) { y[id.x] += k * x[id.x]; }
@compute @workgroup_size(64) fn scale(@builtin(global_invocation_id) id: vec3<u32>) { y[id.x] *= k * x[id.x]; }
"""
# By hand, in the tab's page: everything made before, one encoder and one pass a replay, as somebody would who knows it.
_BY_HAND = """
globalThis.byHand = (async () => {
  const adapter = await navigator.gpu.requestAdapter();
  const device = await adapter.requestDevice();
  const usage = 4 | 8 | 64 | 128; // COPY_SRC, COPY_DST, UNIFORM, STORAGE
  const [y, x] = [0, 1].map(() => device.createBuffer({ size: 256, usage }));
  const scalars = device.createBuffer({ size: 256 * ITEMS, usage });
  const staging = device.createBuffer({ size: 4, usage: 1 | 8 }); // MAP_READ, COPY_DST
  const types = ['storage', 'read-only-storage', 'uniform'];
  const entries = types.map((type, binding) => ({ binding, visibility: 4, buffer: { type } }));
  const layout = device.createBindGroupLayout({ entries });
  const pipelineLayout = device.createPipelineLayout({ bindGroupLayouts: [layout] });
  const module = device.createShaderModule({ code: SOURCE });
  const pipelines = ['add', 'scale'].map((entryPoint) =>
    device.createComputePipeline({ layout: pipelineLayout, compute: { module, entryPoint } }));
  const groups = Array.from({ length: ITEMS }, (_, item) => device.createBindGroup({ layout, entries: [
    { binding: 0, resource: { buffer: y, size: 256 } },
    { binding: 1, resource: { buffer: x, size: 256 } },
    { binding: 2, resource: { buffer: scalars, offset: 256 * item, size: 16 } }] }));
  const run = async (count) => {
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (let item = 0; item < count; item++) {
      pass.setPipeline(pipelines[item % 2]);
      pass.setBindGroup(0, groups[item]);
      pass.dispatchWorkgroups(1);
    }
    pass.end();
    encoder.copyBufferToBuffer(y, 0, staging, 0, 4);
    device.queue.submit([encoder.finish()]);
    await staging.mapAsync(1);
    staging.unmap();
  };
  let busy = false;
  return {
    async seconds(count, times) {
      const start = performance.now();
      for (let i = 0; i < times; i++) await run(count);
      return (performance.now() - start) / 1000 / times;
    },
    async work() { busy = true; while (busy) await run(ITEMS); },
    stop() { busy = false; },
  };
})();
"""


def _chromium() -> Any:  # noqa: ANN401
    """`scripts/headless-tab` as a module: it drives a Chromium for people without a screen, and here for us."""
    path = Path(__file__).parent.parent / "scripts" / "headless-tab"
    spec = spec_from_loader("headless_tab", SourceFileLoader("headless_tab", str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tab:
    """One tab of a browser of its own."""

    def __init__(self, url: str) -> None:
        chromium = _chromium()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._browser = chromium.Browser(chromium.find(), self._profile.name, True)
        target = self._browser.call("Target.createTarget", url=url)["targetId"]
        self._session = self._browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._lock = threading.Lock()
        self._chromium = chromium

    def evaluate(self, expression: str, *, seconds: float = 120) -> Any:  # noqa: ANN401
        """The awaited value of an expression.

        Raises:
            RuntimeError: it threw.
        """
        with self._lock:
            answer = self._browser.call(
                "Runtime.evaluate",
                self._session,
                seconds,
                expression=expression,
                awaitPromise=True,
                returnByValue=True,
            )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"in the tab: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def join(self) -> None:
        """Consent, and wait until the tab is a device."""
        deadline = time.monotonic() + 60
        while self.evaluate(self._chromium.STATE) != "joined":
            self.evaluate(self._chromium.JOIN)
            if time.monotonic() > deadline:
                raise RuntimeError("the tab did not join")
            time.sleep(0.1)

    def prepare(self) -> None:
        """Make the loop by hand ready."""
        script = _BY_HAND.replace("ITEMS", str(_ITEMS)).replace("SOURCE", f"`{_SOURCE}`")
        self.evaluate(f"(async () => {{ {script}; await byHand; return true; }})()")

    def by_hand(self, count: int, times: int) -> float:
        """Seconds that so many dispatches and a read of 4 bytes take by hand."""
        return float(self.evaluate(f"byHand.then((hand) => hand.seconds({count}, {times}))"))

    def close(self) -> None:
        """End the browser."""
        self._browser.close()
        self._profile.cleanup()


@contextmanager
def joined_tab(arguments: list[str]) -> Iterator[tuple[str, Tab]]:
    """A server and a tab that has joined it; gives the client's URL."""
    with server_process(arguments) as process:
        page = process.url.partition("#")[0].replace("ws://", "http://").rstrip("/")
        tab = Tab(f"{page}/#token={process.node_token}")
        try:
            tab.join()
            tab.prepare()
            yield process.url, tab
        finally:
            tab.close()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_replay(report: Report, device: wsgrad.Device, tab: Tab, *, rounds: int) -> None:
    """Dispatches a second of a replayed graph, and by hand."""
    add, scale = (device.program(_SOURCE, entry) for entry in ("add", "scale"))
    x, y = device.zeros(64), device.zeros(64)
    with wsgrad.record(device) as graph:
        for item in range(_ITEMS):
            (scale if item % 2 else add)(y, x, float(item), grid=1)

    def replays() -> None:
        for _ in range(5):
            graph.run()
        graph.wait()

    replay: list[float] = []
    hand: list[float] = []
    for round_ in range(rounds + _WARM_UP):
        seconds = _seconds(replays) / 5, tab.by_hand(_ITEMS, 5)
        if round_ >= _WARM_UP:
            replay.append(seconds[0])
            hand.append(seconds[1])
    rates = [_ITEMS / statistics.median(times) for times in (replay, hand)]
    report.add(Figure("replay of 1,000 dispatches in the tab", rates[0], "dispatches/s"))
    report.add(Figure("the same by hand in the tab", rates[1], "dispatches/s"))
    report.add(Figure("replay beside the loop by hand", rates[0] / rates[1], "×", target=0.8))


def measure_bulk(report: Report, device: wsgrad.Device, tab: Tab, *, nbytes: int, rounds: int) -> None:
    """Bytes to the tab's GPU and back, and the same bytes into a script that only counts them and back."""
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    buffer = device.zeros(nbytes, np.uint8)
    ours: list[float] = []
    bare: list[float] = []

    def there_and_back() -> None:
        buffer.copy_from(source)
        buffer.copy_to(target)

    with bare_peer() as peer:
        tab.evaluate(f"({peer.script})")
        for round_ in range(rounds + 1):
            seconds = _seconds(there_and_back), peer.there_and_back(nbytes)
            if round_:
                ours.append(seconds[0])
                bare.append(seconds[1])
    rates = [2 * nbytes / statistics.median(times) / 1e6 for times in (ours, bare)]
    detail = f"{rates[0]:.0f} of {rates[1]:.0f} MB/s"
    report.add(Figure("64 MiB to the tab's GPU and back, share of bare", rates[0] / rates[1], "×", 0.6, detail=detail))


def measure_read(report: Report, device: wsgrad.Device, tab: Tab, *, rounds: int) -> None:
    """A read of 4 bytes after a dispatch, above what dispatch and map take in the tab."""
    add = device.program(_SOURCE, "add")
    x, y = device.zeros(64), device.zeros(64)
    word = np.empty(1, np.float32)
    first = y[:1]

    def launch_and_read() -> None:
        add(y, x, 1.0, grid=1)
        first.copy_to(word)

    ours: list[float] = []
    hand: list[float] = []
    for round_ in range(rounds + _WARM_UP):
        read = statistics.median(_seconds(launch_and_read) for _ in range(20))
        own = tab.by_hand(1, 20)
        if round_ >= _WARM_UP:
            ours.append(read)
            hand.append(own)
    above = 1e3 * (statistics.median(ours) - statistics.median(hand))
    detail = f"{1e3 * statistics.median(ours):.2f} ms, in the tab {1e3 * statistics.median(hand):.2f} ms"
    figure = Figure("read of 4 bytes after a dispatch, above the tab's own", above, "ms", 0.6, "lower", detail)
    report.add(figure)


def measure_neighbour(report: Report, url: str, tab: Tab, *, reads: int) -> None:
    """Reads of another client's CPU device while a tab is busy for wsgrad, and while one is busy by itself."""
    word = np.empty(1, np.float32)

    def percentile(buffer: wsgrad.Buffer) -> float:
        return float(np.percentile([_seconds(lambda: buffer.copy_to(word)) for _ in range(reads)], 99))

    with wsgrad.connect(url) as busy, wsgrad.connect(url) as other:
        device = busy.devices["browser"]
        add, scale = (device.program(_SOURCE, entry) for entry in ("add", "scale"))
        x, y = device.zeros(64), device.zeros(64)
        with wsgrad.record(device) as graph:
            for item in range(_ITEMS):
                (scale if item % 2 else add)(y, x, float(item), grid=1)
        graph.run(wait=True)
        buffer = other.devices["cpu"].zeros(1, np.float32)
        percentile(buffer)
        connected: list[float] = []
        alone: list[float] = []
        for _ in range(5):
            stop = threading.Event()

            def work(stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    graph.run(wait=True)

            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(0.2)
            connected.append(percentile(buffer))
            stop.set()
            thread.join()
            tab.evaluate("byHand.then((hand) => { hand.work(); return true; })")
            time.sleep(0.2)
            alone.append(percentile(buffer))
            tab.evaluate("byHand.then((hand) => { hand.stop(); return true; })")
    ratio = statistics.median(connected) / statistics.median(alone)
    detail = f"{1e3 * statistics.median(connected):.2f} ms beside {1e3 * statistics.median(alone):.2f} ms"
    figure = Figure("another client's reads beside a busy tab, 99th percentile", ratio, "×", 1.5, "lower", detail)
    report.add(figure)


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON; - for standard output")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of which the median counts")
    options = parser.parse_args()
    report = Report("a browser tab")
    with joined_tab([]) as (url, tab):
        with wsgrad.connect(url) as server:
            device = server.devices["browser"]
            measure_replay(report, device, tab, rounds=options.rounds)
            measure_read(report, device, tab, rounds=options.rounds)
            measure_bulk(report, device, tab, nbytes=64 << 20, rounds=max(1, options.rounds // 3))
        measure_neighbour(report, url, tab, reads=500)
    report.show(options.json)


if __name__ == "__main__":
    main()
