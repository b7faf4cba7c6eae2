"""The types of the fields of messages and commands, and the strict conversion of dataclasses from and to arrays.

The only check of a peer's values for type and range. It knows no message: `messages` and `commands` name the fields.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar, get_args, get_origin, get_type_hints

from wsgrad.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

_U32 = (1 << 32) - 1
_U53 = (1 << 53) - 1
_U64 = (1 << 64) - 1
_MAX_TEXT = 1 << 15


def _u32(value: object) -> bool:
    return type(value) is int and 0 <= value <= _U32


def _u53(value: object) -> bool:
    return type(value) is int and 0 <= value <= _U53


def _u64(value: object) -> bool:
    return type(value) is int and 0 <= value <= _U64


def _text(value: object) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT


def _data(value: object) -> bool:
    return type(value) is bytes


def _key(value: object) -> bool:
    return type(value) is bytes and len(value) == 16


def _digest(value: object) -> bool:
    return type(value) is bytes and len(value) == 32


def _map(value: object) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _maps(value: object) -> bool:
    return type(value) is list and all(_map(item) for item in value)


def _list(value: object) -> bool:
    return type(value) is list


def _arrays(value: object) -> bool:
    return type(value) is list and all(type(item) is list and len(item) > 0 for item in value)


def _dims(value: object) -> bool:
    return type(value) is list and 1 <= len(value) <= 3 and all(_u32(item) for item in value)


def _u32s(value: object) -> bool:
    return type(value) is list and all(_u32(item) for item in value)


def _indices(value: object) -> bool:
    return type(value) is list and len(value) <= 64 and all(type(item) is int and 0 <= item < 64 for item in value)


def _bool(value: object) -> bool:
    return type(value) is bool


def _any(value: object) -> bool:
    return True


def _optional(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


U32 = Annotated[int, _u32, "an unsigned 32-bit integer"]
U53 = Annotated[int, _u53, "an unsigned integer below 2^53"]
OptionalU53 = Annotated[int | None, _optional(_u53), "an unsigned integer below 2^53 or null"]
U64 = Annotated[int, _u64, "an unsigned 64-bit integer"]
Text = Annotated[str, _text, "a text"]
Data = Annotated[bytes, _data, "a byte string"]
Key = Annotated[bytes, _key, "a byte string of 16 bytes"]
Digest = Annotated[bytes, _digest, "a byte string of 32 bytes"]
OptionalKey = Annotated[bytes | None, _optional(_key), "a byte string of 16 bytes or null"]
OptionalText = Annotated[str | None, _optional(_text), "a text or null"]
Map = Annotated[dict[str, object], _map, "a map with text keys"]
Maps = Annotated[list[dict[str, object]], _maps, "an array of maps with text keys"]
Arrays = Annotated[list[list[object]], _arrays, "an array of arrays"]
Values = Annotated[list[object], _list, "an array"]
Dims = Annotated[list[int], _dims, "an array of one to three unsigned 32-bit integers"]
OptionalDims = Annotated[
    list[int] | None, _optional(_dims), "an array of one to three unsigned 32-bit integers or null"
]
OptionalIndices = Annotated[list[int] | None, _optional(_indices), "an array of argument indices or null"]
U32s = Annotated[list[int], _u32s, "an array of unsigned 32-bit integers"]
Bool = Annotated[bool, _bool, "true or false"]
Value = Annotated[object, _any, "any value"]

Item = TypeVar("Item")


class Table(Generic[Item]):
    """The dataclasses of one kind space, by their `KIND`. Every field is annotated with one of the types above."""

    def __init__(self, what: str, classes: tuple[type[Item], ...]) -> None:
        self._what = what
        self._classes: dict[object, tuple[type[Item], tuple[Callable[[object], bool], ...]]] = {}
        self._fields: dict[type, tuple[tuple[str, str], ...]] = {}
        for cls in classes:
            hints = get_type_hints(cls, include_extras=True)
            checks, names = [], []
            for field in fields(cls):  # type: ignore[arg-type]
                hint = hints[field.name]
                assert get_origin(hint) is Annotated, (cls, field.name)
                _, check, text = get_args(hint)
                checks.append(check)
                names.append((field.name, text))
            self._classes[cls.KIND] = cls, tuple(checks)  # type: ignore[attr-defined]
            self._fields[cls] = tuple(names)

    def parse(self, array: list[object]) -> Item:
        """Check an array and return what it stands for.

        Raises:
            ProtocolError: unknown kind, wrong number of fields, or a field of the wrong type or range.
        """
        kind = array[0] if array else None
        entry = self._classes.get(kind) if type(kind) is int else None
        if entry is None:
            raise ProtocolError(f"unknown kind of {self._what}: {kind!r:.40}")
        cls, checks = entry
        if len(array) != len(checks) + 1:
            raise ProtocolError(f"{self._what} {cls.__name__} has {len(array) - 1} fields, not {len(checks)}")
        for index, check in enumerate(checks, 1):
            if not check(array[index]):
                name, text = self._fields[cls][index - 1]
                raise ProtocolError(f"{self._what} {cls.__name__}: {name} is not {text}: {array[index]!r:.40}")
        return cls(*array[1:])

    def array(self, item: Item) -> list[object]:
        """The array that CBOR encodes: the kind, then the fields in order."""
        return [item.KIND, *[getattr(item, name) for name, _ in self._fields[type(item)]]]  # type: ignore[attr-defined]
