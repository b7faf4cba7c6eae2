"""Programs that try to get out of a real server's devices, beside a session that works on: each fails by name."""

import os
import socket

import numpy as np
import pytest
from server_process import running_server

import wsgrad
from wsgrad.devices import linux

pytestmark = pytest.mark.skipif(linux.MACHINE != "x86_64", reason="the attacks are written for x86-64")

SECRET = "wsgrad-secret-0f343b0931126a20"
CALL = """
static long call(long n, long a, long b, long c, long d, long e, long f) {
    long r;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return r;
}
static long zeros[64];
"""
KILLED = {
    "files": 'call(257, -100, (long)"PATH", 0, 0, 0, 0)',
    "making files": 'call(85, (long)"PATH-new", 0644, 0, 0, 0, 0)',
    "/proc": 'call(257, -100, (long)"/proc/SERVER/mem", 2, 0, 0, 0)',
    "sockets": "call(41, 2, 1, 0, 0, 0, 0)",
    "unix sockets": "call(41, 1, 1, 0, 0, 0, 0)",
    "fork": "call(57, 0, 0, 0, 0, 0, 0)",
    "clone": "call(56, 17, 0, 0, 0, 0, 0)",
    "exec": 'call(59, (long)"/bin/true", 0, 0, 0, 0, 0)',
    "ptrace": "call(101, 16, SERVER, 0, 0, 0, 0)",
    "signals": "call(62, SERVER, 9, 0, 0, 0, 0)",
    "signals to all": "call(62, -1, 9, 0, 0, 0, 0)",
    "another session's memory": "call(310, SERVER, (long)zeros, 1, (long)zeros, 1, 0)",
    "writing another's memory": "call(311, SERVER, (long)zeros, 1, (long)zeros, 1, 0)",
    "shared memory": "call(29, 0, 4096, 01600, 0, 0, 0)",
    "limits of others": "call(302, SERVER, 7, (long)zeros, 0, 0, 0)",
    "io_uring": "call(425, 8, (long)zeros, 0, 0, 0, 0)",
    "bpf": "call(321, 0, (long)zeros, 64, 0, 0, 0)",
    "namespaces": "call(272, 0x10000000, 0, 0, 0, 0, 0)",
    "descriptors": "call(46, 3, (long)zeros, 0, 0, 0, 0)",
    "code made at run time": "call(9, 0, 4096, 7, 0x22, -1, 0)",
}
# Packets on the process's own control socket, as its node would send them: a kernel finds it by trying.
FORGED = {
    "an acknowledgement": r'"\x83\x18\x1a\x01\x19\xff\xff", 7',
    "data nobody asked for": r'"\x84\x18\x1b\x01\x19\xff\xff\x00\x41x", 9',
    "another queue's": r'"\x83\x18\x1a\x02\x01", 5',
    "no message": r'"\xff\xff", 2',
    "a list that announces more than there is": r'"\x9b\x7f\xff\xff\xff\xff\xff\xff\xff", 9',
}
LEAKS = {
    "#include": '#include "PATH"\nvoid leak(char *out) {}',
    "#include <>": "#include <PATH>\nvoid leak(char *out) {}",
    ".incbin": '__asm__(".section .rodata\\nstolen: .incbin \\"PATH\\"");\nvoid leak(char *out) {}',
    ".include": '__asm__(".include \\"PATH\\"");\nvoid leak(char *out) {}',
    "#embed": 'static const char stolen[] = {\n#embed "PATH"\n};\nvoid leak(char *out) { out[0] = stolen[0]; }',
}
BOMBS = {
    "macros": "#define A x x x x x x x x x x\n"
    + "".join(f"#define {b} {f'{a} ' * 10}\n" for a, b in zip("ABCDEFGH", "BCDEFGHI", strict=True))
    + "void bomb(char *out) { I }",
    "includes of itself": "#include __FILE__\n#include __FILE__\nvoid bomb(char *out) {}",
    "repetition": '__asm__(".rept 2000000000\\n.quad 0\\n.endr");\nvoid bomb(char *out) {}',
    "a huge array": "char big[1ul << 40] = {1};\nvoid bomb(char *out) {}",
    "nesting": "void bomb(char *out) { out[0] = " + "(" * 100_000 + "1" + ")" * 100_000 + "; }",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("escapes")
    (directory / "secret").write_text(SECRET)
    with running_server(directory, "--device", "cpu", "--cpu-threads", "1", "--compile-seconds", "1") as process:
        process.secret = str(directory / "secret")
        yield process
        assert process.process.poll() is None
        assert not os.path.exists(process.secret + "-new")
        assert "Traceback" not in process.log()


@pytest.fixture(scope="module")
def bystander(server):
    """A session that works on, whatever others try; gives a function that has it work."""
    with wsgrad.connect(server.ready["url"]) as other:
        device = other.devices["cpu"]
        add = device.program("void add(int *x, int by, int i) { x[i] += by; }", "add")
        kept = device.array(np.arange(5000, dtype=np.int32))
        rounds = 0

        def work():
            nonlocal rounds
            rounds += 1
            add(kept, 3, wsgrad.INDEX, grid=len(kept))
            assert (kept.numpy() == np.arange(5000) + 3 * rounds).all()

        work()
        yield work
        work()


@pytest.fixture(scope="module")
def attacker(server):
    with wsgrad.connect(server.ready["url"]) as connected:
        yield connected.devices["cpu"]


def fill_in(text, server):
    return text.replace("PATH", server.secret).replace("SERVER", str(server.process.pid))


@pytest.fixture(scope="module")
def escape(server, attacker):
    cases = "".join(f"case {at}: out[0] = {attack}; break;\n" for at, attack in enumerate(KILLED.values()))
    source = f"{CALL}\nvoid escape(long *out, int which) {{ switch (which) {{ {cases} default: out[0] = 77; }} }}"
    return attacker.program(fill_in(source, server), "escape")


@pytest.mark.parametrize("way", KILLED)
def test_a_way_out_ends_the_program_and_nothing_else(server, bystander, attacker, escape, way):
    out = attacker.zeros(1, np.int64)
    escape(out, list(KILLED).index(way))
    with pytest.raises(wsgrad.DeviceLost, match=r"escape.*SIGSYS"):
        out.numpy()
    bystander()
    attacker.reopen()
    out = attacker.zeros(1, np.int64)
    escape(out, len(KILLED))
    assert out.numpy().tolist() == [77]


@pytest.mark.parametrize("reply", FORGED)
def test_a_forged_reply_costs_the_forger_its_device_and_nobody_else(server, bystander, attacker, reply):
    source = f"{CALL}\nvoid forge(int fd) {{ call(44, fd, (long){FORGED[reply]}, 0, 0, 0); }}"
    forge = attacker.program(source, "forge")
    out = attacker.zeros(1, np.int64)
    for fd in range(3, 40):
        forge(fd)
    with pytest.raises(wsgrad.DeviceLost, match="invalid reply"):
        out.numpy()
    bystander()
    attacker.reopen()
    assert attacker.zeros(1).numpy().tolist() == [0]


def test_memory_of_others_is_nowhere_in_a_process(server, bystander, attacker):
    with wsgrad.connect(server.ready["url"]) as other:
        theirs = other.devices["cpu"].array(np.frombuffer(SECRET.encode() * 3000, np.uint8))
        theirs.numpy()
        peek = attacker.program(
            "void peek(char *out, const char *in, long n) { for (long i = 0; i < n; i++) out[i] = in[i]; }", "peek"
        )
        lost = []
        for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            out, small = attacker.zeros(nbytes, np.uint8), attacker.zeros(64, np.uint8)
            peek(out, small, np.int64(nbytes))
            try:
                assert SECRET.encode() not in out.numpy().tobytes()
            except wsgrad.DeviceLost as error:
                lost.append(str(error))
                attacker.reopen()
        assert all("peek" in text and "SIGSEGV" in text for text in lost)
        bystander()
        assert theirs.numpy().tobytes() == SECRET.encode() * 3000


@pytest.mark.parametrize("way", LEAKS)
def test_a_source_can_not_read_a_file(server, bystander, attacker, way):
    program = attacker.program(fill_in(LEAKS[way], server), "leak")
    with pytest.raises(wsgrad.CompileError) as raised:
        program.ready()
    assert SECRET not in str(raised.value)
    bystander()


def test_a_source_can_not_tell_whether_a_file_exists(server, bystander, attacker):
    source = (
        '#if __has_include("PATH") || __has_include("/etc/passwd")\n#define THERE 1\n#else\n#define THERE 2\n#endif\n'
    )
    out = attacker.zeros(1, np.int32)
    attacker.program(fill_in(source, server) + "void probe(int *out) { *out = THERE; }", "probe")(out)
    assert out.numpy().tolist() == [2]
    bystander()


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_compiler_bomb_is_an_error_by_name_and_nobody_waits_for_it(server, bystander, attacker, bomb):
    program = attacker.program(BOMBS[bomb], "bomb")
    bystander()
    with pytest.raises(wsgrad.CompileError):
        program.ready(timeout=60)
    bystander()
    assert attacker.zeros(1).numpy().tolist() == [0]


def test_the_server_still_lets_others_in(server, bystander):
    with wsgrad.connect(server.ready["url"]) as new:
        assert new.devices["cpu"].array(np.arange(4)).numpy().tolist() == [0, 1, 2, 3]
    host, port = server.ready["url"].removeprefix("ws://").partition("/")[0].split(":")
    socket.create_connection((host, int(port)), timeout=10).close()
    bystander()
