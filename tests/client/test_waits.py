"""The words of errors that a queue's failure becomes."""

import pytest

from wsgrad.client.waits import Failure


@pytest.mark.parametrize("hint", ["; device.reopen() starts it anew", "; device.reopen() starts the device anew", ""])
def test_what_went_with_a_device_tells_once_how_to_go_on(hint):
    failure = Failure(3, "DeviceLost", f"program 'crash' ended the device: SIGSEGV{hint}", {"lost": True})
    assert str(failure.lost_error("buffer 5")) == (
        "buffer 5 is lost: program 'crash' ended the device: SIGSEGV; call device.reopen() and make it again"
    )
