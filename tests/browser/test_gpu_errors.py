"""Time and trouble on a tab's GPU: timed launches, hangs, a lost device, and what a tab without a GPU says."""

import numpy as np
import pytest
from chromium import Chromium
from gpu_rig import RIG, SCRIPTS, GpuRefused, GpuRig

COUNT = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<uniform> rounds: u32;
@compute @workgroup_size(1) fn k() {
  var sum = out[0];
  for (var i = 0u; i < rounds; i++) { sum = sum * 1664525u + 1013904223u; }
  out[0] = sum;
}"""


def timed(rig, program, out, rounds):
    return rig.js(f"rig.runtime.launch({program}, null, null, [{out}, {rounds}], 1, true)")


def test_a_timed_launch_takes_longer_the_more_it_does(any_gpu):
    program, out = any_gpu.load(COUNT, "pI"), any_gpu.empty(4)
    timed(any_gpu, program, out, 1)
    short, long = (min(timed(any_gpu, program, out, rounds) for _ in range(3)) for rounds in (1, 50_000_000))
    assert 0 < short < long < 30


def test_a_timed_launch_without_timestamps_uses_the_clock(gpu):
    gpu.js("(() => { rig.runtime.queue.device.features.has = () => false; })()")
    program, out = gpu.load(COUNT, "pI"), gpu.empty(4)
    short, long = (min(timed(gpu, program, out, rounds) for _ in range(3)) for rounds in (1, 50_000_000))
    assert 0 < short < long < 30


def test_a_timeline_gets_each_launch_in_order(any_gpu):
    program, out = any_gpu.load(COUNT, "pI"), any_gpu.empty(4)
    spans = any_gpu.js(
        f"""(async () => {{
          const spans = [];
          rig.runtime.trace = {{ step: 0, launched: (span) => spans.push(span) }};
          for (let number = 1; number <= 300; number++) {{
            rig.runtime.launch({program}, null, null, [{out}, 1000], number, false);
          }}
          await rig.runtime.settled();
          rig.runtime.trace = null;
          return spans;
        }})()"""
    )
    assert [(span["number"], span["program"], span["step"]) for span in spans] == [
        (i, program, 0) for i in range(1, 301)
    ]
    assert all(span["start"] <= span["end"] for span in spans)


def test_a_launch_that_hangs_is_a_timeout_that_names_it(page_files):
    # A browser of its own: the software adapter goes on with the launch for minutes.
    browser = Chromium()
    rig = GpuRig(browser, page_files, worker=True)
    try:
        rig.open(launchSeconds=0.5)
        program, out = rig.load(COUNT, "pI", name="spin"), rig.empty(4)
        rig.js(f"rig.runtime.launch({program}, null, null, [{out}, 2], 7, false)")
        rig.js(f"rig.runtime.launch({program}, null, null, [{out}, 4294967295], 8, false)")
        rig.js("rig.runtime.flush()")
        waiting = rig.js(f"rig.attempt(() => rig.read({out}))")
        assert waiting["code"] == "Timeout"
        why = rig.js("rig.runtime.lost")
        assert (why["code"], why["message"]) == ("Timeout", "a launch of 'spin' ran longer than 0.5 s")
        assert why["details"] == {"program": "spin", "number": 8, "seconds": 0.5}
        for work in (f"rig.read({out})", "rig.runtime.settled()", "rig.empty(99, 4)"):
            with pytest.raises(GpuRefused) as caught:
                rig.js(work)
            assert caught.value.code == "Timeout"
    finally:
        browser.close()


def test_many_long_launches_are_not_a_hang(gpu):
    gpu.open(launchSeconds=1)
    program, out = gpu.load(COUNT, "pI"), gpu.empty(4)
    rounds, seconds = 1_000_000, 0.0
    while seconds < 0.1:
        rounds *= 2
        seconds = timed(gpu, program, out, rounds)
    gpu.js(
        f"""(async () => {{
          for (let i = 0; i < 30; i++) rig.runtime.launch({program}, null, null, [{out}, {rounds}], i, false);
          await rig.runtime.settled();
        }})()"""
    )
    assert gpu.js("rig.why") is None


def test_a_closed_device_refuses_everything_by_name(gpu):
    out = gpu.array(np.arange(4, dtype=np.uint32))
    waiting = gpu.js(
        f"""(async () => {{
          const [memory] = rig.ranges.get({out});
          const read = rig.attempt(() => rig.runtime.read(memory, 0, 16));
          const large = rig.attempt(() => rig.runtime.download(memory, 0, 16, () => undefined));
          rig.runtime.close();
          return [(await read).code, (await large).code, (await rig.runtime.lost).code];
        }})()"""
    )
    assert waiting == ["DeviceLost"] * 3


def test_a_device_lost_while_idle_says_so(gpu):
    gpu.js("(() => { rig.runtime.queue.device.destroy(); })()")
    assert gpu.js("rig.runtime.lost")["code"] == "DeviceLost"
    with pytest.raises(GpuRefused) as caught:
        gpu.js("rig.empty(1, 4)")
    assert caught.value.code == "DeviceLost"


def test_a_crash_of_the_gpu_process_is_a_lost_device(page_files):
    browser = Chromium()
    try:
        rig = GpuRig(browser, page_files, worker=True)
        rig.open()
        program, out = rig.load(COUNT, "pI", name="spin"), rig.empty(4)
        rig.js(f"rig.runtime.launch({program}, null, null, [{out}, 4294967295], 3, false)")
        browser.open("about:blank")
        browser.crash_gpu()
        why = rig.js("rig.runtime.lost")
        assert why["code"] == "DeviceLost"
        assert "while 'spin' ran" in why["message"]
        assert why["details"] == {"program": "spin", "number": 3}
    finally:
        browser.close()


def test_a_tab_without_webgpu_says_what_is_missing(page_files):
    browser = Chromium("--disable-features=WebGPU,WebGPUService", "--disable-gpu", webgpu=False)
    try:
        tab = browser.open(page_files.scripts(*SCRIPTS, RIG))
        got = tab.evaluate("ready.then(() => rig.attempt(() => gpu.describeAdapter()))")
        assert got["code"] == "DeviceError"
        assert got["details"]["reason"] in ("no-webgpu", "no-adapter")
        tab.evaluate("Object.defineProperty(globalThis, 'isSecureContext', { value: false }), 1")
        got = tab.evaluate("rig.attempt(() => gpu.GpuRuntime.open())")
        assert got["details"] == {"reason": "insecure"}
    finally:
        browser.close()


def test_the_adapter_is_described(any_gpu):
    got = any_gpu.js("gpu.describeAdapter()")
    device = got["device"]
    assert (device["kind"], device["dialects"], device["native_graphs"]) == ("browser", ["wgsl"], True)
    assert device["software"] is True
    assert device["limits"]["maxBufferSize"] >= 1 << 28
    assert device["alignment"] in (32, 64, 128, 256)
    assert got["adapterName"]


def test_memory_that_the_gpu_does_not_have_is_refused_by_name(gpu):
    # What the browser answers is made up: to really fill the memory would harm the machine.
    gpu.js(
        """(() => {
          const { device } = rig.runtime.queue;
          const push = device.pushErrorScope.bind(device);
          const pop = device.popErrorScope.bind(device);
          const filters = [];
          device.pushErrorScope = (filter) => { filters.push(filter); push(filter); };
          device.popErrorScope = async () => {
            const memory = filters.pop() === 'out-of-memory';
            const answer = await pop();
            return memory && globalThis.full ? new GPUOutOfMemoryError('made up') : answer;
          };
          globalThis.full = true;
        })()"""
    )
    with pytest.raises(GpuRefused, match="the GPU has no room for 1048576 bytes on top of 0") as caught:
        gpu.empty(1 << 20)
    assert caught.value.code == "OutOfMemory"
    assert gpu.js("rig.runtime.memoryUsed") == 0
    # A small buffer is not waited for; the shortage is told with the work that follows.
    small = gpu.empty(16)
    with pytest.raises(GpuRefused, match="made up") as caught:
        gpu.read(small)
    assert caught.value.code == "OutOfMemory"
    gpu.js("(() => { globalThis.full = false; })()")
    assert not gpu.read(small).any()
