"""What goes wrong under `DEV=WS`, and what costs: limits, errors, Ctrl-C, weights, several processes, profiles."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

SECONDS = 120


def start(script, **environment):
    """Start a program on WS, with a server of its own unless it is given one."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env | {"DEV": "WS", "CACHELEVEL": "0"} | environment,
    )


def finish(process):
    """What it printed."""
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        pytest.fail(f"no end within {SECONDS} s: {errors}", pytrace=False)
    if process.returncode:
        pytest.fail(errors, pytrace=False)
    return output


def run(script, **environment):
    return finish(start(script, **environment))


@contextmanager
def serving(tmp_path, *options):
    """A server process; its URL."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--ready-fd", str(writing), *options]
    with subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.DEVNULL) as process:
        os.close(writing)
        with open(reading) as ready:
            yield json.loads(ready.readline())["url"]
        process.terminate()
        process.wait(SECONDS)


def test_kernels_are_cut_to_the_devices_buffers_before_it_is_opened():
    script = """
import numpy as np
from tinygrad import Device, Tensor
from tinygrad.schedule.rangeify import DEVICE_MAX_BUFS
many = [Tensor.empty(4) for _ in range(70)]
total = many[0]
for tensor in many[1:]:
    total = total + tensor
assert not Device._opened_devices, Device._opened_devices
assert DEVICE_MAX_BUFS.get("CPU", 0) == 31
(total * 0).realize()
assert DEVICE_MAX_BUFS.get("WS", 0) == 31
assert DEVICE_MAX_BUFS.get("NPY", 0) == 0
"""
    run(script)


def test_an_image_is_refused_by_the_kernels_name():
    script = """
from tinygrad import Device, dtypes
from tinygrad.device import TinyELF
from tinygrad.helpers import Target
try:
    Device["WS"].runtime(TinyELF(b"", "r_4_4", Target("WS"), (("data0", 0, dtypes.float, (4, 4, 4)),)))
except RuntimeError as error:
    assert "r_4_4 takes an image" in str(error), error
else:
    raise AssertionError("it was taken")
"""
    run(script)


def test_too_little_memory_is_a_memory_error_after_what_was_kept_for_reuse(tmp_path):
    script = """
import numpy as np
from tinygrad import Tensor
def new(mib, value):
    return (Tensor.empty(mib << 18, device="WS").contiguous() * 0 + value).contiguous().realize()
big = Tensor(np.ones(30 << 18, np.float32)).realize()  # 30 of 64 MiB
assert big.numpy()[-1] == 1
del big
other = Tensor(np.ones(40 << 18, np.float32)).realize()  # fits only in place of the one that was kept
assert other.numpy()[-1] == 1
try:
    Tensor(np.ones(40 << 18, np.float32)).realize()
except MemoryError as error:
    assert "40.00 MB" in str(error) or "Allocation of" in str(error), error
    assert "67108864" in str(error.__cause__), error.__cause__
else:
    raise AssertionError("it fitted")
assert (other + 1)[:4].tolist() == [2, 2, 2, 2]
"""
    with serving(tmp_path, "--max-session-memory", "64MiB") as url:
        run(script, WSGRAD_URL=url)


def test_weights_are_sent_from_the_mapped_file_and_only_once(tmp_path):
    script = """
import json, mmap, os
import numpy as np
import wsgrad
from tinygrad import Device
from tinygrad.nn.state import safe_load
path = os.environ["WEIGHTS"]
expected = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
header = json.dumps({"w": {"dtype": "F32", "shape": [1024, 1024], "data_offsets": [0, expected.nbytes]}}).encode()
header += b" " * (-len(header) % 8)
with open(path, "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header + expected.tobytes())
weights = safe_load(path)
sent = []
original = wsgrad.Buffer.copy_from
def copy_from(self, source, **options):
    sent.append(source)
    original(self, source, **options)
wsgrad.Buffer.copy_from = copy_from
w = weights["w"].to("WS").realize()
base = sent[-1]
while not isinstance(base, mmap.mmap):
    base = base.obj if isinstance(base, memoryview) else base.base
np.testing.assert_array_equal(w.numpy(), expected)
print(Device["WS"].device_handle.server.statistics["cache_hits"])
"""
    pytest.importorskip("blake3")
    with serving(tmp_path, "--cache-dir", str(tmp_path / "cache")) as url:
        weights = str(tmp_path / "weights.safetensors")
        hits = [int(run(script, WSGRAD_URL=url, WEIGHTS=weights)) for _ in range(2)]
    assert hits == [0, 1]


def test_several_processes_share_a_server(tmp_path):
    script = """
import numpy as np, os
from tinygrad import Tensor, TinyJit
seed = int(os.environ["SEED"])
@TinyJit
def step(x, w):
    return (x @ w).relu().sum(axis=0).realize()
rng = np.random.default_rng(seed)
for _ in range(6):
    x, w = rng.normal(size=(2, 16, 16)).astype(np.float32)
    y = step(Tensor(x).realize(), Tensor(w).realize()).numpy()
    np.testing.assert_allclose(y, np.maximum(x @ w, 0).sum(axis=0), rtol=1e-4, atol=1e-4)
"""
    with serving(tmp_path) as url:
        for process in [start(script, WSGRAD_URL=url, SEED=str(seed)) for seed in range(3)]:
            finish(process)


def test_a_training_loop_goes_on_after_ctrl_c():
    script = """
import signal
import numpy as np
from tinygrad import Context, Tensor, TinyJit, nn
rng = np.random.default_rng(0)
w = rng.normal(size=(8, 1)).astype(np.float32)
layer = nn.Linear(8, 1)
optimizer = nn.optim.SGD([layer.weight, layer.bias], lr=0.1)

@TinyJit
def step(x, y):
    optimizer.zero_grad()
    loss = ((layer(x) - y) ** 2).mean().backward()
    optimizer.step()
    return loss.realize()

def train(steps):
    for _ in range(steps):
        x = rng.normal(size=(32, 8)).astype(np.float32)
        with Context(TRAINING=1):
            loss = step(Tensor(x).realize(), Tensor(x @ w).realize()).item()
    return loss

train(3)
interrupted = 0
for at in range(8):
    # As if the user pressed it: it lands wherever the program is at that moment.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        # Pressed again where Python drops it, as it does in a destructor.
        signal.setitimer(signal.ITIMER_REAL, 0.05 + at * 0.0037, 5)
        train(1000000)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        interrupted += 1
assert interrupted == 8
assert train(60) < 1e-3
"""
    run(script)


def test_an_error_names_the_kernel_and_the_users_line_and_the_next_work_runs():
    script = """
import numpy as np
from tinygrad import Device, Tensor
from tinygrad.device import TinyELF
from tinygrad.helpers import Target
import wsgrad
gone = Tensor(np.ones(8, np.float32)).realize()
device = Device["WS"]
source = b"// writes 0\\nvoid sum_of_rows(float* restrict data0) { *(volatile int *)0 = 1; }"
bad = device.runtime(TinyELF(source, "sum_of_rows", Target("WS"), ()))
bad(gone.uop.buffer._buf)
try:
    gone.numpy()
except wsgrad.DeviceLost as error:
    assert "sum_of_rows" in str(error), error
    assert "issued at <string>:11" in str(error), error
else:
    raise AssertionError("it ran")
new = Tensor(np.arange(8, dtype=np.float32)).realize()
assert (new + 1).tolist() == list(range(1, 9))
try:
    gone.numpy()
except wsgrad.DeviceLost:
    pass
else:
    raise AssertionError("lost memory was read")
assert (new + 2).tolist() == list(range(2, 10))
"""
    run(script, WSGRAD_DEBUG="1")


def test_a_kernel_that_does_not_compile_harms_no_other(tmp_path):
    script = """
import numpy as np
from tinygrad import Device, Tensor
from tinygrad.device import TinyELF
from tinygrad.helpers import Target
import wsgrad
kept = Tensor(np.ones(8, np.float32)).realize()
source = b"// writes 0\\nvoid sum_of_rows(float* a) { no C }"
bad = Device["WS"].runtime(TinyELF(source, "sum_of_rows", Target("WS"), ()))
bad(kept.uop.buffer._buf)
try:
    kept.numpy()
except wsgrad.CompileError as error:
    assert "sum_of_rows" in str(error), error
else:
    raise AssertionError("it ran")
assert (kept + 1).tolist() == [2] * 8
"""
    run(script)


def test_a_profile_has_what_the_device_measured(tmp_path):
    script = """
import numpy as np
import tinygrad.uop.ops
tinygrad.uop.ops.launch_viz = lambda *a, **k: None
from tinygrad import Device, Tensor, TinyJit
from tinygrad.device import Compiled
from tinygrad.helpers import ProfileRangeEvent, cpu_events, perf_counter_us
@TinyJit
def step(x):
    return ((x + 1).contiguous() * 2).realize()
began = perf_counter_us()
for _ in range(4):
    step(Tensor(np.ones(1 << 16, np.float32)).realize())
Device["WS"].synchronize()
ended = perf_counter_us()
Device["WS"]._at_profile_finalize()
ranges = [e for e in Compiled.profile_events if isinstance(e, ProfileRangeEvent) and e.device.startswith("WS")]
kernels = [e for e in ranges if e.device == "WS" and e.name.startswith("E_")]
assert len(kernels) >= 8, ranges
assert any(e.device == "WS:COPY" for e in ranges), ranges
assert all(began - 1000 <= e.st <= e.en <= ended + 1000 for e in kernels), (began, ended, kernels)
"""
    run(script, PROFILE="1", VIZ="0", TMPDIR=str(tmp_path))
