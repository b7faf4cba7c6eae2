"""One side of `benchmarks.tinygrad`: a tinygrad process that measures on request. Knows nothing of wsgrad.

It runs under tinygrad 0.11 and 0.14 alike. Each line of standard input names a figure; the answer is the seconds of one
measurement, behind the word `seconds`. What a figure needs is made when it is first asked for.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, nn
from tinygrad.device import BufferSpec

try:
    from tinygrad import Context
except ImportError:
    from tinygrad.helpers import Context

Once = Callable[[], object]
NBYTES = int(os.environ.get("BENCH_MIB", "64")) << 20
CALLS = 1000
KERNEL = "void bump(float* restrict data0) { data0[0] = data0[0] + 1.0f; }"

device = Device[Device.DEFAULT]


def training() -> AbstractContextManager[object]:
    """tinygrad's switch for training, by its name in this version."""
    try:
        return Context(TRAINING=1)
    except KeyError:
        return Tensor.train()


def bump() -> tuple[Any, Any]:
    """A kernel of the runtime's own, and a buffer for it."""
    if Device.DEFAULT == "WS":
        from tinygrad.device import TinyELF
        from tinygrad.helpers import Target

        program = device.runtime(TinyELF(f"// writes 0\n{KERNEL}".encode(), "bump", Target("WS"), ()))
    else:
        program = device.runtime("bump", device.compiler.compile(KERNEL))
    buffer = device.allocator._alloc(4, BufferSpec())
    device.allocator._copyin(buffer, memoryview(bytearray(4)))
    return program, buffer


def waiter() -> Once:
    """Waits until everything has run: by reading a few bytes, since not every device's `synchronize` does."""
    buffer, data = device.allocator._alloc(4, BufferSpec()), memoryview(bytearray(4))
    device.allocator._copyin(buffer, data)
    return lambda: device.allocator._copyout(data, buffer)


def up() -> Once:
    """Bytes to the device."""
    wait = waiter()
    data = memoryview(bytearray(os.urandom(NBYTES)))
    buffer = device.allocator._alloc(NBYTES, BufferSpec())

    def once() -> None:
        device.allocator._copyin(buffer, data)
        wait()

    return once


def down() -> Once:
    """Bytes from the device."""
    data = memoryview(bytearray(NBYTES))
    buffer = device.allocator._alloc(NBYTES, BufferSpec())
    device.allocator._copyin(buffer, data)
    return lambda: device.allocator._copyout(data, buffer)


def calls() -> Once:
    """Launches of a runtime program, and one wait."""
    program, buffer = bump()
    wait = waiter()

    def once() -> None:
        for _ in range(CALLS):
            program(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1))
        wait()

    return once


def kernel() -> Once:
    """One launch and a wait for its result."""
    program, buffer = bump()
    result = memoryview(bytearray(4))

    def once() -> None:
        program(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1))
        device.allocator._copyout(result, buffer)

    return once


def jitted() -> Once:
    """A jitted call of a thousand kernels, and a wait."""

    @TinyJit
    def chain(x: Tensor) -> Tensor:
        for _ in range(CALLS):
            x = (x + 1).contiguous().realize()
        return x

    x = Tensor(np.ones(16, np.float32)).realize()
    for _ in range(3):
        chain(x).numpy()
    return lambda: chain(x).numpy()


def trainer(network: Callable[[Tensor], Tensor], shape: tuple[int, ...], *, every: int = 1) -> Once:
    """A training step with an upload of its batch; the loss is read at every so many steps."""
    optimizer = nn.optim.SGD(nn.state.get_parameters(network), lr=0.01)
    rng = np.random.default_rng(0)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        with training():
            optimizer.zero_grad()
            loss = network(x).sparse_categorical_crossentropy(y)
            loss.backward()
            optimizer.step()
            return loss.realize()

    def once() -> None:
        for _ in range(every):
            x = rng.normal(size=shape).astype(np.float32)
            y = rng.integers(0, 10, shape[0]).astype(np.int32)
            loss = step(Tensor(x).realize(), Tensor(y).realize())
        if not math.isfinite(loss.item()):
            raise AssertionError("the loss is no number")

    for _ in range(4):
        once()
    return once


class Mlp:
    """784-128-10."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(784, 128), nn.Linear(128, 10)

    def __call__(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.second(self.first(x).relu())


class Conv:
    """The network of tinygrad's beautiful_mnist."""

    def __init__(self) -> None:
        self.layers = [
            nn.Conv2d(1, 32, 5), Tensor.relu, nn.Conv2d(32, 32, 5), Tensor.relu, nn.BatchNorm(32), Tensor.max_pool2d,
            nn.Conv2d(32, 64, 3), Tensor.relu, nn.Conv2d(64, 64, 3), Tensor.relu, nn.BatchNorm(64), Tensor.max_pool2d,
            lambda x: x.flatten(1), nn.Linear(576, 10),
        ]  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """Scores."""
        return x.sequential(self.layers)


def decode() -> Once:
    """Two hundred tokens of a small transformer with random weights, one jitted call a token."""
    from tinygrad import Variable

    layers, dim, heads, longest, vocabulary = 2, 128, 4, 256, 512
    names = ("q", "k", "v", "o")
    blocks = [{name: nn.Linear(dim, dim, bias=False) for name in names} for _ in range(layers)]
    for block in blocks:
        block |= {"up": nn.Linear(dim, 4 * dim), "down": nn.Linear(4 * dim, dim), "n1": nn.RMSNorm(dim)}
        block |= {"cache": Tensor.zeros(2, 1, longest, heads, dim // heads).contiguous().realize()}
    embedding, head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary, bias=False)
    position = Variable("position", 0, longest - 1)

    @TinyJit
    def step(token: Tensor, at: Any) -> Tensor:  # noqa: ANN401
        x = embedding(token)
        for block in blocks:
            y = block["n1"](x)
            q, k, v = (block[name](y).reshape(1, 1, heads, dim // heads) for name in ("q", "k", "v"))
            cache = block["cache"]
            cache[:, :, at : at + 1].assign(Tensor.stack(k, v)).realize()
            keys, values = cache[0, :, : at + 1], cache[1, :, : at + 1]
            q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
            x = x + block["o"](q.scaled_dot_product_attention(keys, values).transpose(1, 2).reshape(1, 1, dim))
            x = x + block["down"](block["up"](x).relu())
        return head(x).argmax(-1).cast("int32").realize()

    def once(tokens: int = 200) -> None:
        token = Tensor(np.zeros((1, 1), np.int32)).realize()
        for at in range(tokens):
            token = Tensor([[step(token, position.bind(at)).item()]], dtype="int32").realize()

    once(4)
    return once


def load() -> Once:
    """Weights from a file to the device: as many bytes as the file has, nothing read back."""
    from tinygrad.nn.state import safe_load

    wait = waiter()

    def once() -> None:
        for tensor in safe_load(os.environ["BENCH_WEIGHTS"]).values():
            tensor.to(Device.DEFAULT).realize()
        wait()

    return once


FIGURES = {
    "up": up,
    "down": down,
    "calls": calls,
    "kernel": kernel,
    "jitted": jitted,
    "mlp": lambda: trainer(Mlp(), (64, 784)),
    "mlp20": lambda: trainer(Mlp(), (64, 784), every=20),
    "conv": lambda: trainer(Conv(), (16, 1, 28, 28)),
    "decode": decode,
    "load": load,
}


def main() -> None:
    """Answer until the input ends."""
    made = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in made:
            made[name] = FIGURES[name]()
            made[name]()
        start = time.perf_counter()
        made[name]()
        print("seconds", time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
