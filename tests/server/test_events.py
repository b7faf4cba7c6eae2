"""Events between queues: order across devices, errors that travel with them, and nothing that waits for ever."""

import pytest
import trio
from heart import ADD, CRASH, SPIN, as_word, serving

from wsgrad.errors import ProtocolError
from wsgrad.server.events import Events, Failure
from wsgrad.server.journal import Journal
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

SLOW = "void slow(int *p) { for (volatile long i = 0; i < 200000000; i++) ; *p = 1; }"  # about half a second


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=("cpu", "cpu", "cpu"), launch_seconds=2.0) as server:
        yield server


async def opened(client, count=2):
    return [await client.open(f"box/cpu/{index}", index + 1) for index in range(count)]


async def test_what_is_behind_a_wait_runs_after_what_is_before_the_signal(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.program(0, SLOW, "slow", "p")
        a.batch(c.Alloc(1, 4))
        b.batch(c.Alloc(1, 4))
        await a.done()
        slow = a.launches([0, 0, 1], 1)
        a.batch(c.Signal(5))
        waits = b.batch(c.Wait(5))
        last = b.batch(c.Write(1, 0, b"done"))
        await b.done(waits)
        assert a.acked > slow
        await b.done(last)
        client.send(m.Release([5]))
        # Its id is free again.
        b.batch(c.Signal(5))
        await a.done(a.batch(c.Wait(5)))


async def test_a_signal_counts_as_soon_as_it_is_reached_although_more_stands_behind_it(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.program(0, SLOW, "slow", "p")
        a.batch(c.Alloc(1, 4))
        await a.done()
        last = a.batch(c.Signal(1), c.Launch(0, None, None, [1], False))
        await b.done(b.batch(c.Wait(1)))
        assert a.acked < last


async def test_one_event_holds_many_queues_and_may_be_waited_for_before_it_is_signalled(server):
    async with server.client() as client:
        a, b, d = await opened(client, 3)
        first, second = b.batch(c.Wait(1), c.Wait(1)), d.batch(c.Wait(1))
        a.batch(c.Alloc(1, 1))
        await a.done()
        assert b.acked < first
        assert d.acked < second
        a.batch(c.Signal(1))
        for queue in (b, d):
            await queue.done()
        await b.done(b.batch(c.Wait(1)))


async def test_signals_and_waits_inside_one_batch_keep_their_order(server):
    async with server.client() as client:
        a, b = await opened(client)
        for queue in (a, b):
            queue.batch(c.Alloc(1, 4))
        a.program(0, ADD, "add", "ppfi")
        count = 40
        ping, pong = [], []
        for index in range(count):
            ping += [c.Signal(2 * index), c.Wait(2 * index + 1), c.Fill(1, 0, 4, bytes([index]))]
            pong += [c.Wait(2 * index), c.Fill(1, 0, 4, bytes([index])), c.Signal(2 * index + 1)]
        a.batch(*ping)
        b.batch(*pong)
        assert await a.read(1, 0, 1) == await b.read(1, 0, 1) == bytes([count - 1])


@pytest.mark.parametrize("how", ["compile", "launch", "crash", "spin", "close", "refused"])
async def test_an_error_reaches_every_waiter_with_the_same_cause(server, how):
    async with server.client() as client:
        a, b, d = await opened(client, 3)
        a.batch(c.Alloc(1, 4))
        await a.done()
        match how:
            case "compile":
                a.program(0, "void broken(", "broken", "p", name="bad")
                a.launches([0, 0, 1], 1)
            case "crash" | "spin":
                a.program(0, CRASH if how == "crash" else SPIN, how, "p", name="bad")
                a.launches([0, 0, 1], 1)
            case "launch":
                a.program(0, ADD, "add", "ppfi", name="bad", writes=[0, 1])
                a.launches([0, 0, 1, 1, as_word(1.0), 1], 1)
            case "refused":
                a.batch(c.Read(9, 0, 1))
            case "close":
                a.batch(c.Wait(99))  # holds the queue
        a.batch(c.Signal(1))
        waited = b.batch(c.Wait(1))
        b.batch(c.Signal(2))
        through = d.batch(c.Wait(2))
        if how == "close":
            client.send(m.Close(1))
            first = None
        else:
            first = await a.failure()
        second, third = await b.failure(), await d.failure()
        assert (second.number, third.number) == (waited, through)
        assert (second.code, second.message, second.details) == (third.code, third.message, third.details)
        assert second.details["cause"] == "box/cpu/0"
        assert "lost" not in second.details
        codes = {"compile": "CompileError", "crash": "DeviceLost", "spin": "Timeout", "launch": "LaunchError"}
        assert second.code == codes.get(how, "DeviceError")
        if first is not None:
            assert (first.code, first.message) == (second.code, second.message)
        for queue, failed in ((b, second), (d, third)):
            queue.batch(c.Clear(failed.number), c.Alloc(1, 4), c.Write(1, 0, b"fine"))
            assert await queue.read(1, 0, 4) == b"fine"
        # What comes behind the clearing is no longer touched by it.
        if how not in ("crash", "spin", "close"):
            a.batch(c.Clear(first.number), c.Signal(3))
            await b.done(b.batch(c.Wait(3)))


async def test_signals_of_a_lost_device_fail_until_it_is_reopened(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.program(0, CRASH, "crash", "p", name="bad")
        a.batch(c.Alloc(1, 4), c.Signal(1))
        a.launches([0, 0, 1], 1)
        await a.failure()
        a.batch(c.Signal(2))
        a.reopen()
        a.batch(c.Signal(3))
        await b.done(b.batch(c.Wait(1), c.Wait(3)))
        b.batch(c.Wait(2))
        failed = await b.failure()
        assert "bad" in failed.message


async def test_events_of_other_servers_are_settled_by_the_client(server):
    async with server.client() as client:
        a, b = await opened(client)
        waits = a.batch(c.Wait(1))
        b.batch(c.Alloc(1, 1))
        await b.done()
        assert a.acked < waits
        client.send(m.Settle(1, None, "", {}))
        await a.done()
        client.send(m.Settle(2, "OutOfMemory", "too much over there", {"cause": "other/cpu/0"}))
        number = b.batch(c.Wait(2))
        failed = await b.failure()
        assert (failed.number, failed.code, failed.message) == (number, "OutOfMemory", "too much over there")
        assert failed.details == {"cause": "other/cpu/0"}
        client.send(m.Release([1, 2]))
        b.batch(c.Clear(number), c.Signal(2))
        await a.done(a.batch(c.Wait(2)))


async def test_a_session_may_end_while_queues_wait_for_what_never_comes(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Wait(1))
        b.batch(c.Wait(2))
        client.send(m.Bye())
        assert (await client.wait_closed()).code == 1000


async def test_an_event_that_is_signalled_twice_ends_the_session_with_words(server):
    async with server.client() as client:
        [a] = await opened(client, 1)
        a.batch(c.Signal(1), c.Signal(1))
        closed = await client.wait_closed()
        assert (closed.code, closed.reason) == (1002, "event 1 is signalled twice")


async def test_order_and_events_survive_a_dropped_connection(server):
    async with server.client() as client:
        a, b = await opened(client)
        key, link = client.welcome.key, client.link
        b.batch(c.Alloc(1, 4), c.Wait(1), c.Write(1, 0, b"late"))
        a.batch(c.Alloc(1, 1))
        await a.done()
    async with server.client(key=key, link=link, queues=(a, b)):
        a.batch(c.Signal(1))
        with trio.fail_after(10):
            assert await b.read(1, 0, 4) == b"late"


# -- the tables alone


def test_a_journal_tells_what_ran_before_an_error_from_what_was_dropped_behind_it():
    events, journal, seen = Events(), Journal(), {}
    failure = Failure("DeviceError", "why")
    for number in (1, 4, 7):
        event = events.signal(number)
        event.when_settled(lambda number=number, event=event: seen.update({number: event.failure}))
        journal.add(number, event)
        if number == 4:
            journal.add(6, 3)  # command 6 clears error 3
    journal.failed(3, failure)
    assert seen == {1: None}
    journal.acked(5)
    assert seen == {1: None, 4: failure}
    journal.acked(7)
    assert seen == {1: None, 4: failure, 7: None}


def test_the_number_of_events_is_bounded():
    events = Events()
    for number in range(1 << 17):
        events.wait(number)
    with pytest.raises(ProtocolError, match="events"):
        events.wait(1 << 17)
    events.release(list(range(100)))
    events.wait(1)
