"""A trio program that is interrupted at random moments by real signals; run by test_async_face, prints what it found.

Arguments: the server's URL, how many interrupts, and the seed.
"""

import os
import random
import signal
import sys
import threading

import numpy as np
import trio

import wsgrad

COUNT = "void count(int *n) { n[0]++; }"


async def main() -> None:
    url, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    launched = interrupts = 0
    async with wsgrad.open_server(url) as server:
        connection = server._driver._connection
        device = server.devices["cpu"]
        counter = device.zeros(1, np.int32)
        count = device.program(COUNT, "count")
        values = np.random.default_rng(seed).integers(0, 255, 5 << 20, np.uint8)
        big = await device.array(values)
        back = np.empty_like(values)

        async def launch() -> None:
            nonlocal launched
            for _ in range(50):
                count(counter)
                launched += 1
            await server.flush()

        async def upload() -> None:
            await big.copy_from(values)

        async def download() -> None:
            await big.copy_to(back)

        async def read() -> None:
            await big[5:9].numpy()

        operations = [launch, upload, download, read, device.synchronize]
        for _ in range(rounds):
            operation = rng.choice(operations)
            killer = threading.Timer(rng.random() * 0.01, os.kill, (os.getpid(), signal.SIGINT))
            try:
                killer.start()
                while True:
                    await operation()
            except KeyboardInterrupt:
                interrupts += 1
            killer.join()
        await big.copy_from(values)
        await big.copy_to(back)
        assert (back == values).all()
        done = int((await counter.numpy())[0])
        assert launched <= done <= launched + interrupts, (launched, done, interrupts)
        assert server._driver._connection is connection, "the connection was lost"
    print(f"interrupted {interrupts} times")


trio.run(main)
