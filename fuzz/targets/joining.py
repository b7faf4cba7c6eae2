"""A machine that joins: a whole one, over links that break, with a hub that may lie to it, and strangers beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.choices import Choices
from fuzz.lies import liar
from fuzz.model_client import ModelClient
from fuzz.model_machine import JoinedWorld
from fuzz.model_server import DEVICE, Wire, run_world
from fuzz.targets.messages import m_array
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 200
_STEPS = 30


def seeds() -> Iterator[bytes]:
    """A run of steps of every kind."""
    for index in range(16):
        yield bytes((index * 41 + k * k * 3 + (k * index) // 3) & 255 for k in range(120))


def check(data: bytes) -> None:
    """However the machine fares, the session goes on; true hubs lose nothing, and nothing is left at the end."""
    choices = Choices(data)
    lies = choices.some(1) == 1
    lie = liar(choices, choices.choice((3, 8, 20)), _forged)
    faulty = choices.some(1) == 1

    async def play(world: JoinedWorld) -> None:
        client = ModelClient(world, wild=False)
        if faulty:
            world.set_faulty()
        await client.connect()
        for number in range(choices.some(2)):
            client.open(number, "far/cpu/0", buffers=5)
        world.liar = lie if lies else None
        for _ in range(_STEPS):
            if not choices.left:
                break
            await _step(world, client)
        assert not client.wire.closed, (client.wire.error or client.wire.ended, client.session._end_code)
        world.liar = None
        await world.come_back()
        _show(world, paused=False)
        await client.settle()
        if not lies:
            for queue in client.queues.values():
                assert client._over(queue), queue
        await client.leave()
        if not lies:
            await world.turn(10)
            assert not world.queues, world.queues

    run_world(choices, play, JoinedWorld)


async def _step(world: JoinedWorld, client: ModelClient) -> None:
    choices = world.choices
    match choices.some(23):
        case 0 | 1:
            world.cut()
            await world.turn(2)
        case 2 | 3:
            world.pass_time(choices.choice((0.6, 3.0, 3.0, 20.0, 40.0)))
            await world.turn(3)
        case 4:
            await _stranger(world)
        case 5:
            _show(world, paused=choices.some(1) == 1)
            await world.turn(2)
        case 6 if choices.some(3) == 0:
            await _sent_away(world)
        case 7 if world.gone or choices.some(3) == 0:
            if not world.gone:
                await world.leave()
            lie, world.liar = world.liar, None
            await world.come_back()
            world.liar = lie
        case _:
            await client.step()


def _show(world: JoinedWorld, *, paused: bool) -> None:
    """As an administrator does it."""
    node = world.hub.node("far")
    if node is not None:
        shown = m.Present("", paused, 0)
        node.present(shown)
        node.tell(shown)


async def _sent_away(world: JoinedWorld) -> None:
    """An administrator kicks the node or revokes its secret; the machine's owner starts it again."""
    node = world.hub.node("far")
    if node is not None:
        code = world.choices.choice(("Kicked", "Unauthorized"))
        if code == "Unauthorized":
            world.hub.forget_node("far")
        node.refuse(code, "an administrator wants it so")
        await world.turn(3)


async def _stranger(world: JoinedWorld) -> None:
    """Somebody joins who may know the secret, or be no node at all, says anything, and is gone."""
    choices = world.choices
    wire = Wire()
    await world.serve(world.hub.serve_node, wire)
    stay: object = choices.choice((None, None, 0, getattr(world.machine._stay, "stay", None)))
    array: list[object] = [
        m.Join.KIND,
        choices.choice((1, 1, 1, 1, 0, 2)),
        choices.choice(("fuzz", "\x1b[2J", "")),
        choices.choice(("far", "box", "stranger", "", "Ä\x1b/", "x" * 300)),
        choices.choice((None, None, "guessed", world.membership.secret)),
        [_device(choices) for _ in range(choices.choice((1, 1, 0, 2, 70)))],
        choices.choice((None, None, 0, 1, 7, 1 << 53)),
        stay,
    ]
    if choices.some(7) == 1:
        array[choices._randbelow(len(array))] = choices.value(2)
    world.raw(wire, array, None)
    for _ in range(choices.some(3)):
        array = m.message_array(_said(choices)) if choices.some(1) else m_array(choices)
        world.raw(wire, array, choices.randbytes(choices.some(20)))
        await world.turn(choices.some(2))
        wire.take()
    wire.lose()
    await world.turn(2)


def _device(choices: Choices) -> object:
    device: dict[str, object] = dict(DEVICE)
    if choices.some(2) == 1:
        key = choices.choice(("kind", "dialects", "memory", "label", "paused", "limits", "id", "index", "name"))
        device[key] = choices.choice(
            (choices.value(2), "\x1b[1m" * 30, ["c"] * 20, {"a" * 50: 1}, {"n": 1 << 60}, 1 << 52, -1, True)
        )
    return device


def _said(choices: Choices) -> m.Message:
    """What a node says of itself."""
    return choices.choice(
        (
            m.Present("\x1b[1m" * choices.some(9), choices.some(1) == 1, choices.choice((0, 1, 1 << 52))),
            m.Time(choices.some(3), 1 << 52),
            m.Seen(choices.some(3)),
            m.Ack(choices.some(4), choices.some(3)),
            m.Bye(),
        )
    )


def _forged(choices: Choices, about: m.Message) -> m.Message:
    """What a hub could say at another time."""
    queue = choices.choice((getattr(about, "queue", 1), choices.some(4)))
    number, transfer = choices.some(12), choices.choice((1, 2, 3, 1 << 31, 1 << 32))
    options: list[dict[str, object]] = [{}, {"memory": -1, "client": 5}, {"launch_seconds": 1e-9}]
    commands: list[c.Command] = [
        c.Read(choices.some(5), 0, choices.choice((0, 4, 1 << 15))),
        c.Download(transfer, choices.some(5), 0, choices.choice((0, 64, 1 << 40))),
        c.Upload(transfer, choices.some(5), 0, choices.choice((0, 64))),
        c.Launch(1, None, None, [1, 1], True),
    ]
    return choices.choice(
        (
            m.Attach(queue, 1, choices.some(2), choices.choice(options)),
            m.Close(queue),
            m.Batch(queue, number, [c.command_array(choices.choice(commands)) for _ in range(choices.some(3))]),
            m.Batch(queue, number, [choices.value(2)]),  # type: ignore[list-item]
            m.Launches(queue, number, choices.choice((1, 3, 1 << 31))),
            m.Program(queue, number, 1, "c", "name", "entry", "pi", None, False, {}),
            m.Credit(queue, choices.choice((0, 1, 5, 1 << 31))),
            m.Chunk(queue, transfer, choices.choice((0, 4, 1 << 20))),
            m.Abort(queue, transfer),
            m.Fail(queue, number, choices.choice(("DeviceError", "Nonsense")), "said", {}),
            m.Graph(queue, choices.some(3), choices.choice((0, 0, 9)), choices.choice((0, 10, 1 << 40))),
            m.Replay(queue, number, choices.some(3), transfer, [], []),
            m.Unrecord(queue, choices.some(3)),
            m.Profile(queue, 1, choices.some(1) == 1),
            m.Joined(1, "far", "secret", {"grace": choices.value(1), "stay": choices.value(1)}, choices.some(3)),
            m.Refused(choices.choice(("Kicked", "Unauthorized", "ProtocolError", "LimitExceeded")), "go"),
            m.Present("\x1b[1m", choices.some(1) == 1, 0),
            m.Seen(choices.some(12)),
            m.Clock(choices.some(3)),
            m.Bye(),
        )
    )
