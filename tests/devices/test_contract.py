"""One contract for every kind of device, through the client: memory to the byte, launches, overlap, graphs, errors."""

import re

import numpy as np
import pytest
from contract_kinds import KINDS, LAUNCH_SECONDS, WGSL_KINDS

import wsgrad

# Sums of a few products of small whole numbers are exact in float32.
N = 1000


@pytest.fixture(scope="session")
def shared(kind):
    with kind.connected() as device:
        yield device


@pytest.fixture
def device(shared):
    yield shared
    shared.synchronize()  # nothing that failed unseen is left to the next test


@pytest.fixture
def dialect(kind):
    return kind.dialect


@pytest.fixture
def rng():
    return np.random.default_rng(11)


only_wgsl = pytest.mark.parametrize("kind", WGSL_KINDS, indirect=True)


# -- memory


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "i4", "f4", "i8", "f8", "?"])
def test_arrays_come_back_as_they_went(device, rng, dtype):
    data = rng.integers(0, 2, size=(7, 31)).astype(dtype)
    assert np.array_equal(device.array(data).numpy(), data)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 31, 32, 33, 255, 257, (1 << 20) + 3])
def test_new_memory_is_zero_also_where_some_was_freed(device, nbytes):
    for _ in range(3):
        buffer = device.empty(nbytes, np.uint8)
        assert not buffer.numpy().any()
        buffer.fill(255)
        buffer.free()


def test_any_bytes_can_be_written_read_copied_and_filled_and_no_others_change(device, rng):
    size = 500
    buffers = [device.empty(size, np.uint8) for _ in range(2)]
    expected = [np.zeros(size, np.uint8) for _ in range(2)]
    for step in range(150):
        which = int(rng.integers(2))
        low, high = sorted(int(edge) for edge in rng.integers(0, size + 1, size=2))
        count = high - low
        match step % 4:
            case 0:
                data = rng.integers(0, 256, size=count, dtype=np.uint8)
                buffers[which][low:high].copy_from(data)
                expected[which][low:high] = data
            case 1:
                source, at = int(rng.integers(2)), int(rng.integers(0, size - count + 1))
                buffers[which][low:high].copy_from(buffers[source][at : at + count])
                expected[which][low:high] = expected[source][at : at + count].copy()
            case 2:
                value = int(rng.integers(256))
                buffers[which][low:high].fill(value)
                expected[which][low:high] = value
            case _:
                assert np.array_equal(buffers[which][low:high].numpy(), expected[which][low:high]), step
    for buffer, data in zip(buffers, expected, strict=True):
        assert np.array_equal(buffer.numpy(), data)


def test_large_arrays_travel_whole_at_odd_places(device, rng):
    data = rng.integers(0, 256, size=(3 << 20) + 1, dtype=np.uint8)
    buffer = device.empty(len(data) + 9, np.uint8)
    buffer[5:-4].copy_from(data)
    found = buffer.numpy()
    assert np.array_equal(found[5:-4], data)
    assert not found[:5].any()
    assert not found[-4:].any()


def test_more_memory_than_there_may_be_is_refused_and_the_device_goes_on(device):
    with pytest.raises(wsgrad.OutOfMemory, match="536870912"):
        device.empty(1 << 30, np.uint8).numpy()
    assert not device.empty(4, np.uint8).numpy().any()


# -- launches


@pytest.mark.parametrize("n", [1, 63, 64, 65, N])
def test_a_program_runs_for_every_index(device, dialect, n):
    axpy = dialect.program(device, "axpy")
    x, y = np.arange(n, dtype=np.float32), np.ones(n, np.float32)
    held_x, held_y = device.array(x), device.array(y)
    for k in (2.0, -0.5):
        dialect.launch(axpy, held_y, held_x, k, n=n)
    assert np.array_equal(held_y.numpy(), y + 1.5 * x)
    assert np.array_equal(held_x.numpy(), x)


def test_thousands_of_launches_run_in_their_order(device, dialect):
    add = dialect.program(device, "add")
    x = device.zeros(100, np.int32)
    for k in range(3000):
        dialect.launch(add, x, k - 1500, n=100)
        if k % 1000 == 500:
            assert np.array_equal(x.numpy(), np.full(100, sum(range(-1500, k - 1500 + 1)), np.int32))
    assert np.array_equal(x.numpy(), np.full(100, sum(range(-1500, 1500)), np.int32))


def test_a_timed_launch_takes_time_and_does_its_work(device, dialect):
    x = device.zeros(64, np.int32)
    add = dialect.program(device, "add")
    last, sizes = dialect.all_of(64)
    seconds = [add.timed(x, 1, *last, **sizes) for _ in range(3)]
    assert all(0 <= second < 10 for second in seconds)
    assert np.array_equal(x.numpy(), np.full(64, 3, np.int32))


def test_views_at_any_offset_can_be_arguments(device, dialect, rng):
    data = rng.integers(0, 256, size=2000, dtype=np.uint8)
    add = dialect.program(device, "add")
    for at in (4, 32, 36, 256, 1000) if dialect.name == "c" else (1, 2, 3, 4, 30, 32, 36, 255, 256, 1001):
        buffer = device.array(data)
        dialect.launch(add, buffer[at : at + 400], 7, n=100)
        expected = data.copy()
        expected[at : at + 400] = (data[at : at + 400].view(np.int32) + np.int32(7)).view(np.uint8)
        assert np.array_equal(buffer.numpy(), expected), at


def test_what_is_only_read_is_read_as_it_was_before_the_launch(device, dialect):
    shift = dialect.program(device, "shift")
    data = np.arange(N, dtype=np.uint32)
    for distance in (1, -1, 100, 0):
        buffer = device.array(data)
        low = 200 + distance
        dialect.launch(shift, buffer[low : low + 500], buffer[200:700], n=500)
        expected = data.copy()
        expected[low : low + 500] = data[200:700]
        assert np.array_equal(buffer.numpy(), expected), distance


def test_parts_of_one_buffer_are_read_and_written_at_once(device, dialect):
    buffer = device.array(np.arange(N, dtype=np.uint32))
    dialect.launch(dialect.program(device, "shift"), buffer[:256], buffer[512:768], n=256)
    dialect.launch(dialect.program(device, "both"), buffer[256:320], buffer[320:384], n=64)
    found = buffer.numpy()
    assert np.array_equal(found[:256], np.arange(512, 768))
    assert np.array_equal(found[256:384].view(np.int32), [*range(64), *(-k for k in range(64))])
    assert np.array_equal(found[384:], np.arange(384, N))


def test_two_written_arguments_that_share_bytes_are_refused(device, dialect):
    both = dialect.program(device, "both")
    buffer = device.array(np.arange(100, dtype=np.int32))
    dialect.launch(both, buffer[:60], buffer[59:], n=10)
    with pytest.raises(wsgrad.LaunchError, match="arguments 0 and 1 of 'both'"):
        device.synchronize()
    assert np.array_equal(buffer.numpy(), np.arange(100))


def test_an_empty_argument_is_one(device, dialect):
    x = device.array(np.ones(8, np.float32))
    axpy = dialect.program(device, "axpy")
    for empty in (device.empty(0), x[4:4]):
        dialect.launch(axpy, x[:4], x[4:], 1.0, n=4)
        assert empty.numpy().size == 0
        if dialect.name == "wgsl":  # elsewhere nothing keeps a program from reading what isn't there
            dialect.launch(axpy, empty, empty, 1.0, n=1)
    assert np.array_equal(x.numpy(), [3, 3, 3, 3, 1, 1, 1, 1])


# -- programs and errors


def test_a_source_that_does_not_compile_says_where_and_stops_nothing_else(device, dialect):
    bad = dialect.program(device, "bad")
    x = device.zeros(64, np.int32)
    if dialect.name == "c":
        dialect.launch(bad, device.zeros(1), n=1)
    else:
        bad(device.zeros(1), grid=1)
    with pytest.raises(wsgrad.CompileError) as caught:
        bad.ready()
    assert re.search(dialect.error_place, str(caught.value)), str(caught.value)
    with pytest.raises(wsgrad.CompileError):
        device.synchronize()
    dialect.launch(dialect.program(device, "add"), x, 1, n=64)
    assert x.numpy().all()


def test_a_launch_that_fails_drops_what_follows_until_it_was_raised(device, dialect):
    add, both = dialect.program(device, "add"), dialect.program(device, "both")
    x = device.zeros(64, np.int32)
    dialect.launch(add, x, 1, n=64)
    dialect.launch(both, x, x, n=64)
    dialect.launch(add, x, 10, n=64)
    with pytest.raises(wsgrad.LaunchError):
        x.numpy()
    dialect.launch(add, x, 100, n=64)
    assert np.array_equal(x.numpy(), np.full(64, 101))


# -- graphs


def test_a_graph_does_what_its_launches_do(device, dialect, rng):
    axpy, shift = dialect.program(device, "axpy"), dialect.program(device, "shift")
    data = rng.integers(-4, 5, size=(3, 256)).astype(np.float32)
    x, y, z = (device.array(row) for row in data)
    with wsgrad.record(device) as graph:
        for _ in range(20):
            dialect.launch(axpy, y, x, 1.0, n=256)
        z[8:16].copy_from(y[1:9])
        z[16:17].fill(5)
        dialect.launch(shift, z[32:128], z[31:127], n=96)
    for _ in range(3):
        graph.run()
        data[1] += 20 * data[0]
        data[2, 8:16], data[2, 16] = data[1, 1:9], 5
        data[2, 32:128] = data[2, 31:127].copy()
    assert np.array_equal(y.numpy(), data[1])
    assert np.array_equal(z.numpy(), data[2])


def test_a_graph_runs_with_other_buffers_and_values(device, dialect):
    add = dialect.program(device, "add")
    x, other = device.zeros(256, np.int32), device.zeros(256, np.int32)
    by, n = wsgrad.Var("by", -100, 100), wsgrad.Var("n", 1, 4)
    with wsgrad.record(device) as graph:
        if dialect.name == "c":
            add(x, by * 2 + 1, wsgrad.INDEX, grid=n * 64)
        else:
            block = {"block": 64} if dialect.name == "opencl-c" else {}
            add(x, by * 2 + 1, n * 64, grid=n, **block)
        dialect.launch(add, x, 1, n=256)
    expected = np.zeros((2, 256), np.int32)
    for round_ in range(1, 9):
        which, groups = round_ % 2, round_ % 4 + 1
        graph.run({x: other} if which else {}, by=-round_, n=groups)
        expected[which, : groups * 64] += 1 - 2 * round_
        expected[which] += 1
    assert np.array_equal(x.numpy(), expected[0])
    assert np.array_equal(other.numpy(), expected[1])


def test_a_long_graph_is_replayed_many_times(device, dialect):
    add = dialect.program(device, "add")
    x = device.zeros(64, np.int32)
    with wsgrad.record(device) as graph:
        for k in range(500):
            dialect.launch(add, x, k % 3, n=64)
    for _ in range(5):
        graph.run()
    assert np.array_equal(x.numpy(), np.full(64, 5 * sum(k % 3 for k in range(500))))


def test_a_graph_with_a_program_that_does_not_compile_fails_and_the_device_goes_on(device, dialect):
    add, bad = dialect.program(device, "add"), dialect.program(device, "bad")
    x, unused = device.zeros(64, np.int32), device.zeros(1)
    with wsgrad.record(device) as graph:
        dialect.launch(add, x, 1, n=64)
        if dialect.name == "c":
            dialect.launch(bad, unused, n=1)
        else:
            bad(unused, grid=1)
    graph.run()
    with pytest.raises(wsgrad.CompileError):
        device.synchronize()
    dialect.launch(add, x, 10, n=64)
    assert set(x.numpy()) <= {10, 11}


# -- time


@pytest.mark.parametrize("kind_name", list(KINDS))
def test_a_launch_over_its_time_loses_the_device_by_name_and_reopening_helps(kind_name):
    with (
        KINDS[kind_name]("--launch-seconds", str(LAUNCH_SECONDS.get(kind_name, 2))) as offer,
        offer.connected() as device,
    ):
        dialect = offer.dialect
        x, y = device.zeros(1 << 16), device.zeros(1 << 16)
        axpy, slow = dialect.program(device, "axpy"), dialect.program(device, "slow")
        dialect.launch(axpy, y, x, 1.0, n=64)
        device.synchronize()
        dialect.launch(slow, x, n=1 << 16)
        dialect.launch(axpy, y, x, 1.0, n=64)
        with pytest.raises(wsgrad.Timeout, match="slow"):
            y.numpy()
        with pytest.raises(wsgrad.DeviceLost):
            y.numpy()
        if not offer.recovers:
            return
        device.reopen()
        x, y = device.array(np.ones(64, np.float32)), device.zeros(64)
        dialect.launch(axpy, y, x, 3.0, n=64)
        assert np.array_equal(y.numpy(), np.full(64, 3))


# -- WGSL alone


@only_wgsl
def test_overrides_structures_and_three_dimensions(device):
    source = """
    struct Task { scale: f32, offset: vec2<u32>, flag: u32 }
    override FACTOR: u32 = 2u;
    @id(5) override extra: i32;
    @group(0) @binding(0) var<storage, read_write> out: array<u32>;
    @group(0) @binding(1) var<uniform> task: Task;
    @compute @workgroup_size(4, 2, 1) fn place(@builtin(global_invocation_id) id: vec3<u32>) {
        let at = id.x + 8u * (id.y + 4u * id.z);
        out[at] = at * FACTOR + u32(task.scale) + task.offset.y * task.flag + u32(extra);
    }"""
    task = np.zeros((), np.dtype([("scale", "f4"), ("", "u4"), ("offset", "u4", 2), ("flag", "u4")]))[()]
    task["scale"], task["offset"], task["flag"] = 3.0, (5, 7), 1
    place = device.program(source, "place")
    out = device.zeros(96, np.uint32)
    place(out, task, grid=(2, 2, 3), extra=1)
    assert np.array_equal(out.numpy(), np.arange(96) * 2 + 3 + 7 + 1)
    place(out, task, grid=(2, 2, 3), extra=0, FACTOR=5)
    assert np.array_equal(out.numpy(), np.arange(96) * 5 + 3 + 7)


@only_wgsl
def test_f16_works_where_the_device_says_so(device):
    source = """
    enable f16;
    @group(0) @binding(0) var<storage, read_write> x: array<f16>;
    @group(0) @binding(1) var<uniform> k: f16;
    @compute @workgroup_size(64) fn scale(@builtin(global_invocation_id) id: vec3<u32>) { x[id.x] *= k; }"""
    x = device.array(np.arange(64, dtype=np.float16))
    scale = device.program(source, "scale")
    scale(x, np.float16(0.5), grid=1)
    if device.properties["f16"]:
        assert np.array_equal(x.numpy(), np.arange(64, dtype=np.float16) / 2)
        return
    with pytest.raises(wsgrad.CompileError):
        device.synchronize()


@only_wgsl
def test_a_grid_over_the_limit_is_refused_by_the_limits_name(device, dialect):
    most = device.properties["limits"]["maxComputeWorkgroupsPerDimension"]
    x = device.zeros(64, np.int32)
    dialect.program(device, "add")(x, 1, 64, grid=most + 1)
    with pytest.raises(wsgrad.WsgradError, match="maxComputeWorkgroupsPerDimension"):
        device.synchronize()
    dialect.program(device, "add")(x, 1, 64, grid=(1, 2, 3))
    assert x.numpy().min() >= 1


@only_wgsl
def test_an_argument_too_small_for_its_type_is_refused_and_what_came_before_has_run(device, dialect):
    source = """
    @group(0) @binding(0) var<storage, read_write> x: array<f32, 64>;
    @compute @workgroup_size(64) fn fixed(@builtin(local_invocation_index) i: u32) { x[i] = 1.0; }"""
    fixed, add = device.program(source, "fixed"), dialect.program(device, "add")
    before = device.zeros(64, np.int32)
    dialect.launch(add, before, 1, n=64)
    fixed(device.zeros(63), grid=1)
    with pytest.raises(wsgrad.LaunchError, match="fixed"):
        device.synchronize()
    assert before.numpy().all()


@only_wgsl
def test_the_same_range_twice_for_writing_is_refused_even_with_alias(device, dialect):
    both = dialect.program(device, "both", alias=True)
    x = device.zeros(64, np.int32)
    dialect.launch(both, x, x, n=64)
    with pytest.raises(wsgrad.LaunchError, match="arguments 0 and 1"):
        device.synchronize()


@only_wgsl
def test_an_unused_binding_is_an_argument_all_the_same(device):
    source = """
    @group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @group(0) @binding(1) var<storage, read> unused: array<u32>;
    @group(0) @binding(2) var<uniform> n: u32;
    @compute @workgroup_size(1) fn count() { x[0] = n; }"""
    x = device.zeros(4, np.uint32)
    device.program(source, "count")(x, device.zeros(4, np.uint32), 9, grid=1)
    assert x.numpy().tolist() == [9, 0, 0, 0]


@only_wgsl
def test_more_bindings_than_a_launch_has_arguments_are_named_and_cost_nothing_else(device):
    bindings = [f"@group(0) @binding({i}) var<storage, read_write> b{i}: array<u32>;" for i in range(65)]
    x = device.array(np.arange(4, dtype=np.uint32))
    many = device.program("\n".join([*bindings, "@compute @workgroup_size(1) fn many() { b64[0] = 1u; }"]), "many")
    with pytest.raises(wsgrad.CompileError, match="65 arguments are more than 64"):
        many.ready()
    assert x.numpy().tolist() == [0, 1, 2, 3]


@only_wgsl
def test_a_ragged_view_keeps_its_neighbours(device, dialect):
    buffer = device.array(np.arange(256, dtype=np.uint8))
    source = """
    @group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @compute @workgroup_size(1) fn ones() { for (var i = 0u; i < arrayLength(&x); i++) { x[i] = 0xffffffffu; } }"""
    device.program(source, "ones")(buffer[3:13], grid=1)
    expected = np.arange(256, dtype=np.uint8)
    expected[3:13] = 255
    assert np.array_equal(buffer.numpy(), expected)
