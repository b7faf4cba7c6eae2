"""Directories of driver processes: gone with them, or with the next one's start, and never while somebody uses them."""

import os

from wsgrad.devices.scratch import Scratch


def test_what_a_crash_left_is_cleared_up_by_the_next_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    used, crashed = Scratch(), Scratch()
    os.close(crashed.descriptor)  # as the system does when a process ends
    half, new = tmp_path / "wsgrad-driver-half", tmp_path / "wsgrad-driver-new"
    for path in (half, new, tmp_path / "other"):
        path.mkdir()
    os.utime(half, (0, 0))
    last = Scratch()
    kept = {used.path, last.path, str(new), str(tmp_path / "other")}
    assert {str(path) for path in tmp_path.iterdir()} == kept
    used.close()
    last.close()
    assert {path.name for path in tmp_path.iterdir()} == {"wsgrad-driver-new", "other"}
