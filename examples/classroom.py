"""Spread a parameter sweep over every browser tab that has joined a server; what a leaving tab had, others do again.

Each job trains the digit classifier with one learning rate and one seed. A thread per tab takes jobs from one queue; a
tab that joins meanwhile gets a thread at once.
"""

import argparse
import itertools
import queue
import threading
import time
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from train_digits import TRAINING_ROWS, Rows, load_digits
from train_digits_wgsl import WgslNetwork

import wsgrad

RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """One point of the sweep."""

    rate: float
    seed: int


@dataclass
class Sweep:
    """The jobs, who does them and what came of them. Threads share it.

    Attributes:
        results: the share of the test split that each job got right.
        done: how many jobs each device has done.
        news: lines on what happened to tabs.
    """

    jobs: "queue.SimpleQueue[Job]"
    epochs: int
    count: int
    results: dict[Job, float] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def finished(self) -> bool:
        """Whether every job has a result."""
        return len(self.results) == self.count


def work(sweep: Sweep, device: wsgrad.Device, *, again: bool) -> None:
    """Do jobs on one device until there are none or it is lost; the job that it had goes back."""
    if again:
        try:
            device.reopen()  # what was lost stays lost; this is a new, empty device in its place
        except wsgrad.WsgradError:
            return
    while not sweep.finished:
        try:
            job = sweep.jobs.get(timeout=0.2)
        except queue.Empty:
            continue  # somebody else has the last ones, and may yet lose them
        try:
            share = evaluate(device, job, sweep.epochs)
        except wsgrad.WsgradError as error:
            sweep.jobs.put(job)
            with sweep.lock:
                sweep.news.append(f"{device.label}: {type(error).__name__}: {error}; its job goes to another")
            return
        with sweep.lock:
            sweep.results[job] = share
            sweep.done[device.id] += 1


def evaluate(device: wsgrad.Device, job: Job, epochs: int) -> float:
    """Train on a device with one learning rate and seed; returns the share of the test split that it gets right."""
    images, labels = load_digits()
    training = Rows.upload(device, images[:TRAINING_ROWS], labels[:TRAINING_ROWS])
    test = Rows.upload(device, images[TRAINING_ROWS:], labels[TRAINING_ROWS:])
    rng = np.random.default_rng(job.seed)
    network = WgslNetwork(device, rng)
    batches = training.batches(network.batch)
    for epoch in range(epochs):
        for i in rng.permutation(len(batches)):
            network.step(batches[i], job.rate * (1 - epoch / epochs))
        device.synchronize()
    network.forward(test)
    return float((test.probability.numpy().argmax(axis=1) == labels[TRAINING_ROWS:]).mean())


def picture(sweep: Sweep) -> Table:
    """What is known so far, as a table."""
    with sweep.lock:
        table = Table(title=f"{len(sweep.results)} of {sweep.count} jobs on {len(sweep.done)} devices")
        table.add_column("learning rate")
        table.add_column("right on the test split, mean over seeds", justify="right")
        for rate in sorted({job.rate for job in sweep.results}):
            shares = [share for job, share in sweep.results.items() if job.rate == rate]
            table.add_row(f"{rate:g}", f"{100 * np.mean(shares):.1f} %  ({len(shares)})")
        # A tab's owner names it: Text shows the name as it is, where a str could hold markup.
        table.caption = Text("\n".join([*(f"{name}: {n} jobs" for name, n in sweep.done.items()), *sweep.news[-3:]]))
    return table


def run(server: wsgrad.Server, sweep: Sweep, *, kind: str, wait: float, console: Console) -> None:
    """Give every device of a kind a thread, those that come later too, until all jobs are done."""
    threads: dict[str, threading.Thread] = {}
    started: dict[str, float] = {}
    with Live(picture(sweep), console=console, refresh_per_second=4) as live:
        deadline = time.monotonic() + wait
        while not sweep.finished:
            for device in [device for device in server.devices if device.kind == kind]:
                thread, before = threads.get(device.id), started.get(device.id)
                if (thread is not None and thread.is_alive()) or (before and time.monotonic() < before + RETRY_SECONDS):
                    continue
                sweep.done.setdefault(device.id, 0)
                started[device.id] = time.monotonic()
                options = {"again": thread is not None}
                threads[device.id] = threading.Thread(target=work, args=(sweep, device), kwargs=options, daemon=True)
                threads[device.id].start()
            if any(thread.is_alive() for thread in threads.values()):
                deadline = time.monotonic() + wait
            elif time.monotonic() > deadline:
                raise SystemExit(f"no device of kind {kind!r} for {wait:g} s; open the server's page in a browser")
            live.update(picture(sweep))
            time.sleep(0.2)
        for thread in threads.values():
            thread.join()
        live.update(picture(sweep))


def main() -> None:
    """Connect, sweep, print the best learning rate."""
    parser = argparse.ArgumentParser(description="Spread a parameter sweep over all browser tabs of a server.")
    parser.add_argument("--url", help="a running server, as wsgrad-serve prints it (default: WSGRAD_URL)")
    parser.add_argument("--kind", default="browser", help="the devices to use (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--seeds", type=int, default=3, help="how many for each rate (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds without any tab before giving up")
    args = parser.parse_args()

    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    points = [Job(rate, seed) for rate, seed in itertools.product(args.rates, range(args.seeds))]
    for job in points:
        jobs.put(job)
    sweep = Sweep(jobs, args.epochs, len(set(points)))
    try:
        with wsgrad.connect(args.url) as server:
            run(server, sweep, kind=args.kind, wait=args.wait, console=Console())
    except (wsgrad.WsgradError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    means = {rate: np.mean([s for job, s in sweep.results.items() if job.rate == rate]) for rate in args.rates}
    best = max(means, key=lambda rate: means[rate])
    print(f"best learning rate {best:g}: {100 * means[best]:.1f} % right")


if __name__ == "__main__":
    main()
