"""The link: every numbered message arrives once and in order, whatever is lost on the way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.errors import ProtocolError
from wsgrad.transport.link import SEEN_MESSAGES, Link


def test_messages_are_kept_until_seen():
    link = Link()
    freed = []
    for index in range(3):
        link.push(b"%d" % index, b"xx", on_seen=lambda index=index: freed.append(index))
    assert link.unsent_bytes == 9
    assert [link.pop().head for _ in range(3)] == [b"0", b"1", b"2"]
    assert link.pop() is None
    assert link.unseen_bytes == 9
    link.seen(2)
    assert freed == [0, 1]
    assert link.unseen_bytes == 3


@pytest.mark.parametrize("count", [1, 4])
def test_a_peer_that_counts_wrong_is_refused(count):
    link = Link()
    for _ in range(3):
        link.push(b"x")
        link.pop()
    link.seen(2)
    with pytest.raises(ProtocolError, match="seen"):
        link.seen(count)


def test_seen_is_due_after_some_messages():
    link = Link()
    due = [link.note_received(10) for _ in range(2 * SEEN_MESSAGES)]
    assert [index for index, flag in enumerate(due, 1) if flag] == [SEEN_MESSAGES, 2 * SEEN_MESSAGES]
    assert not link.untold
    link.note_received(1)
    assert link.untold


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["push", "ping", "send", "lose", "drop", "tell"]), max_size=60))
def test_numbered_messages_arrive_once_and_in_order(steps):
    sender, receiver = Link(), Link()
    arrived, pushed = [], 0
    wire_up = True

    def reconnect():
        sender.resume(receiver.received)

    def send(*, lost):
        outgoing = sender.pop()
        if outgoing is None or lost:
            return
        if outgoing.numbered:
            receiver.note_received(outgoing.nbytes)
            arrived.append(int(outgoing.head))

    for step in steps:
        match step:
            case "push":
                sender.push(b"%d" % pushed)
                pushed += 1
            case "ping":
                sender.push(b"ping", numbered=False)
            case "send" if wire_up:
                send(lost=False)
            case "lose" if wire_up:
                send(lost=True)
                wire_up = False
            case "drop":
                reconnect()
                wire_up = True
            case "tell" if wire_up:
                sender.seen(receiver.received)
    reconnect()
    while sender:
        send(lost=False)
    assert arrived == list(range(pushed))
    sender.seen(receiver.received)
    assert sender.unseen_bytes == 0
    assert sender.unsent_bytes == 0
