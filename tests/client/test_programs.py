"""Programs and launches on a real device: arguments, grids, errors and whom they reach, losing and reopening."""

import gc
import time
from itertools import pairwise

import numpy as np
import pytest
from kernels import ADD, COUNT

import wsgrad

SET = "void set(float *x, {type} value) {{ x[0] = value; }}"


def test_a_program_runs_on_buffers_views_and_scalars(device, rng):
    x, y = rng.random((2, 1000), np.float32)
    add = device.program(ADD, "add", writes=(0,))
    bx, by = device.array(x), device.array(y)
    add(by, bx, 2.0, 1000)
    add(by[500:], bx[:500], 1.0, 500)
    expected = y + np.float32(2) * x
    expected[500:] += x[:500]
    np.testing.assert_allclose(by.numpy(), expected, rtol=1e-6)


def test_launches_run_in_the_order_they_were_issued(device):
    counter = device.zeros(1, np.int32)
    count = device.program(COUNT, "count")
    double = device.program("void twice(int *n) { n[0] *= 2; }", "twice")
    expected = 0
    for n in range(3000):
        if n % 100 == 99:
            double(counter)
            expected = (expected * 2) & 0xFFFF
            device.program("void cut(int *n) { n[0] &= 0xFFFF; }", "cut")(counter)
        else:
            count(counter)
            expected += 1
    assert counter.numpy()[0] == expected


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("int", 7), ("int", -7), ("int", True), ("double", 2.5), ("long", np.int64(-(2**40))),
        ("unsigned", np.uint32(2**31)), ("unsigned long", np.uint64(2**63)), ("double", np.float64(0.1)),
        ("float", np.float16(1.5)), ("char", np.int8(-3)),
        ("float", float("inf")), ("float", float("-inf")), ("short", np.bool_(True)),
    ],
)  # fmt: skip
def test_scalars_arrive_as_c_converts_them(device, type_, value):
    x = device.zeros(1)
    device.program(SET.format(type=type_), "set")(x, value)
    assert x.numpy()[0] == np.float32(value)


def test_nan_is_a_value(device):
    x = device.zeros(1)
    device.program(SET.format(type="float"), "set")(x, float("nan"))
    assert np.isnan(x.numpy()[0])


@pytest.mark.parametrize("grid", [1, 5, (5,), [5], np.int64(5), 100_000, 0])
def test_a_grid_calls_once_per_index(device, grid):
    count = int(np.ravel(grid)[0])
    x = device.zeros(count + 1, np.int32)
    device.program("void f(int *x, int i) { x[i] += i + 1; }", "f")(x, wsgrad.INDEX, grid=grid)
    assert np.array_equal(x.numpy(), np.append(np.arange(1, count + 1), 0))


def test_a_grid_may_do_without_an_index(device):
    counter = device.zeros(1, np.int32)
    program = device.program("void f(int *n) { __atomic_fetch_add(n, 1, 5); }", "f")
    program(counter, grid=300)
    assert counter.numpy()[0] == 300


def test_the_same_program_is_compiled_once_per_signature(device):
    x = device.zeros(1)
    program = device.program(SET.format(type="double"), "set")
    for value in (1, 2.0, np.float64(3), np.int64(4), 5, 6.0):
        program(x, value)
        assert x.numpy()[0] == value
    assert sorted(signature for signature, _ in program._variants) == ["pd", "pf", "pi", "pq"]


def test_what_can_not_be_launched_is_refused_at_once(device, url):
    add = device.program(ADD, "add", writes=(0,))
    y, x = device.zeros(8), device.zeros(8)
    freed = device.zeros(8)
    freed.free()
    with wsgrad.connect(url) as other:
        foreign = other.devices["cpu"].zeros(8)
        for launch, text in [
            (lambda: add(y, freed, 1.0, 8), "argument 1 .*freed"),
            (lambda: add(y, foreign, 1.0, 8), "argument 1 .*not a buffer of"),
            (lambda: add(y, np.zeros(8), 1.0, 8), r"argument 1 is a ndarray.*device\.array"),
            (lambda: add(y, x, "1", 8), "argument 2 is a str"),
            (lambda: add(y, x, None, 8), "argument 2 is a NoneType"),
            (lambda: add(y, x, 1e39, 8), "argument 2: 1e[+]39 does not fit float32"),
            (lambda: add(y, x, 1.0, 2**31), "argument 3: 2147483648 does not fit int32.*int64"),
            (lambda: add(y, x, 1.0, wsgrad.INDEX), "argument 3 is INDEX, which needs grid="),
            (lambda: add(y, x, 1.0, 8, grid=-1), "outside 0 to"),
            (lambda: add(y, x, 1.0, 8, grid=2**32), "outside 0 to"),
            (lambda: add(y, x, 1.0, 8, grid=(2, 2)), "one dimension"),
            (lambda: add(y, x, 1.0, 8, grid=1.5), "not a number of calls"),
            (lambda: add(y, x, 1.0, 8, block=4), "block= has no meaning"),
            (lambda: add(1, x, 1.0, 8), "writes= names argument 0, which is not a buffer"),
            (lambda: add(*[1] * 65), "65 arguments"),
        ]:
            for _ in range(2):  # the quick way and the careful one
                with pytest.raises(wsgrad.LaunchError, match=text) as caught:
                    launch()
                assert "'add'" in str(caught.value)
    assert not y.numpy().any()


def test_programs_that_can_not_be_are_refused_at_once(device):
    for arguments, error, text in [
        ({"name": "/etc/passwd"}, ValueError, "name"),
        ({"name": "a..b"}, ValueError, "name"),
        ({"name": "x" * 65}, ValueError, "name"),
        ({"name": ""}, ValueError, "name"),
        ({"dialect": "wgsl"}, wsgrad.DeviceError, "no dialect 'wgsl', it has c"),
        ({"writes": (-1,)}, ValueError, "writes="),
    ]:
        with pytest.raises(error, match=text):
            device.program(COUNT, "count", **arguments)
    with pytest.raises(ValueError, match="function"):
        device.program(COUNT, "1count")
    with pytest.raises(wsgrad.LimitExceeded, match="the limit is"):
        device.program("/" * (1 << 20) + "/", "f")


def test_a_source_that_does_not_compile_is_said_by_ready(device):
    program = device.program("void f(float *x)\n{\n  x[0] = y;\n}", "f")
    for _ in range(2):
        with pytest.raises(wsgrad.CompileError, match=r"source\.c:3:\d+.*y"):
            program.ready()
    assert "does not compile" in repr(program)
    device.synchronize()


@pytest.mark.parametrize(
    "source",
    [
        "void f(float *x) {}", "void g(float *x);", "int g;", "", "/* void g(float *x) {} */",
        "#define M(n) void n##1(int *x) {}\nM(g)",
    ],
)  # fmt: skip
def test_a_function_that_the_source_lacks_is_named_by_ready(device, source):
    program = device.program(source, "g")
    for _ in range(2):
        with pytest.raises(wsgrad.CompileError, match=r"\bg\b") as caught:
            program.ready()
        assert "wsgrad_" not in str(caught.value)
    assert "does not compile" in repr(program)
    device.synchronize()


@pytest.mark.parametrize(
    "source",
    [
        "typedef float real; void g(real *x, real a) { x[0] = a; }",
        "#define M(n) void n(float *x, float a) { x[0] = a; }\nM(g)",
    ],
)  # fmt: skip
def test_ready_waits_for_a_source_whose_parameters_are_not_understood(device, source):
    program, x = device.program(source, "g"), device.zeros(1)
    program.ready()
    assert ": compiled>" in repr(program)
    program(x, 2.5)
    assert x.numpy()[0] == 2.5
    broken = device.program(source + " int y = z;", "g")
    with pytest.raises(wsgrad.CompileError, match=r"source\.c:\d:\d+: error: .*z"):
        broken.ready()


def test_a_launch_with_arguments_that_do_not_fit_says_nothing_of_the_program(device):
    program, x = device.program("void f(float *x, int n) { x[0] = n; }", "f"), device.zeros(1)
    program(x)
    with pytest.raises(wsgrad.CompileError, match="'f' can't be called with these arguments: too few"):
        device.synchronize()
    program.ready()
    assert ": compiled>" in repr(program)
    program(x, 3)
    assert x.numpy()[0] == 3


@pytest.mark.parametrize(("source", "entry"), [(b"void f(void) {}", "f"), (None, "f"), ("void f(void) {}", b"f")])
def test_what_is_no_text_is_refused_with_what_to_pass(device, source, entry):
    with pytest.raises(TypeError, match=r"is a str, not (bytes; pass \w+\.decode\(\)|NoneType)"):
        device.program(source, entry)


def test_a_launch_of_what_does_not_compile_fails_the_next_waiting_call_once(device):
    x = device.array(np.arange(3, dtype=np.float32))
    device.program("void f(float *x) { x[0] = y; }", "f", name="typo")(x)
    with pytest.raises(wsgrad.CompileError, match=r"source\.c:1"):
        x.numpy()
    assert x.numpy().tolist() == [0, 1, 2]


def test_a_file_of_the_server_can_not_be_included(device):
    program = device.program('#include "/etc/passwd"\nvoid f(void) {}', "f")
    with pytest.raises(wsgrad.CompileError):
        program.ready()


def test_one_failed_launch_does_not_fail_the_next_batch(device):
    x = device.zeros(8)
    add, count = device.program(ADD, "add", writes=(0, 1)), device.program(COUNT, "count")
    counter = device.zeros(1, np.int32)
    add(x, x, 1.0, 8)  # two written arguments overlap
    count(counter)  # dropped with the rest of the queue
    with pytest.raises(wsgrad.LaunchError, match="add"):
        device.synchronize()
    count(counter)
    assert counter.numpy()[0] == 1


def test_overlapping_arguments_mean_the_same_as_copies(device):
    add = device.program(ADD, "add", writes=(0,))
    x = device.array(np.arange(8, dtype=np.float32))
    add(x[1:], x[:-1], 1.0, 7)
    assert x.numpy().tolist() == [0, 1, 3, 5, 7, 9, 11, 13]


def test_the_same_range_may_be_written_twice_by_a_program_that_says_so(device):
    x = device.array(np.arange(4, dtype=np.float32))
    device.program("void f(float *a, float *b) { a[0] += 1; b[0] += 1; }", "f", alias=True)(x, x)
    assert x.numpy()[0] == 2


def test_a_timed_launch_returns_seconds(device):
    spin = device.program("void spin(long n) { for (volatile long i = 0; i < n; i++); }", "spin")
    short, long_ = spin.timed(1000), spin.timed(20_000_000)
    assert 0 <= short < long_ < 5
    assert spin.timed(1000, grid=0) == 0


def test_a_crash_names_the_program_and_costs_the_device_until_it_is_reopened(server, device):
    x = device.array(np.arange(3))
    crash = device.program("void crash(int i) { *(volatile int *)(long)i = 1; }", "crash")
    count = device.program(COUNT, "count")
    crash(16)
    with pytest.raises(wsgrad.DeviceLost, match="crash"):
        device.synchronize()
    with pytest.raises(wsgrad.DeviceLost, match=r"crash.*reopen"):
        x.numpy()
    with pytest.raises(wsgrad.DeviceLost, match="reopen"):
        device.empty(3)
    with pytest.raises(wsgrad.DeviceLost, match="reopen"):
        count(x)
    assert "lost" in repr(x)
    assert "lost" in repr(device)
    device.reopen()
    with pytest.raises(wsgrad.DeviceLost, match="crash"):
        x.numpy()
    with pytest.raises(wsgrad.LaunchError, match="argument 0"):
        count(x) if x._life is device._queue.life else count("x")
    counter = device.zeros(1, np.int32)
    count(counter)  # sent again by itself
    assert counter.numpy()[0] == 1
    assert not server.closed


def test_a_crash_is_not_felt_by_another_session(url, device):
    x = device.array(np.arange(3))
    with wsgrad.connect(url) as other:
        bad = other.devices["cpu"]
        bad.program("void crash(int i) { *(volatile int *)(long)i = 1; }", "crash")(16)
        with pytest.raises(wsgrad.DeviceLost):
            bad.synchronize()
    assert x.numpy().tolist() == [0, 1, 2]


def test_a_living_device_can_be_reopened_to_free_everything(device):
    x = device.array(np.arange(3))
    device.reopen()
    with pytest.raises(wsgrad.DeviceLost, match="reopened"):
        x.numpy()
    assert device.zeros(2).numpy().tolist() == [0, 0]


def test_a_closed_device_opens_again_when_it_is_used(device):
    x = device.array(np.arange(3))
    device.close()
    with pytest.raises(wsgrad.DeviceError, match="closed"):
        x.numpy()
    assert device.array(np.arange(3)).numpy().tolist() == [0, 1, 2]


def test_an_error_that_no_call_met_is_raised_by_closing(url):
    server = wsgrad.connect(url)
    device = server.devices["cpu"]
    x = device.zeros(8)
    device.program(ADD, "add")(x, x, 1.0, 8)
    with pytest.raises(wsgrad.LaunchError, match="add"):
        server.close()
    assert server.closed
    server.close()


def test_dropped_programs_are_dropped_on_the_server(device):
    for n in range(50):
        x = device.zeros(1, np.int32)
        device.program(f"void f(int *x) {{ x[0] = {n}; }}", "f")(x)
        assert x.numpy()[0] == n
    gc.collect()
    device.synchronize()
    assert len(device._queue.life.handles) <= 2


def test_programs_that_nobody_launches_hold_neither_others_nor_closing(url):
    slow = "#define A x[0] += x[1];\n" + "".join(
        f"#define {name} {' '.join([before] * 10)}\n" for before, name in pairwise("ABCDE")
    )
    server = wsgrad.connect(url)
    device = server.devices["cpu"]
    programs = [
        device.program(f"{slow}void f(volatile int *x) {{ E E E E x[2] = {time.monotonic_ns()}; }}", "f")
        for _ in range(50)
    ]
    for program in programs[:20]:
        assert "compiling" in repr(program)
    del programs[10:]
    assert device.array(np.arange(3), timeout=20).numpy(timeout=20).tolist() == [0, 1, 2]
    assert sum("compiling" in repr(program) for program in programs) > 5
    server.close(timeout=20)


def test_debugging_names_the_users_line(url, monkeypatch):
    monkeypatch.setenv("WSGRAD_DEBUG", "1")
    with wsgrad.connect(url) as server:
        device = server.devices["cpu"]
        x = device.zeros(8)
        add = device.program(ADD, "add")
        add(x, device.zeros(8), 1.0, 8)
        line = test_debugging_names_the_users_line.__code__.co_firstlineno + 8
        add(x, x, 1.0, 8)
        with pytest.raises(wsgrad.LaunchError, match=rf"issued at .*test_programs\.py:{line}\)"):
            device.synchronize()


def test_programs_say_what_they_are(device):
    program = device.program(COUNT, "count", name="counter")
    program.ready()
    assert repr(program) == f"<Program 'counter' (c) on '{device.id}': compiled>"
    assert (program.name, program.entry, program.source, program.device) == ("counter", "count", COUNT, device)
