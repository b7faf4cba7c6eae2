"""Messages and commands of clients, nodes and peers: any array is refused by name or comes back the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from fuzz.choices import Choices
from fuzz.targets.cbor import fits, same
from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor, express
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 128

_MESSAGES = get_args(m.Message)
_COMMANDS = get_args(c.Command)


def field(choices: Choices, hint: str) -> object:
    """A value for a field by the name of its type, mostly one that passes."""
    if choices.some(9) == 0:
        return choices.value()
    plain = hint.removeprefix("Optional")
    if plain != hint and choices.some(2) == 0:
        return None
    match plain:
        case "U32":
            return choices.choice((0, 1, 2, 3, 7, 64, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32))
        case "U53" | "U64":
            return choices.choice((0, 1, 2, 3, 4, 16, 64, 100, 1 << 20, 1 << 32, (1 << 53) - 1, 1 << 53))
        case "Text":
            return choices.choice(
                ("", "a", "c", "wgsl", "entry", "pxi", "é\u2028", "box/cpu/0", "x" * choices.some(99))
            )
        case "Data":
            return choices.randbytes(choices.some(33))
        case "Key":
            return choices.randbytes(16)
        case "Digest":
            return choices.randbytes(32)
        case "Map":
            return {choices.choice(("a", "memory", "threads")): choices.value(1) for _ in range(choices.some(3))}
        case "Maps":
            return [field(choices, "Map") for _ in range(choices.some(3))]
        case "Arrays":
            return [choices.choice((c_array, any_array))(choices) for _ in range(choices.some(3))]
        case "Dims" | "U32s" | "Indices":
            return [choices.choice((0, 1, 2, 63, 64, (1 << 32) - 1)) for _ in range(choices.some(4))]
        case "Bool":
            return choices.choice((False, True))
        case "Values":
            return [choices.value(1) for _ in range(choices.some(3))]
    return choices.value()


def any_array(choices: Choices) -> list[object]:
    """An array with anything in it, or nothing."""
    return [choices.value(1) for _ in range(choices.some(4))]


def c_array(choices: Choices) -> list[object]:
    """A command's array."""
    return _array(choices, choices.choice(_COMMANDS))


def m_array(choices: Choices) -> list[object]:
    """A message's array."""
    return _array(choices, choices.choice(_MESSAGES))


def _array(choices: Choices, cls: type) -> list[object]:
    array = [cls.KIND, *(field(choices, str(hint)) for name, hint in cls.__annotations__.items() if name != "KIND")]  # type: ignore[attr-defined]
    if choices.some(15) == 0:
        array = array[: choices.some(len(array))] or [choices.value(1)]
    return array


def seeds() -> Iterator[bytes]:
    """Encoded arrays, and bytes that make some of each kind."""
    yield b"\0" + express.request(1, 2, 3, 4)
    yield b"\0" + express.answer(1, 2, 2, b"data")
    yield b"\0" + cbor.encode([16, 1, 1, [[1, 1, 64], [4, 1, 0, b"abcd"], [6, 1, 0, 4]]])
    yield b"\0" + cbor.encode([22, 1, "box/cpu/0", {}])
    for index in range(len(_MESSAGES)):
        yield bytes((1, index)) + bytes(range(index, index + 24))
    for index in range(len(_COMMANDS)):
        yield bytes((2, index)) + bytes(range(index, index + 16))


def check(data: bytes) -> None:
    """Parse, and hold what was parsed against what went in."""
    if not data:
        return
    kind, rest = data[0] % 3, data[1:]
    if kind == 1:
        _message(m_array(Choices(rest)))
        return
    if kind == 2:
        _command(c_array(Choices(rest)))
        return
    fast = express.received(rest)
    try:
        end = cbor.scan(rest)
        array = cbor.decode(rest[:end])
    except (ProtocolError, cbor.NeedMore):
        assert fast is None
        return
    if fast is not None:
        assert same(fast.head, array), (fast, array)
        assert fast.raw == rest[:end]
        assert (fast.bulk is None) == (array[0] == m.Batch.KIND)  # type: ignore[index]
        if fast.bulk is not None:
            head = cbor.read_bytes_head(rest, end)
            assert head is not None
            assert rest[head[1] :] == fast.bulk
    if isinstance(array, list):
        _message(array)
        _command(array)


def _message(array: list[object]) -> None:
    try:
        message = m.parse_message(array)
    except ProtocolError as exc:
        assert len(str(exc)) < 500, exc
        return
    assert same(m.message_array(message), array), (message, array)
    if fits(array):
        assert same(cbor.decode(cbor.encode(array)), array)
    if isinstance(message, m.Batch):
        for item in message.commands:
            _command(item)


def _command(array: list[object]) -> None:
    try:
        command = c.parse_command(array)
    except ProtocolError as exc:
        assert len(str(exc)) < 500, exc
        return
    assert same(c.command_array(command), array), (command, array)
