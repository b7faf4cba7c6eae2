"""Uploads that the server's cache may bring, over the raw protocol to real node processes: hits, misses, failures."""

import os

import numpy as np
import pytest
import trio
from blake3 import blake3
from heart import ADD, CRASH, as_word, eventually, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.server.blobs import BlobCache
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

MIB = 1 << 20
STEPS = ["cached", "plain", "copy", "fill", "abort", "receive"]


def some_bytes(nbytes, seed=1):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


@pytest.fixture
def blobs(tmp_path):
    return tmp_path / "blobs"


@pytest.fixture
async def server(cache, blobs):
    async with serving(cache, cache_dir=str(blobs), cache_size=16 * MIB) as server:
        yield server


@pytest.fixture
async def client(server):
    async with server.client() as client:
        yield client


def files(blobs):
    return {name for name in os.listdir(blobs) if len(name) == 64} if blobs.exists() else set()


def ask(queue, buffer, data, *, transfer=1, digest=None, offset=0):
    return queue.batch(c.UploadCached(transfer, buffer, offset, len(data), digest or blake3(data).digest()))


async def chunks(queue, data, *, transfer=1, start=0, end=None):
    for offset in range(start, len(data) if end is None else end, m.CHUNK_BYTES):
        await queue.client.until(lambda: queue.credit > 0)
        queue.credit -= 1
        queue.client.send(m.Chunk(queue.number, transfer, offset), data[offset : offset + m.CHUNK_BYTES])


async def missing(queue, number):
    message, _ = await queue.client.next(m.Missing, where=lambda message: message.queue == queue.number)
    assert message.number == number
    return message.offset


async def teach(client, data, blobs, number=1):
    """Upload something that is not there yet, and wait until it is written down."""
    before = files(blobs)
    queue = await client.open(number=number)
    queue.batch(c.Alloc(0, len(data)))
    asked = ask(queue, 0, data)
    assert await missing(queue, asked) == 0
    await chunks(queue, data)
    assert await queue.download(0, 0, len(data)) == data
    await eventually(lambda: files(blobs) > before)
    return queue


async def test_what_was_sent_once_is_not_sent_again(server, client, blobs):
    data = some_bytes(5 * MIB + 123)
    queue = await teach(client, data, blobs)
    assert files(blobs) == {blake3(data).hexdigest()}
    assert os.stat(blobs).st_mode & 0o777 == 0o700
    received = server.hub.statistics.received
    async with server.client() as other:
        again = await other.open()
        again.batch(c.Alloc(3, len(data) + 100))
        ask(again, 3, data, offset=60)
        assert await again.download(3, 60, len(data)) == data
        assert await again.read(3, 0, 60) == bytes(60)
        assert again.credit == m.SLOTS
    assert server.hub.statistics.received - received < 2000
    assert server.hub.statistics.cache_hits == 1
    assert server.hub.statistics.cache_nbytes == len(data)
    await queue.client.until(lambda: queue.credit == m.SLOTS)


async def test_one_message_asks_for_many_and_order_is_kept(server, client, blobs):
    known, unknown, other = some_bytes(2 * MIB, 1), some_bytes(3 * MIB, 2), some_bytes(MIB + 7, 3)
    queue = await teach(client, known, blobs)
    digests = [blake3(data).digest() for data in (known, unknown, other, known)]
    first = queue.batch(c.Alloc(1, 4 * MIB), c.Alloc(2, 4 * MIB)) + 1
    queue.batch(
        c.UploadCached(1, 1, 0, len(known), digests[0]),
        c.Copy(2, 0, 1, 0, MIB),
        c.UploadCached(2, 1, 0, len(unknown), digests[1]),
        c.Fill(1, 0, 16, b"x"),
        c.UploadCached(3, 2, 2 * MIB, len(other), digests[2]),
        c.UploadCached(4, 1, MIB, len(known), digests[3]),
    )
    asked = {(await client.next(m.Missing))[0].number for _ in range(2)}
    assert asked == {first + 2, first + 4}
    await queue.done(first + 1)
    await chunks(queue, unknown, transfer=2)
    await queue.done(first + 3)
    await chunks(queue, other, transfer=3)
    await queue.done()
    expected = bytearray(4 * MIB)
    expected[: len(unknown)] = unknown
    expected[:16] = b"x" * 16
    expected[MIB : MIB + len(known)] = known
    assert await queue.download(1, 0, 4 * MIB) == expected
    assert await queue.download(2, 0, 4 * MIB) == known[:MIB] + bytes(MIB) + other + bytes(MIB - 7)
    await client.until(lambda: queue.credit == m.SLOTS)


async def test_a_damaged_blob_is_not_used_but_removed_and_sent(server, client, blobs):
    data = some_bytes(3 * MIB)
    await teach(client, data, blobs)
    (path,) = blobs.iterdir()
    content = bytearray(path.read_bytes())
    content[2 * MIB + 5] ^= 1
    path.write_bytes(content)
    queue = await client.open(number=2)
    queue.batch(c.Alloc(0, len(data)))
    assert await missing(queue, ask(queue, 0, data)) == 0
    assert not path.exists()
    assert server.hub.blobs.damaged == 1
    await chunks(queue, data)
    assert await queue.download(0, 0, len(data)) == data
    await eventually(path.exists)
    ask(queue, 0, data)
    await queue.done()
    assert server.hub.statistics.cache_hits == 1


async def test_a_blob_that_shrinks_while_it_is_fed_is_continued_by_the_client(server, client, blobs, monkeypatch):
    data = some_bytes(8 * MIB)
    await teach(client, data, blobs)
    (path,) = blobs.iterdir()
    check = BlobCache._check

    async def checked_then_cut(self, *arguments):
        good = await check(self, *arguments)
        os.truncate(path, 3 * MIB + 17)
        return good

    monkeypatch.setattr(BlobCache, "_check", checked_then_cut)
    queue = await client.open(number=2)
    queue.batch(c.Alloc(0, len(data)))
    assert await missing(queue, ask(queue, 0, data)) == 3 * MIB
    await chunks(queue, data, start=3 * MIB)
    assert await queue.download(0, 0, len(data)) == data
    await client.until(lambda: queue.credit == m.SLOTS)


async def test_a_hit_needs_the_whole_hash_and_the_size(server, client, blobs):
    data = some_bytes(2 * MIB)
    queue = await teach(client, data, blobs)
    digest = blake3(data).digest()
    queue.batch(c.Alloc(1, 4 * MIB))
    for index, (claimed, part) in enumerate(
        [(digest[:31] + bytes([digest[31] ^ 1]), data), (digest, data[:-1]), (digest, data + b"x"), (bytes(32), data)]
    ):
        transfer = 10 + index
        assert await missing(queue, ask(queue, 1, part, transfer=transfer, digest=claimed)) == 0
        queue.client.send(m.Abort(queue.number, transfer))
        await queue.done()
    assert await queue.download(1, 0, 4 * MIB) == bytes(4 * MIB)
    # Who asked with a wrong size has not made it go.
    ask(queue, 1, data, transfer=20)
    await queue.done()
    assert server.hub.statistics.cache_hits == 1


async def test_bytes_that_are_not_those_of_the_hash_are_not_remembered(server, client, blobs):
    data, digest = some_bytes(2 * MIB), blake3(b"something else").digest()
    queue = await client.open()
    queue.batch(c.Alloc(0, len(data)))
    for _ in range(2):
        assert await missing(queue, ask(queue, 0, data, digest=digest)) == 0
        await chunks(queue, data)
        assert await queue.download(0, 0, len(data)) == data
        await eventually(lambda: not server.hub.blobs._keeping)
    assert os.listdir(blobs) == []


async def test_the_least_recently_used_leaves_first(server, client, blobs):
    parts = [some_bytes(5 * MIB, seed) for seed in range(4)]
    for number, part in enumerate(parts[:3], 1):
        queue = await teach(client, part, blobs, number)
    queue.batch(c.Alloc(1, 5 * MIB))
    ask(queue, 1, parts[0])  # used now, so the second one is the oldest
    await queue.done()
    assert server.hub.statistics.cache_hits == 1
    kept = {blake3(part).hexdigest() for part in (parts[0], parts[2], parts[3])}
    asked = ask(queue, 1, parts[3])
    assert await missing(queue, asked) == 0
    await chunks(queue, parts[3])
    await queue.done()
    await eventually(lambda: files(blobs) == kept)
    assert sum(path.stat().st_size for path in blobs.iterdir()) <= 16 * MIB


async def test_what_exceeds_the_whole_cache_is_not_written(server, client, blobs):
    data = some_bytes(17 * MIB)
    queue = await client.open()
    queue.batch(c.Alloc(0, len(data)))
    assert await missing(queue, ask(queue, 0, data)) == 0
    await chunks(queue, data)
    assert await queue.download(0, 0, len(data)) == data
    assert files(blobs) == set()


async def test_two_clients_upload_the_same_at_once(server, blobs):
    data = some_bytes(6 * MIB)

    async def upload():
        async with server.client() as client:
            queue = await client.open()
            queue.batch(c.Alloc(0, len(data)))
            assert await missing(queue, ask(queue, 0, data)) == 0
            both.append(queue)
            await eventually(lambda: len(both) == 2)
            await chunks(queue, data)
            assert await queue.download(0, 0, len(data)) == data

    both = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upload)
        nursery.start_soon(upload)
    await eventually(lambda: os.listdir(blobs) == [blake3(data).hexdigest()])


async def test_an_upload_is_aborted_at_every_stage(server, client, blobs):
    data = some_bytes(6 * MIB)
    queue = await teach(client, data, blobs)
    other = some_bytes(6 * MIB, 2)
    queue.batch(c.Alloc(1, len(data)))
    # While it is looked for, while it is fed, when it is over: wherever so many turns of the loop have brought it.
    for turns in range(0, 120, 8):
        ask(queue, 1, data, transfer=1)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        client.send(m.Abort(queue.number, 1))
        await queue.done()
    # While the client sends, and once more when it has said so already.
    assert await missing(queue, ask(queue, 1, other, transfer=3)) == 0
    await chunks(queue, other, transfer=3, end=2 * MIB)
    client.send(m.Abort(queue.number, 3))
    client.send(m.Abort(queue.number, 3))
    await queue.done()
    await client.until(lambda: queue.credit == m.SLOTS)
    number = await queue.upload(1, other, transfer=4)
    await queue.done(number)
    assert await queue.download(1, 0, len(other)) == other
    await eventually(lambda: not server.hub.blobs._keeping)
    assert os.listdir(blobs) == [blake3(data).hexdigest()]


async def test_an_abort_behind_a_held_upload_lets_the_queue_go_on(server, client):
    queue, data = await client.open(), some_bytes(2 * MIB)
    queue.batch(c.Alloc(0, len(data)), c.Alloc(1, 8))
    asked = ask(queue, 0, data, transfer=1)
    later = ask(queue, 0, data, transfer=2)
    assert {(await client.next(m.Missing))[0].number for _ in range(2)} == {asked, later}
    # The second is given up although the first, of which nothing has come, holds the queue.
    client.send(m.Abort(queue.number, 2))
    queue.batch(c.Write(1, 0, b"12345678"))
    await chunks(queue, data, transfer=1)
    assert await queue.read(1, 0, 8) == b"12345678"
    assert await queue.download(0, 0, len(data)) == data


async def test_a_refused_upload_asks_for_nothing(client):
    queue, data = await client.open(), some_bytes(2 * MIB)
    queue.batch(c.Alloc(0, MIB))
    number = ask(queue, 0, data)
    failure = await queue.failure()
    assert (failure.number, failure.code, failure.details["operation"]) == (number, "DeviceError", "upload")
    client.send(m.Abort(queue.number, 1))
    queue.batch(c.Clear(number), c.Fill(0, 0, 8, b"z"))
    assert await queue.read(0, 0, 8) == b"z" * 8


async def test_an_upload_behind_a_failure_is_dropped(server, client, blobs):
    data = some_bytes(3 * MIB)
    queue = await teach(client, data, blobs)
    failed = queue.batch(c.Free(9), c.Alloc(1, 3 * MIB), c.Copy(1, 0, 99, 0, 8))
    ask(queue, 1, data)
    assert (await queue.failure()).number == failed
    await queue.done()
    queue.batch(c.Clear(failed))
    assert await queue.download(1, 0, 3 * MIB) == bytes(3 * MIB)
    await client.until(lambda: queue.credit == m.SLOTS)


async def test_a_lost_device_ends_what_was_asked_for_and_fed(server, client, blobs):
    data, other = some_bytes(4 * MIB), some_bytes(4 * MIB, 2)
    queue = await teach(client, data, blobs)
    queue.program(0, CRASH, "crash", "p")
    queue.batch(c.Alloc(1, len(data)), c.Launch(0, None, None, [1], False))
    ask(queue, 1, data, transfer=1)
    asked = ask(queue, 1, other, transfer=2)
    failure = await queue.failure()
    assert failure.code == "DeviceLost"
    await queue.done()
    # It may have been asked for before the loss; then chunks are swallowed, and an abort ends them.
    if any(isinstance(message, m.Missing) for message, _ in client._kept):
        assert await missing(queue, asked) == 0
        await chunks(queue, other, transfer=2, end=2 * MIB)
        client.send(m.Abort(queue.number, 2))
    number = queue.reopen()
    await client.next(m.Result, where=lambda message: message.number == number)
    queue.batch(c.Alloc(1, len(data)))
    ask(queue, 1, data)
    assert await queue.download(1, 0, len(data)) == data
    await client.until(lambda: queue.credit == m.SLOTS)


async def test_a_reopening_waits_for_uploads_that_are_given_up(server, client):
    queue, data = await client.open(), some_bytes(3 * MIB)
    queue.batch(c.Alloc(0, len(data)))
    assert await missing(queue, ask(queue, 0, data)) == 0
    await chunks(queue, data, end=MIB)
    client.send(m.Abort(queue.number, 1))
    number = queue.reopen()
    await client.next(m.Result, where=lambda message: message.number == number)
    await client.until(lambda: queue.credit == m.SLOTS)


async def test_closing_leaves_no_task_and_no_file_open(server, blobs):
    data = some_bytes(6 * MIB)
    async with server.client() as client:
        await teach(client, data, blobs)
        queue = await client.open(number=2)
        queue.batch(c.Alloc(0, len(data)))
        assert await missing(queue, ask(queue, 0, some_bytes(6 * MIB, 2))) == 0
        await chunks(queue, data, end=2 * MIB)
        ask(queue, 0, data, transfer=2)  # found, but behind the other
        await eventually(lambda: any(str(blobs) in os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors()))
        client.send(m.Bye())
        await client.wait_closed()
    await eventually(lambda: not server.hub.blobs._keeping)
    await eventually(lambda: not any(str(blobs) in os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors()))
    assert os.listdir(blobs) == [blake3(data).hexdigest()]
    assert server.hub.blobs._backlog == 0


def is_missing(client, number):
    return any(isinstance(message, m.Missing) and message.number == number for message, _ in client._kept)


def descriptors():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


async def test_chunks_of_another_upload_may_not_overtake(client, blobs):
    queue, data = await client.open(), some_bytes(2 * MIB)
    queue.batch(c.Alloc(0, len(data)))
    ask(queue, 0, data, transfer=1)
    queue.batch(c.Upload(2, 0, 0, len(data)))
    await chunks(queue, data, transfer=2, end=MIB)
    closed = await client.wait_closed()
    assert closed.code in (1002, 1008)
    assert "transfer" in closed.reason


async def test_a_transfer_that_is_in_use_is_refused(client):
    queue, data = await client.open(), some_bytes(2 * MIB)
    queue.batch(c.Alloc(0, len(data)))
    assert await missing(queue, ask(queue, 0, data)) == 0
    ask(queue, 0, data)
    assert "transfer 1 is in use" in (await client.wait_closed()).reason


async def test_work_before_an_upload_runs_while_it_is_looked_for(server, client, blobs):
    data = np.arange(MIB, dtype=np.float32).tobytes()
    queue = await teach(client, data, blobs)
    queue.program(0, ADD, "add", "ppfi")
    queue.batch(c.Alloc(1, len(data)), c.Alloc(2, len(data)))
    for value in (1.0, 2.0):
        ask(queue, 1, data)
        queue.launches([0, 0, 2, 1, as_word(value), MIB], 1)
        result = np.frombuffer(await queue.download(2, 0, len(data)), np.float32)
        assert (result == np.arange(MIB, dtype=np.float32) + np.float32(value)).all()


async def test_any_number_is_asked_for_in_order_and_few_files_are_open(server, client, blobs):
    data = some_bytes(MIB)
    queue = await teach(client, data, blobs)
    digest = blake3(data).digest()
    queue.batch(c.Alloc(1, MIB), c.Alloc(2, 0))
    opened = server.hub.statistics.cache_hits
    for start in range(0, 300, 50):
        queue.batch(*(c.UploadCached(start + index, 1, 0, MIB, digest) for index in range(50)))
    queue.batch(c.UploadCached(1000, 2, 0, 0, bytes(32)))
    most = 0
    while queue.acked < queue.next - 1:
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors()]
        most = max(most, sum(str(blobs) in name for name in held))
        await trio.sleep(0.01)
    assert 0 < most <= 33
    assert server.hub.statistics.cache_hits == opened + 300
    assert await queue.download(1, 0, MIB) == data


async def test_a_broken_package_costs_only_the_cache(server, client, blobs, monkeypatch):
    def fail():
        raise ImportError("blake3 is damaged")

    monkeypatch.setattr("wsgrad.server.blobs._hasher", fail)
    blobs.mkdir(mode=0o700)
    data = some_bytes(2 * MIB)
    (blobs / blake3(data).hexdigest()).write_bytes(data)
    queue = await client.open()
    queue.batch(c.Alloc(0, len(data)))
    assert await missing(queue, ask(queue, 0, data)) == 0
    await chunks(queue, data)
    assert await queue.download(0, 0, len(data)) == data


async def test_a_directory_that_others_may_read_is_not_used(server, client, blobs):
    blobs.mkdir(mode=0o755)
    blobs.chmod(0o755)
    queue, data = await client.open(), some_bytes(2 * MIB)
    queue.batch(c.Alloc(0, len(data)))
    for _ in range(2):
        assert await missing(queue, ask(queue, 0, data)) == 0
        await chunks(queue, data)
        assert await queue.download(0, 0, len(data)) == data
    await eventually(lambda: not server.hub.blobs._keeping)
    assert os.listdir(blobs) == []


async def test_a_server_without_a_cache_asks_for_the_bytes(cache, blobs):
    async with serving(cache, cache_dir=str(blobs), cache_size=0) as server, server.client() as client:
        assert client.welcome.info["cache"] is False
        queue, data = await client.open(), some_bytes(2 * MIB)
        queue.batch(c.Alloc(0, len(data)))
        assert await missing(queue, ask(queue, 0, data)) == 0
        await chunks(queue, data)
        assert await queue.download(0, 0, len(data)) == data
    assert not blobs.exists()


async def test_what_a_killed_server_left_is_cleared(server, client, blobs):
    blobs.mkdir(mode=0o700)
    stale, fresh = blobs / ".new-0123", blobs / ".new-4567"
    stale.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(stale, (1e9, 1e9))
    await teach(client, some_bytes(2 * MIB), blobs)
    assert not stale.exists()
    assert fresh.exists()


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["cached", "plain", "copy", "fill", "abort"]), st.integers(0, 3)), max_size=12)
)
def test_any_mixture_has_the_result_of_its_order(tmp_path_factory, cache, steps):
    blobs = tmp_path_factory.mktemp("blobs") / "b"
    parts = [some_bytes(nbytes, seed) for seed, nbytes in enumerate((MIB, MIB + 1, 3 * MIB - 5, 2 * MIB))]

    async def main():
        devices = ("cpu", "cpu")
        async with (
            serving(cache, devices=devices, cache_dir=str(blobs), cache_size=8 * MIB) as server,
            server.client() as client,
        ):
            queue = await client.open()
            queue.batch(c.Alloc(0, 4 * MIB), c.Alloc(1, 4 * MIB))
            other = await client.open("box/cpu/1", number=2)
            other.batch(c.Alloc(0, len(parts[2])))
            await other.upload(0, parts[2], transfer=1)
            expected = [bytearray(4 * MIB), bytearray(4 * MIB)]
            for transfer, (step, which) in enumerate(steps):
                data, buffer = parts[which], which % 2
                match step:
                    case "cached" | "abort":
                        number = ask(queue, buffer, data, transfer=transfer)
                        if step == "abort":
                            client.send(m.Abort(queue.number, transfer))
                            number = queue.batch(c.Fill(buffer, 0, 4 * MIB, b"a"))
                            expected[buffer][:] = b"a" * (4 * MIB)
                            await queue.done(number)
                            continue
                        await client.until(lambda number=number: queue.acked >= number or is_missing(client, number))
                        if queue.acked < number:
                            await client.next(m.Missing, where=lambda message, number=number: message.number == number)
                            await chunks(queue, data, transfer=transfer)
                            await queue.done(number)
                        expected[buffer][: len(data)] = data
                    case "plain":
                        await queue.upload(buffer, data, transfer=transfer)
                        expected[buffer][: len(data)] = data
                    case "receive":
                        queue.batch(c.Receive(transfer, buffer, 3, len(parts[2]), 0))
                        other.batch(c.Send(transfer, 0, 0, len(parts[2]), 0))
                        expected[buffer][3 : 3 + len(parts[2])] = parts[2]
                    case "copy":
                        queue.batch(c.Copy(buffer, 0, 1 - buffer, 5, MIB))
                        expected[buffer][:MIB] = expected[1 - buffer][5 : MIB + 5]
                    case "fill":
                        queue.batch(c.Fill(buffer, 8, 80, b"q"))
                        expected[buffer][8:88] = b"q" * 80
            for buffer in (0, 1):
                assert await queue.download(buffer, 0, 4 * MIB) == expected[buffer]
            await client.until(lambda: queue.credit == m.SLOTS)

    trio.run(main)
