"""Train a two-layer digit classifier on a device behind a wsgrad server; no mathematics runs in this process.

The 1,797 handwritten digits beside this file (see DIGITS.md) go to the device once. Everything after that, forward,
backward and the SGD step, is C that runs there. docs/tutorial.md walks through this program.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import wsgrad
from wsgrad.client import bench

KERNELS = r"""
#include <math.h>

enum { INPUTS = 65, HIDDEN = 128, UNITS = HIDDEN + 1, CLASSES = 10 };

/* One image: 64 pixels and a constant 1 (the bias) -> 128 ReLU units and a constant 1 -> 10 probabilities. */
void forward(float *restrict hidden, float *restrict probability, float *restrict loss,
             const float *restrict image, const int *restrict label,
             const float *restrict w1, const float *restrict w2, int row)
{
    const float *x = image + row * INPUTS;
    float *h = hidden + row * UNITS, *p = probability + row * CLASSES;
    for (int j = 0; j < HIDDEN; j++) {
        float sum = 0;
        for (int i = 0; i < INPUTS; i++) sum += w1[j * INPUTS + i] * x[i];
        h[j] = sum > 0 ? sum : 0;
    }
    h[HIDDEN] = 1;

    float score[CLASSES] = {0}, highest = -INFINITY, total = 0;
    for (int j = 0; j < UNITS; j++)
        for (int k = 0; k < CLASSES; k++) score[k] += h[j] * w2[j * CLASSES + k];
    for (int k = 0; k < CLASSES; k++) highest = fmaxf(highest, score[k]);
    for (int k = 0; k < CLASSES; k++) total += p[k] = expf(score[k] - highest);
    for (int k = 0; k < CLASSES; k++) p[k] /= total;
    loss[row] = highest + logf(total) - score[label[row]];
}

/* One hidden unit: the gradients of the weights into it and out of it, averaged over the batch. */
void backward(float *restrict g1, float *restrict g2,
              const float *restrict image, const int *restrict label, const float *restrict hidden,
              const float *restrict probability, const float *restrict w2, int rows, int unit)
{
    float into[INPUTS] = {0}, out[CLASSES] = {0};
    for (int row = 0; row < rows; row++) {
        const float *x = image + row * INPUTS, *p = probability + row * CLASSES;
        float h = hidden[row * UNITS + unit], slope = 0;
        for (int k = 0; k < CLASSES; k++) {
            float error = (p[k] - (k == label[row])) / rows;
            out[k] += h * error;
            slope += w2[unit * CLASSES + k] * error;
        }
        if (h > 0)
            for (int i = 0; i < INPUTS; i++) into[i] += slope * x[i];
    }
    for (int k = 0; k < CLASSES; k++) g2[unit * CLASSES + k] = out[k];
    if (unit < HIDDEN)
        for (int i = 0; i < INPUTS; i++) g1[unit * INPUTS + i] = into[i];
}

/* Stochastic gradient descent with momentum. */
void sgd(float *restrict weight, float *restrict velocity, const float *restrict gradient,
         float rate, float momentum, int n)
{
    for (int i = 0; i < n; i++) {
        velocity[i] = momentum * velocity[i] - rate * gradient[i];
        weight[i] += velocity[i];
    }
}
"""

INPUTS, HIDDEN, CLASSES = 65, 128, 10
UNITS = HIDDEN + 1
TRAINING_ROWS = 1437  # the other 360 of the 1,797 images are the test split
BATCH, RATE, MOMENTUM = 32, 0.1, 0.9


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read the images as float32 (1797, 65), the last column a constant 1, and the labels as int32 (1797,)."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        pixels, labels = file["images"], file["labels"]
    images = np.ones((len(pixels), INPUTS), np.float32)
    images[:, :64] = pixels / 16
    order = np.random.default_rng(0).permutation(len(images))  # one fixed split, whatever the seed
    return images[order], labels[order].astype(np.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """Images and labels on a device, with room for what the network computes for each of them."""

    image: wsgrad.Buffer
    label: wsgrad.Buffer
    hidden: wsgrad.Buffer
    probability: wsgrad.Buffer
    loss: wsgrad.Buffer

    @classmethod
    def upload(cls, device: wsgrad.Device, images: np.ndarray, labels: np.ndarray) -> "Rows":
        """Copy images and labels to the device and allocate the rest there."""
        count = len(images)
        return cls(
            image=device.array(images),
            label=device.array(labels),
            hidden=device.empty((count, UNITS), np.float32),
            probability=device.empty((count, CLASSES), np.float32),
            loss=device.empty(count, np.float32),
        )

    def batches(self, size: int) -> "list[Rows]":
        """Cut into batches. A slice of a buffer is a view of the same memory: nothing is copied."""
        cuts = [slice(start, start + size) for start in range(0, len(self.image), size)]
        return [
            Rows(self.image[cut], self.label[cut], self.hidden[cut], self.probability[cut], self.loss[cut])
            for cut in cuts
        ]


class Network:
    """The weights, their gradients and velocities on a device, and the three programs that use them."""

    batch = BATCH

    def __init__(self, device: wsgrad.Device, rng: np.random.Generator) -> None:
        self.device = device
        self.w1 = device.array(rng.normal(0, np.sqrt(2 / INPUTS), (HIDDEN, INPUTS)).astype(np.float32))
        self.w2 = device.array(rng.normal(0, np.sqrt(1 / HIDDEN), (UNITS, CLASSES)).astype(np.float32))
        self.g1, self.g2 = device.empty_like(self.w1), device.empty_like(self.w2)
        self.v1, self.v2 = device.zeros(self.w1.shape, np.float32), device.zeros(self.w2.shape, np.float32)
        self.compile(device)

    def compile(self, device: wsgrad.Device) -> None:
        """Send the three programs, which are compiled there."""
        # writes= names the arguments a program changes, by position; the rest it only reads.
        self._forward = device.program(KERNELS, "forward", writes=(0, 1, 2))
        self._backward = device.program(KERNELS, "backward", writes=(0, 1))
        self._sgd = device.program(KERNELS, "sgd", writes=(0, 1))

    def forward(self, rows: Rows) -> None:
        """Fill in `hidden`, `probability` and `loss`: one call of the C function per row, spread over threads."""
        outputs = rows.hidden, rows.probability, rows.loss
        self._forward(*outputs, rows.image, rows.label, self.w1, self.w2, wsgrad.INDEX, grid=len(rows.image))

    def step(self, rows: Rows, rate: float) -> None:
        """Train on one batch. These four launches only join the device's queue: nothing here waits."""
        self.forward(rows)
        inputs = rows.image, rows.label, rows.hidden, rows.probability
        self._backward(self.g1, self.g2, *inputs, self.w2, len(rows.image), wsgrad.INDEX, grid=UNITS)
        self._sgd(self.w1, self.v1, self.g1, rate, MOMENTUM, self.w1.size)
        self._sgd(self.w2, self.v2, self.g2, rate, MOMENTUM, self.w2.size)


def train(network: Network, *, epochs: int, rng: np.random.Generator, console: Console) -> float:
    """Train on the network's device with a progress bar and return the share of the test split it gets right."""
    device = network.device
    images, labels = load_digits()
    training = Rows.upload(device, images[:TRAINING_ROWS], labels[:TRAINING_ROWS])
    batches = training.batches(network.batch)

    columns = TextColumn("training on {task.fields[device]}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("training", total=epochs, device=device.id, loss="...")
        for epoch in range(epochs):
            rate = RATE * (1 - epoch / epochs)
            for i in rng.permutation(len(batches)):
                network.step(batches[i], rate)
            loss = training.loss.numpy().mean()  # the one wait of an epoch: the queue has run up to here
            progress.update(task, advance=1, loss=f"{loss:.4f}")

    test = Rows.upload(device, images[TRAINING_ROWS:], labels[TRAINING_ROWS:])
    network.forward(test)
    return float((test.probability.numpy().argmax(axis=1) == labels[TRAINING_ROWS:]).mean())


def measure(device: wsgrad.Device, console: Console) -> None:
    """Print how far away the device feels: one round trip, bulk speed both ways, launches a second."""
    nbytes = 64 << 20
    table = Table("figure", "measured", title=f"{device.id} through the WebSocket")
    table.add_row("round trip (read 4 bytes)", f"{bench.measure_round_trip(device) * 1e6:,.0f} µs")
    table.add_row("upload of 64 MiB", f"{bench.measure_upload(device, nbytes) / 1e6:,.0f} MB/s")
    table.add_row("download of 64 MiB", f"{bench.measure_download(device, nbytes) / 1e6:,.0f} MB/s")
    table.add_row("launches of an empty kernel", f"{bench.measure_launches(device):,.0f} /s")
    console.print(table)


def main(network: type[Network] = Network, device: str = "cpu") -> None:
    """Connect, train, print the accuracy, then the table."""
    parser = argparse.ArgumentParser(description="Train a digit classifier on a device behind a wsgrad server.")
    parser.add_argument("--url", help="a running server, as wsgrad-serve prints it (default: start one here)")
    parser.add_argument("--device", default=device, help="id, label or kind of the device (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the batches")
    args = parser.parse_args()

    console = Console()
    try:
        with wsgrad.connect(args.url) as server:
            where = server.devices[args.device]
            rng = np.random.default_rng(args.seed)
            accuracy = train(network(where, rng), epochs=args.epochs, rng=rng, console=console)
            print(f"accuracy {100 * accuracy:.1f} %")
            measure(where, console)
    except (wsgrad.WsgradError, OSError) as error:  # a wrong address, token or device; what failed there
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
