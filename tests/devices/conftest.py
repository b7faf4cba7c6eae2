"""The parts that the tests of devices share: a compiler, the native loop, a zygote, a node that dialled in."""

from __future__ import annotations

import pytest
from contract_kinds import KINDS
from device_rigs import DialInServer, ExecutorRig, Toolbox, ZygoteClient, memfd

from wsgrad.devices import elf, mathlib, native


@pytest.fixture(scope="session")
def toolbox(tmp_path_factory):
    return Toolbox(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def native_program(toolbox):
    return toolbox.build(native.source())


@pytest.fixture
def loop(native_program):
    """A native loop in this process."""
    with memfd(native_program) as fd:
        loop = native.Native(fd, len(native_program))
    yield loop
    loop.close()


@pytest.fixture
def mapped(toolbox):
    """Maps a program into this process and gives the address of its call shim."""
    images = []

    def load(source, signature, *, entry="entry", **keywords):
        images.append(elf.load_bytes(toolbox.program(source, entry, signature, **keywords), mathlib.addresses()))
        return images[-1].symbols["wsgrad_call"]

    yield load
    for image in images:
        elf.unload(image)


@pytest.fixture(scope="session")
def zygote(native_program):
    zygote = ZygoteClient()
    zygote.set_up(native_program)
    yield zygote
    zygote.close()


@pytest.fixture
def node(zygote, toolbox):
    """A local node process."""
    rig = zygote.open_node(toolbox)
    yield rig
    rig.close()


@pytest.fixture(scope="session")
def dialled_in(toolbox, tmp_path_factory):
    server = DialInServer(toolbox, tmp_path_factory.mktemp("cache"))
    yield server
    server.close()


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request):
    """A server that offers a device, of each kind."""
    with KINDS[request.param]("--max-session-memory", "512MiB") as offer:
        yield offer


@pytest.fixture(params=["executor", "process", "dialled in"])
def rig(request, toolbox):
    """A fresh queue, reached in each of the three ways."""
    if request.param == "executor":
        rig = ExecutorRig(toolbox, request.getfixturevalue("loop"))
    elif request.param == "process":
        rig = request.getfixturevalue("zygote").open_node(toolbox)
    else:
        rig = request.getfixturevalue("dialled_in").open_queue()
    yield rig
    rig.close()
