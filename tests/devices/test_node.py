"""A real node process forked from a real zygote, driven packet by packet."""

from __future__ import annotations

import os
import struct

import pytest

from wsgrad.devices.ring import SLOT_BYTES
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

DOUBLE = (
    "void entry(float *restrict y, const float *restrict x, int n) { for (int i = 0; i < n; i++) y[i] = 2 * x[i]; }"
)


def test_a_program_computes_what_it_should(node, toolbox):
    node.load(1, toolbox.program(DOUBLE, "entry", "ppi"), "ppi", writes=[0])
    node.run(c.Alloc(1, 16), c.Alloc(2, 16), c.Write(2, 0, struct.pack("<4f", 1, 2, 3, 4)))
    node.launches([1, 0, 1, 2, 4], 1)
    assert struct.unpack("<4f", node.read(1, 16)) == (2, 4, 6, 8)


def test_a_large_array_survives_upload_and_download(node):
    data = os.urandom(5 * SLOT_BYTES + 12345)
    node.run(c.Alloc(1, len(data)))
    node.upload(1, data)
    assert node.download(1, len(data)) == data


def test_the_process_leaves_when_its_socket_closes(zygote):
    node = zygote.open_node()
    node.close()
    assert node.ended() == 0


def test_a_crash_is_reported_with_its_signal_and_the_zygote_lives(zygote, toolbox):
    node = zygote.open_node()
    node.load(1, toolbox.program("void entry(void) { *(volatile int *)8 = 1; }", "entry", ""), "")
    node.launches([1, 0], 1)
    assert os.WTERMSIG(node.ended()) == 11
    assert node.receive() is None or node.receive() is None
    assert node.ring.progress() == (2, True)
    node.close()
    again = zygote.open_node()
    again.close()
    assert again.ended() == 0
