"""Train the digits model on several devices of several servers; its gradients are summed around a ring of them.

Each device holds all weights and a share of every batch. After a step's gradients are computed, each device sends a
piece to the next one, which adds it to its own and sends it on, until every piece is whole somewhere, and then goes
round once more: a ring all-reduce. The devices send to each other; nothing but launches and copies is issued here, and
`wsgrad.record` turns a whole step, on all servers, into one message for each.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
from train_digits import BATCH, CLASSES, HIDDEN, INPUTS, KERNELS, MOMENTUM, RATE, TRAINING_ROWS, UNITS, load_digits

import wsgrad

# The gradients of both layers lie in one buffer, so that one ring sums them all. `backward` divides by the rows it
# sees: a device's share counts as much as any other, and the sum is divided by the number of devices.
MORE = r"""
void add(float *restrict into, const float *restrict piece, int n)
{
    for (int i = 0; i < n; i++) into[i] += piece[i];
}

void scale(float *gradient, float factor, int n)
{
    for (int i = 0; i < n; i++) gradient[i] *= factor;
}
"""
N1, N2 = HIDDEN * INPUTS, UNITS * CLASSES


class Replica:
    """One device's copy of the network, its share of the rows, and a place for a piece that the one before it sends."""

    def __init__(self, device: wsgrad.Device, weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> None:
        self.device = device
        self.weights, self.velocity = device.array(weights), device.zeros(weights.shape, np.float32)
        self.gradient, self.inbox = device.empty_like(self.weights), device.empty_like(self.weights)
        self.images, self.labels = device.array(images), device.array(labels)
        rows = images.shape[1]
        self.image, self.label = device.empty((rows, INPUTS), np.float32), device.empty(rows, np.int32)
        self.hidden = device.empty((rows, UNITS), np.float32)
        self.probability, self.loss = device.empty((rows, CLASSES), np.float32), device.empty(rows, np.float32)
        self.w1, self.w2 = self.weights[:N1], self.weights[N1:]
        self.g1, self.g2 = self.gradient[:N1], self.gradient[N1:]
        self.forward = device.program(KERNELS, "forward", writes=(0, 1, 2))
        self.backward = device.program(KERNELS, "backward", writes=(0, 1))
        self.sgd = device.program(KERNELS, "sgd", writes=(0, 1))
        self.add = device.program(MORE, "add", writes=(0,))
        self.scale = device.program(MORE, "scale", writes=(0,))

    def differentiate(self) -> None:
        """Gradients of the rows in `image` and `label`, averaged over them."""
        rows = len(self.image)
        outputs, inputs = (self.hidden, self.probability, self.loss), (self.image, self.label)
        self.forward(*outputs, *inputs, self.w1, self.w2, wsgrad.INDEX, grid=rows)
        backward = *inputs, self.hidden, self.probability, self.w2, rows
        self.backward(self.g1, self.g2, *backward, wsgrad.INDEX, grid=UNITS)

    def update(self, devices: int) -> None:
        """One step of gradient descent with the sum of all devices' gradients."""
        self.scale(self.gradient, 1 / devices, self.gradient.size)
        self.sgd(self.weights, self.velocity, self.gradient, RATE, MOMENTUM, self.weights.size)


def all_reduce(replicas: list[Replica]) -> None:
    """Give every replica the sum of all gradients; each link of the ring carries 2 (n - 1) / n of one gradient."""
    count = len(replicas)
    size = replicas[0].gradient.size
    cuts = [slice(size * piece // count, size * (piece + 1) // count) for piece in range(count)]
    for turn in range(count - 1):
        for at, replica in enumerate(replicas):
            cut, after = cuts[(at - turn) % count], replicas[(at + 1) % count]
            after.inbox[cut].copy_from(replica.gradient[cut])
        for at, replica in enumerate(replicas):
            cut = cuts[(at - 1 - turn) % count]
            replica.add(replica.gradient[cut], replica.inbox[cut], cut.stop - cut.start)
    for turn in range(count - 1):
        for at, replica in enumerate(replicas):
            cut, after = cuts[(at + 1 - turn) % count], replicas[(at + 1) % count]
            after.gradient[cut].copy_from(replica.gradient[cut])


def train(devices: list[wsgrad.Device], steps: int) -> np.ndarray:
    """Train from the same first weights on the same batches whatever the devices; returns the weights of each."""
    rng = np.random.default_rng(0)
    first = np.concatenate([rng.normal(0, np.sqrt(2 / INPUTS), N1), rng.normal(0, np.sqrt(1 / HIDDEN), N2)]).astype(
        np.float32
    )
    images, labels = load_digits()
    batches = TRAINING_ROWS // BATCH
    # (batch, device, row, …): each device gets its rows of every batch.
    shape = batches, len(devices), BATCH // len(devices)
    images = images[: batches * BATCH].reshape(*shape, INPUTS)
    labels = labels[: batches * BATCH].reshape(shape)
    replicas = [Replica(device, first, images[:, at], labels[:, at]) for at, device in enumerate(devices)]
    with wsgrad.record(*devices) as step:
        for replica in replicas:
            replica.differentiate()
        all_reduce(replicas)
        for replica in replicas:
            replica.update(len(devices))
    for number in range(steps):
        for replica in replicas:
            replica.image.copy_from(replica.images[number % batches])
            replica.label.copy_from(replica.labels[number % batches])
        step.run()
    step.wait()
    return np.stack([replica.weights.numpy() for replica in replicas])


@contextlib.contextmanager
def server(devices: int) -> Iterator[str]:
    """Start a server of our own with so many devices; gives its address."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--device", f"cpu*{devices}"]
    command += ["--log-level", "warning", "--ready-fd", str(writing)]
    with subprocess.Popen(command, pass_fds=(writing,), stdin=subprocess.DEVNULL) as process:
        os.close(writing)
        try:
            with os.fdopen(reading) as ready:
                yield json.loads(ready.readline())["url"]
        finally:
            process.terminate()


def main() -> None:
    """Train on all devices, then on the first alone, and compare."""
    parser = argparse.ArgumentParser(description="Sum gradients over the devices of several wsgrad servers.")
    parser.add_argument("--url", help="running servers, as 'item,item' (default: start two with two devices each)")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    with contextlib.ExitStack() as stack:
        items = args.url or [stack.enter_context(server(2)) for _ in range(2)]
        servers = stack.enter_context(wsgrad.connect_all(items))
        devices = list(servers.devices)
        if BATCH % len(devices):
            parser.error(f"a batch of {BATCH} rows can't be shared by {len(devices)} devices; choose with *N in --url")
        many = train(devices, args.steps)
        [alone] = train(devices[:1], args.steps)
        print(f"{args.steps} steps on {len(devices)} devices of {len(servers.servers)} servers")
        print(f"copies through this client: {servers.statistics['relayed']}")
        for (source, target), reason in servers.relay_reasons.items():
            print(f"  {source} to {target}: {reason}")
        print(f"largest difference to one device: {np.abs(many - alone).max():.1e}")
        np.testing.assert_array_equal(many, np.broadcast_to(many[0], many.shape))
        np.testing.assert_allclose(many[0], alone, rtol=1e-3, atol=1e-4)
        print("the same weights on all of them, and as on one device")


if __name__ == "__main__":
    main()
