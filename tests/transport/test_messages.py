"""Messages and commands: round trips, refusals, and agreement with the schema."""

import contextlib
import functools
import re
from importlib import resources
from typing import get_args

import pycddl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor, commands, messages, tracing
from wsgrad.transport.commands import Command, command_array, parse_command
from wsgrad.transport.fields import (
    U32,
    U53,
    U64,
    Arrays,
    Bool,
    Data,
    Digest,
    Dims,
    Key,
    Map,
    Maps,
    OptionalDims,
    OptionalIndices,
    OptionalKey,
    OptionalText,
    OptionalU53,
    Text,
    U32s,
    Value,
    Values,
)
from wsgrad.transport.messages import BULK_KINDS, Message, message_array, parse_message

SCHEMA_TEXT = resources.files("wsgrad.transport").joinpath("protocol.cddl").read_text()
# pycddl 0.6 picks wrongly between null and another type and among alternatives that are arrays: what may be null is
# left to the code's own check, and each message is held against its own rule.
CHECKED_TEXT = re.sub(r"[a-z0-9-]+ / null", "any", SCHEMA_TEXT)


@functools.cache
def schema(cls: type) -> pycddl.Schema:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()
    what = "command" if cls in get_args(Command) else "message"
    return pycddl.Schema(f"start-here = {words}-{what}\n{CHECKED_TEXT}")


_u32 = st.integers(0, 2**32 - 1)
_u53 = st.integers(0, 2**53 - 1)
_text = st.text(max_size=20)
_map = st.dictionaries(_text, st.one_of(st.none(), st.booleans(), _u53, _text), max_size=3)
_dims = st.lists(_u32, min_size=1, max_size=3)
_command_arrays = st.deferred(lambda: st.sampled_from(get_args(Command)).flatmap(instances).map(command_array))
STRATEGIES = {
    U32: _u32,
    U53: _u53,
    U64: st.integers(0, 2**64 - 1),
    Text: _text,
    Data: st.binary(max_size=20),
    Key: st.binary(min_size=16, max_size=16),
    Digest: st.binary(min_size=32, max_size=32),
    OptionalKey: st.none() | st.binary(min_size=16, max_size=16),
    OptionalText: st.none() | _text,
    OptionalU53: st.none() | _u53,
    Map: _map,
    Maps: st.lists(_map, max_size=2),
    Arrays: st.lists(_command_arrays, max_size=3),
    Values: st.lists(st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False), max_size=4),
    Dims: _dims,
    OptionalDims: st.none() | _dims,
    OptionalIndices: st.none() | st.lists(st.integers(0, 63), max_size=4),
    U32s: st.lists(_u32, max_size=4),
    Bool: st.booleans(),
    Value: st.none() | _u53 | _text,
}


# What a graph's arrays hold is checked where they are used; the schema says it here.
_bindings = st.lists(st.tuples(_u32, _u32, _u53).map(list), max_size=2)
_pairs = st.lists(st.tuples(_u32, _u32).map(list), max_size=2)
_integers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2)
ITEMS = {
    (messages.Record, "queues"): _pairs,
    (messages.Record, "bindings"): _pairs,
    (messages.Record, "routes"): st.lists(st.tuples(_u32, _u32, _u32).map(list), max_size=2),
    (messages.Run, "numbers"): _pairs,
    (messages.Run, "bindings"): _bindings,
    (messages.Run, "values"): _integers,
    (messages.Replay, "bindings"): _bindings,
    (messages.Replay, "values"): _integers,
    (messages.Traced, "names"): st.lists(st.tuples(_u32, _text).map(list), max_size=2),
}


def instances(cls: type) -> st.SearchStrategy:
    module = commands if cls.__module__.endswith("commands") else messages
    kinds = {
        name: vars(tracing if cls.__module__.endswith("tracing") else module)[hint]
        for name, hint in cls.__annotations__.items()
        if not hint.startswith("ClassVar")
    }
    return st.builds(cls, **{name: ITEMS.get((cls, name), STRATEGIES[kind]) for name, kind in kinds.items()})


@settings(max_examples=400)
@given(st.sampled_from(get_args(Message)).flatmap(instances))
def test_every_message_survives_the_wire_and_fits_the_schema(message):
    encoded = cbor.encode(message_array(message))
    schema(type(message)).validate_cbor(encoded)
    assert parse_message(cbor.decode(encoded)) == message


@settings(max_examples=200)
@given(st.sampled_from(get_args(Command)).flatmap(instances))
def test_every_command_survives_the_wire_and_fits_the_schema(command):
    encoded = cbor.encode(command_array(command))
    schema(type(command)).validate_cbor(encoded)
    assert parse_command(cbor.decode(encoded)) == command


_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | _text | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.lists(_anything, max_size=11) | st.tuples(st.integers(0, 60), st.lists(_anything, max_size=10)))
def test_any_array_is_a_message_or_a_protocol_error(array):
    if isinstance(array, tuple):
        array = [array[0], *array[1]]
    for parse in (parse_message, parse_command):
        with contextlib.suppress(ProtocolError):
            parse(list(array))


@pytest.mark.parametrize("array", [[], [99], [True, 1], [5.0, 1], ["ack", 1, 2], [None], [[5], 1]])
def test_unknown_kinds_are_named(array):
    with pytest.raises(ProtocolError, match="unknown kind of message"):
        parse_message(array)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        ([32, 1], "message Ack has 1 fields, not 2"),
        ([32, -1, 0], "queue is not an unsigned 32-bit integer: -1"),
        ([32, True, 0], "queue is not an unsigned 32-bit integer: True"),
        ([32, 1, 2**53], "number is not an unsigned integer below 2"),
        ([0, 1, "x", b"short", 0, {}], "key is not a byte string of 16 bytes or null"),
        ([16, 1, 1, [[]]], "commands is not an array of arrays"),
    ],
)
def test_wrong_fields_are_named_with_their_value(array, text):
    with pytest.raises(ProtocolError, match=re.escape(text)):
        parse_message(array)


def test_schema_and_code_list_the_same_kinds():
    kinds = {int(kind) for kind in re.findall(r"^[a-z-]+-message = \[ (\d+)[, ]", SCHEMA_TEXT, re.M)}
    assert kinds == {cls.KIND for cls in get_args(Message)}
    kinds = {int(kind) for kind in re.findall(r"^[a-z-]+-command = \[ (\d+)[, ]", SCHEMA_TEXT, re.M)}
    assert kinds == {cls.KIND for cls in get_args(Command)}
    bulk = re.search(r"^bulk-message = (.*)$", SCHEMA_TEXT, re.M)[1].split(" / ")
    assert {int(re.search(rf"^{name} = \[ (\d+)", SCHEMA_TEXT, re.M)[1]) for name in bulk} == BULK_KINDS
