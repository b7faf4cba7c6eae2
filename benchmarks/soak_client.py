"""Some clients of a soak in one process: `python -m benchmarks.soak_client rounds|reads URL SESSIONS FIRST`.

It opens its sessions and prints a line. Each line `SECONDS` that it is then sent makes all of them work for so long,
and is answered with a line of JSON: what each did, and how often the device gave something else than it should. It ends
with its standard input, and judges no figures.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import numpy as np
import trio

import wsgrad
from benchmarks.random_work import SOURCE

COUNTS: Final = (16, 1_000, 16_384, 65_536)
"""Sizes of a round's arrays, in int32, in turn."""
READ_SECONDS: Final = 0.01
UPLOAD_SECONDS: Final = 1.0
UPLOAD_NBYTES: Final = 1 << 20


class Rounds:
    """Sessions that upload, launch, replay a graph and read, and compare what they read."""

    def __init__(self, servers: list[wsgrad.AsyncServer], first: int) -> None:
        self._servers = servers
        self._first = first

    async def work(self, seconds: float) -> dict[str, object]:
        rounds = [0] * len(self._servers)
        wrong = [0] * len(self._servers)
        give_up = trio.current_time() + seconds

        async def one(index: int) -> None:
            session = await _RoundsOfOne.opened(self._servers[index], self._first + index)
            while trio.current_time() < give_up:
                wrong[index] += not await session.round()
                rounds[index] += 1

        async with trio.open_nursery() as nursery:
            for index in range(len(self._servers)):
                nursery.start_soon(one, index)
        return {"rounds": rounds, "wrong": sum(wrong)}


class _RoundsOfOne:
    def __init__(self, device: wsgrad.AsyncDevice, number: int) -> None:
        self._rng = np.random.default_rng(number)
        self._device = device
        self._done = 0
        self._mix = device.program(SOURCE, "mix", writes=(0,))
        self._parts = []
        for count in COUNTS:
            x, y = device.empty(count, np.int32), device.empty(count, np.int32)
            with wsgrad.record(device) as graph:
                self._mix(y, x, count, wsgrad.Var("k", -9, 9))
                y[: count // 2].fill(number)
                self._mix(y, x, count, 2)
            self._parts.append((count, x, y, graph))
        self._number = number

    @classmethod
    async def opened(cls, server: wsgrad.AsyncServer, number: int) -> _RoundsOfOne:
        made = cls(server.devices["cpu"], number)
        await made._mix.ready()
        return made

    async def round(self) -> bool:
        """One round; returns whether the device had what NumPy has."""
        count, x, y, graph = self._parts[self._done % len(self._parts)]
        self._done += 1
        k = self._done % 19 - 9
        values = self._rng.integers(-(1 << 31), 1 << 31, count, dtype=np.int32)
        await x.copy_from(values)
        y.fill(self._done)
        self._mix(y, x, count, k + 1)
        graph.run(k=k)
        expected = np.full(count, self._done, np.int32)
        _mix(expected, values, k + 1)
        _mix(expected, values, k)
        expected[: count // 2] = self._number
        _mix(expected, values, 2)
        return bool((await y.numpy() == expected).all())


class Reads:
    """Sessions that read 4 bytes every 10 ms and upload 1 MiB a second, each read timed."""

    def __init__(self, servers: list[wsgrad.AsyncServer], first: int) -> None:
        self._servers = servers
        self._first = first

    async def work(self, seconds: float) -> dict[str, object]:
        times: list[list[float]] = [[] for _ in self._servers]
        wrong = 0
        start = trio.current_time()

        async def read(index: int, device: wsgrad.AsyncDevice) -> None:
            nonlocal wrong
            number = self._first + index
            small = await device.array(np.array([number], np.int32))
            # Not all at the same moment, as no two clients' clocks would be.
            due = start + READ_SECONDS * (number * 0.618 % 1)
            while (due := due + READ_SECONDS) < start + seconds:
                await trio.sleep_until(due)
                began = time.perf_counter()
                got = await small.numpy()
                times[index].append(time.perf_counter() - began)
                wrong += int(got[0]) != number

        async def upload(index: int, device: wsgrad.AsyncDevice) -> None:
            nonlocal wrong
            number = self._first + index
            data = np.full(UPLOAD_NBYTES, number % 256, np.uint8)
            large = device.empty(UPLOAD_NBYTES, np.uint8)
            due = start + UPLOAD_SECONDS * (number * 0.618 % 1)
            while (due := due + UPLOAD_SECONDS) < start + seconds:
                await trio.sleep_until(due)
                await large.copy_from(data)
                wrong += int((await large[-4:].numpy())[0]) != number % 256

        async with trio.open_nursery() as nursery:
            for index, server in enumerate(self._servers):
                nursery.start_soon(read, index, server.devices["cpu"])
                nursery.start_soon(upload, index, server.devices["cpu"])
        return {"times": times, "wrong": wrong}


def _mix(y: np.ndarray[Any, Any], x: np.ndarray[Any, Any], k: int) -> None:
    y[:] = np.int32(3) * y + np.int32(k) * x + np.int32(1)


async def _serve(kind: type[Rounds] | type[Reads], url: str, sessions: int, first: int) -> None:
    async with trio.open_nursery() as nursery:
        servers: list[wsgrad.AsyncServer] = []
        done = trio.Event()

        async def session(task_status: trio.TaskStatus[None]) -> None:
            async with wsgrad.open_server(url) as server:
                await server.devices["cpu"].synchronize()
                servers.append(server)
                task_status.started()
                await done.wait()

        for _ in range(sessions):
            await nursery.start(session)
        clients = kind(servers, first)
        print("open", flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            print(json.dumps(await clients.work(float(line))), flush=True)
        done.set()


def main() -> None:
    """Open, then work as told."""
    kind, url, sessions, first = sys.argv[1:]
    trio.run(_serve, Rounds if kind == "rounds" else Reads, url, int(sessions), int(first))


if __name__ == "__main__":
    main()
