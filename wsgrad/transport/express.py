"""The two messages of a small read in one fixed-width form each, packed and unpacked in one step; any form is accepted.

CBOR may write an integer in more bytes than it needs. Here every field that varies takes its widest form, so a `Batch`
of one `Read`, and its `ReadData`, are constants around fields at fixed offsets. Whoever waits for a single value waits
for these two, and a process that was just woken runs everything for the first time: what takes 5 µs in a loop takes
25 (measured). A message in another form, or with something unusual in it, goes the general way and means the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final

from wsgrad.transport.commands import Read
from wsgrad.transport.messages import Batch, ReadData
from wsgrad.transport.received import Received

MAX_DATA: Final = 23
"""The most bytes that an answer in this form carries; their number is in one byte with the head of the byte string."""

_REQUEST: Final = Struct(">3sIcQ4sI2sI")
_ANSWER: Final = Struct(">4sIcQcQB")
_ANSWER_HEAD: Final = Struct(">4sIcQcQ")
_U32, _U64 = b"\x1a", b"\x1b"
# [16, queue, number, [[6, buffer, 0, nbytes]]]
_OPENING: Final = bytes((0x84, Batch.KIND)) + _U32
_COMMAND: Final = bytes((0x81, 0x84, Read.KIND)) + _U32
_OFFSET: Final = b"\x00" + _U32
# [34, queue, number, acked], then a byte string
_ANSWERED: Final = bytes((0x84, 0x18, ReadData.KIND)) + _U32
_BYTES: Final = 0x40
_HEAD_NBYTES: Final = _ANSWER_HEAD.size


@dataclass(frozen=True, slots=True)
class Request:
    """A read of the first bytes of a buffer or view as the only command of its batch."""

    queue: int
    number: int
    buffer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Its data; `data` is at most `MAX_DATA` bytes. `acked` acknowledges as an `Ack` would."""

    queue: int
    number: int
    acked: int
    data: bytes


def request(queue: int, number: int, buffer: int, nbytes: int) -> bytes:
    """The encoded head of a batch of one read."""
    return _REQUEST.pack(_OPENING, queue, _U64, number, _COMMAND, buffer, _OFFSET, nbytes)


def answer(queue: int, number: int, acked: int, data: bytes) -> bytes:
    """The encoded `ReadData`, its bulk included."""
    return _ANSWER.pack(_ANSWERED, queue, _U64, number, _U64, acked, _BYTES + len(data)) + data


def answer_head(queue: int, number: int) -> bytes:
    """The encoded head of a `ReadData` that acknowledges its own command."""
    return _ANSWER_HEAD.pack(_ANSWERED, queue, _U64, number, _U64, number)


def read_request(payload: bytes) -> Request | None:
    """The request that a whole message is, if it has this form."""
    if len(payload) != _REQUEST.size:
        return None
    opening, queue, wide, number, command, buffer, offset, nbytes = _REQUEST.unpack(payload)
    if opening != _OPENING or wide != _U64 or command != _COMMAND or offset != _OFFSET:
        return None
    return Request(queue, number, buffer, nbytes)


def read_answer(payload: bytes) -> Answer | None:
    """The answer that a whole message is, if it has this form."""
    if not _HEAD_NBYTES < len(payload) <= _HEAD_NBYTES + 1 + MAX_DATA:
        return None
    opening, queue, wide, number, also_wide, acked, size = _ANSWER.unpack_from(payload)
    if opening != _ANSWERED or wide != _U64 or also_wide != _U64 or size - _BYTES != len(payload) - _ANSWER.size:
        return None
    return Answer(queue, number, acked, payload[_ANSWER.size :])


def received(payload: bytes) -> Received | None:
    """The message that a payload holds, if it has one of the two forms; a `Connection` is told to try this first."""
    asked = read_request(payload)
    if asked is not None:
        head: list[object] = [Batch.KIND, asked.queue, asked.number, [[Read.KIND, asked.buffer, 0, asked.nbytes]]]
        return Received(head, None, len(payload), payload, asked)
    answered = read_answer(payload)
    if answered is not None:
        head = [ReadData.KIND, answered.queue, answered.number, answered.acked]
        return Received(head, memoryview(bytearray(answered.data)), len(payload), payload[:_HEAD_NBYTES], answered)
    return None
