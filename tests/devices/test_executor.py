"""What a queue does with commands, its executor called directly, in a node process, or in a node that dialled in."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest

from wsgrad.devices.ring import SLOT_BYTES
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

DOUBLE = (
    "void entry(float *restrict y, const float *restrict x, int n) { for (int i = 0; i < n; i++) y[i] = 2 * x[i]; }"
)
ADD_ONE = "void entry(int *a, int n) { for (int i = 0; i < n; i++) a[i] += 1; }"
SUM = (
    "void entry(int *restrict y, const int *restrict x, int n) { for (int i = 0; i < n; i++) y[i] = x[n - 1 - i] + 1; }"
)


def failures(messages):
    return [message for message in messages if isinstance(message, m.Failed)]


def test_a_program_computes_what_it_should(rig):
    rig.program(1, DOUBLE, "ppi", writes=[0])
    rig.run(c.Alloc(1, 16), c.Alloc(2, 16), c.Write(2, 0, struct.pack("<4f", 1, 2, 3, 4)))
    rig.launches([1, 0, 1, 2, 4])
    assert rig.read_as("4f", 1) == (2, 4, 6, 8)


def test_new_memory_is_zeroed_even_where_it_was_used_before(rig):
    for nbytes in (4, 5000, 3 << 20):
        rig.run(c.Alloc(1, nbytes), c.Fill(1, 0, nbytes, b"\xff"))
        rig.run(c.Free(1))
        rig.run(c.Alloc(1, nbytes))
        assert rig.download(1, nbytes) == bytes(nbytes)
        rig.run(c.Free(1))


def test_writes_fills_and_copies_reach_the_right_bytes(rig):
    rig.run(
        c.Alloc(1, 100),
        c.Write(1, 10, b"hello"),
        c.Fill(1, 20, 8, b"ab"),
        c.Fill(1, 32, 48, bytes(range(16))),
        c.Copy(1, 12, 1, 10, 5),
    )
    expected = bytearray(100)
    expected[10:15] = b"hello"
    expected[20:28] = b"abababab"
    expected[32:80] = bytes(range(16)) * 3
    expected[12:17] = b"hello"
    assert rig.read(1, 100) == bytes(expected)


def test_views_share_bytes_and_keep_their_buffer_alive(rig):
    rig.program(1, ADD_ONE, "pi")
    rig.run(c.Alloc(1, 40), c.View(2, 1, 8, 16), c.Write(2, 4, struct.pack("<i", 5)))
    rig.launches([1, 0, 2, 4])
    assert rig.read_as("10i", 1) == (0, 0, 1, 6, 1, 1, 0, 0, 0, 0)
    rig.run(c.Free(1), c.Alloc(1, 40))
    assert rig.read_as("4i", 2) == (1, 6, 1, 1)
    assert failures(rig.run(c.View(3, 2, 12, 8)))


def test_buffers_of_no_bytes_work(rig):
    rig.program(1, DOUBLE, "ppi")
    rig.run(c.Alloc(1, 0), c.Alloc(2, 0), c.Write(1, 0, b""), c.Fill(1, 0, 0, b"x"), c.Copy(1, 0, 2, 0, 0))
    rig.launches([1, 0, 1, 1, 0])
    assert rig.read(1, 0) == b""
    assert rig.download(1, 0) == b""
    rig.settle()
    rig.upload(1, b"")
    assert not failures(rig.settle())


@pytest.mark.parametrize("nbytes", [1, SLOT_BYTES, 6 * SLOT_BYTES + 12345])
def test_arrays_survive_upload_and_download(rig, nbytes):
    data = os.urandom(nbytes)
    rig.run(c.Alloc(1, nbytes + 10))
    rig.upload(1, data, offset=7)
    rig.settle()
    assert rig.download(1, nbytes, offset=7) == data
    rig.settle()
    assert rig.read(1, 7) == bytes(7)
    assert rig.read(1, 3, offset=nbytes + 7) == bytes(3)


def test_a_download_without_credit_holds_the_queue_and_an_abort_ends_it(rig):
    rig.run(c.Alloc(1, 8 * SLOT_BYTES), c.Alloc(2, 8))
    download = rig.batch(c.Download(5, 1, 0, 8 * SLOT_BYTES))
    for index in range(m.SLOTS):
        assert rig.receive_chunk()[:2] == (5, index * SLOT_BYTES)
    rig.program(1, ADD_ONE, "pi")
    rig.batch(c.Write(2, 0, struct.pack("<2i", 1, 2)))
    rig.launches([1, 0, 2, 2])
    rig.send(m.Credit(rig.queue, 1))
    assert rig.receive_chunk()[1] == m.SLOTS * SLOT_BYTES
    assert all(not isinstance(message, m.Ack) or message.number < download for message, _ in rig.received)
    assert rig.silent()
    rig.send(m.Abort(rig.queue, 5))
    rig.settle()
    rig.send(m.Credit(rig.queue, m.SLOTS))
    assert rig.read_as("2i", 2) == (2, 3)
    assert len(rig.download(1, 8 * SLOT_BYTES)) == 8 * SLOT_BYTES


def test_an_aborted_upload_counts_as_done(rig):
    rig.run(c.Alloc(1, 3 * SLOT_BYTES))
    rig.batch(c.Upload(9, 1, 0, 3 * SLOT_BYTES))
    rig.send_chunk(9, 0, b"x" * SLOT_BYTES)
    rig.send(m.Abort(rig.queue, 9))
    rig.settle()
    assert rig.upload_credit == m.SLOTS
    assert rig.read(1, 4) == b"xxxx"


def test_an_error_stops_the_queue_until_it_is_cleared(rig):
    rig.program(1, ADD_ONE, "pi", name="increment")
    rig.run(c.Alloc(1, 4), c.Alloc(2, 4))
    bad = rig.batch(c.Read(1, 2, 4))
    rig.launches([1, 0, 1, 1])
    messages = rig.run(c.Write(1, 0, b"abcd"), c.Read(1, 0, 4), c.Alloc(3, 4), c.Free(2))
    (failed,) = failures(messages)
    assert (failed.number, failed.code) == (bad, "DeviceError")
    assert "outside buffer 1 of 4 bytes" in failed.message
    assert failed.details["operation"] == "read"
    assert not any(isinstance(message, m.ReadData) for message in messages)
    rig.run(c.Clear(bad + 1), c.Write(1, 0, b"abcd"))
    rig.run(c.Clear(bad))
    assert rig.read(1, 4) == bytes(4)
    assert rig.read(3, 4) == bytes(4)
    assert "no buffer 2" in failures(rig.run(c.Read(2, 0, 4)))[0].message


def test_chunks_of_an_upload_behind_an_error_are_thrown_away_and_their_credit_returns(rig):
    rig.run(c.Alloc(1, 6 * SLOT_BYTES))
    bad = rig.batch(c.Read(2, 0, 4))
    upload = rig.upload(1, b"x" * (6 * SLOT_BYTES))
    rig.wait_for(m.Ack, lambda message: message.number >= upload)
    assert rig.upload_credit == m.SLOTS
    rig.run(c.Clear(bad))
    assert rig.read(1, 4) == bytes(4)


def test_chunks_of_a_failed_upload_are_thrown_away(rig):
    rig.run(c.Alloc(1, 10))
    bad = rig.batch(c.Upload(3, 1, 0, 20))
    rig.send_chunk(3, 0, b"y" * 20)
    assert failures(rig.settle())[0].details["operation"] == "upload"
    rig.run(c.Clear(bad))
    assert rig.read(1, 10) == bytes(10)


def test_what_the_server_refused_fails_in_its_place(rig):
    rig.run(c.Alloc(1, 4))
    rig.number += 1
    rig.send(m.Fail(rig.queue, rig.number, "LimitExceeded", "too much", {"limit": 5}))
    messages = rig.run(c.Write(1, 0, b"abcd"))
    assert failures(messages) == [m.Failed(rig.queue, rig.number - 1, "LimitExceeded", "too much", {"limit": 5})]
    rig.run(c.Clear(rig.number - 1))
    assert rig.read(1, 4) == bytes(4)


def test_a_failing_packed_launch_names_its_number_and_program_and_the_ones_before_have_run(rig):
    rig.program(1, ADD_ONE, "pi", name="increment")
    rig.run(c.Alloc(1, 4))
    last = rig.launches([1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 99, 1], [1, 0, 1, 1])
    (failed,) = failures(rig.settle())
    assert (failed.number, failed.code) == (last - 1, "LaunchError")
    assert failed.details == {"operation": "launch", "program": "increment"}
    assert "buffer 99" in failed.message
    rig.run(c.Clear(failed.number))
    assert rig.read_as("i", 1) == (2,)


@pytest.mark.parametrize("words", [[5, 0], [1], [1, 0, 1], [1, 0, 0xFFFFFFFF, 1], [0xFFFFFFFF, 0xFFFFFFFF]])
def test_malformed_packed_launches_are_refused(rig, words):
    rig.program(1, ADD_ONE, "pi")
    rig.run(c.Alloc(1, 4))
    rig.launches(words)
    assert failures(rig.settle())[0].code == "LaunchError"


def test_a_program_that_did_not_compile_fails_only_where_it_is_launched(rig):
    rig.program(1, "void entry(int *a { }", "p", name="broken")
    rig.program(2, ADD_ONE, "pi")
    rig.run(c.Alloc(1, 4))
    rig.launches([2, 0, 1, 1])
    assert rig.read_as("i", 1) == (1,)
    last = rig.launches([1, 0, 1])
    (failed,) = failures(rig.settle())
    assert (failed.number, failed.code) == (last, "CompileError")
    assert failed.details["program"] == "broken"


def test_a_dropped_program_is_gone_and_its_id_can_be_used_again(rig):
    rig.program(1, ADD_ONE, "pi")
    rig.run(c.Alloc(1, 4), c.Drop(1))
    rig.launches([1, 0, 1, 1])
    assert "no program 1" in failures(rig.settle())[0].message
    rig.run(c.Clear(rig.number))
    rig.program(1, "void entry(int *a) { *a = 41; }", "p")
    rig.launches([1, 0, 1])
    assert rig.read_as("i", 1) == (41,)


def test_single_launches_take_every_scalar_and_a_timed_one_says_how_long_it_took(rig):
    source = """
    void entry(double *out, int i, unsigned u, long long q, unsigned long long Q, float f, double d, double from_int) {
        out[0] = i; out[1] = u; out[2] = q; out[3] = Q; out[4] = f; out[5] = d; out[6] = from_int;
    }"""
    rig.program(1, source, "piIqQfdi")
    rig.run(c.Alloc(1, 56))
    values = [-5, 4_000_000_000, -(1 << 40), 1 << 63, 0.5, 1e300, -7]
    messages = rig.run(c.Launch(1, None, None, [1, *values], True))
    (result,) = (message for message in messages if isinstance(message, m.Result))
    assert 0 <= result.value < 1
    assert rig.read_as("7d", 1) == tuple(float(value) for value in values)


def test_packed_scalars_of_both_sizes_arrive(rig):
    source = (
        "void entry(double *out, long long q, float f, double d, int i) { out[0]=q; out[1]=f; out[2]=d; out[3]=i; }"
    )
    rig.program(1, source, "pqfdi")
    rig.run(c.Alloc(1, 32))
    packed = struct.pack("<IIIqfdi", 1, 0, 1, -(1 << 50), 0.25, -1e-300, -3)
    rig.launches(list(struct.unpack(f"<{len(packed) // 4}I", packed)))
    assert rig.read_as("4d", 1) == (-float(1 << 50), 0.25, -1e-300, -3.0)


@pytest.mark.parametrize(
    ("signature", "arguments", "words"),
    [
        ("pi", [1, 1 << 31], "does not fit"),
        ("pi", [1, 0.5], "does not fit"),
        ("pf", [1, 1e39], "too large for a float"),
        ("pI", [1, -1], "does not fit"),
        ("pi", [1], "takes 2 arguments, not 1"),
        ("pi", ["x", 1], "not a buffer"),
    ],
)
def test_wrong_arguments_of_a_single_launch_are_named(rig, signature, arguments, words):
    kind = {"i": "int", "f": "float", "I": "unsigned"}[signature[1]]
    rig.program(1, f"void entry(int *a, {kind} b) {{ }}", signature)
    rig.run(c.Alloc(1, 4))
    (failed,) = failures(rig.run(c.Launch(1, None, None, arguments, False)))
    assert failed.code == "LaunchError"
    assert words in failed.message


def test_a_grid_calls_once_per_index(rig):
    rig.program(1, "void entry(long *a, long i, int k) { a[i] += i * k; }", "pxi")
    rig.run(c.Alloc(1, 8 * 1000))
    rig.launches([1, 1000, 1, 3], [1, 500, 1, 1])
    rig.run(c.Launch(1, [10], None, [1, 2], False))
    expected = np.arange(1000) * 3
    expected[:500] += np.arange(500)
    expected[:10] += np.arange(10) * 2
    assert np.array_equal(np.frombuffer(rig.read(1, 8000), np.int64), expected)
    assert failures(rig.run(c.Launch(1, [2, 2], None, [1, 2], False)))[0].code == "LaunchError"


def test_a_read_only_argument_that_overlaps_a_written_one_is_read_as_it_was_before(rig):
    rig.program(1, SUM, "ppi", writes=[0])
    rig.run(c.Alloc(1, 48), c.View(2, 1, 0, 32), c.View(3, 1, 16, 32), c.Write(1, 0, struct.pack("<12i", *range(12))))
    rig.launches([1, 0, 3, 2, 8], [1, 0, 1, 1, 4])
    expected = list(range(12))
    expected[4:12] = [value + 1 for value in reversed(range(8))]
    expected[:4] = [value + 1 for value in reversed(expected[:4])]
    assert list(rig.read_as("12i", 1)) == expected


def test_two_written_arguments_must_not_overlap_unless_declared_and_the_same(rig):
    both = "void entry(int *a, int *b) { a[0] += 1; b[0] += 1; }"
    rig.program(1, both, "pp", name="both")
    rig.program(2, both, "pp", alias=True)
    rig.run(c.Alloc(1, 16), c.View(2, 1, 0, 8), c.View(3, 1, 4, 8), c.View(4, 1, 8, 8))
    rig.launches([1, 0, 2, 4])
    assert not failures(rig.settle())
    for program, first, second in ((1, 1, 1), (1, 2, 3), (2, 2, 3), (2, 1, 2)):
        rig.launches([program, 0, first, second])
        (failed,) = failures(rig.settle())
        assert failed.code == "LaunchError"
        assert "both written and share bytes" in failed.message
        rig.run(c.Clear(failed.number))
    rig.launches([2, 0, 1, 1])
    assert rig.read_as("4i", 1) == (3, 0, 1, 0)


def test_more_memory_than_allowed_is_refused_and_the_rest_stays_usable(rig):
    rig.run(c.Alloc(1, 8))
    (failed,) = failures(rig.run(c.Alloc(2, 1 << 30)))
    assert failed.code == "OutOfMemory"
    assert failed.details["operation"] == "alloc"
    rig.run(c.Clear(failed.number), c.Alloc(2, 8), c.Write(2, 0, b"12345678"))
    assert rig.read(2, 8) == b"12345678"
