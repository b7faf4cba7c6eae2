"""A program that is interrupted at random moments by real signals; run by test_interrupts, prints what it found.

Arguments: the server's URL, how many interrupts, and the seed.
"""

import os
import random
import signal
import sys
import threading

import numpy as np

import wsgrad

ADD = "void add(float *y, const float *x, float a, int n) { for (int i = 0; i < n; i++) y[i] += a * x[i]; }"
COUNT = "void count(int *n) { n[0]++; }"


def main() -> None:
    url, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    server = wsgrad.connect(url)
    channel = server._driver.channel
    device = server.devices["cpu"]
    counter = device.zeros(1, np.int32)
    count = device.program(COUNT, "count")
    small = device.array(np.arange(4, dtype=np.float32))
    values = np.random.default_rng(seed).integers(0, 255, 5 << 20, np.uint8)
    big = device.array(values)
    strided = np.zeros((2048, 2048), np.uint8)[:, ::2]
    wide = device.array(np.ones(strided.shape, np.uint8))
    back = np.empty_like(values)
    launched = interrupts = 0

    def launch() -> None:
        nonlocal launched
        for _ in range(rng.choice([50, 700])):  # a full batch is sent by the launch that finds it full
            count(counter)
            launched += 1

    def upload() -> None:
        big.copy_from(values)

    def download() -> None:
        big.copy_to(back)

    def scatter() -> None:
        wide.copy_to(strided)

    def read() -> None:
        assert small.numpy().tolist() == [0, 1, 2, 3]

    def allocate() -> None:
        device.empty(1000).fill(1)

    def compile_and_wait() -> None:
        source = f"void f(int *x) {{ x[0] = {rng.randrange(1 << 30)}; }}"
        device.program(source, "f").ready()

    def rows() -> None:
        small[1:3].numpy()

    operations = [launch, upload, download, scatter, read, allocate, device.synchronize, rows, server.flush]
    operations += [compile_and_wait]
    for _ in range(rounds):
        operation = rng.choice(operations)
        killer = threading.Timer(rng.random() * 0.006, os.kill, (os.getpid(), signal.SIGINT))
        try:
            killer.start()
            while True:
                operation()
        except KeyboardInterrupt:
            interrupts += 1
        killer.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if rng.random() < 0.1:
            assert small.numpy().tolist() == [0, 1, 2, 3]
            done = int(counter.numpy()[0])
            assert launched <= done <= launched + interrupts, (launched, done, interrupts)
    big.copy_from(values)
    big.copy_to(back)
    assert (back == values).all()
    wide.copy_to(strided)
    assert (strided == 1).all()
    done = int(counter.numpy()[0])
    assert launched <= done <= launched + interrupts, (launched, done, interrupts)
    assert server._driver.channel is channel, "the connection was lost"
    server.close()
    print(f"interrupted {interrupts} times")


main()
