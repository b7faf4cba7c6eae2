"""tinygrad programs with `DEV=WS` on a server's devices of tinygrad's own, in the dialects with work-groups."""

import sys
from pathlib import Path

import pytest
from tinygrad.helpers import Target

sys.path.append(str(Path(__file__).parent.parent / "devices"))
from contract_kinds import KINDS
from test_tinygrad_device import run

from wsgrad.tinygrad_kernels import KERNEL_RENDERERS

SCRIPT = """
import numpy as np
from tinygrad import Tensor, TinyJit, Variable, Device
assert "tinygrad" in Device["WS"].device_handle.id
rng = np.random.default_rng(0)
a, b = rng.normal(size=(65, 70)).astype(np.float32), rng.normal(size=(70, 66)).astype(np.float32)
c = (Tensor(a) @ Tensor(b)).relu()
np.testing.assert_allclose(c.numpy(), np.maximum(a @ b, 0), rtol=1e-4, atol=1e-4)
assert (Tensor(np.arange(1000, dtype=np.int32)).realize()[3:700:7] * 3).tolist() == [3 * k for k in range(3, 700, 7)]
assert Tensor(np.array([1, 2**40])).add(2**33).tolist() == [1 + 2**33, 2**40 + 2**33]

@TinyJit
def step(x, n):
    return (x.shrink(((0, n),)).sum() * 2 + n).realize()
x = Tensor(np.arange(100, dtype=np.float32)).realize()
for n in range(1, 8):
    found = step(x, Variable("n", 1, 90).bind(n)).item()
    assert found == 2 * sum(range(n)) + n, (n, found)
"""


@pytest.mark.parametrize("kind", ["tinygrad-cpu", "tinygrad-cl"])
def test_tensors_and_jitted_steps_run_on_a_wrapped_device(kind):
    with KINDS[kind]() as offer:
        run(SCRIPT, WSGRAD_URL=offer.url)


def test_kernels_that_a_search_tries_harm_nothing_on_a_wrapped_device():
    script = """
import numpy as np
from tinygrad import Device, Tensor
from tinygrad.device import TinyELF
from tinygrad.helpers import Target
kept = Tensor(np.arange(10, dtype=np.float32)).realize()
device = Device["WS"]
buffer = kept.uop.buffer._buf

def attempt(body):
    source = f"// writes 0\\nkernel void test(global volatile float* data0) {{ {body} }}"
    kernel = device.runtime(TinyELF(source.encode(), "test", Target("WS"), (("data0", 0, kept.dtype, (10,)),)))
    return kernel(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), wait=True, timeout=2000)

for body, why in (("this is no C", "error"), ("while (data0[0] >= 0) data0[1] += 1;", "was given up")):
    try:
        attempt(body)
    except RuntimeError as error:
        assert why in str(error), error
    else:
        raise AssertionError(f"it ran: {body}")
assert attempt("data0[0] = 7;") >= 0
assert (kept.numpy() == np.arange(10)).all()
"""
    with KINDS["tinygrad-cl"]() as offer:
        run(script, WSGRAD_URL=offer.url)


def test_kernels_are_rendered_without_the_vendors_compilers():
    archs = {"opencl-c": "cl_khr_fp64", "cuda-c": "sm_89", "hip-c": "gfx1100", "msl": "Apple9"}
    assert set(archs) == set(KERNEL_RENDERERS)
    for dialect, renderer in KERNEL_RENDERERS.items():
        made = renderer(Target("WS", arch=archs[dialect]))
        assert made.compiler.compile("source") == b"source"
        assert made.has_local
