"""Whatever ends a session, nothing of it is left: no process, memory, file, descriptor, ticket or entry of a table."""

import gc
import os
import signal

import pytest
import trio
from heart import CRASH, NOTHING, SPIN, mapped_rings, open_files, processes_below, serving

from wsgrad.server.queue import Queue
from wsgrad.server.session import Session
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m


async def work(client):
    """Do in a session what leaves traces: a device, a program, memory, an upload, a ticket; the queue."""
    queue = await client.open()
    queue.program(7, NOTHING, "nothing", "")
    queue.batch(c.Alloc(1, 8 << 20))
    await queue.upload(1, bytes(3 << 20))
    assert await queue.read(1, 0, 1) == b"\0"
    client.send(m.Peer(5))
    await client.next(m.Ticket)
    return queue


async def launched(queue, source, entry):
    queue.program(8, source, entry, "p")
    queue.launches([8, 0, 1], 1)
    return await queue.failure()


async def bye(server, client, queue):
    client.send(m.Bye())
    assert (await client.wait_closed()).code == 1000


async def close_the_device(server, client, queue):
    """The session itself ends by its connection."""
    client.send(m.Close(1))


async def leave_a_download_unread(server, client, queue):
    queue.batch(c.Download(3, 1, 0, 5 << 20))
    await client.next(m.Chunk)


async def drop(server, client, queue):
    """Nothing is said; the grace time ends it."""


async def drop_in_the_middle_of_a_chunk(server, client, queue):
    queue.batch(c.Upload(2, 1, 0, 4 << 20))
    frame = client.connection._connection.encode(b"\x84\x13\x01\x02\x00", bytes(1 << 20))
    await client.connection._stream.send_all(b"".join(frame)[:300_000])
    await trio.aclose_forcefully(client.connection._stream)


async def break_the_protocol(server, client, queue):
    client.send(m.Ack(1, 1))
    assert (await client.wait_closed()).code == 1002


async def crash(server, client, queue):
    assert (await launched(queue, CRASH, "crash")).code == "DeviceLost"


async def spin(server, client, queue):
    assert (await launched(queue, SPIN, "spin")).code == "Timeout"


async def kill_the_node(server, client, queue):
    for pid in server.zygote._nodes:
        os.kill(pid, signal.SIGKILL)
    assert (await queue.failure()).code == "DeviceLost"


async def kill_the_zygote(server, client, queue):
    server.zygote._process.kill()
    assert (await queue.failure()).code == "DeviceLost"


async def idle(server, client, queue):
    await client.until(lambda: queue.acked == queue.next - 1)
    server.session(client)._active_at -= 1e6
    assert "--idle-seconds" in (await client.wait_closed()).reason


WAYS = (
    bye,
    close_the_device,
    leave_a_download_unread,
    drop,
    drop_in_the_middle_of_a_chunk,
    break_the_protocol,
    crash,
    spin,
    kill_the_node,
    kill_the_zygote,
    idle,
)


def left(server):
    """What a server without sessions should have none of, by name."""
    hub = server.hub
    found = {
        "sessions": len(hub._sessions),
        "tickets": len(hub.tickets._entries),
        "node processes": server.zygote.processes,
        "processes": len(processes_below(server.zygote._process.pid)) if server.zygote._process else 0,
        "compiles": len(hub._programs._jobs),
        "rings": mapped_rings(),
        "loads": sum(device["sessions"] for device in hub.devices),
    }
    return {name: count for name, count in found.items() if count}


async def patiently(condition):
    """Wait for what nothing announces: a process that starts anew takes its time on a busy machine."""
    with trio.move_on_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


async def nothing_left(server, files):
    await patiently(lambda: not left(server) and open_files() == files)
    assert (left(server), open_files()) == ({}, files)


@pytest.fixture
async def server(cache, monkeypatch):
    async with serving(cache, launch_seconds=0.4, resume_grace=0.1) as server:
        async with server.client() as client:
            await bye(server, client, await work(client))  # what is made once, by the first session
        await patiently(lambda: not left(server) and "/memfd" not in open_files())
        gc.collect()
        gc.disable()  # what only the collector frees is not freed when the session ends
        try:
            yield server
        finally:
            gc.enable()


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_is_left_of_a_session(server, way):
    files = open_files()
    async with server.client() as client:
        await way(server, client, await work(client))
    await nothing_left(server, files)


def fault_in(monkeypatch, kind, name, victim):
    """From now on a method fails, by a fault of our own, for one session only; returns how often it did."""
    original = getattr(kind, name)
    failed = []

    def broken(self, *arguments, **values):
        owner = getattr(self, "owner", self)
        if getattr(owner, "session", owner) is victim:
            failed.append(name)
            raise RuntimeError("a fault in our own code")
        return original(self, *arguments, **values)

    monkeypatch.setattr(kind, name, broken)
    return failed


FAULTS = [(Queue, "submit"), (Queue, "work"), (Queue, "reply"), (Queue, "may_idle"), (Session, "tell_devices")]
"""Where a connection's reader, a session's turns, a node's reader, its watch and the hub's news would fail."""


@pytest.mark.parametrize(("kind", "name"), FAULTS, ids=[name for _, name in FAULTS])
async def test_a_fault_in_our_own_code_ends_its_session_alone_and_leaves_nothing(
    server, monkeypatch, caplog, kind, name
):
    files = open_files()
    async with server.client() as other:
        second = await work(other)
        async with server.client() as client:
            queue = await work(client)
            session = server.session(client)
            with monkeypatch.context() as patch:
                failed = fault_in(patch, kind, name, session)
                queue.batch(c.Write(1, 0, b"more"))
                session.later(session._queues[1])
                other.send(m.Open(2, "box/cpu/0", {}))  # of which all are told
                closed = await client.wait_closed()
                assert failed
            assert (closed.code, closed.reason) == (1011, "internal error")
        await patiently(lambda: any("a fault in our" in str(one.exc_info) for one in caplog.records if one.exc_info))
        assert any("a fault in our" in str(one.exc_info) for one in caplog.records if one.exc_info)
        second.batch(c.Write(1, 0, b"on"))
        assert await second.read(1, 0, 2) == b"on"
        other.send(m.Bye())
        await other.wait_closed()
    await nothing_left(server, files)
    async with server.client() as client:
        await bye(server, client, await work(client))
