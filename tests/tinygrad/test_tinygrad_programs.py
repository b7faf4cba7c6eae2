"""What tinygrad programs do on their devices, as one does locally: on each kind of device, and over several servers."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "devices"))
from contract_kinds import KINDS
from test_tinygrad_device import environment, run

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "train_digits_tinygrad.py"

TENSORS = """
import numpy as np
from tinygrad import Tensor, TinyJit, Variable
whole = np.arange(64, dtype=np.int32)
x = Tensor(whole).realize()
for start, end in ((1, 7), (3, 64), (63, 64)):
    view = x[start:end].contiguous().realize()
    assert (view.numpy() == whole[start:end]).all(), (start, end)
    assert ((view * 2)[1:].numpy() == 2 * whole[start + 1 : end]).all()
part = x[5:9]
part.assign(Tensor([50, 60, 70, 80], dtype="int32")).realize()
assert x.tolist() == [*range(5), 50, 60, 70, 80, *range(9, 64)]

Tensor.manual_seed(7)
print("random", Tensor.randint(5, low=0, high=1 << 20).tolist(), [f"{v:.5f}" for v in Tensor.rand(3).tolist()])

@TinyJit
def step(x, n):
    return (x.shrink(((0, n),)).sum() * 2 + n).realize()
y = Tensor(np.arange(100, dtype=np.float32)).realize()
for n in range(1, 6):
    assert step(y, Variable("n", 1, 90).bind(n)).item() == n * (n - 1) + n
"""


def test_views_random_numbers_and_symbolic_sizes_are_the_same_on_every_kind():
    """The random numbers are those that tinygrad's own generator gives, whoever computes it."""
    found = []
    for kind in ("cpu", "webgpu", "chromium"):
        with KINDS[kind]() as offer:
            found += re.findall(r"random .*", run(TENSORS, WSGRAD_URL=offer.url))
    assert len(found) == 3
    assert len(set(found)) == 1, found


@pytest.mark.parametrize(("kind", "epochs", "least"), [("cpu", 30, 97), ("webgpu", 5, 90), ("chromium", 5, 90)])
def test_the_example_learns_its_digits(kind, epochs, least):
    with KINDS[kind]() as offer:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), "--epochs", str(epochs)],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment(WSGRAD_URL=offer.url),
        )
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"^accuracy (\d+\.\d) %$", done.stdout, re.MULTILINE)
    assert accuracy, done.stdout
    assert float(accuracy[1]) >= least


def test_shards_over_several_servers_move_without_the_client():
    script = """
import numpy as np
from tinygrad import Device, Tensor
from wsgrad.client.queue import Queue
devices = ("WS", "WS:1", "WS:2")
servers = {Device[name].device_handle.server for name in devices}
assert len(servers) == 2
a, b = np.arange(48, dtype=np.float32).reshape(6, 8), np.ones((8, 4), np.float32)
x = Tensor(a).realize()

def never(self, *arguments, **options):
    raise AssertionError("bytes of a tensor came through the client")
own = Queue.read, Queue.upload, Queue.write
Queue.read = Queue.upload = Queue.write = never
moved = x.to("WS:2").realize()
sharded = x.shard(devices, axis=0).realize()
Queue.read, Queue.upload, Queue.write = own

assert moved.device == "WS:2"
assert (moved.numpy() == a).all()
# Otherwise tinygrad puts the shards together on its own CPU device, which needs clang.
assert (sharded.to("WS").numpy() == a).all()
weights = Tensor(b).shard(devices).realize()
assert ((sharded @ weights).to("WS:1").numpy() == a @ b).all()
assert (sharded.sum(axis=0).to("WS").numpy() == a.sum(axis=0)).all()
"""
    with ExitStack() as stack:
        first, second = (stack.enter_context(KINDS["cpu"]("--device", "cpu*2")) for _ in range(2))
        run(script, WSGRAD_URL=f"{first.url}*1,{second.url}*2")


def test_debug_shows_the_devices_own_times():
    script = """
from tinygrad import Tensor
print("sum", (Tensor.ones(1 << 20).contiguous().realize() * 3).sum().item())
"""
    said = run(script, DEBUG="2", NO_COLOR="1")
    times = [float(ms) for ms in re.findall(r"\*\*\* WS .*? tm +([0-9.]+)[mu]s", said)]
    assert len(times) >= 2, said
    assert all(ms > 0 for ms in times), said
    assert "sum 3145728.0" in said
