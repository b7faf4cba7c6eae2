"""Train the digit classifier with tinygrad: the same program on this machine, a GPU box or a browser tab on a phone.

Nothing here knows of wsgrad. `DEV=WS` chooses its devices and `WSGRAD_URL` the server; without a URL tinygrad gets a
server of its own on this machine's CPU. The images are the 1,797 of the other example (see DIGITS.md).

    DEV=WS WSGRAD_URL='ws://gpu-box:7667#token=…' python examples/train_digits_tinygrad.py
"""

import argparse
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tinygrad import Context, Device, Tensor, TinyJit, nn

TRAINING_ROWS = 1437  # the other 360 of the 1,797 images are the test split
BATCH, RATE = 64, 0.002


class Network:
    """64 pixels, 128 units, 10 classes."""

    def __init__(self) -> None:
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 10)

    def __call__(self, images: Tensor) -> Tensor:
        """Scores for images of shape (rows, 64)."""
        return self.second(self.first(images).relu())


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read the images as float32 (1797, 64) and the labels as int32 (1797,), in a fixed order."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"].astype(np.float32) / 16, file["labels"].astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order], labels[order]


def main() -> None:
    """Train with a progress bar and print the share of the test split that it gets right."""
    parser = argparse.ArgumentParser(description="Train a digit classifier with tinygrad on the device that DEV names.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    Tensor.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    images, labels = load_digits()
    x, y = Tensor(images[:TRAINING_ROWS]).realize(), Tensor(labels[:TRAINING_ROWS]).realize()
    network = Network()
    optimizer = nn.optim.Adam(nn.state.get_parameters(network), lr=RATE)

    @TinyJit
    def step(rows: Tensor) -> Tensor:
        """One step on the rows of that numbers; recorded once, then one message a step."""
        optimizer.zero_grad()
        loss = network(x[rows]).sparse_categorical_crossentropy(y[rows]).backward()
        optimizer.step()
        return loss.realize()

    columns = TextColumn("training on {task.fields[device]}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), TimeElapsedColumn()) as progress:
        task = progress.add_task("training", total=args.epochs, device=Device.DEFAULT, loss="...")
        for _ in range(args.epochs):
            order = rng.permutation(TRAINING_ROWS).astype(np.int32)
            for start in range(0, TRAINING_ROWS - BATCH + 1, BATCH):
                with Context(TRAINING=1):
                    loss = step(Tensor(order[start : start + BATCH]).realize())
            progress.update(task, advance=1, loss=f"{loss.item():.4f}")  # the one wait of an epoch

    scores = network(Tensor(images[TRAINING_ROWS:])).numpy()
    print(f"accuracy {100 * (scores.argmax(axis=1) == labels[TRAINING_ROWS:]).mean():.1f} %")


if __name__ == "__main__":
    main()
