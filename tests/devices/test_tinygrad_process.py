"""Devices of tinygrad's: what is offered and refused, numbers in the sizes a source declares, what a crash costs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contract_kinds import KINDS

import wsgrad
from wsgrad.server.config import Config
from wsgrad.server.options import BadValue, device
from wsgrad.server.startup import settle


@pytest.fixture(scope="module")
def opencl():
    with KINDS["tinygrad-cl"]() as offer, offer.connected() as opened:
        yield opened


@pytest.mark.parametrize("text", ["tinygrad:CL", "tinygrad:AMD:3"])
def test_devices_are_named_by_runtime_and_place(text):
    assert device(text) == (text, 1)


@pytest.mark.parametrize(
    "text", ["tinygrad", "tinygrad:", "tinygrad:cl", "tinygrad:CL:01", "tinygrad:CL*2", "tinygrad:../x"]
)
def test_other_names_are_refused(text):
    with pytest.raises(BadValue, match="tinygrad:CL"):
        device(text)


@pytest.mark.parametrize(("name", "words"), [("NOPE", "there are AMD"), ("CUDA", "NVIDIA's driver")])
def test_what_is_missing_is_refused_by_name(name, words):
    if name == "CUDA" and Path("/dev/nvidiactl").exists():
        pytest.skip("there is an NVIDIA driver here")
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", "--device", f"tinygrad:{name}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WSGRAD_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert result.returncode == 1
    assert f"tinygrad:{name}" in result.stderr
    assert words in result.stderr


def test_others_are_offered_them_only_unconfined():
    devices = ("tinygrad:CL",)
    assert settle(Config(devices=devices, host="127.0.0.1"))[0].devices == devices
    config, warnings = settle(Config(devices=devices, host="0.0.0.0"))
    assert config.devices == ()
    assert "--unconfined" in warnings[-1]
    assert settle(Config(devices=devices, host="0.0.0.0", unconfined=True))[0].devices == devices


def test_numbers_take_the_size_and_kind_of_their_parameters_and_grids_have_three_dimensions(opencl):
    source = """
    __kernel void k(char c, __global long *out, ushort s, ulong big, float f, double d, int i) {
        size_t at = get_global_id(0) + get_global_size(0) * (get_global_id(1) + get_global_size(1) * get_global_id(2));
        out[at] = c + s + (long)big + (long)(f * 2) + (long)(d * 4) + i + 1000 * get_local_size(1);
    }"""
    out = opencl.zeros(4 * 6 * 2, np.int64)
    kernel = opencl.program(source, "k")
    kernel(-3, out, 65535, 1 << 40, 1.5, 0.25, -7, grid=(2, 3, 2), block=(2, 2))
    assert set(out.numpy().tolist()) == {-3 + 65535 + (1 << 40) + 3 + 1 - 7 + 2000}
    kernel(300, out, 1, 1, 1.0, 1.0, 1, grid=1)
    with pytest.raises(wsgrad.LaunchError, match="argument 0"):
        opencl.synchronize()
    with pytest.raises(wsgrad.LaunchError, match="an integer"):
        kernel(1.5, out, 1, 1, 1.0, 1.0, 1, grid=1)
    with pytest.raises(wsgrad.LaunchError, match="block="):
        kernel(1, out, 1, 1, 1.0, 1.0, 1, grid=1, block=(1, 1, 1, 1))


def test_a_work_group_that_is_too_large_and_a_kernel_that_is_not_there_are_errors_by_name(opencl):
    source = "__kernel void k(__global int *x) { x[get_global_id(0)] = 1; }"
    x = opencl.zeros(4, np.int32)
    opencl.program(source, "k")(x, grid=1, block=1 << 20)
    with pytest.raises(wsgrad.LaunchError, match=r"'k'.*CL_INVALID_WORK_GROUP_SIZE"):
        opencl.synchronize()
    with pytest.raises(wsgrad.CompileError, match="no kernel 'missing'"):
        opencl.program(source, "missing").ready()
    opencl.program(source, "k")(x, grid=2, block=2)
    assert x.numpy().tolist() == [1] * 4


def test_a_crash_costs_the_session_its_device_until_it_is_reopened(opencl):
    del opencl  # only to be skipped with it
    with KINDS["tinygrad-cpu"]() as offer, offer.connected() as opened:
        crash = opened.program("void crash(void) { __builtin_trap(); }", "crash")
        crash()
        with pytest.raises(wsgrad.DeviceLost, match=signal.SIGILL.name):
            opened.synchronize()
        opened.reopen()
        assert opened.array(np.arange(3)).numpy().tolist() == [0, 1, 2]
