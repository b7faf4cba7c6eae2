"""Programs that really try to get out of a node process: each must end with SIGSYS and nothing else."""

from __future__ import annotations

import os
import signal

import pytest
from test_node import CALLS

from wsgrad.devices import linux
from wsgrad.devices.confine import probe_node_confinement
from wsgrad.transport import commands as c

pytestmark = pytest.mark.skipif(linux.MACHINE != "x86_64", reason="the attacks are written for x86-64")

ATTACKS = {
    "open a file": 'call(2, (long)"/etc/passwd", 0, 0, 0, 0, 0)',
    "openat": 'call(257, -100, (long)"/etc/passwd", 0, 0, 0, 0)',
    "openat2": 'call(437, -100, (long)"/etc/passwd", (long)zeros, 24, 0, 0)',
    "create a file": 'call(85, (long)"/tmp/wsgrad-was-here", 0644, 0, 0, 0, 0)',
    "shared memory of others": 'call(257, -100, (long)"/dev/shm/x", 2, 0, 0, 0)',
    "its own memory through /proc": 'call(257, -100, (long)"/proc/self/mem", 2, 0, 0, 0)',
    "stat a file": 'call(262, -100, (long)"/etc/passwd", (long)zeros, 0, 0, 0)',
    "read a link": 'call(89, (long)"/proc/self/exe", (long)zeros, 64, 0, 0, 0)',
    "socket": "call(41, 2, 1, 0, 0, 0, 0)",
    "socketpair": "call(53, 1, 1, 0, (long)zeros, 0, 0)",
    "fork": "call(57, 0, 0, 0, 0, 0, 0)",
    "vfork": "call(58, 0, 0, 0, 0, 0, 0)",
    "clone": "call(56, 17, 0, 0, 0, 0, 0)",
    "clone3": "call(435, (long)zeros, 64, 0, 0, 0, 0)",
    "exec": 'call(59, (long)"/bin/true", 0, 0, 0, 0, 0)',
    "execveat": 'call(322, -100, (long)"/bin/true", 0, 0, 0, 0)',
    "ptrace its parent": "call(101, 16, 1, 0, 0, 0, 0)",
    "kill": "call(62, -1, 9, 0, 0, 0, 0)",
    "kill a thread": "call(200, 1, 9, 0, 0, 0, 0)",
    "prctl": "call(157, 4, 1, 0, 0, 0, 0)",
    "read another process": "call(310, 1, (long)zeros, 0, (long)zeros, 0, 0)",
    "write another process": "call(311, 1, (long)zeros, 0, (long)zeros, 0, 0)",
    "io_uring": "call(425, 8, (long)zeros, 0, 0, 0, 0)",
    "bpf": "call(321, 0, 0, 0, 0, 0, 0)",
    "unshare": "call(272, 0x10000000, 0, 0, 0, 0, 0)",
    "setns": "call(308, 3, 0, 0, 0, 0, 0)",
    "mount": "call(165, 0, 0, 0, 0, 0, 0)",
    "memfd": 'call(319, (long)"x", 0, 0, 0, 0, 0)',
    "dup": "call(32, 3, 0, 0, 0, 0, 0)",
    "ioctl": "call(16, 3, 0x5401, (long)zeros, 0, 0, 0)",
    "a signal handler": "call(13, 9, 0, 0, 8, 0, 0)",
    "raise its limits": "call(160, 9, (long)zeros, 0, 0, 0, 0)",
    "another filter": "call(317, 1, 0, (long)zeros, 0, 0, 0)",
    "anonymous memory to execute": "call(9, 0, 4096, 7, 0x22, -1, 0)",
    "anonymous memory to execute later": "call(10, call(9, 0, 4096, 3, 0x22, -1, 0), 4096, 5, 0, 0, 0)",
    "a file mapped to write and execute": "call(9, 0, 4096, 7, 2, 3, 0)",
    "an x32 call": "call(0x40000000 | 39, 0, 0, 0, 0, 0, 0)",
    "a 32-bit call": '({ long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20) : "memory"); r; })',
    "write to a descriptor": 'call(1, 0, (long)"x", 1, 0, 0, 0)',
    "read from a descriptor": "call(0, 3, (long)zeros, 1, 0, 0, 0)",
    "send a descriptor": "call(46, 3, (long)zeros, 0, 0, 0, 0)",
    "a call that does not exist": "call(999, 0, 0, 0, 0, 0, 0)",
}
SOURCE = (
    CALLS
    + "static long zeros[64];\nvoid entry(long *out, int which) {\n    switch (which) {\n"
    + "".join(f"    case {index}: out[0] = {attack}; break;\n" for index, attack in enumerate(ATTACKS.values()))
    + "    default: out[0] = 1234;\n    }\n}\n"
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_escape_ends_the_process(zygote, toolbox, attack):
    node = zygote.open_node(toolbox)
    node.program(1, SOURCE, "pi")
    node.run(c.Alloc(1, 8))
    node.launches([1, 0, 1, list(ATTACKS).index(attack)])
    status = node.ended()
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSYS
    node.close()


def test_an_escape_on_a_worker_thread_ends_the_process(zygote, toolbox):
    node = zygote.open_node(toolbox, threads=4)
    # The caller's thread keeps busy with what it claims, so that workers come to the rest.
    node.program(1, SOURCE.replace("long *out, int which", "long *out, int which, long i"), "pix")
    node.run(c.Alloc(1, 8))
    node.launches([1, 10000, 1, list(ATTACKS).index("open a file")])
    assert os.WTERMSIG(node.ended()) == signal.SIGSYS
    node.close()


def test_a_harmless_program_of_the_same_source_runs(node):
    node.program(1, SOURCE, "pi")
    node.run(c.Alloc(1, 8))
    node.launches([1, 0, 1, len(ATTACKS)])
    assert node.read_as("q", 1) == (1234,)


def test_this_machine_confines_nodes():
    # The development machines can; a machine that can't must say what is missing instead of failing the attacks.
    assert probe_node_confinement() == []


def test_nothing_was_written():
    assert not os.path.exists("/tmp/wsgrad-was-here")


def test_a_kernel_without_landlock_is_named(monkeypatch):
    monkeypatch.setattr(linux, "landlock_version", lambda: 0)
    (missing,) = probe_node_confinement()
    assert "Landlock" in missing


def test_a_machine_without_a_filter_is_named(monkeypatch):
    monkeypatch.setattr(linux, "MACHINE", "riscv64")
    (missing,) = probe_node_confinement()
    assert "riscv64" in missing
