"""Clocks that are compared over a way that takes its time, and spans of what a link gives out."""

from types import SimpleNamespace

import pytest

from wsgrad.transport import tracing
from wsgrad.transport.cbor import encode
from wsgrad.transport.link import Link
from wsgrad.transport.messages import Ack, Batch, Time, message_array
from wsgrad.transport.tracing import Alignment, FrameWatch


class Way:
    """Two clocks and a way between them, in a time of its own."""

    def __init__(self, monkeypatch, ahead):
        self.now = 10**12
        self.ahead = ahead
        self.asked = []
        monkeypatch.setattr(tracing, "time", SimpleNamespace(monotonic_ns=lambda: self.now))
        self.alignment = Alignment(self.asked.append)

    def answer(self, there, back):
        [clock] = self.asked
        self.asked.clear()
        self.now += there
        message = Time(clock.token, self.now + self.ahead)
        self.now += back
        self.alignment.answer(message)


@pytest.mark.parametrize("ahead", [5_000_000_000, -3_000_000_000_000])
def test_the_answer_that_came_fastest_is_believed(monkeypatch, ahead):
    way = Way(monkeypatch, ahead if ahead > 0 else -(10**11))
    way.alignment.start(3)
    assert not way.alignment.known
    way.answer(900_000, 100_000)
    way.answer(40_000, 40_000)
    assert not way.alignment.done
    way.answer(100_000, 5_000_000)
    assert way.alignment.done
    assert way.asked == []
    assert way.alignment.offset == way.ahead
    assert way.alignment.slack == 80_000


def test_clocks_that_differ_by_less_than_the_way_takes_are_one_clock(monkeypatch):
    way = Way(monkeypatch, 0)
    way.alignment.start(2)
    way.answer(70_000, 10_000)
    way.answer(10_000, 90_000)
    assert way.alignment.offset == 0


def test_an_answer_to_an_earlier_question_is_ignored(monkeypatch):
    way = Way(monkeypatch, 10**9)
    way.alignment.start()
    late = way.asked.pop()
    way.alignment.start(1)
    way.alignment.answer(Time(late.token, 5))
    assert not way.alignment.known
    way.answer(1000, 1000)
    assert way.alignment.offset == 10**9


def test_a_message_given_out_lasts_until_the_next_or_until_none_is_left(monkeypatch):
    now = iter(range(100, 1000, 100))
    monkeypatch.setattr(tracing, "time", SimpleNamespace(monotonic_ns=lambda: next(now)))
    link, spans = Link(), []
    link.observer = FrameWatch(lambda *span: spans.append(span))
    link.push(encode(message_array(Ack(1, 70000))))
    link.push(encode(message_array(Batch(1, 2, [[2, 1]]))), numbered=False)
    first = link.pop()
    link.pop()
    assert spans == [(Ack.KIND, first.nbytes, 100, 200)]
    assert link.pop() is None
    assert link.pop() is None
    assert [span[0] for span in spans] == [Ack.KIND, Batch.KIND]
    assert spans[1][2:] == (200, 300)
