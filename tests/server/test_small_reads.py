"""Reads in their fixed-width form through a whole server: the same data, errors and order as in the general form."""

import os
import resource

import pytest
from heart import serving

from wsgrad.server.outstanding import Outstanding, Sent
from wsgrad.server.usage import Usage
from wsgrad.transport import commands as c
from wsgrad.transport import express
from wsgrad.transport import messages as m


@pytest.fixture
async def server(cache):
    async with serving(cache) as server:
        yield server


def ask(queue, buffer, nbytes):
    number = queue.next
    queue.next += 1
    queue.client.link.push(express.request(queue.number, number, buffer, nbytes))
    queue.client.connection.wake()
    return number


async def data(queue, number):
    message, bulk = await queue.client.next(m.ReadData, m.Failed)
    assert (type(message), message.number) == (m.ReadData, number)
    return bulk


async def test_reads_of_buffers_and_views_answer_with_their_bytes(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 40), c.Write(1, 0, bytes(range(40))), c.View(2, 1, 8, 20))
        for nbytes in (1, 4, 23, 24, 40):  # at first behind commands that are still under way
            assert await data(queue, ask(queue, 1, nbytes)) == bytes(range(nbytes))
        assert await data(queue, ask(queue, 2, 20)) == bytes(range(8, 28))
        assert queue.acked == queue.next - 1


async def test_many_reads_at_once_are_answered_in_order(server):
    async with server.client() as client:
        queue, other = await client.open(), await client.open(number=2)
        for one, word in ((queue, b"mine"), (other, b"else")):
            one.batch(c.Alloc(1, 4), c.Write(1, 0, word))
        numbers = [(one, ask(one, 1, 4)) for _ in range(50) for one in (queue, other)]
        for one, number in numbers:
            message, bulk = await client.next(m.ReadData, where=lambda message, one=one: message.queue == one.number)
            assert (message.number, bulk) == (number, b"mine" if one is queue else b"else")


async def test_a_read_before_the_device_is_open_waits_for_it(server):
    async with server.client() as client:
        queue = await client.open()
        reopened = queue.reopen()
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"word"))
        number = ask(queue, 1, 4)
        await client.next(m.Result, where=lambda message: message.number == reopened)
        assert await data(queue, number) == b"word"


@pytest.mark.parametrize(("buffer", "nbytes"), [(7, 4), (1, 5), (1, 1 << 31)])
async def test_a_refused_read_fails_as_in_the_general_form(server, buffer, nbytes):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4))
        failures = []
        for read in (lambda: ask(queue, buffer, nbytes), lambda: queue.batch(c.Read(buffer, 0, nbytes))):
            await queue.done()
            number = read()
            failed = await queue.failure()
            assert failed.number == number
            failures.append((failed.code, failed.message, failed.details))
            dropped = ask(queue, 1, 4)
            await queue.done(dropped)
            queue.batch(c.Clear(number))
            assert await data(queue, ask(queue, 1, 4)) == bytes(4)
        assert failures[0] == failures[1]


async def test_a_read_out_of_order_ends_the_session_as_in_the_general_form(server):
    reasons = []
    for short in (True, False):
        async with server.client() as client:
            queue = await client.open()
            queue.batch(c.Alloc(1, 4))
            await queue.done()
            queue.next += 1
            ask(queue, 1, 4) if short else queue.batch(c.Read(1, 0, 4))
            reasons.append(await client.wait_closed())
    assert reasons[0] == reasons[1]
    assert "comes next" in reasons[0].reason


async def test_reads_are_answered_where_a_thousand_descriptors_are_open(server):
    """`select` refuses descriptors of 1024 and more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"no more than {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    opened = [os.dup(2) for _ in range(1100)]
    try:
        async with server.client() as client:
            queue = await client.open()
            queue.batch(c.Alloc(1, 400))
            await queue.done()
            for nbytes in (4, 400):
                assert await data(queue, ask(queue, 1, nbytes)) == bytes(nbytes)
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def under_way(*reads, timed=()):
    outstanding = Outstanding(Usage())
    for number, nbytes in reads:
        outstanding.add(Sent(number, number, 30, b"", reads=[(number, nbytes)], timed=list(timed)))
    return outstanding


def test_only_the_answer_to_the_only_read_goes_the_short_way():
    assert under_way((1, 4)).answered(1, 4) == 30
    assert under_way((1, 4)).answered(1, 5) is None
    assert under_way((1, 4)).answered(2, 4) is None
    assert under_way((1, 4), (2, 4)).answered(2, 4) is None
    assert under_way((1, 4), (2, 4)).answered(1, 4) is None
    assert under_way((1, 4), timed=[1]).answered(1, 4) is None
    assert under_way().answered(0, 4) is None
    taken = under_way((1, 4))
    taken.answered(1, 4)
    assert (taken.acked, taken.expected, taken.answered(1, 4)) == (1, False, None)
