"""Replays of a graph on a tab's GPU give what its steps give one by one, with other buffers and values each time."""

import json
import struct

import numpy as np
import pytest
from gpu_rig import GpuRefused, b64

AXPY = """
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> a: f32;
@group(0) @binding(3) var<uniform> n: u32;
@compute @workgroup_size(1) fn k(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < n) { y[id.x] = y[id.x] + a * x[id.x]; }
}"""


class Graph:
    """A part with one lane of steps, prepared in the rig."""

    def __init__(self, rig, slots, steps, programs):
        self.rig = rig
        lane = ",".join(f"{{number: {number}, op: {op}, waits: []}}" for number, op in enumerate(steps))
        rig.js(
            f"""(() => {{
              globalThis.prepared?.close();
              const part = {{
                programs: new Map({json.dumps(list(programs.items()))}),
                slots: {json.dumps(slots)},
                lanes: [[{lane}], [], []],
              }};
              globalThis.prepared = rig.runtime.prepare(part);
            }})()"""
        )

    def replay(self, *ranges, values=()):
        return self.rig.js(f"rig.replay(prepared, {json.dumps(ranges)}, {json.dumps(values)})")


def launch(program, grid, *arguments):
    return json.dumps([0, program, grid, None, arguments])


def test_launches_copies_and_fills_with_variables(any_gpu):
    program = any_gpu.load(AXPY, "ppfI")
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    buffers = [any_gpu.array(x), any_gpu.array(y), any_gpu.empty(400)]
    steps = [
        launch(program, [[0, 1, 0]], 1, 0, 0.5, [0, 1, 0]),  # y[:n] += 0.5 x
        launch(program, [100], 1, 0, [0, -3, 1], 100),  # y += (1 - 3n) x
        "[1, 2, 1]",
        f"[2, 1, rig.bytes({b64(np.float32(2.5))})]",
        launch(program, None, 1, 2, 1, 1),  # y[0] += z[0]
    ]
    graph = Graph(any_gpu, [[0, 0, 400], [1, 0, 400], [2, 0, 400]], steps, {program: "ppfI"})
    for n in (1, 7, 100, 7):
        assert graph.replay(*buffers, values=[n]) is None
        y[:n] += np.float32(0.5) * x[:n]
        y += np.float32(1 - 3 * n) * x
        z = y.copy()
        y[:] = 2.5
        y[0] += z[0]
        assert np.allclose(any_gpu.read(buffers[2], np.float32), z, rtol=1e-6)
        assert np.allclose(any_gpu.read(buffers[1], np.float32), y, rtol=1e-6)


def test_scalars_from_variables_wrap_and_round_as_in_c(gpu):
    source = """
    @group(0) @binding(0) var<storage, read_write> out: array<u32>;
    @group(0) @binding(1) var<uniform> a: i32;
    @group(0) @binding(2) var<uniform> b: u32;
    @group(0) @binding(3) var<uniform> c: f32;
    @compute @workgroup_size(1) fn k() { out[0] = bitcast<u32>(a); out[1] = b; out[2] = bitcast<u32>(c); }"""
    program, out = gpu.load(source, "piIf"), gpu.empty(12)
    steps = [launch(program, None, 0, [0, -1, 0], [0, 3, 1], [0, 16777217, 1])]
    graph = Graph(gpu, [[0, 0, 12]], steps, {program: "piIf"})
    for n in (0, 1, 5, 2**30):
        graph.replay(out, values=[n])
        expected = struct.pack("<iIf", -n, 3 * n + 1, np.float32(16777217 * n + 1))
        assert gpu.read(out).tobytes() == expected


def test_other_buffers_stand_for_a_graphs_in_each_replay(any_gpu):
    program = any_gpu.load(AXPY, "ppfI")
    arrays = [np.full(64, value, np.float32) for value in (1, 10, 100)]
    buffers = [any_gpu.array(data) for data in arrays]
    steps = [launch(program, [64], 0, 1, float(a), 64) for a in range(50)]
    graph = Graph(any_gpu, [[0, 0, 256], [1, 0, 256]], steps, {program: "ppfI"})
    for to, of in ((0, 1), (2, 1), (1, 0), (0, 1), (0, 2)):
        graph.replay(buffers[to], buffers[of])
        for a in range(50):
            arrays[to] += np.float32(a) * arrays[of]
    for buffer, data in zip(buffers, arrays, strict=True):
        assert np.array_equal(any_gpu.read(buffer, np.float32), data)


def test_slots_that_webgpu_cannot_bind(any_gpu):
    program = any_gpu.load(AXPY, "ppfI")
    data = np.arange(300, dtype=np.float32)
    buffer = any_gpu.array(data)
    graph = Graph(any_gpu, [[0, 0, 256], [0, 0, 256]], [launch(program, [64], 0, 1, 2.0, 64)] * 3, {program: "ppfI"})
    for to, at in ((400, 4), (4, 0), (256, 512), (0, 0)):
        places = [any_gpu.view(buffer, to, 256), any_gpu.view(buffer, at, 256)]
        graph.replay(*places)
        for _ in range(3):
            data[to // 4 : to // 4 + 64] += 2 * data[at // 4 : at // 4 + 64].copy()
    assert np.allclose(any_gpu.read(buffer, np.float32), data, rtol=1e-5)


def test_runs_end_where_a_transfer_has_its_place(gpu):
    got = gpu.js(
        """(() => {
          const steps = [0, 1, 3, 5].map((number) => ({ number, op: [1, 0, 1], waits: [] }));
          const lanes = [steps, [{ number: 2 }], [{ number: 4 }]];
          const part = { programs: new Map(), slots: [[0, 0, 4], [1, 0, 4]], lanes };
          return rig.runtime.prepare(part).queue.map((run) => run.steps.map(({ number }) => number));
        })()"""
    )
    assert got == [[0, 1], [3], [5]]


def test_a_step_that_fails_is_named_and_those_before_have_run(gpu):
    program, out = gpu.load(AXPY, "ppfI"), gpu.array(np.ones(4, np.float32))
    x = gpu.array(np.ones(4, np.float32))
    too_many = gpu.js("rig.runtime.queue.device.limits.maxComputeWorkgroupsPerDimension") + 1
    steps = [launch(program, [grid], 0, 1, 1.0, 4) for grid in (4, 4, [0, 1, 0], 4)]
    graph = Graph(gpu, [[0, 0, 16], [1, 0, 16]], steps, {program: "ppfI"})
    failure = graph.replay(out, x, values=[too_many])
    assert (failure["number"], failure["code"], failure["program"]) == (3, "LaunchError", "k")
    assert gpu.read(out, np.float32)[0] == 3
    assert graph.replay(out, x, values=[4]) is None
    assert gpu.read(out, np.float32)[0] == 7


def test_a_graph_uses_the_program_that_its_id_means_now(gpu):
    program, out, x = gpu.load(AXPY, "ppfI"), gpu.empty(16), gpu.array(np.ones(4, np.float32))
    graph = Graph(gpu, [[0, 0, 16], [1, 0, 16]], [launch(program, [4], 0, 1, 1.0, 4)], {program: "ppfI"})
    graph.replay(out, x)
    gpu.js(f"rig.load({program}, {json.dumps(AXPY.replace('a *', '10.0 *'))}, 'ppfI')")
    graph.replay(out, x)
    assert gpu.read(out, np.float32)[0] == 11
    gpu.js(f"rig.runtime.drop({program})")
    assert graph.replay(out, x)["code"] == "LaunchError"


def test_a_thousand_launches_in_few_submissions(gpu):
    program, out, x = gpu.load(AXPY, "ppfI"), gpu.empty(256), gpu.array(np.ones(64, np.float32))
    steps = [launch(program, [64], 0, 1, 1.0, 64)] * 1000
    graph = Graph(gpu, [[0, 0, 256], [1, 0, 256]], steps, {program: "ppfI"})
    graph.replay(out, x)
    submits = gpu.js(
        """(async () => {
          await rig.runtime.settled();
          const { queue } = rig.runtime.queue.device;
          let submits = 0;
          const submit = queue.submit.bind(queue);
          queue.submit = (list) => { submits += 1; submit(list); };
          for (let i = 0; i < 4; i++) { prepared.run(prepared.queue[0], 1); await rig.runtime.settled(); }
          return submits;
        })()"""
    )
    assert gpu.read(out, np.float32)[0] == 5000
    assert submits <= 400  # of 4,000 launches; how many exactly is a matter of their measured time


def test_a_slot_that_is_not_bound_is_refused(gpu):
    Graph(gpu, [[0, 0, 4], [1, 0, 4]], ["[1, 0, 1]"], {})
    with pytest.raises(GpuRefused, match="slot 0 of a graph is not bound"):
        gpu.js("(() => { throw prepared.run(prepared.queue[0], 1).error; })()")
