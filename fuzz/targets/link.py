"""A session's numbered messages over connections that drop at any point: each arrives once, in order, and is let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.choices import Choices
from wsgrad.errors import ProtocolError
from wsgrad.transport.link import Link, Outgoing

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = 64


def seeds() -> Iterator[bytes]:
    """Steps in turn, some of each kind."""
    yield bytes(range(9)) * 4
    yield bytes((0, 0, 0, 2, 2, 3, 4, 5, 0, 2, 6, 1, 2, 7))
    yield bytes((0, 2)) * 40 + bytes((4, 5, 6))


class _Side:
    """One end: what it has sent and got."""

    def __init__(self) -> None:
        self.link = Link()
        self.pushed = 0
        self.got: list[int] = []
        self.let_go: list[int] = []
        self.wire: list[Outgoing] = []
        self.bytes = 0

    def push(self, nbytes: int) -> None:
        number = self.pushed
        self.pushed += 1
        self.link.push(b"%d" % number, bytes(nbytes), on_seen=lambda: self.let_go.append(number))

    def check(self) -> None:
        link = self.link
        assert link.unsent_bytes >= 0
        assert link.unseen_bytes == sum(outgoing.nbytes for outgoing in link._unseen)
        assert link.unsent_bytes == sum(outgoing.nbytes for outgoing in link._outbox)
        assert self.let_go == list(range(len(self.let_go)))


def check(data: bytes) -> None:
    """Two ends and a wire between them that loses what is on it when it drops."""
    choices = Choices(data)
    one, other = _Side(), _Side()
    while choices.left:
        step = choices.some(9)
        here, there = (one, other) if choices.some(1) else (other, one)
        match step:
            case 0 | 1:
                here.push(choices.choice((0, 1, 100, 1 << 18)))
            case 2:
                here.link.push(b"ping", numbered=False)
            case 3 | 4:
                outgoing = here.link.pop()
                if outgoing is not None:
                    here.wire.append(outgoing)
            case 5 | 6:
                _arrive(here, there)
            case 7:
                here.link.seen(there.link.received)
                there.link.told()
            case 8:
                one.wire.clear()
                other.wire.clear()
                one.link.resume(other.link.received)
                other.link.resume(one.link.received)
            case _:
                _lie(here.link, choices.choice((-1, 1, 2, 1 << 53)), there.link.received)
        one.check()
        other.check()
    for here, there in ((one, other), (other, one)):
        here.link.resume(there.link.received)
        here.wire.clear()
        while here.link:
            outgoing = here.link.pop()
            assert outgoing is not None
            here.wire.append(outgoing)
            _arrive(here, there)
        here.link.seen(there.link.received)
        assert there.got == list(range(here.pushed))
        assert here.let_go == there.got
        assert here.link.unseen_bytes == here.link.unsent_bytes == 0


def _arrive(here: _Side, there: _Side) -> None:
    if here.wire:
        outgoing = here.wire.pop(0)
        if outgoing.numbered:
            there.link.note_received(outgoing.nbytes)
            there.got.append(int(outgoing.head))


def _lie(link: Link, by: int, truth: int) -> None:
    """A count that can't be is refused and changes nothing."""
    least, most = link._seen, link._seen + len(link._unseen)
    count = truth + by
    if least <= count <= most:
        return
    before = link.unseen_bytes, link.unsent_bytes
    for claim in (link.seen, link.resume):
        try:
            claim(count)
        except ProtocolError:
            pass
        else:
            raise AssertionError(f"{count} was believed where {least} to {most} can be")
    assert (link.unseen_bytes, link.unsent_bytes) == before
