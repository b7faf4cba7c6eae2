"""Reads in their fixed-width form: a node process answers them like any other read, and in the queue's order."""

import pytest
from device_rigs import SLOT_BYTES

from wsgrad.transport import commands as c
from wsgrad.transport import messages as m


@pytest.fixture
def node(zygote, toolbox):
    node = zygote.open_node(toolbox)
    yield node
    node.close()


def data(node, number):
    message, bulk = node.wait_for(m.ReadData)
    assert (message.number, message.acked) == (number, number)
    return bulk


def test_a_read_answers_with_the_first_bytes_and_acknowledges_itself(node):
    node.run(c.Alloc(1, 40), c.Write(1, 0, bytes(range(40))), c.View(2, 1, 8, 20))
    for nbytes in (1, 4, 23):
        assert data(node, node.ask(1, nbytes)) == bytes(range(nbytes))
    assert data(node, node.ask(2, 20)) == bytes(range(8, 28))
    assert node.silent()


def test_a_read_of_more_than_the_short_form_carries_is_answered_too(node):
    node.run(c.Alloc(1, 4000), c.Fill(1, 0, 4000, b"x"))
    for nbytes in (0, 24, 4000):
        assert data(node, node.ask(1, nbytes)) == b"x" * nbytes


def test_a_read_waits_for_the_download_before_it(node):
    size = (m.SLOTS + 1) * SLOT_BYTES
    node.run(c.Alloc(1, size), c.Write(1, 0, b"word"))
    node.batch(c.Download(5, 1, 0, size))
    for _ in range(m.SLOTS):
        node.receive_chunk()
    number = node.ask(1, 4)
    assert node.silent()
    node.send(m.Credit(node.queue, 1))
    node.receive_chunk()
    assert data(node, number) == b"word"


@pytest.mark.parametrize(("buffer", "nbytes", "said"), [(2, 4, "no buffer 2"), (1, 5, "outside buffer 1 of 4 bytes")])
def test_a_read_that_does_not_fit_fails_and_stops_the_queue(node, buffer, nbytes, said):
    node.run(c.Alloc(1, 4))
    number = node.ask(buffer, nbytes)
    failed = node.wait_for(m.Failed)
    assert (failed.number, failed.code) == (number, "DeviceError")
    assert said in failed.message
    dropped = node.ask(1, 4)
    ack = node.wait_for(m.Ack, lambda message: message.number >= dropped)
    assert ack.number == dropped
    assert not any(isinstance(message, m.ReadData) for message, _ in node.received)
    node.run(c.Clear(number))
    assert data(node, node.ask(1, 4)) == bytes(4)
