"""Launches in a tab give NumPy's results wherever their arguments are, and are refused by name where they can't be."""

import json

import numpy as np
import pytest
from gpu_rig import GpuRefused

ADD = """
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> by: f32;
@compute @workgroup_size(64) fn k(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < arrayLength(&out)) { out[id.x] = x[id.x] + by; }
}"""
BYTES = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@compute @workgroup_size(64) fn k(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < arrayLength(&out)) { out[id.x] = x[id.x] + 1u; }
}"""
COUNT = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(1) fn k() { out[0] = out[0] + 1u; }"""


def packed(*launches):
    return f"new Uint8Array(Uint32Array.of({','.join(str(word) for launch in launches for word in launch)}).buffer)"


def bits(value):
    return int(np.float32(value).view(np.uint32))


def test_a_launch_with_buffers_and_a_scalar(any_gpu):
    data = np.arange(1000, dtype=np.float32)
    out, x = any_gpu.empty(4000), any_gpu.array(data)
    program = any_gpu.load(ADD, "ppf")
    any_gpu.launch(program, out, x, 0.5, grid=[16])
    assert np.array_equal(any_gpu.read(out, np.float32), data + np.float32(0.5))


def test_packed_launches_run_in_order(any_gpu):
    a, b = any_gpu.array(np.zeros(64, np.float32)), any_gpu.empty(256)
    program = any_gpu.load(ADD, "ppf")
    launches = []
    for step in range(600):
        to, of = ((b, a), (a, b))[step % 2]
        launches.append((program, step % 2, to, of, bits(step)))
    assert any_gpu.js(f"rig.runtime.launchPacked({packed(*launches)}, 1)") is None
    assert np.array_equal(any_gpu.read(a, np.float32), np.full(64, sum(range(600)), np.float32))


def test_scalars_of_each_kind_at_their_limits(any_gpu):
    source = """
    @group(0) @binding(0) var<storage, read_write> out: array<u32>;
    @group(0) @binding(1) var<uniform> a: i32;
    @group(0) @binding(2) var<uniform> b: u32;
    @group(0) @binding(3) var<uniform> c: f32;
    @compute @workgroup_size(1) fn k() { out[0] = bitcast<u32>(a); out[1] = b; out[2] = bitcast<u32>(c); }"""
    program = any_gpu.load(source, "piIf")
    out = any_gpu.empty(12)
    for a, b, c in [(-(2**31), 2**32 - 1, -1.5), (2**31 - 1, 0, 3.0e38), (-1, 7, 1e-40)]:
        any_gpu.launch(program, out, a, b, c)
        words = any_gpu.read(out, np.uint32)
        assert words[:2].tolist() == [a % 2**32, b]
        assert words[2] == bits(c)


@pytest.mark.parametrize(
    ("signature", "value", "why"),
    [("i", 2**31, "does not fit"), ("I", -1, "does not fit"), ("i", 1.5, "does not fit"), ("f", 1e39, "too large")],
)
def test_scalars_that_do_not_fit_are_refused(gpu, signature, value, why):
    kind = {"i": "i32", "I": "u32", "f": "f32"}[signature]
    source = f"@group(0) @binding(0) var<uniform> a: {kind}; @compute @workgroup_size(1) fn k() {{ _ = a; }}"
    program = gpu.load(source, signature)
    with pytest.raises(GpuRefused, match=f"argument 0 of 'k' is .*{why}") as caught:
        gpu.launch(program, value)
    assert caught.value.code == "LaunchError"


def test_grids_of_three_dimensions(any_gpu):
    source = """
    @group(0) @binding(0) var<storage, read_write> out: array<u32>;
    @compute @workgroup_size(2, 1, 1)
    fn k(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>) {
      out[(id.z * n.y + id.y) * n.x * 2u + id.x] = id.x + 10u * id.y + 100u * id.z;
    }"""
    program = any_gpu.load(source, "p")
    out = any_gpu.empty(4 * 6 * 4 * 5)
    any_gpu.launch(program, out, grid=[3, 4, 5])
    z, y, x = np.meshgrid(range(5), range(4), range(6), indexing="ij")
    assert np.array_equal(any_gpu.read(out, np.uint32), (x + 10 * y + 100 * z).ravel())


def test_override_constants(any_gpu):
    source = """
    override scale: f32; @id(3) override more: u32 = 1; override on: bool = false;
    @group(0) @binding(0) var<storage, read_write> out: array<f32>;
    @compute @workgroup_size(1) fn k() { if (on) { out[0] = scale * f32(more); } }"""
    out = any_gpu.empty(4)
    program = any_gpu.load(source, "p", constants={"scale": 1.5, "3": 4, "on": True})
    any_gpu.launch(program, out)
    assert any_gpu.read(out, np.float32)[0] == 6
    with pytest.raises(GpuRefused, match="nothere") as caught:
        any_gpu.load(source, "p", constants={"scale": 1, "nothere": 1})
    assert caught.value.code == "CompileError"


def test_a_binding_that_is_not_used(any_gpu):
    source = """
    @group(0) @binding(0) var<storage, read> unused: array<f32>;
    @group(0) @binding(1) var<storage, read_write> out: array<u32>;
    @group(0) @binding(2) var<uniform> also: vec4<u32>;
    @compute @workgroup_size(1) fn k() { out[0] = 7u; }"""
    program = any_gpu.load(source, "pii".replace("i", "p"))
    unused, out, also = any_gpu.empty(4), any_gpu.empty(4), any_gpu.empty(16)
    any_gpu.launch(program, unused, out, also)
    assert any_gpu.read(out, np.uint32)[0] == 7


def test_a_structure_in_a_buffer_as_uniform(any_gpu):
    source = """
    struct P { a: f32, b: vec3<f32>, c: u32 }
    @group(0) @binding(0) var<storage, read_write> out: array<f32>;
    @group(0) @binding(1) var<uniform> p: P;
    @compute @workgroup_size(1) fn k() { out[0] = p.a + p.b.x + p.b.y + p.b.z + f32(p.c); }"""
    kind = np.dtype({"names": ["a", "b", "c"], "formats": ["f4", "3f4", "u4"], "offsets": [0, 16, 28], "itemsize": 32})
    data = np.zeros(1, kind)
    data["a"], data["b"], data["c"] = 1, [2, 3, 4], 5
    program, out = any_gpu.load(source, "pp"), any_gpu.empty(4)
    any_gpu.launch(program, out, any_gpu.array(data))
    assert any_gpu.read(out, np.float32)[0] == 15
    with pytest.raises(GpuRefused, match=r"argument 1 of 'k' has 16 bytes; its type P needs at least 32"):
        any_gpu.launch(program, out, any_gpu.empty(16))


# -- places that WebGPU can't bind


@pytest.mark.parametrize(
    ("to", "at", "nbytes"), [(256, 512, 400), (4, 8, 400), (3, 1, 401), (0, 257, 6), (77, 1024, 1)]
)
def test_views_at_any_place(any_gpu, to, at, nbytes):
    big = np.arange(3000, dtype=np.uint32).view(np.uint8).copy()
    other = np.arange(5000, 8000, dtype=np.uint32).view(np.uint8).copy()
    x, y = any_gpu.array(big), any_gpu.array(other)
    program = any_gpu.load(BYTES, "pp")
    any_gpu.launch(program, any_gpu.view(y, to, nbytes), any_gpu.view(x, at, nbytes), grid=[4])
    words = np.zeros(-(-nbytes // 4) * 4, np.uint8)
    words[:nbytes] = big[at : at + nbytes]
    other[to : to + nbytes] = (words.view(np.uint32) + 1).view(np.uint8)[:nbytes]
    assert np.array_equal(any_gpu.read(y), other)
    assert np.array_equal(any_gpu.read(x), big)


@pytest.mark.parametrize("shift", [0, 4, 256, 400, 4096])
def test_a_read_argument_that_shares_a_buffer_with_a_written_one(any_gpu, shift):
    data = np.arange(4096, dtype=np.uint32)
    buffer = any_gpu.array(data)
    program = any_gpu.load(BYTES, "pp")
    any_gpu.launch(program, any_gpu.view(buffer, shift, 4096), any_gpu.view(buffer, 0, 4096), grid=[16])
    expected = data.copy()
    expected[shift // 4 : shift // 4 + 1024] = data[:1024] + 1
    assert np.array_equal(any_gpu.read(buffer, np.uint32), expected)


TWO = """
@group(0) @binding(0) var<storage, read_write> a: array<u32>;
@group(0) @binding(1) var<storage, read_write> b: array<u32>;
@compute @workgroup_size(64) fn k(@builtin(global_invocation_id) id: vec3<u32>) { a[id.x] = b[id.x] * 2u; }"""


def test_two_written_arguments_that_overlap_are_refused(any_gpu):
    buffer = any_gpu.array(np.arange(256, dtype=np.uint32))
    one, two = any_gpu.view(buffer, 0, 512), any_gpu.view(buffer, 256, 512)
    program = any_gpu.load(TWO, "pp")
    with pytest.raises(GpuRefused, match="arguments 0 and 1 of 'k' are both written and share bytes") as caught:
        any_gpu.launch(program, one, two)
    assert caught.value.code == "LaunchError"
    assert caught.value.details == {"arguments": [0, 1]}
    aliased = any_gpu.load(TWO, "pp", alias=True)
    with pytest.raises(GpuRefused, match="WebGPU binds only once"):
        any_gpu.launch(aliased, one, one)
    # Disjoint ones are no problem, and the error is over.
    any_gpu.launch(program, any_gpu.view(buffer, 0, 256), any_gpu.view(buffer, 256, 256))
    assert np.array_equal(any_gpu.read(buffer, np.uint32)[:64], np.arange(64, 128) * 2)


def test_what_writes_does_not_name_is_only_read(any_gpu):
    buffer = any_gpu.array(np.arange(256, dtype=np.uint32))
    program = any_gpu.load(TWO, "pp", writes=[0])
    any_gpu.launch(program, any_gpu.view(buffer, 0, 256), any_gpu.view(buffer, 128, 256))
    expected = np.arange(256)
    expected[:64] = np.arange(32, 96) * 2
    assert np.array_equal(any_gpu.read(buffer, np.uint32), expected)


def test_two_bindings_of_one_range_of_which_none_is_written(any_gpu):
    source = """
    @group(0) @binding(0) var<storage, read_write> out: array<u32>;
    @group(0) @binding(1) var<storage, read_write> a: array<atomic<u32>>;
    @group(0) @binding(2) var<storage, read_write> b: array<atomic<u32>>;
    @group(0) @binding(3) var<storage, read> c: array<u32>;
    @compute @workgroup_size(64) fn k(@builtin(global_invocation_id) id: vec3<u32>) {
      out[id.x] = atomicLoad(&a[id.x]) + atomicLoad(&b[id.x]) + c[id.x];
    }"""
    program = any_gpu.load(source, "pppp", writes=[0])
    x, out = any_gpu.array(np.arange(64, dtype=np.uint32)), any_gpu.empty(256)
    any_gpu.launch(program, out, x, x, x)
    assert np.array_equal(any_gpu.read(out, np.uint32), np.arange(64) * 3)


# -- what is refused


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("@compute @workgroup_size(1) fn k() {\n  let a = b;\n}", "2:11"),
        ("\n\n@group(1) @binding(0) var<uniform> a: u32;\n@compute @workgroup_size(1) fn k() {}", "3:36"),
    ],
)
def test_compile_errors_have_line_and_column(any_gpu, source, where):
    with pytest.raises(GpuRefused, match=f"^CompileError: {where}: ") as caught:
        any_gpu.load(source, "")
    assert caught.value.code == "CompileError"
    any_gpu.load("@compute @workgroup_size(1) fn k() {}", "")


def test_a_launch_of_what_did_not_compile_fails_the_same_way(gpu):
    with pytest.raises(GpuRefused) as compiling:
        gpu.js('rig.load(77, "fn k() { oh no }", "p")')
    with pytest.raises(GpuRefused) as launching:
        gpu.launch(77, 1)
    assert str(launching.value) == str(compiling.value)


def test_an_entry_that_is_not_there_is_named(gpu):
    with pytest.raises(GpuRefused, match="there is no @compute function nope, but: k"):
        gpu.load("@compute @workgroup_size(1) fn k() {}", "", entry="nope")


def test_too_many_bindings_are_refused_with_the_limit(any_gpu):
    limit = any_gpu.js("rig.runtime.queue.device.limits.maxStorageBuffersPerShaderStage")
    if limit > 500:
        pytest.skip("this adapter has no limit that a program meets")
    many = "".join(f"@group(0) @binding({i}) var<storage, read> a{i}: array<u32>;" for i in range(limit + 1))
    with pytest.raises(GpuRefused, match=f"the program has {limit + 1} storage buffers but this GPU allows {limit}"):
        any_gpu.load(many + "@compute @workgroup_size(1) fn k() {}", "p" * (limit + 1))


def test_a_workgroup_over_the_limit_is_a_compile_error(gpu):
    with pytest.raises(GpuRefused) as caught:
        gpu.load("@compute @workgroup_size(100000) fn k() {}", "")
    assert caught.value.code == "CompileError"


@pytest.mark.parametrize("grid", [[0], [-1], [1 << 31], [1, 1, 1 << 20], [1.5], [], [1, 1, 1, 1]])
def test_grids_over_the_limits_are_refused(gpu, grid):
    program, out = gpu.load(COUNT, "p"), gpu.empty(4)
    with pytest.raises(GpuRefused, match="the grid") as caught:
        gpu.launch(program, out, grid=grid)
    assert caught.value.code == "LaunchError"
    gpu.launch(program, out)
    assert gpu.read(out, np.uint32)[0] == 1


def test_arguments_of_the_wrong_kind_and_number(gpu):
    out = gpu.empty(4)
    for source, signature, values, why in [
        (COUNT, "", [], "takes 1 arguments, one a binding, not 0"),
        (COUNT, "f", [1.0], "argument 0 of 'k' is a number, but out is a var<storage>"),
        (COUNT, "q", [1], "argument 0 of 'k' is a 64-bit number"),
        (COUNT, "p", [out, out], "takes 1 arguments, not 2"),
        (COUNT, "p", [99999], "argument 0 of 'k' is buffer 99999, which does not exist"),
    ]:
        program = gpu.load(source, signature)
        with pytest.raises(GpuRefused, match=why) as caught:
            gpu.launch(program, *values)
        assert caught.value.code == "LaunchError"
    with pytest.raises(GpuRefused, match="there is no program 4711"):
        gpu.launch(4711)
    with pytest.raises(GpuRefused, match="has a block"):
        gpu.js(f"rig.runtime.launch({gpu.load(COUNT, 'p')}, null, [64], [{out}], 1, false)")


def test_a_range_over_the_binding_limit_is_refused(gpu):
    limit = gpu.js("rig.runtime.queue.device.limits.maxStorageBufferBindingSize")
    most = gpu.js("rig.runtime.queue.device.limits.maxBufferSize")
    if most <= limit:
        pytest.skip("this adapter binds whole buffers")
    program = gpu.load(COUNT, "p")
    try:
        out = gpu.empty(limit + 4)
    except GpuRefused:
        pytest.skip("this machine has no memory for a buffer over the binding limit")
    with pytest.raises(GpuRefused, match=f"this GPU binds at most {limit}"):
        gpu.launch(program, out)


def test_a_failing_packed_launch_stops_there_and_is_named(gpu):
    out, program = gpu.empty(4), gpu.load(COUNT, "p")
    words = packed((program, 0, out), (program, 0, out), (program, 1 << 20, out), (program, 0, out))
    got = gpu.js(
        f"(({{number, program, error}}) => [number, program, error.code])(rig.runtime.launchPacked({words}, 10))"
    )
    assert got == [12, "k", "LaunchError"]
    assert gpu.read(out, np.uint32)[0] == 2
    for cut in (f"{words}.subarray(0, 8)", f"{words}.subarray(0, 9)"):
        assert gpu.js(f"rig.runtime.launchPacked({cut}, 1).error.code") == "LaunchError"


def test_an_error_found_only_by_the_device_harms_no_other_launch(gpu):
    # A type whose size the runtime can't work out, and an argument that is too small for it.
    source = """
    @group(0) @binding(0) var<storage, read_write> out: array<array<u32, 2 + 2>>;
    @compute @workgroup_size(1) fn k() { out[0][0] = 9u; }"""
    unsure, count = gpu.load(source, "p"), gpu.load(COUNT, "p")
    out, small = gpu.empty(4), gpu.empty(4)
    gpu.js(
        f"""(() => {{
          for (const [program, buffer, number] of [[{count}, {out}, 1], [{unsure}, {small}, 2], [{count}, {out}, 3]]) {{
            rig.runtime.launch(program, null, null, [buffer], number, false);
          }}
        }})()"""
    )
    with pytest.raises(GpuRefused, match="the GPU refused the work") as caught:
        gpu.js("rig.runtime.settled()")
    assert caught.value.code == "LaunchError"
    assert caught.value.details == {"number": 2, "program": "k"}
    gpu.js("rig.runtime.settled()")
    assert gpu.read(out, np.uint32)[0] == 2


def test_half_precision_where_there_is_some(any_gpu):
    if not any_gpu.js("rig.runtime.describe().f16"):
        pytest.skip("this adapter has no shader-f16")
    source = """enable f16;
    @group(0) @binding(0) var<storage, read_write> a: array<f16>;
    @compute @workgroup_size(64) fn k(@builtin(global_invocation_id) id: vec3<u32>) { a[id.x] = a[id.x] * 2h; }"""
    data = np.arange(64, dtype=np.float16)
    buffer = any_gpu.array(data)
    any_gpu.launch(any_gpu.load(source, "p"), buffer)
    assert np.array_equal(any_gpu.read(buffer, np.float16), data * 2)


def test_warnings_come_with_the_program(gpu):
    source = """@group(0) @binding(0) var<storage, read_write> out: array<u32>;
    @compute @workgroup_size(64) fn k(@builtin(local_invocation_index) i: u32) { return; out[i] = 1u; }"""
    warnings = gpu.js(f"rig.load(78, {json.dumps(source)}, 'p')")
    assert "warning" in warnings
    assert warnings.startswith("2:")
