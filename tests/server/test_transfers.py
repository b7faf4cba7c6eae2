"""Transfers between devices of one server: whole, pipelined, in order, and never left waiting whatever fails."""

import os
import random
import resource

import numpy as np
import pytest
from heart import ADD, CRASH, SPIN, as_word, eventually, serving

from wsgrad.errors import DeviceError
from wsgrad.server.events import Failure
from wsgrad.server.transfers import Flow
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

MIB = 1 << 20


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=("cpu", "cpu", "cpu"), launch_seconds=2.0) as server:
        yield server


async def opened(client, count=2):
    return [await client.open(f"box/cpu/{index}", index + 1) for index in range(count)]


def transfer(source, target, number, nbytes, *, buffers=(1, 1), offsets=(0, 0), sizes=None):
    """Issue both ends; the numbers of the commands."""
    sent, wanted = sizes or (nbytes, nbytes)
    return (
        source.batch(c.Send(number, buffers[0], offsets[0], sent, 0)),
        target.batch(c.Receive(number, buffers[1], offsets[1], wanted, 0)),
    )


@pytest.mark.parametrize("nbytes", [0, 1, 1000, MIB, MIB + 1, 5 * MIB + 3])
async def test_bytes_arrive_as_they_were_at_the_place_of_the_send(server, nbytes):
    data = os.urandom(nbytes)
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, nbytes + 7))
        b.batch(c.Alloc(1, nbytes + 9))
        await a.upload(1, data, offset=7)
        transfer(a, b, 1, nbytes, offsets=(7, 9))
        a.batch(c.Fill(1, 0, nbytes + 7, b"\xff"))  # behind the send: must not be seen
        if nbytes:
            assert await b.download(1, 9, nbytes) == data
        await a.done()
        await b.done()
        assert not len(server.session(client).transfers)


async def test_large_transfers_are_pipelined_in_bounded_memory(server):
    nbytes, count = 64 * MIB, 4
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, nbytes), c.Fill(1, 0, nbytes, bytes(range(16))))
        b.batch(c.Alloc(1, nbytes), c.Fill(1, 0, nbytes, b"\0"))
        await a.done()
        await b.done()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(1, count + 1):
            transfer(a, b, number, nbytes)
        await b.done()
        # Most of it would be the slots of both rings, which this process maps.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
        assert await b.read(1, nbytes - 16, 16) == bytes(range(16))
        assert server.hub.statistics.transferred == count * nbytes
        assert server.hub.statistics.downloaded == 0


async def test_opposite_directions_at_once_and_a_third_device_between(server):
    nbytes = 9 * MIB + 5
    async with server.client() as client:
        queues = await opened(client, 3)
        for index, queue in enumerate(queues):
            queue.batch(c.Alloc(1, nbytes), c.Alloc(2, nbytes), c.Fill(1, 0, nbytes, bytes([index + 1])))
        number = 0
        for _ in range(3):
            for index, queue in enumerate(queues):
                number += 1
                transfer(queue, queues[(index + 1) % 3], number, nbytes, buffers=(1, 2))
                number += 1
                transfer(queues[(index + 1) % 3], queue, number, nbytes, buffers=(1, 2))
        for queue in queues:
            await queue.done()
        # The last one into each buffer counts.
        assert [await queue.read(2, nbytes - 1, 1) for queue in queues] == [b"\3", b"\3", b"\1"]


async def test_an_upload_behind_a_receive_does_not_take_its_slots(server):
    nbytes = 16 * MIB
    data = os.urandom(8 * MIB)
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, nbytes), c.Fill(1, 0, nbytes, b"\5"))
        b.batch(c.Alloc(1, nbytes), c.Alloc(2, len(data)))
        number = b.batch(c.Receive(1, 1, 0, nbytes, 0))
        last = b.batch(c.Upload(3, 2, 0, len(data)))
        for start in range(0, 4 * MIB, MIB):  # as much as there is credit for
            b.credit -= 1
            client.send(m.Chunk(b.number, 3, start), data[start : start + MIB])
        assert b.acked < number
        a.batch(c.Send(1, 1, 0, nbytes, 0))
        for start in range(4 * MIB, len(data), MIB):
            await client.until(lambda: b.credit > 0)
            b.credit -= 1
            client.send(m.Chunk(b.number, 3, start), data[start : start + MIB])
        await b.done(last)
        assert await b.download(2, 0, len(data)) == data
        assert await b.read(1, nbytes - 3, 3) == b"\5\5\5"


async def test_a_receive_in_one_burst_with_an_upload_behind_it(server):
    data = os.urandom(3 * MIB)
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, 6 * MIB), c.Fill(1, 0, 6 * MIB, b"\6"))
        b.batch(c.Alloc(1, 6 * MIB), c.Alloc(2, len(data)))
        for number in range(1, 6):
            transfer(a, b, number, 6 * MIB)
            await b.upload(2, data)
        await b.done()
        assert await b.download(2, 0, len(data)) == data
        assert await b.read(1, 6 * MIB - 1, 1) == b"\6"


async def test_a_download_that_the_client_has_not_seen_keeps_its_slots(server):
    nbytes = 6 * MIB
    data = os.urandom(nbytes)
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, nbytes), c.Alloc(2, nbytes), c.Fill(2, 0, nbytes, b"\2"))
        b.batch(c.Alloc(1, nbytes))
        await a.upload(1, data)
        await a.done()
        client.sees = False
        a.batch(c.Download(9, 1, 0, 3 * MIB))
        transfer(a, b, 1, nbytes, buffers=(2, 1))
        parts = [(await client.next(m.Chunk))[1] for _ in range(3)]
        assert b"".join(parts) == data[: 3 * MIB]
        client.sees = True
        client.send(m.Seen(client.link.received))
        await b.done()
        assert await b.read(1, nbytes - 2, 2) == b"\2\2"


async def test_a_refused_end_fails_both_in_their_queues(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, 8))
        b.batch(c.Alloc(1, 8))
        # The target does not fit: the receive fails, the send counts as run.
        _, received = transfer(a, b, 1, 16, sizes=(8, 16))
        failed = await b.failure()
        assert (failed.number, failed.code) == (received, "DeviceError")
        await a.done()
        b.batch(c.Clear(failed.number))
        # The source does not: both fail, with the same words.
        sent, received = transfer(a, b, 2, 16, sizes=(16, 8))
        first, second = await a.failure(), await b.failure()
        assert (first.number, second.number) == (sent, received)
        a.batch(c.Clear(sent))
        b.batch(c.Clear(received), c.Write(1, 0, b"lives"))
        assert await b.read(1, 0, 5) == b"lives"
        # The sizes differ.
        _, received = transfer(a, b, 3, 8, sizes=(4, 8))
        failed = await b.failure()
        assert "a transfer of 4 bytes to a place of 8 bytes" in failed.message
        await a.done()
        await b.done()


async def test_an_error_before_the_send_reaches_the_receiver_with_its_cause(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.program(0, "void broken(", "broken", "p", name="wrong")
        a.batch(c.Alloc(1, 4 * MIB))
        b.batch(c.Alloc(1, 4 * MIB))
        a.launches([0, 0, 1], 1)
        _, received = transfer(a, b, 1, 4 * MIB)
        first, second = await a.failure(), await b.failure()
        assert first.code == second.code == "CompileError"
        assert first.message == second.message
        assert second.number == received
        assert second.details["program"] == "wrong"
        assert second.details["cause"] == "box/cpu/0"
        a.batch(c.Clear(first.number), c.Fill(1, 0, 4 * MIB, b"\3"))
        b.batch(c.Clear(second.number))
        transfer(a, b, 2, 4 * MIB)
        assert await b.read(1, 4 * MIB - 1, 1) == b"\3"


async def test_an_error_before_the_receive_lets_the_sender_go_on(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, 9 * MIB))
        b.batch(c.Alloc(1, 9 * MIB), c.Read(7, 0, 1))
        transfer(a, b, 1, 9 * MIB)
        failed = await b.failure()
        await a.done()
        await b.done()
        b.batch(c.Clear(failed.number))
        transfer(a, b, 2, 9 * MIB)
        await b.done()


@pytest.mark.parametrize("which", ["source", "target"])
@pytest.mark.parametrize("how", ["crash", "spin", "close", "reopen of a lost one"])
async def test_a_lost_device_never_leaves_the_other_end_waiting(server, which, how):
    nbytes = 32 * MIB
    async with server.client() as client:
        a, b = await opened(client)
        for queue in (a, b):
            queue.batch(c.Alloc(1, nbytes))
        bad, good = (a, b) if which == "source" else (b, a)
        bad.program(0, SPIN if how == "spin" else CRASH, "spin" if how == "spin" else "crash", "p", name="bad")
        await bad.done()
        if how == "reopen of a lost one":
            bad.launches([0, 0, 1], 1)
            await bad.failure()
        elif how != "close":
            bad.launches([0, 0, 1], 1)
        transfer(a, b, 1, nbytes)
        transfer(b, a, 2, nbytes)
        if how == "close":
            client.send(m.Close(bad.number))
        # One end of each fails with the cause, or is thrown away.
        failed = await good.failure()
        assert failed.details["cause"] == f"box/cpu/{bad.number - 1}"
        assert failed.code == {"spin": "Timeout", "close": "DeviceError"}.get(how, "DeviceLost")
        assert "lost" not in failed.details
        assert how == "close" or "bad" in failed.message
        await good.done()
        good.batch(c.Clear(failed.number), c.Write(1, 0, b"fine"))
        assert await good.read(1, 0, 4) == b"fine"
        if how != "close":
            bad.reopen()
            bad.batch(c.Alloc(1, nbytes))
            bad.batch(c.Fill(1, 0, nbytes, b"\4"))
            good.batch(c.Fill(1, 0, nbytes, b"\4"))
            transfer(a, b, 3, nbytes)
            await b.done()
            assert await b.read(1, nbytes - 1, 1) == b"\4"


async def test_a_device_lost_in_the_middle_of_a_transfer(server):
    nbytes = 128 * MIB
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, nbytes))
        b.batch(c.Alloc(1, nbytes))
        await a.done()
        await b.done()
        _, received = transfer(a, b, 1, nbytes)
        await eventually(lambda: server.hub.statistics.transferred > 4 * MIB)
        port = server.session(client)._queues[1]._port
        os.kill(port._process.pid, 9)
        failed = await b.failure()
        assert (failed.number, failed.code) == (received, "DeviceLost")
        assert "SIGKILL" in failed.message
        b.batch(c.Clear(received), c.Write(1, 0, b"on"))
        assert await b.read(1, 0, 2) == b"on"


async def test_rings_are_lent_once_for_each_life_of_their_node_and_given_back(server):
    nbytes = 3 * MIB
    async with server.client() as client:
        a, b, other = await opened(client, 3)
        for queue in (a, b, other):
            queue.batch(c.Alloc(1, nbytes))
        queues = server.session(client)._queues
        for life in range(1, 5):
            for number, value in ((1, b"x"), (2, b"y")):
                a.batch(c.Fill(1, 0, nbytes, value))
                transfer(a, b, 10 * life + number, nbytes)
                assert await b.download(1, 0, nbytes) == value * nbytes
            transfer(other, b, 10 * life, nbytes)
            await b.done()
            lent = queues[2]._port._lenders
            assert {port for port in lent if not port.closed} == {queues[1]._port, queues[3]._port}
            assert len(lent) <= 3
            os.kill(queues[1]._port._process.pid, 9)
            await a.failure()
            a.reopen()
            a.batch(c.Alloc(1, nbytes))


async def test_chunks_that_a_lost_target_has_not_read_are_the_sources_again(server):
    nbytes = 16 * MIB
    async with server.client() as client:
        a, b, other = await opened(client, 3)
        for queue in (a, b, other):
            queue.batch(c.Alloc(1, nbytes))
        a.batch(c.Fill(1, 0, nbytes, b"z"))
        b.program(0, SPIN, "spin", "p", name="spin")
        await b.done()
        b.launches([0, 0, 1], 1)
        transfer(a, b, 1, nbytes)
        port = server.session(client)._queues[2]._port
        await eventually(lambda: len(port._with_node) == 4)
        os.kill(port._process.pid, 9)
        await b.failure()
        transfer(a, other, 2, nbytes)
        assert await other.download(1, 0, nbytes) == b"z" * nbytes


async def test_a_session_that_ends_in_the_middle_leaves_nothing(server):
    async with server.client() as client:
        a, b = await opened(client)
        a.batch(c.Alloc(1, 64 * MIB))
        b.batch(c.Alloc(1, 64 * MIB))
        transfer(a, b, 1, 64 * MIB)
        b.batch(c.Receive(2, 1, 0, 64 * MIB, 0))  # never sent
        client.send(m.Bye())
        assert (await client.wait_closed()).code == 1000
    await eventually(lambda: not server.hub.status()["sessions"])


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ([c.Send(1, 1, 0, 4, 0), c.Send(1, 1, 0, 4, 0)], "sent twice"),
        ([c.Receive(1, 1, 0, 4, 0), c.Receive(1, 1, 0, 4, 0)], "received twice"),
        ([c.Send(1 << 31, 1, 0, 4, 0)], "ids of transfers are below"),
        ([c.Download(1 << 31, 1, 0, 4)], "ids of transfers are below"),
    ],
)
async def test_ids_that_are_no_good_end_the_session_with_words(server, commands, words):
    async with server.client() as client:
        [queue] = await opened(client, 1)
        queue.batch(c.Alloc(1, 4), *commands)
        closed = await client.wait_closed()
        assert closed.code == 1002
        assert words in closed.reason


async def test_programs_over_three_devices_give_what_numpy_gives(server):
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    count, floats = 3, 400_000  # 1.6 MB: two chunks
    async with server.client() as client:
        queues = await opened(client, count)
        model = [[np.zeros(floats, np.float32) for _ in range(2)] for _ in range(count)]
        for queue in queues:
            queue.program(0, ADD, "add", "ppfi", writes=[0])
            queue.batch(*(c.Alloc(index, floats * 4) for index in range(2)))
        events = number = 0
        for _ in range(60):
            at, to = rng.sample(range(count), 2)
            match rng.randrange(4):
                case 0:
                    a = float(rng.randrange(100))
                    queues[at].launches([0, 0, 1, 0, as_word(a), floats], 1)
                    model[at][1][:] = model[at][0] + np.float32(a)
                case 1:
                    queues[at].batch(c.Copy(0, 0, 1, 0, floats * 4))
                    model[at][0][:] = model[at][1]
                case 2:
                    number += 1
                    size = rng.choice([0, 4, 4000, floats * 4])
                    first, second = rng.randrange(2), rng.randrange(2)
                    start = rng.randrange(0, floats * 4 - size + 1, 4)
                    transfer(queues[at], queues[to], number, size, buffers=(first, second), offsets=(start, start))
                    piece = slice(start // 4, (start + size) // 4)
                    model[to][second][piece] = model[at][first][piece]
                case 3:
                    events += 1
                    queues[at].batch(c.Signal(events))
                    queues[to].batch(c.Wait(events))
        for queue, arrays in zip(queues, model, strict=True):
            for index, array in enumerate(arrays):
                assert await queue.download(index, 0, floats * 4) == array.tobytes(), seed


# -- the pairing alone


class Place:
    """A target with room for so many chunks."""

    def __init__(self, room):
        self.has_room = room
        self.data = b""
        self.over = None

    def put(self, chunk):
        self.data += bytes(chunk.bulk)
        chunk.taken()

    def finished(self):
        self.over = "finished"

    def failed(self, failure):
        self.over = failure


def test_a_flow_gives_chunks_back_only_when_the_target_has_them():
    flow, taken, place = Flow(1, lambda: taken.append("forgotten")), [], Place(False)
    flow.send(4)
    flow.receive(4)
    flow.offer(memoryview(b"ab"), lambda: taken.append(1), owned=False)
    flow.start(place)
    assert not taken
    place.has_room = True
    flow.offer(memoryview(b"cd"), lambda: taken.append(2), owned=False)
    assert (place.data, place.over, taken) == (b"abcd", "finished", [1, 2])
    flow.source_done()
    assert taken[-1] == "forgotten"


@pytest.mark.parametrize("order", ["source first", "target first"])
def test_a_flow_that_fails_is_forgotten_once_both_ends_know(order):
    failure, gone, stopped = Failure.of(DeviceError("why"), device="d"), [], []
    flow, place = Flow(1, lambda: gone.append(True)), Place(True)
    flow.send(10)
    flow.receive(10)
    flow.stop = stopped.append
    flow.start(place)
    flow.offer(memoryview(b"abc"), lambda: None, owned=False)
    if order == "source first":
        flow.source_failed(failure)
        assert place.over is failure
        assert not stopped
    else:
        flow.target_failed(failure)
        assert stopped == [failure]
        assert not gone
        flow.offer(memoryview(b"abc"), lambda: gone.append("given back"), owned=False)
        assert gone.pop() == "given back"
        flow.source_done()
    assert gone == [True]


def test_a_source_that_ends_early_fails_the_transfer():
    flow, place = Flow(1, lambda: None), Place(True)
    flow.send(4)
    flow.receive(4)
    flow.start(place)
    flow.offer(memoryview(b"ab"), lambda: None, owned=True)
    flow.source_done()
    assert "2 of 4 bytes" in place.over.message
