"""The browser's CBOR, messages, graphs and WGSL under Node, against Python and cbor-x: one verdict, one value."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

from fuzz.browser import alike, ask, value_of
from fuzz.choices import Choices
from fuzz.shared import TESTS
from fuzz.targets.cbor import fits
from fuzz.targets.graphs import PARTS, bend
from fuzz.targets.messages import c_array, m_array
from fuzz.targets.sources import WORDS
from wsgrad.devices.replay import Graph
from wsgrad.errors import CompileError, ProtocolError
from wsgrad.graph import wgsl
from wsgrad.graph.parse import device_arrays, parse_device_part
from wsgrad.transport import cbor
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 160
_FOR_TABS = (
    m.Joined, m.Refused, m.Ping, m.Pong, m.Seen, m.Bye, m.Clock, m.Present, m.Batch, m.Launches, m.Program, m.Chunk,
    m.Abort, m.Credit, m.Close, m.Attach, m.Fail, m.Graph, m.Replay, m.Unrecord, m.Profile,
)  # fmt: skip
_graphs = [
    [device, [[number, 1] for number in parse_device_part(device)[1]]]
    for part in PARTS
    for device in device_arrays(part).values()
]
_NOT_FOR_NODES = (c.Signal, c.Wait, c.Send, c.Receive, c.UploadCached)


def seeds() -> Iterator[bytes]:
    """The shared vectors, and bytes that make messages and sources."""
    vectors = json.loads((TESTS / "vectors.json").read_text(encoding="utf-8"))
    for vector in (*vectors["valid"], *vectors["invalid"])[::3]:
        if len(vector["hex"]) < 100:
            yield b"\0" + bytes.fromhex(vector["hex"])
    for index in range(0, 50, 3):
        yield bytes((1, index)) + bytes(range(index, index + 30))
    for index in range(4):
        yield b"\2" + bytes(range(index * 11, index * 11 + 40))
    for index in range(8):
        yield bytes((5, index, 0, 5, index, 2, 1)) + bytes(range(20))
    yield (
        b"\3" + b"@group(0) @binding(0) var<storage, read_write> a: array<f32>; @compute @workgroup_size(64) fn f() {}"
    )


def check(data: bytes) -> None:
    """Both sides read the same, or both refuse."""
    if not data:
        return
    kind, rest = data[0] % 6, data[1:]
    match kind:
        case 0:
            _cbor(rest)
        case 1:
            choices = Choices(rest)
            array = m_array(choices) if choices.some(3) else [16, 1, 1, [c_array(choices), c_array(choices)]]
            if not fits(array):
                return
            head = cbor.encode(array)
            bulk = choices.randbytes(choices.some(30))
            carries = bool(array) and type(array[0]) is int and array[0] in m.BULK_KINDS and choices.some(9) != 0
            _message(head + (cbor.bytes_head(len(bulk)) + bulk if carries else b""))
        case 2:
            choices = Choices(rest)
            _wgsl("".join(choices.choice(WORDS) for _ in range(min(len(rest), 100))))
        case 3:
            _wgsl(rest.decode("utf-8", "replace"))
        case 4:
            _message(rest)
        case _:
            choices = Choices(rest)
            graph: list[object] = copy.deepcopy(_graphs[choices._randbelow(len(_graphs))])
            for _ in range(choices.some(3)):
                bend(choices, graph)
            if fits(graph):
                _graph(cbor.encode(graph))


def _cbor(data: bytes) -> None:
    try:
        ours: object = cbor.decode(data)
    except ProtocolError as exc:
        read, _ = ask("cbor", data.hex())
        assert read is None, (data, exc, read)
        return
    read, refused = ask("cbor", data.hex())
    assert read is not None, (data, ours, refused)
    assert alike(ours, value_of(read["value"])), (data, ours, read)
    assert alike(ours, cbor.decode(bytes.fromhex(read["encoded"]))), (data, ours, read)


def _message(data: bytes) -> None:
    read, refused = ask("message", data.hex())
    try:
        end = cbor.scan(data)
        array = cbor.decode(data[:end])
        if not isinstance(array, list):
            raise ProtocolError("a message must begin with an array")
        message = m.parse_message(array)
        bulk = None
        if message.KIND in m.BULK_KINDS:
            head = cbor.read_bytes_head(data, end)
            if head is None or head[1] + head[0] != len(data):
                raise ProtocolError("a bulk that does not fit")
            bulk = data[head[1] :]
        elif end != len(data):
            raise ProtocolError("bytes follow")
    except (ProtocolError, cbor.NeedMore) as exc:
        # There is one kind of number in JavaScript: a whole float passes for an integer, there and nowhere else.
        assert read is None or _has_whole_float(data), (data, exc, read)
        return
    if not isinstance(message, _FOR_TABS):
        assert read is None, (message, read)
        return
    assert read is not None, (message, refused)
    assert alike(array, value_of(read["fields"])), (message, read)
    assert read["bulk"] == (None if bulk is None else bulk.hex())
    if isinstance(message, m.Batch):
        for command, taken in zip(message.commands, read["commands"], strict=True):
            assert taken == _command(command) or _has_whole_float(data), (command, taken)


class _Idle:
    """A runtime that runs nothing."""

    def prepare(self, part: object) -> None:
        return None


def _graph(data: bytes) -> None:
    read, refused = ask("graph", data.hex())
    try:
        graph = Graph(data, _Idle())  # type: ignore[arg-type]
    except ProtocolError as exc:
        assert read is None or _whole(cbor.decode(data)), (data, exc, read)
        return
    assert read is not None, (data, refused)
    assert read["transfers"] == graph.transfers, data


def _command(array: list[object]) -> bool:
    try:
        return not isinstance(c.parse_command(array), _NOT_FOR_NODES)
    except ProtocolError:
        return False


def _has_whole_float(data: bytes) -> bool:
    try:
        return _whole(cbor.decode(data[: cbor.scan(data)]))
    except (ProtocolError, cbor.NeedMore):
        return False


def _whole(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_whole, value))
    if isinstance(value, dict):
        return any(map(_whole, value.values()))
    return isinstance(value, float) and value.is_integer()


def _wgsl(source: str) -> None:
    read, refused = ask("wgsl", source)
    try:
        module = wgsl.parse_module(source)
    except CompileError as exc:
        assert refused == str(exc), (source, refused, exc)
        return
    assert read is not None, (source, refused)
    assert read["bindings"] == [[b.index, b.space, b.access, b.type_text, b.name] for b in module.bindings], source
    assert read["entries"] == [[e.name, e.stage, list(e.workgroup_size)] for e in module.entry_points], source
    assert read["overrides"] == [[o.name, o.id, o.type_text, o.has_default] for o in module.overrides], source
