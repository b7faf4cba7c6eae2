"""A session's state: structured messages of a client, drops and resumes among them, against a hub with model nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.choices import Choices
from fuzz.model_client import ModelClient
from fuzz.model_server import World, run_world

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 160
_STEPS = 30


def seeds() -> Iterator[bytes]:
    """A run of steps of every kind."""
    for index in range(12):
        yield bytes((index * 29 + k * k * 7 + (k * index) // 3) & 255 for k in range(120))


def check(data: bytes) -> None:
    """Every message has its effect or a named error; limits hold; at the end nothing is left."""
    choices = Choices(data)
    wild = choices.some(1) == 1
    faulty = choices.some(1) == 1

    async def play(world: World) -> None:
        client = ModelClient(world, wild=wild)
        if faulty:
            world.set_faulty()
        await client.connect()
        for _ in range(_STEPS):
            if not choices.left or client.wire.closed or client.refused:
                break
            await client.step()
        assert wild or not client.wire.closed, (client.wire.error or client.wire.ended, client.session._end_code)
        await client.settle()
        if not wild and not client.wire.closed:
            for queue in client.queues.values():
                assert client._over(queue), queue
        await client.leave()

    run_world(choices, play, World)
