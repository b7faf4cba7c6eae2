"""The trio driver over real loopback sockets, TLS and memory streams: what arrives, what waits, how it ends."""

import contextlib
import os
import socket
import ssl
import struct
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
import trustme

from wsgrad.errors import ProtocolError
from wsgrad.transport.cbor import encode
from wsgrad.transport.frames import Closed
from wsgrad.transport.link import Link
from wsgrad.transport.messages import Chunk, Credit, Seen, message_array
from wsgrad.transport.timing import DEAD_SECONDS
from wsgrad.transport.trio_driver import TrioConnection

MIB = 1 << 20


def numbered(count):
    return encode(message_array(Credit(0, count)))


def chunk(offset):
    return encode(message_array(Chunk(0, 0, offset)))


class End:
    """One end of a connection with what it has received."""

    def __init__(self, stream, *, client):
        self.connection = TrioConnection.from_stream(stream, client=client, max_bulk=MIB)
        self.received = []
        self.closed = None
        self.error = None
        self.over = trio.Event()
        self._changed = trio.Event()

    def handle(self, received):
        self.received.append((received.head, None if received.bulk is None else bytes(received.bulk)))
        self._changed.set()

    async def run(self):
        try:
            self.closed = await self.connection.run(self.handle)
        except ProtocolError as exc:
            self.error = exc
        self.over.set()

    async def wait_for(self, count):
        with trio.fail_after(10):
            while len(self.received) < count:
                self._changed = trio.Event()
                await self._changed.wait()
        return self.received


async def tcp_pair():
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        client = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        return client, await listener.accept()


async def tls_pair():
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server_context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    client, server = await tcp_pair()
    client = trio.SSLStream(client, client_context, server_hostname="127.0.0.1")
    server = trio.SSLStream(server, server_context, server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.do_handshake)
        nursery.start_soon(server.do_handshake)
    return client, server


async def memory_pair():
    return trio.testing.memory_stream_pair()


@pytest.fixture(params=[tcp_pair, tls_pair, memory_pair], ids=["tcp", "tls", "memory"])
def make_pair(request):
    return request.param


@asynccontextmanager
async def running(make_pair=tcp_pair):
    client_stream, server_stream = await make_pair()
    client = End(client_stream, client=True)
    server = End(server_stream, client=False)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            nursery.start_soon(server.run)
            yield client, server
            client.connection.close(1000, "done")


async def test_messages_arrive_in_order_and_unnumbered_ones_first(make_pair):
    async with running(make_pair) as (client, server):
        link = client.connection.link = Link()
        for count in range(300):
            link.push(numbered(count))
        client.connection.send(encode(message_array(Seen(7))))
        client.connection.wake()
        received = await server.wait_for(301)
        assert received[0][0] == message_array(Seen(7))
        assert [head[2] for head, _ in received[1:]] == list(range(300))
    assert client.closed == server.closed == Closed(1000, "done")


async def test_bulk_lands_in_its_destination_both_ways(make_pair):
    data = os.urandom(6 * MIB + 12345)
    pieces = [(start, data[start : start + MIB]) for start in range(0, len(data), MIB)]
    async with running(make_pair) as (client, server):
        for sender, receiver in ((client, server), (server, client)):
            target = bytearray(len(data))
            view = memoryview(target)
            receiver.connection.destination = lambda head, nbytes, view=view: view[head[3] : head[3] + nbytes]
            sender.connection.link = Link()
            for start, piece in pieces:
                sender.connection.link.push(chunk(start), piece)
            sender.connection.wake()
            await receiver.wait_for(len(pieces))
            assert target == data


async def test_what_was_sent_before_a_close_arrives_before_it(make_pair):
    async with running(make_pair) as (client, server):
        server.connection.link = Link()
        bulk = bytes(MIB)
        for number in range(8):
            server.connection.link.push(chunk(number), bulk)
        server.connection.close(1001, "going away")
        server.connection.send(encode(message_array(Seen(1))))  # too late: nothing may follow a close
        await client.over.wait()
    assert len(client.received) == 8
    assert client.closed == Closed(1001, "going away")
    assert server.closed.code == 1001


async def test_a_peer_that_does_not_read_stops_neither_sends_nor_cuts_a_frame():
    client_stream, server_stream = await tcp_pair()
    server = End(server_stream, client=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        link = server.connection.link = Link()
        bulk = os.urandom(MIB)
        for number in range(32):
            link.push(chunk(number), bulk)
            server.connection.wake()
        assert link.unsent_bytes > 16 * MIB
        client = End(client_stream, client=True)
        nursery.start_soon(client.run)
        received = await client.wait_for(32)
        assert [head[3] for head, _ in received] == list(range(32))
        assert all(data == bulk for _, data in received)
        client.connection.close(1000, "")


async def test_an_error_of_the_handler_reaches_the_peer_with_its_code_although_it_still_sends():
    client_stream, server_stream = await tcp_pair()
    client = End(client_stream, client=True)
    connection = TrioConnection.from_stream(server_stream, client=False, max_bulk=MIB)

    def refuse(received):
        raise ProtocolError("more than 16 MiB wait on queue 3", close_code=1008)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        client.connection.link = Link()
        for number in range(16):
            client.connection.link.push(chunk(number), bytes(MIB))
        client.connection.wake()
        with pytest.raises(ProtocolError, match="more than 16 MiB"):
            await connection.run(refuse)
    assert client.closed == Closed(1008, "more than 16 MiB wait on queue 3")


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x81\x82\0\0\0\0hi", 1003),
        (b"\x82\x02hi", 1002),
        (b"\x82\x81\0\0\0\0\xff", 1002),
        (b"\x82\x84\0\0\0\0" + encode([5, "x"])[:4], 1002),
    ],
    ids=["text", "unmasked", "no array", "malformed heartbeat"],
)
async def test_a_fault_of_the_peer_is_answered_with_its_close_code(frame, code):
    raw, server_stream = await tcp_pair()
    connection = TrioConnection.from_stream(server_stream, client=False, max_bulk=MIB)

    async def peer():
        await raw.send_all(frame)
        answer = b""
        while data := await raw.receive_some():
            answer += data
        assert answer[0] == 0x88
        assert int.from_bytes(answer[2:4], "big") == code
        await raw.aclose()

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer)
            with pytest.raises(ProtocolError) as caught:
                await connection.run(lambda received: None)
    assert caught.value.close_code == code


async def test_an_unexpected_error_of_the_handler_closes_with_1011_and_tells_the_peer_nothing():
    client_stream, server_stream = await tcp_pair()
    client = End(client_stream, client=True)
    connection = TrioConnection.from_stream(server_stream, client=False, max_bulk=MIB)

    def broken(received):
        raise ValueError("/home/someone/secret.py")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        client.connection.send(encode([7, 1]))
        with pytest.raises(ValueError, match="secret"):
            await connection.run(broken)
    assert client.closed == Closed(1011, "internal error")


async def test_a_peer_that_leaves_without_closing_ends_with_1006(make_pair):
    client_stream, server_stream = await make_pair()
    server = End(server_stream, client=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await trio.aclose_forcefully(client_stream)
    assert server.closed.code == 1006


async def test_a_reset_by_the_peer_ends_with_1006():
    client_stream, server_stream = await tcp_pair()
    server = End(server_stream, client=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        client_stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await client_stream.aclose()
    assert server.closed.code == 1006


async def test_bytes_that_came_with_the_handshake_are_not_lost():
    client_stream, server_stream = await tcp_pair()
    frames = b"".join(b"\x82\x83\0\0\0\0" + encode([7, number]) for number in range(20))
    received = []
    connection = TrioConnection.from_stream(server_stream, client=False, max_bulk=MIB, leftover=frames[:47])
    async with trio.open_nursery() as nursery:
        await client_stream.send_all(frames[47:] + b"\x88\x80\0\0\0\0")
        closed = await connection.run(lambda message: received.append(message.head[1]))
        nursery.cancel_scope.cancel()
    assert received == list(range(20))
    assert closed.code == 1005
    await client_stream.aclose()


async def test_nothing_is_handled_after_a_close():
    async with running() as (client, server):
        server.connection.close(1008, "another connection attached")
        client.connection.send(encode([7, 1]))
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert server.received == []
    assert client.closed == Closed(1008, "another connection attached")


async def test_a_peer_that_does_not_answer_a_close_is_left_after_two_seconds(autojump_clock):
    _peer, server_stream = trio.testing.memory_stream_pair()
    server = End(server_stream, client=False)
    server.connection.close(1001, "going away")
    start = trio.current_time()
    await server.run()
    assert server.closed == Closed(1001, "going away")
    assert trio.current_time() - start == pytest.approx(2.0)


async def test_two_silent_ends_keep_each_other_alive(autojump_clock):
    async with running(memory_pair) as (client, server):
        with trio.CancelScope(deadline=trio.current_time() + 15):
            await trio.sleep_forever()
        assert not client.connection.closed
        assert not server.connection.closed
    assert client.received == server.received == []


async def test_a_peer_that_goes_silent_is_asked_twice_and_dead_after_fifteen_seconds(autojump_clock):
    peer, server_stream = trio.testing.memory_stream_pair()
    server = End(server_stream, client=False)
    start = trio.current_time()
    await server.run()
    assert server.closed.code == 1006
    assert f"nothing was received for {DEAD_SECONDS:g} s" in server.closed.reason
    assert trio.current_time() - start == pytest.approx(DEAD_SECONDS)
    assert await peer.receive_some() == b"\x82\x03" + encode([5, 1]) + b"\x82\x03" + encode([5, 2])


async def test_heartbeats_and_rfc_pings_are_answered_at_once():
    raw, server_stream = await tcp_pair()
    server = End(server_stream, client=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await raw.send_all(b"\x82\x83\0\0\0\0" + encode([5, 9]))
        assert await raw.receive_some() == b"\x82\x03" + encode([6, 9])
        await raw.send_all(b"\x89\x82\0\0\0\0hi")
        assert await raw.receive_some() == b"\x8a\x02hi"
        await raw.aclose()


async def test_a_peer_that_floods_heartbeats_and_reads_nothing_is_refused():
    raw, server_stream = await tcp_pair()
    server_stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = End(server_stream, client=False)

    async def send_for_ever(data):
        while True:
            await raw.send_all(data)

    async def flood():
        with pytest.raises(trio.BrokenResourceError):
            await send_for_ever((b"\x82\x83\0\0\0\0" + encode([5, 9])) * 10_000)
        await raw.aclose()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await server.run()
    assert server.error.close_code == 1008


@pytest.mark.parametrize("data", [b"\x89\x80\0\0\0\0", b"\x00\x80\0\0\0\0"], ids=["pings", "empty fragments"])
async def test_others_get_their_turns_beside_a_flood_of_frames_that_hold_nothing(make_pair, data):
    raw, server_stream = await make_pair()
    server = End(server_stream, client=False)
    most = 0
    enough = trio.Event()

    async def flood():
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await raw.send_all(b"\x02\x80\0\0\0\0")
            for _ in range(10):
                await raw.send_all(data * 5_000)
            await enough.wait()
        await trio.aclose_forcefully(raw)

    async def watch():
        nonlocal most
        while not server.over.is_set():
            before = server.connection._connection.frames
            await trio.lowlevel.checkpoint()
            most = max(most, server.connection._connection.frames - before)
            if server.connection._connection.frames > 10_000:
                enough.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            nursery.start_soon(flood)
            await server.run()
    assert server.connection._connection.frames > 10_000
    assert most < 1_500  # at first, before reads have shrunk


async def test_a_peer_that_reads_nothing_of_what_it_is_told_is_left():
    raw, server_stream = await tcp_pair()
    server_stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = End(server_stream, client=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        for _ in range(200_000):
            if server.connection.closed:
                break
            server.connection.send(encode(message_array(Seen(1))))
        with trio.fail_after(5):
            await server.over.wait()
    assert (server.closed.code, "does not read" in server.closed.reason) == (1006, True)
    await raw.aclose()


async def test_many_small_messages_leave_room_for_other_tasks():
    async with running() as (client, server):
        count = 20_000
        turns = 0
        link = client.connection.link = Link()
        for number in range(count):
            link.push(numbered(number))
        client.connection.wake()
        while len(server.received) < count:
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns > 100


async def test_cancelling_closes_the_stream():
    client_stream, server_stream = await tcp_pair()
    server = End(server_stream, client=False)
    with trio.move_on_after(0.01):
        await server.run()
    assert server_stream.socket.fileno() == -1
    server.connection.send(encode([7, 1]))
    server.connection.wake()
    server.connection.close(1000, "")
    assert await client_stream.receive_some() == b""
    await client_stream.aclose()


async def test_answers_to_messages_that_came_together_leave_together_and_all():
    raw, server_stream = await tcp_pair()
    connection = TrioConnection.from_stream(server_stream, client=False, max_bulk=MIB)
    link = connection.link = Link()
    connection.kinds = {}

    def answer(received):
        link.push(numbered(received.head[1]))
        connection.wake()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run, answer)
        await raw.send_all(b"".join(b"\x82\x83\0\0\0\0" + encode([7, number]) for number in range(20)))
        wanted = b"".join(bytes([0x82, len(numbered(number))]) + numbered(number) for number in range(20))
        received = b""
        while len(received) < len(wanted):
            received += await raw.receive_some()
        assert received == wanted
        assert connection.kinds == {7: 20}
        await raw.aclose()
