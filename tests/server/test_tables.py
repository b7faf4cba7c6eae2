"""The session's checks: nothing a client sends gets past them, and nothing makes them fail in another way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.errors import CompileError, DeviceError, LaunchError, LimitExceeded, OutOfMemory, WsgradError
from wsgrad.server.tables import Quota, Tables
from wsgrad.transport import commands as c
from wsgrad.transport.messages import Program


def make(*, memory=1000, buffers=10, programs=4):
    quota = Quota(memory, buffers, programs)
    return quota, Tables(quota, max_program_nbytes=100)


def program(number=0, **changes):
    values = {"dialect": "c", "name": "", "entry": "f", "signature": "pif", "writes": None, "alias": False} | changes
    return Program(1, 1, number, **values)


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        (c.Read(1, 90, 11), DeviceError, ("11 bytes", "offset 90", "100")),
        (c.Write(1, (1 << 53) - 1, b"x"), DeviceError, (str((1 << 53) - 1),)),
        (c.Upload(1, 7, 0, 1), DeviceError, ("no buffer 7",)),
        (c.Download(1, 1, 0, 101), DeviceError, ("101",)),
        (c.Copy(1, 0, 1, 50, 51), DeviceError, ("51",)),
        (c.Fill(1, 0, 9, b"ab"), DeviceError, ("9", "2")),
        (c.Fill(1, 0, 9, b"abc"), DeviceError, ("3",)),
        (c.Fill(1, 0, 0, b""), DeviceError, ("0",)),
        (c.View(2, 1, 1, 100), DeviceError, ("100",)),
        (c.Alloc(1, 1), DeviceError, ("in use",)),
        (c.Alloc(2, 901), OutOfMemory, ("901", "1000", "--max-session-memory")),
        (c.Alloc(10, 1), LimitExceeded, ("10", "--max-buffers")),
        (c.Launch(0, None, None, [], False), LaunchError, ("no program",)),
        (c.Launch(1, None, None, [1, 1], False), LaunchError, ("2 arguments", "3", "'f'")),
        (c.Launch(1, None, None, [9, 1, 1.0], False), LaunchError, ("argument 0",)),
        (c.Launch(1, None, None, [1, 1 << 31, 1.0], False), LaunchError, ("argument 1", "int32")),
        (c.Launch(1, None, None, [1, True, 1.0], False), LaunchError, ("argument 1",)),
        (c.Launch(1, None, None, [1, 1, None], False), LaunchError, ("argument 2",)),
    ],
)
def test_refusals_name_the_values(command, kind, words):
    _, tables = make()
    tables.check(c.Alloc(1, 100))
    tables.check_program(program(1), 10)
    with pytest.raises(kind) as caught:
        tables.check(command)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"name": "/etc/passwd"}, CompileError),
        ({"name": "a..b"}, CompileError),
        ({"name": "a\\b"}, CompileError),
        ({"name": "a\nb"}, CompileError),
        ({"name": "x" * 65}, CompileError),
        ({"entry": "f; }"}, CompileError),
        ({"entry": "../f"}, CompileError),
        ({"dialect": "wgsl"}, CompileError),
        ({"signature": "pz"}, CompileError),
        ({"signature": "p" * 65}, CompileError),
        ({"writes": [1]}, CompileError),
        ({"writes": [5]}, CompileError),
        ({"number": 4}, LimitExceeded),
    ],
)
def test_programs_with_bad_names_entries_and_signatures_are_refused(changes, kind):
    quota, tables = make()
    with pytest.raises(kind):
        tables.check_program(program(**changes), 10)
    assert quota.programs == 0


def test_a_source_over_the_limit_is_refused_by_size():
    _, tables = make()
    with pytest.raises(LimitExceeded, match="--max-program-size"):
        tables.check_program(program(), 101)


def test_two_queues_share_their_sessions_quota():
    quota, first = make()
    second = Tables(quota, max_program_nbytes=100)
    first.check(c.Alloc(1, 600))
    with pytest.raises(OutOfMemory):
        second.check(c.Alloc(1, 600))
    first.clear()
    second.check(c.Alloc(1, 600))
    assert quota.memory == 600


def test_freeing_what_never_was_is_no_error():
    quota, tables = make()
    tables.check(c.Free(5))
    tables.check(c.Drop(3))
    assert (quota.memory, quota.buffers, quota.programs) == (0, 0, 0)


SMALL = st.integers(0, 12)
SIZE = st.one_of(st.integers(0, 300), st.sampled_from([(1 << 53) - 1, 1 << 32]))
COMMANDS = st.one_of(
    st.builds(c.Alloc, SMALL, SIZE),
    st.builds(c.Free, SMALL),
    st.builds(c.View, SMALL, SMALL, SIZE, SIZE),
    st.builds(c.Write, SMALL, SIZE, st.binary(max_size=40)),
    st.builds(c.Upload, SMALL, SMALL, SIZE, SIZE),
    st.builds(c.Read, SMALL, SIZE, SIZE),
    st.builds(c.Download, SMALL, SMALL, SIZE, SIZE),
    st.builds(c.Copy, SMALL, SIZE, SMALL, SIZE, SIZE),
    st.builds(c.Fill, SMALL, SIZE, SIZE, st.binary(max_size=17)),
    st.builds(
        c.Launch,
        SMALL,
        st.none(),
        st.none(),
        st.lists(st.one_of(st.integers(-(1 << 64), 1 << 64), st.floats(), st.text(max_size=3), st.none()), max_size=4),
        st.booleans(),
    ),
    st.builds(c.Drop, SMALL),
    st.builds(c.Clear, SMALL),
    st.builds(program, SMALL, signature=st.text("piIqQfdxz", max_size=4)),
)


class Model:
    """What should be there after the commands that passed."""

    def __init__(self):
        self.ids = {}

    def apply(self, command):
        match command:
            case c.Alloc(buffer, nbytes):
                self.ids[buffer] = [nbytes]
            case c.View(view, buffer, _, _):
                self.ids[view] = self.ids[buffer]
            case c.Free(buffer):
                self.ids.pop(buffer, None)

    @property
    def memory(self):
        return sum({id(base): base[0] for base in self.ids.values()}.values())


@given(st.lists(COMMANDS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_commands_pass_or_are_refused_by_name_and_the_quota_is_right(commands):
    quota, tables = make()
    model = Model()
    for command in commands:
        try:
            if isinstance(command, Program):
                tables.check_program(command, 10)
            else:
                tables.check(command)
        except WsgradError:
            continue
        model.apply(command)
        assert quota.memory == model.memory <= quota.max_memory
        assert quota.buffers == len(model.ids) <= quota.max_buffers
        assert 0 <= quota.programs <= quota.max_programs
    tables.clear()
    assert (quota.memory, quota.buffers, quota.programs) == (0, 0, 0)
