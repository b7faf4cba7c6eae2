"""tinygrad programs with `DEV=WS`, as users start them: a process of their own that knows nothing of wsgrad."""

import os
import subprocess
import sys

import pytest

SECONDS = 120


def environment(**more):
    """What a program finds that runs on WS; without a URL it gets a server of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WSGRAD_")}
    return kept | {"DEV": "WS", "CACHELEVEL": "0"} | more


def run(script, **more):
    """Run a program on WS with a server of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS, env=environment(**more)
    )
    if done.returncode:
        pytest.fail(done.stderr, pytrace=False)
    return done.stdout


def test_tensors_run_on_the_device_without_an_import_of_ours():
    script = """
import numpy as np
from tinygrad import Device, Tensor
rng = np.random.default_rng(0)
a, b = rng.normal(size=(33, 17)).astype(np.float32), rng.normal(size=(17, 9)).astype(np.float32)
c = (Tensor(a) @ Tensor(b)).relu().sum(axis=0)
assert Device.DEFAULT == "WS", Device.DEFAULT
assert c.device == "WS"
np.testing.assert_allclose(c.numpy(), np.maximum(a @ b, 0).sum(axis=0), rtol=1e-4, atol=1e-4)
halves = Tensor(a).half() + 1
np.testing.assert_allclose(halves.float().numpy(), a.astype(np.float16).astype(np.float32) + 1, atol=2e-3)
"""
    run(script)


def test_a_jitted_training_step_learns_with_one_message_a_step():
    script = """
import numpy as np
import wsgrad.client.session_graphs as graphs
from tinygrad import Context, Tensor, TinyJit, nn
rng = np.random.default_rng(0)
w = rng.normal(size=(8, 1)).astype(np.float32)
layer = nn.Linear(8, 1)
optimizer = nn.optim.SGD([layer.weight, layer.bias], lr=0.1)
runs = []
original = graphs.SessionGraphs.run
graphs.SessionGraphs.run = lambda self, *a, **k: (runs.append(1), original(self, *a, **k))[1]

@TinyJit
def step(x, y):
    optimizer.zero_grad()
    loss = ((layer(x) - y) ** 2).mean().backward()
    optimizer.step()
    return loss.realize()

losses = []
for _ in range(60):
    x = rng.normal(size=(32, 8)).astype(np.float32)
    runs.clear()
    with Context(TRAINING=1):
        loss = step(Tensor(x).realize(), Tensor(x @ w).realize())
    losses.append(loss.item())
assert losses[-1] < 0.01 * losses[0], losses
assert len(runs) == 1, len(runs)
"""
    run(script)


def test_symbolic_sizes_replay_one_graph():
    script = """
import numpy as np
from tinygrad import Tensor, TinyJit, Variable
data = np.arange(40, dtype=np.float32).reshape(10, 4)
whole = Tensor(data).contiguous().realize()

@TinyJit
def total(t):
    return ((t + 1).sum() * 2).realize()

for n in (3, 4, 5, 7, 10, 2):
    bound = Variable("n", 1, 10).bind(n)
    assert total(whole[:bound]).item() == 2 * (data[:n] + 1).sum(), n
"""
    run(script)


def test_finding_the_device_costs_other_programs_nothing_heavy():
    script = "import sys; assert not {'trio', 'numpy', 'tinygrad', 'wsgrad'} & set(sys.modules), sorted(sys.modules)"
    run(script)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("for (;;) __atomic_thread_fence(__ATOMIC_SEQ_CST);", "was given up"),
        ("*(volatile int *)0 = 1;", "was given up"),
        ("this is no C", "error"),
    ],
    ids=["hangs", "crashes", "does not compile"],
)
def test_a_kernel_that_a_search_tries_harms_nothing(body, why):
    script = f"""
import numpy as np
from tinygrad import Device, Tensor
from tinygrad.device import TinyELF
from tinygrad.helpers import Target
kept = Tensor(np.arange(10, dtype=np.float32)).realize()
device = Device["WS"]
buffer = kept.uop.buffer._buf
for _ in range(2):
    source = "// writes 0\\nvoid test(float* restrict data0) {{ {body} }}"
    kernel = device.runtime(TinyELF(source.encode(), "test", Target("WS"), (("data0", 0, kept.dtype, (10,)),)))
    try:
        kernel(buffer, wait=True, timeout=300)
    except RuntimeError as error:
        assert {why!r} in str(error), error
    else:
        raise AssertionError("the kernel ran")
source = b"// writes 0\\nvoid test(float* restrict data0) {{ data0[0] = 7; }}"
good = device.runtime(TinyELF(source, "test", Target("WS"), ()))
assert good(buffer, wait=True, timeout=300) >= 0
assert (kept.numpy() == np.arange(10)).all()
"""
    run(script)


def test_searched_kernels_give_the_right_result():
    script = """
import numpy as np
from tinygrad import Context, Tensor
rng = np.random.default_rng(0)
a, b = rng.normal(size=(2, 24, 24)).astype(np.float32)
x, y = Tensor(a).realize(), Tensor(b).realize()
with Context(BEAM=1):
    z = (x @ y).realize()
np.testing.assert_allclose(z.numpy(), a @ b, rtol=1e-4, atol=1e-4)
"""
    run(script, PARALLEL="0")


def test_there_is_no_device_beyond_the_last():
    script = """
from tinygrad import Device
try:
    Device["WS:7"]
except RuntimeError as error:
    assert "there is no device WS:7: the servers offer" in str(error), error
else:
    raise AssertionError("it opened")
"""
    run(script)
