"""Node processes and the zygote that forks them: how they start, crash, stall and end."""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import subprocess
import sys

import pytest
from device_rigs import PATIENCE_SECONDS, ZygoteClient

from wsgrad.devices.ring import UPLOAD_SLOTS, Ring
from wsgrad.transport import cbor
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

# Offered to every program below: system calls without a library.
CALLS = """
static long call(long n, long a, long b, long c, long d, long e, long f) {
    long r;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return r;
}
"""


def wait_until_gone(pid):
    """Wait for a process that is not our child; only its end is seen, not how it ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([pidfd], [], [], PATIENCE_SECONDS)
        assert ready, f"process {pid} still runs"
    finally:
        os.close(pidfd)


def test_a_node_leaves_when_its_socket_closes(zygote, toolbox):
    node = zygote.open_node(toolbox)
    node.close()
    assert node.ended() == 0


def test_a_node_leaves_when_its_queue_is_closed(zygote, toolbox):
    node = zygote.open_node(toolbox)
    node.send(m.Close(node.queue))
    assert node.receive() is None
    assert node.ended() == 0
    node.close()


def test_a_node_says_what_it_has(node):
    assert node.info == {"memory": 1 << 30, "threads": 1, "alignment": 256}


def test_a_crash_is_reported_with_its_signal_and_launch_and_the_next_node_works(zygote, toolbox):
    node = zygote.open_node(toolbox)
    node.program(1, "void entry(int where) { if (where) *(volatile int *)8 = 1; }", "i")
    last = node.launches([1, 0, 0], [1, 0, 0], [1, 0, 1], [1, 0, 0])
    assert os.WTERMSIG(node.ended()) == signal.SIGSEGV
    assert node.ring.progress() == (last - 1, True)
    node.close()
    again = zygote.open_node(toolbox)
    again.run(c.Alloc(1, 4))
    again.close()


def test_an_endless_loop_shows_in_the_progress_and_can_be_killed(zygote, toolbox):
    node = zygote.open_node(toolbox)
    node.program(1, "void entry(volatile int *flag) { *flag = 1; while (*flag) { } }", "p")
    node.run(c.Alloc(1, 4))
    last = node.launches([1, 0, 1])
    while node.ring.progress() != (last, True):
        pass
    os.kill(node.pid, signal.SIGKILL)
    assert os.WTERMSIG(node.ended()) == signal.SIGKILL
    node.close()


def test_progress_says_that_an_idle_node_waits(node):
    node.run(c.Alloc(1, 4))
    while node.ring.progress()[1]:
        pass
    assert node.ring.progress() == (0, False)


def test_grids_on_threads_give_the_same_result_as_on_one(zygote, toolbox):
    node = zygote.open_node(toolbox, threads=4)
    node.program(1, "void entry(int *a, int i) { a[i] += i; }", "px")
    node.run(c.Alloc(1, 40000))
    node.launches(*[[1, 10000, 1]] * 20, *[[1, 3, 1]] * 100)
    expected = [20 * i + (100 * i if i < 3 else 0) for i in range(10000)]
    assert list(struct.unpack("<10000i", node.read(1, 40000, 0)[:40000])) == expected
    node.close()


def test_a_program_that_allocates_without_end_is_refused_and_the_node_lives(node):
    source = (
        CALLS
        + """
    void entry(long *out) {
        long n = 0;
        for (;;) {
            char *p = (char *)call(9, 0, 64 << 20, 3, 0x22, -1, 0);
            if ((unsigned long)p > -4096ul) { out[0] = (long)p; out[1] = n; return; }
            n++;
        }
    }"""
    )
    node.program(1, source, "p")
    node.run(c.Alloc(1, 16))
    node.launches([1, 0, 1])
    result, blocks = node.read_as("2q", 1)
    assert result == -12
    assert 0 < blocks < 64


def test_a_program_can_write_on_the_control_socket_but_only_its_own(node):
    source = CALLS + 'void entry(long *out, int fd) { out[0] = call(44, fd, (long)"\\xff\\xff", 2, 0, 0, 0); }'
    node.program(1, source, "pi")
    node.run(c.Alloc(1, 8))
    for fd in range(3, 40):
        node.launches([1, 0, 1, fd])
    seen = []
    while True:
        packet = node.socket.recv(1 << 17)
        seen.append(packet)
        if packet != b"\xff\xff" and m.parse_message(cbor.decode(packet)) == m.Ack(7, node.number):
            break
    assert seen.count(b"\xff\xff") == 1


def test_a_program_that_closes_every_descriptor_ends_only_its_own_node(zygote, toolbox, node):
    other = zygote.open_node(toolbox)
    other.program(1, CALLS + "void entry(void) { for (int i = 0; i < 64; i++) call(3, i, 0, 0, 0, 0, 0); }", "")
    other.launches([1, 0])
    other.ended()
    other.close()
    node.run(c.Alloc(1, 4))
    assert node.read(1, 4) == bytes(4)


def test_a_node_holds_nothing_open_but_its_socket(node):
    listing = f"/proc/{node.pid}/fd"
    targets = sorted({os.readlink(f"{listing}/{fd}").partition(":")[0] for fd in os.listdir(listing)})
    assert targets == ["/dev/null", "socket"]


def test_reads_past_a_buffer_never_show_another_session(zygote, toolbox, node):
    secret = os.urandom(16)
    other = zygote.open_node(toolbox)
    other.run(c.Alloc(1, 1 << 20), c.Fill(1, 0, 1 << 20, secret))
    other.close()
    source = """
    void entry(long *found, unsigned char *a, const unsigned char *secret, long n) {
        for (long i = 0; i < n; i++) {
            int k = 0;
            while (k < 16 && a[i + k] == secret[k]) k++;
            if (k == 16) found[0]++;
        }
    }"""
    node.program(1, source, "pppq", writes=[0])
    # The whole slab that the buffer is cut from: beyond it lies no memory at all.
    node.run(c.Alloc(1, 8), c.Alloc(2, 64), c.Alloc(3, 16), c.Write(3, 0, secret))
    node.launches([1, 0, 1, 2, 3, 4_000_000, 0])
    assert node.read_as("q", 1) == (1,)


@pytest.mark.parametrize(
    ("packet", "what"),
    [
        (b"\x00", "not an array"),
        (b"\x83", "cut off"),
        (b"\xff" * 10, "not CBOR"),
        (b"\x81\x18\xc8", "unknown kind"),
        (b"\x84\x13\x07\x01\x00\x45abc", "a byte string longer than its packet"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_packet_that_is_no_message_ends_the_node(zygote, toolbox, packet, what):
    node = zygote.open_node(toolbox)
    node.socket.send(packet)
    assert os.waitstatus_to_exitcode(node.ended()) == 70, what
    node.close()


def test_a_chunk_out_of_order_ends_the_node(zygote, toolbox):
    node = zygote.open_node(toolbox)
    node.run(c.Alloc(1, 100))
    node.batch(c.Upload(1, 1, 0, 100))
    node.send(m.Slot(node.queue, 1, 50, UPLOAD_SLOTS[0], 50))
    assert os.waitstatus_to_exitcode(node.ended()) == 70
    node.close()


def test_a_chunk_is_read_where_another_nodes_ring_has_it(node):
    source = Ring.create()
    source.slot(5)[:4] = b"lent"
    fd = source.open_to_read()
    node.send(m.Lend(node.queue, 3), fd=fd)
    os.close(fd)
    node.batch(c.Alloc(1, 4), c.Upload(1, 1, 0, 4))
    node.send(m.Slot(node.queue, 1, 0, 3 * 8 + 5, 4))
    assert node.read(1, 4) == b"lent"
    node.send(m.Lend(node.queue, 3))
    assert node.read(1, 4) == b"lent"
    node.batch(c.Upload(2, 1, 0, 4))
    node.send(m.Slot(node.queue, 2, 0, 3 * 8 + 5, 4))
    assert os.waitstatus_to_exitcode(node.ended()) == 70
    source.close()


def test_a_lent_ring_cannot_be_written_to():
    ring = Ring.create()
    fd = ring.open_to_read()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as view:
        ring.slot(0)[:2] = b"on"
        assert view[:2] == b"on"
    os.close(fd)
    ring.close()


def test_nodes_end_with_their_zygote_and_it_with_its_server(native_program, toolbox):
    zygote = ZygoteClient()
    zygote.set_up(native_program)
    nodes = [zygote.open_node(toolbox) for _ in range(3)]
    nodes[0].program(1, "void entry(volatile int *flag) { *flag = 1; while (*flag) { } }", "p")
    nodes[0].run(c.Alloc(1, 4))
    nodes[0].launches([1, 0, 1])
    zygote.close()
    assert zygote.process.returncode == 0
    for node in nodes:
        wait_until_gone(node.pid)
        node.socket.close()
        node.ring.close()


def test_nodes_end_when_their_zygote_is_killed(native_program, toolbox):
    zygote = ZygoteClient()
    zygote.set_up(native_program)
    node = zygote.open_node(toolbox)
    zygote.process.kill()
    zygote.process.wait()
    wait_until_gone(node.pid)
    node.socket.close()
    node.ring.close()
    zygote.close()


def test_the_zygote_outlives_ctrl_c(native_program, toolbox):
    zygote = ZygoteClient()
    zygote.set_up(native_program)
    node = zygote.open_node(toolbox)
    for pid in (zygote.process.pid, node.pid):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    node.run(c.Alloc(1, 4))
    node.close()
    zygote.close()
    assert zygote.process.returncode == 0


def test_the_zygote_compiles_side_by_side_and_reports_failures(zygote, toolbox):
    good = [zygote.compile(toolbox.compiler, f"void f{i}(void) {{ }}") for i in range(3)]
    bad = zygote.compile(toolbox.compiler, "void f( {")
    visible = '__attribute__((visibility("default")))'
    undefined = zygote.compile(toolbox.compiler, f"int puts(const char *); {visible} void f(void) {{ puts(0); }}")
    for serial in good:
        ok, _, program = zygote.compiled(serial)
        assert ok
        assert program.startswith(b"\x7fELF")
    ok, log, _ = zygote.compiled(bad)
    assert not ok
    assert "source.c:1:" in log
    ok, log, _ = zygote.compiled(undefined)
    assert not ok
    assert "puts" in log


def test_no_node_starts_before_the_native_loop_is_there(toolbox):
    zygote = ZygoteClient()
    serial = zygote.next_serial()
    reader, writer = os.pipe()
    zygote.send(["node", serial, {}], reader, writer)
    os.close(reader)
    os.close(writer)
    (_, _, text), _ = zygote.wait_for("error", serial)
    assert "native loop" in text
    zygote.close()


def test_a_zygote_stays_small():
    # What it imports is in every node process.
    code = "import sys, wsgrad.devices.zygote; print(*{'numpy', 'trio', 'asyncio', 'ssl'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
