"""Random programs on real servers by way of links that fail: `python -m benchmarks.soak chaos --faults 1000 --seed 1`.

Each round is a program of its own with links of its own, of the blocking or the trio face, over devices of one or two
servers and of a machine that has joined; `--link` chooses whose connection to the server fails: the client's, that
machine's, or both. What fails in a round follows from the seed and the round's number.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, get_args

import trio

import wsgrad
from benchmarks.faulty import FaultyLink, Kind
from benchmarks.processes import ServerProcess, joined_process, server_process
from benchmarks.random_work import Tally, Work, run_blocking, run_trio
from benchmarks.report import Figure
from benchmarks.soak_command import SoakCommand

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from benchmarks.report import Report

T = TypeVar("T")
Failing = Literal["client", "node", "both"]
"""Whose links to the servers fail."""

_BLACK_HOLE_EVERY: Final = 25
"""So many rounds bring one black hole, which costs its 15 s of silence."""
_TRIES: Final = 200
_ROUND_SECONDS: Final = 300.0
_GRACE_SECONDS: Final = 30


@dataclass(frozen=True, slots=True)
class Shape:
    """What a round is made of."""

    face: str
    servers: tuple[int, ...]
    workers: int
    steps: int
    cache: bool
    weights: dict[Kind, float] | None
    most: int | None = None


def shape_of(seed: int, number: int, *, steps: int, failing: Failing) -> Shape:
    """The shape of a round; one of a node's link has the server that a machine joins among its own."""
    rng = random.Random(f"shape/{seed}/{number}")
    face = ("blocking", "trio")[number % 2]
    black = number % _BLACK_HOLE_EVERY == _BLACK_HOLE_EVERY - 1
    return Shape(
        face,
        rng.choice(((0,), (0, 1), (0, 1), (2,) if failing == "client" else (0,))),
        rng.choice((1, 1, 2, 3)),
        steps,
        rng.random() < 0.3,
        {"black hole": 1.0} if black else None,
        1 if black else None,
    )


class Farm:
    """Servers, started when they are first used: a machine joins 0, 1 dials nobody, 2 has TLS. They end with `with`.

    The machine stays from round to round, unless its link fails: each round then has one of its own.
    """

    def __init__(self, failing: Failing) -> None:
        self.failing = failing
        self._stack = ExitStack()
        self._servers: dict[int, ServerProcess] = {}
        self._state = self._stack.enter_context(tempfile.TemporaryDirectory())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, index: int) -> str:
        """The address of a server."""
        return self._server(index).url

    @contextmanager
    def node(self, shape: Shape, seed: str) -> Iterator[FaultyLink]:
        """A machine of its own for a round, and the link by which it joins."""
        server = self._server(0)
        with FaultyLink(server.url, seed=seed, weights=shape.weights, most=shape.most) as link:
            link.failing = False  # until it has joined: to come in is no part of a stay
            arguments = ("--device", "cpu*2")
            with joined_process(replace(server, url=link.url), "joined", self._state, arguments):
                link.failing = True
                yield link

    def _server(self, index: int) -> ServerProcess:
        if index not in self._servers:
            arguments = ["--device", "cpu*2", "--cpu-threads", "1", "--resume-grace", f"{_GRACE_SECONDS}"]
            arguments += ["--node-grace", f"{_GRACE_SECONDS}"]
            arguments += (("--max-sessions", "64"), ("--allow-peer", "192.0.2.1"), ("--tls",))[index]
            state = self._stack.enter_context(tempfile.TemporaryDirectory())
            server = self._stack.enter_context(server_process(arguments, state=state))
            if not index and self.failing == "client":
                self._stack.enter_context(joined_process(server, "joined", self._state))
            self._servers[index] = server
        return self._servers[index]


def run_round(farm: Farm, seed: int, number: int, *, steps: int) -> tuple[Tally, Counter[Kind]]:
    """One round; returns what it did and what failed."""
    shape = shape_of(seed, number, steps=steps, failing=farm.failing)
    faults: Counter[Kind] = Counter()
    with ExitStack() as stack:
        links, urls = [], [farm.url(index) for index in shape.servers]
        if farm.failing != "client":
            links.append(stack.enter_context(farm.node(shape, f"{seed}/{number}/node")))
        if farm.failing != "node":
            for place, index in enumerate(shape.servers):
                seeded = f"{seed}/{number}/{index}"
                link = FaultyLink(urls[place], seed=seeded, weights=shape.weights, most=shape.most)
                links.append(stack.enter_context(link))
                urls[place] = link.url
        if shape.face == "trio":
            tally = trio.run(_in_trio, urls, links, shape, seed, number)
        else:
            tally = _blocking(urls, links, shape, seed, number)
        for link in links:
            faults += link.faults
    return tally, faults


def _blocking(urls: Sequence[str], links: Sequence[FaultyLink], shape: Shape, seed: int, number: int) -> Tally:
    with ExitStack() as stack:
        servers = []
        for url in urls:
            servers.append(stack.enter_context(_persistent(partial(wsgrad.connect, url, cache=shape.cache))))
        works = _works(servers, shape, f"{seed}/{number}")
        with ThreadPoolExecutor(len(works)) as pool:
            for done in [pool.submit(run_blocking, work.steps(count=shape.steps // len(works))) for work in works]:
                done.result()
        _calm(links, number)
    return _together(works)


async def _in_trio(urls: Sequence[str], links: Sequence[FaultyLink], shape: Shape, seed: int, number: int) -> Tally:
    async with AsyncExitStack() as stack:
        servers = []
        for each in urls:

            async def opened(url: str = each) -> wsgrad.AsyncServer:
                return await stack.enter_async_context(wsgrad.open_server(url, cache=shape.cache))

            servers.append(await _persistently(opened))
        works = _works(servers, shape, f"{seed}/{number}")
        async with trio.open_nursery() as nursery:
            for work in works:
                nursery.start_soon(run_trio, work.steps(count=shape.steps // len(works)))
        _calm(links, number)
    return _together(works)


def _persistent(open_it: Callable[[], T]) -> T:
    """Opening a session is no part of one: what fails then is told, and tried again."""
    for _ in range(_TRIES):
        try:
            return open_it()
        except (wsgrad.ConnectionLost, TimeoutError, OSError):
            continue
    return open_it()


async def _persistently(open_it: Callable[[], Awaitable[T]]) -> T:
    for _ in range(_TRIES):
        try:
            return await open_it()
        except (wsgrad.ConnectionLost, TimeoutError, OSError):
            await trio.lowlevel.checkpoint()
    return await open_it()


def _calm(links: Sequence[FaultyLink], number: int) -> None:
    """Every other session says good-bye over a link that holds."""
    if number // 2 % 2:
        for link in links:
            link.failing = False


def _works(servers: Sequence[Any], shape: Shape, seed: str) -> list[Work]:
    """One program, or several that share sessions and devices."""
    devices = [device for server in servers for device in server.devices if device.kind == "cpu"]
    alone = shape.workers == 1
    return [Work(devices, f"{seed}/{number}", alone=alone) for number in range(shape.workers)]


def _together(works: Sequence[Work]) -> Tally:
    tally = Tally()
    for work in works:
        tally.add(work.tally)
    return tally


def soak(
    *,
    faults: int,
    seed: int,
    steps: int = 60,
    first: int = 0,
    rounds: int | None = None,
    failing: Failing = "client",
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Tally, Counter[Kind]]:
    """Run rounds until so many faults have come, or so many rounds are over; returns what was done and what failed."""
    tally, total = Tally(), Counter[Kind]()
    number = first
    with Farm(failing) as farm:
        while total.total() < faults and (rounds is None or number < first + rounds):
            done, failed = run_round(farm, seed, number, steps=steps)
            say(f"round {number}: {dict(failed)}, {done.commands} commands{'' if done.right else ', WRONG'}")
            for line in done.said:
                say(f"  {line}")
            tally.add(done)
            total += failed
            number += 1
    return tally, total


def measure(report: Report, options: argparse.Namespace) -> None:
    """Soak, and report the counts."""

    def say(line: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(_ROUND_SECONDS, exit=True)
        print(line, file=sys.stderr, flush=True)

    again = f"--link {options.link} --seed {options.seed} --first ROUND --rounds 1"
    say(f"seed {options.seed}; one round again: {again}")
    started = time.monotonic()
    tally, faults = soak(
        faults=options.faults,
        seed=options.seed,
        steps=options.steps,
        first=options.first,
        rounds=options.rounds,
        failing=options.link,
        say=say,
    )
    faulthandler.cancel_dump_traceback_later()
    kinds = ", ".join(f"{count} {kind}" for kind, count in faults.most_common())
    report.add(Figure("faults", faults.total(), "", detail=f"{options.link}, seed {options.seed}: {kinds}"))
    report.add(Figure("time", time.monotonic() - started, "s", better="lower"))
    report.add(Figure("commands", tally.commands, "", detail=f"{tally.checks} results compared"))
    report.add(Figure("wrong results", tally.wrong, "", 0.0, better="lower"))
    report.add(Figure("lost commands", tally.lost, "", 0.0, better="lower"))
    report.add(Figure("commands run twice", tally.twice, "", 0.0, better="lower"))
    if not tally.right:
        raise AssertionError("\n".join(tally.said))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--faults", type=int, default=1000, help="stop after so many")
    parser.add_argument("--seed", type=int, default=1, help="what everything follows from")
    parser.add_argument("--link", choices=get_args(Failing), default="client", help="whose link to the server fails")
    parser.add_argument("--steps", type=int, default=60, help="steps of each round's program")
    parser.add_argument("--first", type=int, default=0, help="the round to begin with")
    parser.add_argument("--rounds", type=int, help="so many rounds at most")


COMMAND = SoakCommand(
    "chaos", "random programs over failing links: nothing lost, nothing twice", add_arguments, measure
)
