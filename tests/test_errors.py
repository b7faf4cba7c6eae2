"""The error tree as a user meets it: built-in bases, codes on the wire, details, pickling."""

import pickle

import pytest

from wsgrad import errors

NAMED = [
    errors.ProtocolError,
    errors.ConnectionLost,
    errors.DeviceError,
    errors.OutOfMemory,
    errors.CompileError,
    errors.LaunchError,
    errors.DeviceLost,
    errors.Timeout,
    errors.LimitExceeded,
    errors.Unauthorized,
]


@pytest.mark.parametrize("kind", NAMED)
def test_error_survives_the_wire(kind):
    sent = kind("no room for 70 MiB", details={"nbytes": 73400320})
    code = errors.error_code(sent)
    got = errors.error_from_wire(code, str(sent), sent.details)
    assert code == kind.__name__
    assert type(got) is kind
    assert str(got) == "no room for 70 MiB"
    assert got.details == {"nbytes": 73400320}


@pytest.mark.parametrize("kind", NAMED)
def test_error_survives_pickling(kind):
    got = pickle.loads(pickle.dumps(kind("why", details={"a": 1})))
    assert (type(got), str(got), got.details) == (kind, "why", {"a": 1})


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.OutOfMemory, MemoryError),
        (errors.ConnectionLost, ConnectionError),
        (errors.Timeout, TimeoutError),
        (errors.Unauthorized, PermissionError),
    ],
)
def test_error_is_the_builtin_a_user_expects(kind, builtin):
    with pytest.raises(builtin, match="why"):
        raise kind("why")


def test_unknown_code_becomes_a_device_error_that_names_it():
    got = errors.error_from_wire("WarpStall", "lane 3", {})
    assert type(got) is errors.DeviceError
    assert str(got) == "WarpStall: lane 3"


def test_code_of_a_subclass_and_of_a_foreign_error():
    class Special(errors.LaunchError):
        pass

    assert errors.error_code(Special("x")) == "LaunchError"
    assert errors.error_code(ValueError("x")) == "DeviceError"


def test_close_code_of_a_protocol_error_travels_in_the_details():
    assert errors.ProtocolError("x").close_code == 1002
    assert errors.error_from_wire("ProtocolError", "x", {"close_code": 1009}).close_code == 1009
    assert errors.error_from_wire("ProtocolError", "x", {"close_code": "bad"}).close_code == 1002


@pytest.mark.parametrize("code", ["DeviceError", "CompileError", "ProtocolError", "\x1b[2J"])
def test_words_of_a_peer_can_not_command_a_terminal(code):
    got = errors.error_from_wire(code, "1:2: é\n\tb\x1b]0;c\x07\r\u202ed", {})
    assert str(got).endswith("1:2: é\n\tb ]0;c   d")
    assert "\x1b" not in str(got)
