"""What a process that loads a driver can't do, tried in one that is confined for it; each way out must be refused."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from contract_kinds import KINDS
from test_node import CALLS

from wsgrad.devices import confine, linux, seccomp
from wsgrad.server.config import Config
from wsgrad.server.startup import settle

pytestmark = pytest.mark.skipif(linux.MACHINE not in seccomp.ARCHITECTURES, reason="there is no filter for it")

ATTEMPTS = """
import ctypes, errno, json, mmap, os, resource, signal, socket, subprocess, sys, threading
from wsgrad.devices import linux, seccomp
from wsgrad.devices.confine import confine_driver

numbers = seccomp.ARCHITECTURES[linux.MACHINE].numbers
libc = ctypes.CDLL(None, use_errno=True)
server, scratch, secret, pair = int(sys.argv[1]), sys.argv[2] or None, sys.argv[3], socket.socketpair()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[4])
listener.listen()

def call(name, *arguments):
    ctypes.set_errno(0)
    pointers = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    result = libc.syscall(numbers[name], *pointers)
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]

def tried(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

zeros = bytes(128)
attempts = {
    "read a file": lambda: tried(lambda: open(secret).close()),
    "write a file": lambda: tried(lambda: open(secret + "-new", "w").close()),
    "the machine's secrets": lambda: tried(lambda: open("/etc/shadow").close()),
    "a disk": lambda: tried(lambda: open("/dev/full", "rb").close()),
    "shared memory": lambda: tried(lambda: os.mkdir("/dev/shm/wsgrad-new")),
    "another's memory through /proc": lambda: tried(lambda: open(f"/proc/{server}/mem", "rb").close()),
    "another's environment": lambda: tried(lambda: open(f"/proc/{server}/environ", "rb").close()),
    "a signal to the server": lambda: tried(lambda: os.kill(server, signal.SIGCONT)),
    "a signal to its group": lambda: tried(lambda: os.kill(0, signal.SIGCONT)),
    "a signal to everybody": lambda: call("kill", -1, 0),
    "a signal to a thread": lambda: call("tgkill", server, server, 0),
    "a signal through a descriptor": lambda: call("fcntl", pair[0].fileno(), 8, server),
    "a signal from a queue": lambda: call("rt_sigqueueinfo", server, 0, zeros),
    "pidfd": lambda: call("pidfd_open", server, 0),
    "ptrace": lambda: call("ptrace", 16, server, 0, 0),
    "process_vm_readv": lambda: call("process_vm_readv", server, zeros, 0, zeros, 0, 0),
    "process_vm_writev": lambda: call("process_vm_writev", server, zeros, 0, zeros, 0, 0),
    "limits of the server": lambda: tried(lambda: resource.prlimit(server, resource.RLIMIT_NOFILE)),
    "processors of the server": lambda: tried(lambda: os.sched_setaffinity(server, {0, 1})),
    "priority of the server": lambda: tried(lambda: os.setpriority(os.PRIO_PROCESS, server, 19)),
    "io_uring": lambda: call("io_uring_setup", 8, bytes(256)),
    "bpf": lambda: call("bpf", 0, zeros, 128),
    "perf": lambda: call("perf_event_open", zeros, 0, -1, -1, 0),
    "userfaultfd": lambda: call("userfaultfd", 1),
    "keys": lambda: call("keyctl", 0, 0, 0),
    "mount": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, 0),
    "a new mount": lambda: call("fsopen", b"tmpfs", 0),
    "namespaces": lambda: tried(lambda: linux.unshare(linux.CLONE_NEWUSER)),
    "another's namespace": lambda: call("setns", pair[0].fileno(), 0),
    "chroot": lambda: call("chroot", b"/tmp"),
    "memory of System V": lambda: call("shmget", 0, 4096, 0o1600),
    "a message queue": lambda: call("msgget", 0, 0o1600),
    "TCP": lambda: tried(lambda: socket.socket(socket.AF_INET).close()),
    "UDP": lambda: tried(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()),
    "netlink": lambda: tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()),
    "a datagram to a service": lambda: tried(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).close()),
    "the same from a pair": lambda: tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)),
    "a service": lambda: tried(lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[4])),
    "being a service": lambda: tried(lambda: socket.socket(socket.AF_UNIX).bind("\\0wsgrad-new")),
    "typing into a terminal": lambda: call("ioctl", pair[0].fileno(), 0x5412, b"x"),
    "a program from memory": lambda: call("execveat", -1, b"/bin/true", 0, 0, 0),
    "a program": lambda: tried(lambda: os.execv("/bin/true", ["true"])),
    "a process": lambda: tried(lambda: os._exit(0) if os.fork() == 0 else os.wait()),
}
allowed = {
    "a driver's file": lambda: tried(lambda: os.listdir("/usr/lib")),
    "who it runs as": lambda: tried(lambda: open("/etc/passwd").close()),
    "names of devices": lambda: tried(lambda: os.listdir("/dev")),
    "its own status": lambda: tried(lambda: open("/proc/self/status").close()),
    "memory to execute": lambda: tried(lambda: mmap.mmap(-1, 4096, prot=7).close()),
    "memory with a descriptor": lambda: tried(lambda: os.close(os.memfd_create("x"))),
    "a pair of streams": lambda: tried(socket.socketpair),
    "its own processors": lambda: tried(lambda: os.sched_setaffinity(0, os.sched_getaffinity(0))),
    "a signal to itself": lambda: tried(lambda: os.kill(os.getpid(), 0)),
    "its own limits": lambda: tried(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
}
if scratch:
    del attempts["a program"], attempts["a process"]
    allowed["a program"] = lambda: tried(lambda: subprocess.run(["/bin/true"], check=True))
    allowed["scratch"] = lambda: tried(lambda: open(scratch + "/new", "w").close())
confine_driver(keep=(1, 2, listener.fileno(), *(end.fileno() for end in pair)), scratch=scratch)
found = {}
def attempt():
    for name, action in (attempts | allowed).items():
        found[name] = action()
thread = threading.Thread(target=attempt)  # drivers have threads
thread.start()
thread.join()
print(json.dumps([found, list(allowed)]))
"""
MISSING = {"done", "EBADF", "EFAULT", "EINVAL", "ENOTTY", "ESRCH", "ENOSYS"}
"""What would show that a call was not refused but only failed."""


@pytest.fixture(scope="module", params=[False, True], ids=["webgpu", "tinygrad"])
def found(request, tmp_path_factory):
    if linux.landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    directory = tmp_path_factory.mktemp("confined")
    (directory / "secret").write_text("secret")
    scratch = directory / "scratch"
    scratch.mkdir()
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    arguments = [
        str(bystander.pid),
        str(scratch) * request.param,
        str(directory / "secret"),
        str(directory / "service"),
    ]
    try:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(ATTEMPTS), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=directory,
        )
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")
    assert result.returncode == 0, result.stderr
    assert bystander.returncode == 0
    return json.loads(result.stdout)


def test_each_way_out_is_refused(found):
    outcomes, allowed = found
    through = {name: outcome for name, outcome in outcomes.items() if name not in allowed and outcome in MISSING}
    assert not through
    assert outcomes["a service"] == "ECONNREFUSED"


def test_what_drivers_need_is_left(found):
    outcomes, allowed = found
    assert {name: outcomes[name] for name in allowed} == dict.fromkeys(allowed, "done")


def test_a_process_with_threads_is_not_taken_for_confined():
    script = """
import threading, wsgrad.devices.confine as confine
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
confine.confine_driver(keep=(1, 2))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "threads were started before" in result.stderr


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("starts_programs", [False, True])
def test_the_filter_of_each_machine_is_well_formed(machine, starts_programs):
    program = seccomp.driver_filter(seccomp.ARCHITECTURES[machine], process=77, starts_programs=starts_programs)
    steps = [program[at : at + 8] for at in range(0, len(program), 8)]
    assert len(steps) < 4096
    for at, step in enumerate(steps):
        code, yes, no = int.from_bytes(step[:2], "little"), step[2], step[3]
        if code in (0x15, 0x35, 0x45):
            assert at + 1 + max(yes, no) < len(steps)
    assert int.from_bytes(steps[-1][:2], "little") == 0x06


def test_what_a_system_lacks_to_confine_drivers_is_said_at_start(monkeypatch):
    assert confine.probe_driver_confinement() == []
    _, warnings = settle(Config(devices=("webgpu",)))
    assert warnings == []
    monkeypatch.setattr(linux, "landlock_version", lambda: 0)
    monkeypatch.setattr(linux, "MACHINE", "riscv64")
    missing = confine.probe_driver_confinement()
    assert "Landlock" in missing[0]
    assert "riscv64" in missing[1]
    config, [warning] = settle(Config(devices=("webgpu",)))
    assert config.devices == ("webgpu",)
    assert "webgpu" in warning
    assert "Landlock" in warning


@pytest.mark.skipif(linux.MACHINE != "x86_64", reason="the attack is written for x86-64")
def test_machine_code_in_a_drivers_process_gets_no_further(tmp_path):
    if linux.landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "secret").write_text("secret")
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    calls = {
        "open": f'2, (long)"{tmp_path / "secret"}", 0, 0, 0, 0, 0',
        "memory of another": f'2, (long)"/proc/{bystander.pid}/mem", 2, 0, 0, 0, 0',
        "kill": f"62, {bystander.pid}, 9, 0, 0, 0, 0",
        "ptrace": f"101, 16, {bystander.pid}, 0, 0, 0, 0",
        "socket": "41, 2, 1, 0, 0, 0, 0",
        "io_uring": "425, 8, (long)zeros, 0, 0, 0, 0",
        "unshare": "272, 0x10000000, 0, 0, 0, 0, 0",
    }
    cases = "".join(f"out[{at}] = call({call});\n" for at, call in enumerate(calls.values()))
    source = f"{CALLS}\nstatic long zeros[64];\nvoid escape(long *out) {{ {cases} }}"
    try:
        with KINDS["tinygrad-cpu"]() as offer, offer.connected() as device:
            out = device.zeros(len(calls), np.int64)
            device.program(source, "escape")(out)
            outcomes = dict(zip(calls, out.numpy().tolist(), strict=True))
            assert set(outcomes.values()) <= {-errno.EPERM, -errno.EACCES}, outcomes
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")
