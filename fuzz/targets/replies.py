"""What nodes say, dialled in or local processes: answers that are true, twisted, repeated, lost or forged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.choices import Choices
from fuzz.lies import liar
from fuzz.model_client import ModelClient
from fuzz.model_server import World, run_world
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 200
_STEPS = 25
_DETAILS: tuple[dict[str, object], ...] = (
    {}, {"lost": True}, {"program": 5}, {"number": "x", "step": -1}, {"close_code": 1},
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    """A run of steps of every kind, some of whose answers are lies."""
    for index in range(12):
        yield bytes((index * 31 + k * k * 5 + (k * index) // 3) & 255 for k in range(120))


def check(data: bytes) -> None:
    """A lie costs its node or nothing; the session goes on, and at the end nothing is left."""
    choices = Choices(data)
    lie = liar(choices, choices.choice((3, 8, 20)), _forged)

    async def play(world: World) -> None:
        client = ModelClient(world, wild=False)
        world.set_faulty()
        await client.connect()
        world.liar = lie
        for _ in range(_STEPS):
            if not choices.left:
                break
            await client.step()
            if world.node.closed and choices.some(3) == 0:
                world.liar = None
                await world.join_again()
                world.liar = lie
        assert not client.wire.closed, (client.wire.error or client.wire.ended, client.session._end_code)
        world.liar = None
        await client.settle()
        await client.leave()

    run_world(choices, play, World)


def _forged(choices: Choices, about: m.Message) -> m.Message:
    """A reply that could be true at another time."""
    queue = getattr(about, "queue", 1)
    number = choices.some(12)
    transfer = choices.choice((1, 2, 3, 1 << 31, (1 << 31) + 1, (3 << 30) + choices.some(3)))
    return choices.choice(
        (
            m.Ack(queue, number),
            m.Result(queue, number, choices.value(1)),
            m.ReadData(queue, number, choices.some(12)),
            m.Failed(
                queue,
                number,
                choices.choice(("LaunchError", "DeviceLost", "Timeout", "ProtocolError", "Nonsense", "CompileError")),
                "said\x1b[2J so",
                choices.choice(_DETAILS),
            ),
            m.Compiled(queue, choices.some(6), choices.some(1) == 1, "words"),
            m.Credit(queue, choices.choice((0, 1, 4, 5, 1 << 31))),
            m.Chunk(queue, transfer, choices.choice((0, 4, 1 << 20))),
            m.Slot(queue, transfer, 0, choices.some(9), choices.choice((0, 4, 64, 1 << 20, (1 << 20) + 1, 1 << 40))),
            m.Abort(queue, transfer),
            m.Spans(queue, choices.some(2), choices.some(1) == 1),
            m.Time(choices.some(3), 1 << 52),
            m.Present("\x1b[1m" * choices.some(9), choices.some(1) == 1, choices.choice((0, 1, 1 << 52))),
        )
    )
