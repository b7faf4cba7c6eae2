"""A graph's part as a peer sends it: a real part with anything changed in it is refused by name or is a part again."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING

from fuzz.choices import Choices
from fuzz.shared import load_test_module
from wsgrad.errors import LaunchError, ProtocolError
from wsgrad.graph.parse import check_values, device_arrays, parse_device_part, parse_part
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.transport import cbor

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 1024
_SAMPLES = 12
random_recording = load_test_module("graph/random_graphs").random_recording
PARTS = [
    part_array(part) for seed in range(_SAMPLES) for part in Plan(random_recording(random.Random(seed))).parts.values()
]


def seeds() -> Iterator[bytes]:
    """Small parts as they are sent, and bytes that bend the samples."""
    whole = sorted((cbor.encode(part) for part in PARTS), key=len)
    for encoded in whole[:6]:
        yield b"\0" + encoded
    for index in range(8):
        yield bytes((1, index, 0, 5, index, 2, 1)) + bytes(range(20))


def check(data: bytes) -> None:
    """Parse, and parse again what came of it."""
    if not data:
        return
    if data[0] & 1:
        choices = Choices(data[1:])
        array: object = copy.deepcopy(PARTS[choices._randbelow(len(PARTS))])
        for _ in range(1 + choices.some(2)):
            bend(choices, array)
    else:
        try:
            array = cbor.decode(data[1:])
        except ProtocolError:
            return
    try:
        part = parse_part(array)
    except ProtocolError as exc:
        assert len(str(exc)) < 2000, exc
        return
    assert parse_part(part_array(part)) == part
    for index, device in device_arrays(part_array(part)).items():
        again, _, variables = parse_device_part(device)
        assert again.index == index
        assert again == next(d for d in part.devices if d.index == index)
        assert tuple(variables) == part.variables
    values: list[object] = [low for _, low, _ in part.variables]
    assert check_values(part, values) == tuple(values)
    try:
        check_values(part, [*values, 1])
    except LaunchError:
        pass
    else:
        raise AssertionError("one value too many")


def bend(choices: Choices, place: object) -> None:
    """Replace, take out, repeat or move something somewhere inside."""
    while isinstance(place, list) and place:
        inner = [value for value in place if isinstance(value, list) and value]
        if inner and choices.some(4):
            place = inner[choices._randbelow(len(inner))]
            continue
        at = choices._randbelow(len(place))
        match choices.some(5):
            case 0:
                place[at] = choices.value(2)
            case 1:
                del place[at]
            case 2:
                place.append(copy.deepcopy(place[at]))
            case 3:
                place[at], place[-1] = place[-1], place[at]
            case 4 if type(place[at]) is int:
                place[at] += choices.choice((-1, 1, 8, 1 << 31))
            case _:
                place[at] = choices.choice((0, 1, -1, True, None, [], 1 << 53, [0, 1, 0]))
        return
