"""The frames of RFC 6455 with any payload, cut anywhere, against wsproto's core: verdict, messages and close codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wsproto.connection import Connection as Stock
from wsproto.connection import ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.utilities import RemoteProtocolError

from fuzz.choices import Choices
from wsgrad.errors import ProtocolError
from wsgrad.transport import cbor
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.frames import Closed

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 260

_BULK = 9
_KEY = b"\x11\x22\x33\x44"
_STRICTER = ("shortest form", "over the limit", "text messages", "highest bit")
"""What we refuse where wsproto goes on, or says so later: by the words of our error."""


def seeds() -> Iterator[bytes]:
    """Streams that a real client and a real server write."""
    for client in (False, True):
        sender = Connection(client=client, bulk_kinds=frozenset({_BULK}))
        data = sender.ping(b"hello")
        for head, bulk in (([2, 1], None), ([_BULK, "x"], b"abc"), ([_BULK], bytes(300))):
            data += b"".join(bytes(part) for part in sender.encode(cbor.encode(head), bulk))
        stock = Stock(ConnectionType.CLIENT if client else ConnectionType.SERVER)
        data += stock.send(BytesMessage(data=b"\x82\x09\x01\x43", message_finished=False))
        data += stock.send(Ping(payload=b"between"))
        data += stock.send(BytesMessage(data=b"abc", message_finished=True))
        data += sender.close(1001, "going")
        yield bytes((client, 7)) + data
        yield bytes((client + 2, 0)) + data


def _payloads(data: bytes, *, client: bool) -> tuple[list[bytes], CloseConnection | None, str | None]:
    """What wsproto makes of the stream: whole messages, the close, and why it refuses."""
    stock = Stock(ConnectionType.CLIENT if client else ConnectionType.SERVER)
    whole: list[bytes] = []
    partial = b""
    try:
        stock.receive_data(data)
        for event in stock.events():
            match event:
                case BytesMessage():
                    partial += bytes(event.data)
                    if event.message_finished:
                        whole.append(partial)
                        partial = b""
                case CloseConnection():
                    return whole, event, None
                case TextMessage():
                    return whole, None, "text"
                case Ping() | Pong():
                    pass
    except RemoteProtocolError as exc:
        return whole, None, str(exc)
    return whole, None, None


def _ours(data: bytes, *, client: bool, step: int) -> tuple[list[Received | Closed], ProtocolError | None, Connection]:
    connection = Connection(client=client, bulk_kinds=frozenset({_BULK}), max_bulk=1000)
    events: list[Received | Closed] = []
    try:
        for start in range(0, len(data), step):
            events += connection.feed(data[start : start + step])
        connection.get_buffer()  # a fault behind the last message is raised here
    except ProtocolError as exc:
        return events, exc, connection
    return events, None, connection


def _masked(data: bytes, *, client: bool) -> bytes:
    """For a server: frames made of the input, with the mask that it asks for; the input chooses header and payload."""
    choices = Choices(data)
    out = b""
    while choices.left and len(out) < 2000:
        first = choices.choice((0x82, 0x02, 0x00, 0x80, 0x89, 0x8A, 0x88, choices.getrandbits(8)))
        payload = choices.randbytes(choices.choice((0, 1, 2, 3, 5, 9, 30, 125, 126, 200)))
        length = choices.choice((0, 0, 0, 0, 0, 0, 2, 8))
        if length or len(payload) > 125:
            length = length or 2
            field = bytes((0x7E if length == 2 else 0x7F,)) + len(payload).to_bytes(length, "big")
        else:
            field = bytes((len(payload),))
        if client:
            out += bytes((first,)) + field + payload
        else:
            masked = bytes(byte ^ _KEY[i & 3] for i, byte in enumerate(payload))
            out += bytes((first, field[0] | 0x80)) + field[1:] + _KEY + masked
    return out


def check(data: bytes) -> None:
    """Both cores read the same; so does ours in pieces of any size."""
    if len(data) < 2:
        return
    client, made, step, stream = bool(data[0] & 1), bool(data[0] & 4), data[1] % 50 + 1, data[2:]
    if made:
        stream = _masked(stream, client=client)
    events, error, connection = _ours(stream, client=client, step=len(stream) or 1)
    again, error_again, cut = _ours(stream, client=client, step=step)
    # A head that comes in pieces is looked at again only once it may be whole: its fault may be found at another place,
    # before or behind a close frame between its fragments. What came before it is the same.
    if error is None and error_again is None:
        assert list(map(_plain, events)) == list(map(_plain, again)), (events, again)
    else:
        assert all(_plain(a) == _plain(b) for a, b in zip(events, again, strict=False)), (events, again)
        both = error is not None and error_again is not None
        waits = cut if error is not None else connection
        assert both or waits._partial or waits.closed, (error, error_again)
    if error is not None:
        assert connection.closed
        assert b"\x88" in connection.take_control()
    for event in events:
        if isinstance(event, Received):
            bulk = None if event.bulk is None else bytes(event.bulk)
            raw = event.raw if bulk is None else event.raw + cbor.bytes_head(len(bulk)) + bulk
            assert cbor.decode(event.raw) == event.head or event.head != event.head
            assert event.nbytes >= len(raw)
    whole, closed, refused = _payloads(stream, client=client)
    ours = [event for event in events if isinstance(event, Received)]
    assert len(ours) <= len(whole) or refused is not None or _early(error), (ours, whole, error, refused)
    for event, payload in zip(ours, whole, strict=False):
        assert payload.startswith(event.raw), (event, payload)
        assert event.bulk is None or payload.endswith(bytes(event.bulk)), (event, payload)
    if error is None and not any(isinstance(event, Closed) for event in events):
        assert refused is None or not whole or len(ours) == len(whole), (refused, stream)
    if closed is not None and error is None:
        last = events[-1]
        assert isinstance(last, Closed), (events, closed)
        assert last.code == int(closed.code), (last, closed)
        assert last.reason == (closed.reason or ""), (last, closed)


def _early(error: ProtocolError | None) -> bool:
    return error is not None and any(words in str(error) for words in _STRICTER)


def _plain(event: Received | Closed) -> object:
    if isinstance(event, Closed):
        return event
    return event.raw, None if event.bulk is None else bytes(event.bulk), event.nbytes
