"""What breaks a device, and what it costs: a named error for its owner, nothing for others, and nothing left behind."""

import contextlib
import errno
import os
import platform
import resource
import signal
import subprocess

import pytest
import trio
from heart import CRASH, NOTHING, SLOW, SPIN, eventually, serving

from wsgrad.devices.ring import Ring
from wsgrad.server import session, zygote
from wsgrad.server.zygote import NodeProcess
from wsgrad.transport import commands as c
from wsgrad.transport import express
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import encode


@pytest.fixture
async def server(cache):
    async with serving(cache, launch_seconds=0.4) as server:
        yield server


async def broken(queue, source, entry, *, packed=0):
    """Load a program and launch it; `packed` puts it behind so many launches of another in one message."""
    queue.program(7, NOTHING, "nothing", "")
    queue.program(8, source, entry, "p")
    queue.batch(c.Alloc(1, 64))
    await queue.done()
    queue.launches([7, 0] * packed + [8, 0, 1] + [7, 0] * packed, 2 * packed + 1)
    return queue.next - 1 - packed


@pytest.mark.parametrize("packed", [0, 100])
async def test_a_kernel_that_segfaults_is_named_and_the_device_opens_again(server, packed):
    async with server.client() as client:
        queue = await client.open()
        number = await broken(queue, CRASH, "crash", packed=packed)
        failed = await queue.failure()
        assert (failed.code, failed.number) == ("DeviceLost", number)
        assert "program 'crash' ended the device: SIGSEGV (address error)" in failed.message
        assert failed.details == {"operation": "launch", "program": "crash", "lost": True}
        queue.batch(c.Write(1, 0, b"dropped"))
        await queue.done()
        queue.reopen()
        queue.batch(c.Alloc(1, 8), c.Write(1, 0, b"anew"))
        assert await queue.read(1, 0, 8) == b"anew\0\0\0\0"


@pytest.mark.parametrize("packed", [0, 100])
async def test_a_kernel_that_never_ends_is_named_after_its_limit(server, packed):
    async with server.client() as client, server.client() as other:
        queue, second = await client.open(), await other.open()
        number = await broken(queue, SPIN, "spin", packed=packed)
        second.batch(c.Alloc(1, 4))
        assert await second.read(1, 0, 4) == bytes(4)
        failed = await queue.failure()
        assert (failed.code, failed.number) == ("Timeout", number)
        assert "program 'spin' ran longer than the limit of 0.4 s (--launch-seconds)" in failed.message
        assert await second.read(1, 0, 4) == bytes(4)
        queue.reopen()
        queue.batch(c.Alloc(1, 8))
        assert await queue.read(1, 0, 8) == bytes(8)


async def test_many_launches_within_the_limit_may_take_longer_together(server):
    source = "void wait(int *p) { for (volatile int i = 0; i < 30000000; i++) ; }"
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, source, "wait", "p")
        queue.batch(c.Alloc(1, 4))
        timed = queue.batch(c.Launch(1, None, None, [1], True))
        result, _ = await client.next(m.Result, m.Failed)
        assert result.number == timed, result
        count = 1 + int(1.0 / result.value)
        queue.launches([1, 0, 1] * count, count)
        await queue.done()
        assert await queue.read(1, 0, 4) == bytes(4)


async def test_endless_allocation_ends_with_a_named_error(cache):
    async with serving(cache, max_session_memory=64 << 20) as server, server.client() as client:
        queue = await client.open()
        queue.batch(*(c.Alloc(n, 16 << 20) for n in range(10)))
        failed = await queue.failure()
        assert (failed.number, failed.code) == (5, "OutOfMemory")
        assert "--max-session-memory" in failed.message
        queue.batch(c.Clear(5), c.Free(0), c.Alloc(20, 16 << 20), c.Write(20, 0, b"fits"))
        assert await queue.read(20, 0, 4) == b"fits"


async def test_a_refused_command_stops_the_queue_at_its_place_and_frees_still_run(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"1111"), c.Write(1, 2, b"2222"), c.Write(1, 0, b"3333"), c.Free(1))
        failed = await queue.failure()
        assert (failed.number, failed.code) == (3, "DeviceError")
        assert failed.details["operation"] == "write"
        queue.batch(c.Clear(3), c.Alloc(1, 4))
        assert await queue.read(1, 0, 4) == bytes(4)
        assert server.hub.statistics.refused == 1


async def test_the_chunks_of_a_refused_upload_are_thrown_away(server):
    data = bytes(3 << 20)
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 1000))
        number = await queue.upload(1, data)
        failed = await queue.failure()
        assert failed.number == number
        queue.batch(c.Clear(number), c.Write(1, 0, b"on"))
        assert await queue.read(1, 0, 2) == b"on"
        assert queue.credit == m.SLOTS


async def test_a_device_that_is_lost_during_an_upload_takes_the_rest_and_gives_all_credit_back(server):
    data = bytes(20 << 20)
    async with server.client() as client:
        queue = await client.open()
        await broken(queue, CRASH, "crash")
        queue.batch(c.Alloc(2, len(data)))
        await queue.upload(2, data)
        assert (await queue.failure()).code == "DeviceLost"
        await queue.done()
        await client.until(lambda: queue.credit == m.SLOTS)
        queue.reopen()
        queue.batch(c.Alloc(1, len(data)))
        await queue.upload(1, data)
        assert await queue.download(1, 0, 4) == bytes(4)


async def test_an_idle_node_that_is_killed_is_reported_without_a_program(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        (pid,) = server.zygote._nodes
        os.kill(pid, signal.SIGKILL)
        failed = await queue.failure()
        assert failed.code == "DeviceLost"
        assert "device 'box/cpu/0' is lost: SIGKILL" in failed.message


@pytest.mark.parametrize("number", [0, 1, 3, (1 << 64) - 1])
async def test_a_lost_node_that_claims_to_have_run_nonsense_names_no_program(server, number):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        (session,) = server.hub._sessions.values()
        session._queues[1]._port._ring.set_progress(number, True)
        (pid,) = server.zygote._nodes
        os.kill(pid, signal.SIGKILL)
        failed = await queue.failure()
        assert (failed.code, failed.number) == ("DeviceLost", 2)
        assert "program" not in failed.details


async def test_a_zygote_that_dies_takes_the_devices_and_a_new_one_serves(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, 4))
        await queue.done()
        server.zygote._process.kill()
        failed = await queue.failure()
        assert failed.code == "DeviceLost"
        assert "the process that starts nodes ended, and its nodes with it; open the device again" in failed.message
        queue.reopen()
        queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"anew"))
        assert await queue.read(1, 0, 4) == b"anew"


# -- replies that nobody asked for. A kernel can write on its node's control socket, whose descriptor it can guess; here
# the test writes on it in the kernel's name, which needs no luck.

FORGED = {
    "an ack beyond what was sent": [m.Ack(1, 1000)],
    "another queue": [m.Ack(2, 1)],
    "a result that was not asked for": [m.Result(1, 2, 1.0)],
    "a failure in the future": [m.Failed(1, 1000, "DeviceError", "x", {})],
    "a chunk that is not under way": [m.Slot(1, 9, 0, 4, 100)],
    "credit that it does not have": [m.Credit(1, 1)],
    "a client's message": [m.Batch(1, 1, [])],
    "a compile": [m.Compiled(1, 7, True, "")],
    "no message": [b"\xff\xff"],
    "a message cut off": [b"\x83\x18"],
    "a good message and a bad one in one packet": [encode(m.message_array(m.Ack(1, 2))) + b"\x81\x08"],
    "data nobody asked for in the short form": [express.answer(1, 2, 2, b"data")],
    "no array": [b"\x01"],
    "an unknown kind": [b"\x82\x18\x63\x01"],
    "nothing but repeated acks": [m.Ack(1, 2)] * 1100,
}


def send_all(end, packets):
    with contextlib.suppress(ConnectionError):  # the node may be ended before the last one
        for packet in packets:
            end.send(packet)


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
async def test_a_node_that_forges_a_reply_is_ended_and_others_notice_nothing(server, monkeypatch, forged):
    ends = []
    spawn = server.zygote.spawn

    async def keep_end(control, *args):
        ends.append(control.dup())
        return await spawn(control, *args)

    monkeypatch.setattr(server.zygote, "spawn", keep_end)
    async with server.client() as client, server.client() as other:
        queue, second = await client.open(), await other.open()
        try:
            queue.batch(c.Alloc(1, 4), c.Write(1, 0, b"mine"))
            await queue.done()
            packets = [item if isinstance(item, bytes) else encode(m.message_array(item)) for item in forged]
            ends[0].setblocking(True)
            await trio.to_thread.run_sync(send_all, ends[0], packets)
            failed = await queue.failure()
            assert failed.code == "DeviceLost"
            assert "invalid reply" in failed.message
            second.batch(c.Alloc(1, 4))
            assert await second.read(1, 0, 4) == bytes(4)
        finally:
            for end in ends:
                end.close()


SCRIBBLE = """void scribble(int *p) {
    static const char garbage[] = "\\x83\\x18 what is this";
    for (long fd = 0; fd < 256; fd++) {
        register long flags __asm__("r10") = 0x4000, address __asm__("r8") = 0, size __asm__("r9") = 0;
        long result = 44; /* sendto, the only way of writing that a confined program has */
        __asm__ volatile("syscall" : "+a"(result)
            : "D"(fd), "S"(garbage), "d"(sizeof garbage), "r"(flags), "r"(address), "r"(size) : "rcx", "r11", "memory");
    }
    for (;;) ;
}"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel is written for x86-64")
async def test_a_kernel_that_writes_garbage_on_every_descriptor_is_named(server):
    async with server.client() as client:
        queue = await client.open()
        number = await broken(queue, SCRIBBLE, "scribble")
        failed = await queue.failure()
        assert (failed.code, failed.number) == ("DeviceLost", number)
        assert "program 'scribble' ended the device: its node sent an invalid reply" in failed.message


# -- nothing is left behind


async def test_a_process_number_that_is_somebody_elses_by_now_is_not_killed():
    process = NodeProcess(os.getppid(), parent=os.getpid())
    process.kill()
    process.has_ended(None)
    assert process.ended.is_set()


def failing_once(function):
    """The function, except that the system has no descriptor left the first time."""
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return function(*args, **kwargs)

    return fail


@pytest.mark.parametrize("where", [(Ring, "create"), (zygote.os, "pidfd_open")], ids=["ring", "process"])
async def test_a_device_that_can_not_be_opened_for_want_of_descriptors_is_an_error_that_leaves_the_session(
    server, monkeypatch, where
):
    async with server.client() as client:
        first = await client.open()
        with monkeypatch.context() as patch:
            patch.setattr(*where, failing_once(getattr(*where)))
            client.send(m.Open(2, "box/cpu/0", {}))
            failed, _ = await client.next(m.Failed)
        assert (failed.queue, failed.number, failed.code) == (2, 0, "DeviceLost")
        assert os.strerror(errno.EMFILE) in failed.message
        client.send(m.Close(2))
        await (await client.open(number=3)).done()
        first.batch(c.Alloc(1, 4))
        assert await first.read(1, 0, 4) == bytes(4)
        await eventually(lambda: server.zygote.processes == 2)


async def test_a_zygote_that_can_not_be_started_anew_at_once_is_started_later(server, monkeypatch):
    monkeypatch.setattr(zygote.subprocess, "Popen", failing_once(subprocess.Popen))
    async with server.client() as client:
        queue = await client.open()
        server.zygote._process.kill()
        assert (await queue.failure()).code == "DeviceLost"
        queue.reopen()
        queue.batch(c.Alloc(1, 4))
        assert await queue.read(1, 0, 4) == bytes(4)


async def test_descriptors_beyond_those_that_select_knows_are_served(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.dup(2) for _ in range(1030)]
    try:
        async with server.client() as client:
            queue = await client.open()
            queue.batch(c.Alloc(1, 4))
            await queue.done()
            assert await queue.read(1, 0, 4) == bytes(4)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_compile_of_a_devices_earlier_life_says_nothing_about_its_next(server):
    programs = server.hub._programs
    free, programs._free = programs._free, 0
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, f"/* {id(client)} */ this is not C", "f", "")
        await eventually(lambda: programs._jobs)
        for pid in server.zygote._nodes:
            os.kill(pid, signal.SIGKILL)
        assert (await queue.failure()).code == "DeviceLost"
        queue.reopen()
        queue.program(0, f"/* {id(client)} */" + NOTHING, "nothing", "")
        programs._free = free
        programs._begin()
        await queue.done()
        await eventually(lambda: not programs._jobs)
        queue.launches([0, 0], 1)
        queue.batch(c.Alloc(1, 4))
        assert await queue.read(1, 0, 4) == bytes(4)
        assert [message.ok for message, _ in client._kept if isinstance(message, m.Compiled)] == [True]


async def test_a_session_that_ends_while_it_compiles_ends_the_compiler_too(server):
    programs = server.hub._programs
    before, free = programs.compiled, programs._free
    async with server.client() as client:
        queue = await client.open()
        queue.program(0, f"/* {id(client)} */" + SLOW, "slow", "p")
        await eventually(lambda: any(job.stop for job in programs._jobs.values()))
        client.send(m.Bye())
        await client.wait_closed()
        await eventually(lambda: not programs._jobs and programs._free == free)
    assert programs.compiled == before
    assert not programs._turns._under_way


async def test_programs_that_a_session_leaves_behind_are_not_compiled(server):
    programs = server.hub._programs
    before = programs.compiled
    free, programs._free = programs._free, 0
    async with server.client() as gone, server.client() as other:
        sources = [f"/* {index} of {id(gone)} */" + NOTHING for index in range(20)]
        queue, still = await gone.open(), await other.open()
        for index, source in enumerate(sources):
            queue.program(index, source, "nothing", "")
        still.program(0, sources[7], "nothing", "")
        await eventually(lambda: len(programs._jobs) == len(sources))
        gone.send(m.Bye())
        await gone.wait_closed()
        programs._free = free
        programs._begin()
        compiled, _ = await other.next(m.Compiled)
        assert compiled.ok
        await eventually(lambda: not programs._jobs)
    assert programs.compiled == before + 1


async def test_nothing_more_is_said_about_a_queue_that_was_closed(server):
    async with server.client() as client:
        queue = await client.open()
        await broken_upload(client, queue)
        client.send(m.Close(1))
        await client.open(number=2)
        assert not any(isinstance(message, m.Credit) for message, _ in client._kept)


async def test_a_session_that_holds_too_much_ends_cleanly_with_uploads_under_way(server, monkeypatch, caplog):
    monkeypatch.setattr(session, "_MAX_UNSEEN", 3 << 20)
    async with server.client() as client:
        client.sees = False
        queue = await client.open()
        await broken_upload(client, queue)
        other = await client.open(number=2)
        other.batch(c.Alloc(1, 4 << 20), c.Download(1, 1, 0, 4 << 20))
        closed = await client.wait_closed()
        assert (closed.code, "not seen" in closed.reason) == (1008, True)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def broken_upload(client, queue):
    """An upload of which two chunks came and whose node does not get to them."""
    queue.program(0, SPIN, "spin", "p")
    queue.batch(c.Alloc(1, 4 << 20))
    await queue.done()
    queue.launches([0, 0, 1], 1)
    queue.batch(c.Upload(1, 1, 0, 4 << 20))
    for index in range(2):
        client.send(m.Chunk(1, 1, index << 20), bytes(1 << 20))
