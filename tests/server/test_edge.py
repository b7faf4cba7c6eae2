"""The port itself: what one connection does to it costs no other; the limit of an address; frames after the upgrade."""

import socket
import struct

import pytest
import trio
import trio.testing
from edge_port import TOKENS, WEBSOCKET, bearer, read_answer, serving

from wsgrad.server.listener import open_listeners
from wsgrad.transport.cbor import encode
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.messages import MAX_HEAD, Chunk, Launches, Seen, message_array
from wsgrad.transport.trio_driver import TrioConnection


async def open_client(edge, *, token=TOKENS.client, path="/v1/client", stream=None):
    stream = stream or await edge.connect()
    leftover = await open_websocket(
        stream,
        host=f"127.0.0.1:{edge.number}",
        path=path,
        headers=[("Authorization", f"Bearer {token}")],
        subprotocols=["wsgrad.v1"],
    )
    return TrioConnection.from_stream(stream, client=True, max_bulk=1 << 24, leftover=leftover)


class Conversation:
    def __init__(self, connection):
        self.connection = connection
        self.answers, self._received = trio.open_memory_channel(100)

    async def ask(self, message):
        self.connection.send(encode(message_array(message)))
        return (await self._received.receive()).head


async def talk(edge, **options):
    """Open a client, ask once, close."""
    conversation = Conversation(await open_client(edge, **options))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(conversation.connection.run, conversation.answers.send_nowait)
        assert await conversation.ask(Seen(5)) == [Seen.KIND, 5]
        conversation.connection.close(1000, "")


@pytest.mark.parametrize(
    ("path", "token"), [("/v1/client", TOKENS.client), ("/v1/node", TOKENS.node)], ids=["client", "node"]
)
async def test_messages_flow_after_the_upgrade(path, token):
    async with serving() as edge:
        await talk(edge, path=path, token=token)
        assert len(edge.hub.clients) + len(edge.hub.nodes) == 1


async def test_frames_sent_right_behind_the_head_are_not_lost():
    async with serving() as edge:
        stream = await edge.connect()
        lines = ["GET /v1/client HTTP/1.1", "Host: localhost", bearer(TOKENS.client), *WEBSOCKET, "", ""]
        frame = b"\x82\x83\0\0\0\0" + encode(message_array(Seen(5)))
        async with stream:
            await stream.send_all("\r\n".join(lines).encode() + frame)
            answer = b""
            while not answer.endswith(b"\x82\x03" + encode(message_array(Seen(5)))):
                answer += await stream.receive_some()


async def test_a_slow_head_costs_nobody_else_and_is_cut_off_in_time():
    async with serving(handshake_seconds=1.0) as edge:
        slow = [await edge.connect() for _ in range(10)]
        for stream in slow:
            await stream.send_all(b"GET /healthz HTT")
        with trio.fail_after(0.9):
            await talk(edge)
        with trio.fail_after(2):
            for stream in slow:
                assert (await read_answer(stream)).status == 408
                await stream.aclose()


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"], ids=len)
async def test_whose_head_is_late_is_told_so_in_time(sent, notes):
    async with serving(handshake_seconds=0.2) as edge, await edge.connect() as stream:
        await stream.send_all(sent)
        with trio.fail_after(2):
            answer = await read_answer(stream)
            assert await stream.receive_some() == b""
        assert answer.status == 408
        assert answer.body == b"no whole request came within 0.2 s (--handshake-seconds)\n"
        assert edge.port.counters.refused == 1
        assert [note["why"] for note in notes("refused")] == [answer.body.decode().strip()]
        await talk(edge)


async def test_who_leaves_before_its_time_is_over_is_not_refused(notes):
    async with serving(handshake_seconds=5.0) as edge:
        await (await edge.connect()).aclose()
        await edge.until_connections(0)
        assert edge.port.counters.refused == 0
        assert notes("refused") == []


@pytest.mark.parametrize("sent", [0, 1, 40, 150])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_who_leaves_in_the_middle_of_the_handshake_ends_only_its_own_connection(sent, reset, caplog):
    lines = ["GET /v1/client HTTP/1.1", "Host: localhost", bearer(TOKENS.client), *WEBSOCKET, "", ""]
    async with serving() as edge:
        other = Conversation(await open_client(edge))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.connection.run, other.answers.send_nowait)
            for _ in range(5):
                stream = await edge.connect()
                await stream.send_all("\r\n".join(lines).encode()[:sent])
                if reset:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await stream.aclose()
            assert await other.ask(Seen(5)) == [Seen.KIND, 5]
            await talk(edge)
            await edge.until_connections(1)
            other.connection.close(1000, "")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_tls_client_on_a_port_without_tls_is_turned_away_at_once():
    async with serving() as edge, await edge.connect() as stream:
        await stream.send_all(b"\x16\x03\x01\x02\x00\x01")
        with trio.fail_after(2), pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()


async def test_one_address_may_hold_so_many_connections_and_they_count_down_again():
    async with serving(max_connections_per_address=3) as edge:
        held = [await edge.connect() for _ in range(3)]
        while (answer := await edge.ask("/healthz")).status != 429:
            pass
        assert b"--max-connections-per-address" in answer.body
        await held.pop().aclose()
        while (await edge.ask("/healthz")).status != 200:
            pass
        await talk(edge)
        for stream in held:
            await stream.aclose()


async def test_a_message_over_the_limit_closes_with_1009_and_names_it():
    async with serving() as edge:
        for message, nbytes in ((Chunk(0, 0, 0), (1 << 20) + 1), (Launches(0, 1, 1), (1 << 16) + 1)):
            connection = await open_client(edge)
            connection.send(encode(message_array(message)), bytes(nbytes))
            closed = await connection.run(lambda received: None)
            assert closed.code == 1009
            assert str(nbytes - 1) in closed.reason


async def test_a_head_of_a_message_over_the_limit_ends_the_connection():
    async with serving() as edge:
        connection = await open_client(edge)
        connection.send(encode([9, [{"a": "b" * MAX_HEAD}]]))
        closed = await connection.run(lambda received: None)
        assert closed.code in (1002, 1009)
        await talk(edge)


async def test_text_and_garbage_after_the_upgrade_end_only_their_connection():
    async with serving() as edge:
        for frame, code in (
            (b"\x81\x82\0\0\0\0hi", 1003),
            (b"\x82\x82\0\0\0\0\xff\xff", 1002),
            (b"\xf2\x80\0\0\0\0", 1002),
        ):
            stream = await edge.connect()
            lines = ["GET /v1/client HTTP/1.1", "Host: localhost", bearer(TOKENS.client), *WEBSOCKET, "", ""]
            async with stream:
                await stream.send_all("\r\n".join(lines).encode())
                assert (await read_answer(stream)).status == 101
                await stream.send_all(frame)
                answer = await stream.receive_some()
                assert answer[0] == 0x88
                assert int.from_bytes(answer[2:4], "big") == code
        await talk(edge)


async def test_a_frame_that_announces_more_than_any_message_may_have_closes_with_1009_at_once():
    async with serving() as edge:
        stream = await edge.connect()
        lines = ["GET /v1/client HTTP/1.1", "Host: localhost", bearer(TOKENS.client), *WEBSOCKET, "", ""]
        async with stream:
            await stream.send_all("\r\n".join(lines).encode())
            assert (await read_answer(stream)).status == 101
            await stream.send_all(b"\x82\xff" + (1 << 31).to_bytes(8, "big") + bytes(4))
            answer = await stream.receive_some()
            assert int.from_bytes(answer[2:4], "big") == 1009
            assert b"2147483648 bytes is over the limit of" in answer
        await talk(edge)


async def test_the_port_can_be_bound_again_while_old_connections_linger():
    async with serving() as edge:
        number = edge.number
        conversation = Conversation(await open_client(edge))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conversation.connection.run, conversation.answers.send_nowait)
            edge.accepting.cancel()
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(OSError, match="failed"):
                await edge.connect()
            [listener] = await open_listeners("127.0.0.1", number)
            await listener.aclose()
            assert await conversation.ask(Seen(5)) == [Seen.KIND, 5]
            conversation.connection.close(1000, "")
    [listener] = await open_listeners("127.0.0.1", number)
    await listener.aclose()


async def test_port_zero_gives_every_address_of_a_name_the_same_port():
    listeners = await open_listeners("localhost", 0)
    assert len({listener.socket.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        await listener.aclose()
