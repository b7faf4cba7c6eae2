"""What somebody who lies makes of a message: lost, doubled, twisted, cut, or another one beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.targets.messages import m_array
from wsgrad.transport import cbor
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.choices import Choices
    from fuzz.model_server import Liar, Way, World


def liar(choices: Choices, rate: int, forge: Callable[[Choices, m.Message], m.Message]) -> Liar:
    """Lies about one message of `rate` + 1; `forge` makes what could be true at another time."""

    def lie(world: World, way: Way, message: m.Message, bulk: bytes | None) -> None:
        if choices.some(rate) or not choices.left:
            world.tell(way, message, bulk)
            return
        match choices.some(7):
            case 0:
                return
            case 1:
                world.tell(way, message, bulk)
                world.tell(way, message, bulk)
            case 2:
                array = m.message_array(message)
                array[choices._randbelow(len(array))] = choices.value(1)
                world.raw(way, array, bulk)
            case 3:
                array = m.message_array(message)
                at = choices._randbelow(len(array))
                if type(array[at]) is int:
                    array[at] = max(0, array[at] + choices.choice((-2, -1, 1, 2, 64)))  # type: ignore[operator]
                world.raw(way, array, bulk)
            case 4:
                world.raw(way, m.message_array(forge(choices, message)), choices.randbytes(choices.some(70)))
                world.tell(way, message, bulk)
            case 5:
                world.raw(way, m_array(choices), choices.randbytes(choices.some(30)))
            case 6:
                wrong = b"" if bulk is None else bulk[: choices.some(len(bulk))] + bytes(choices.some(2))
                world.raw(way, m.message_array(message), wrong)
            case _:
                world.bytes(way, cbor.encode(m.message_array(message))[: choices.some(30)] + choices.randbytes(3))

    return lie
