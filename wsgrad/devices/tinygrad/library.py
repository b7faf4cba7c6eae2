"""Opens devices of tinygrad's and tells what they are; runs nothing on them.

`python -m wsgrad.devices.tinygrad.library NAME` prints those of one runtime as one line of JSON: the server asks a
process of its own, since drivers start threads, hold files and may crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
from typing import Any, Final

from wsgrad.errors import DeviceError

# By the renderer that tinygrad chose, which goes with its compiler: what the compiler takes.
_DIALECTS: Final = {
    "ClangRenderer": "c",
    "OpenCLRenderer": "opencl-c",
    "QCOMCLRenderer": "opencl-c",
    "CUDARenderer": "cuda-c",
    "NVCCRenderer": "cuda-c",
    "HIPRenderer": "hip-c",
    "HIPCCRenderer": "hip-c",
    "MetalRenderer": "msl",
}
_KNOWN: Final = ("AMD", "CL", "CPU", "CUDA", "HIP", "METAL", "NV", "QCOM")
_ADVICE: Final = {
    "CPU": "it needs clang: install it, or name it in CC",
    "CL": "it needs libOpenCL and a driver for it; for the processor, on Debian and Ubuntu: "
    "apt install ocl-icd-libopencl1 pocl-opencl-icd",
    "CUDA": "it needs NVIDIA's driver and the CUDA toolkit's nvrtc",
    "NV": "it needs NVIDIA's kernel driver, a device that this user may open, and nvrtc",
    "AMD": "it needs a device that this user may open at /dev/kfd, and ROCm's comgr",
    "HIP": "it needs ROCm",
    "METAL": "it needs macOS",
    "QCOM": "it needs an Adreno GPU's kernel driver",
}
_CLANGS: Final = ("clang", *(f"clang-{version}" for version in range(30, 13, -1)))
# What tinygrad's renderers ask an OpenCL device's extensions for; all of them together are too long to be told.
_CL_EXTENSIONS: Final = ("cl_khr_fp16", "cl_khr_fp64")


def load_tinygrad(name: str) -> Any:  # noqa: ANN401  # tinygrad's classes are its own
    """What opens devices, with everything loaded that is not of the device's own runtime.

    Raises:
        DeviceError: the package is missing, or has no such runtime.
    """
    kind = name.partition(":")[0]
    if kind not in _KNOWN:
        raise DeviceError(f"tinygrad:{name}: no such runtime is wrapped; there are {', '.join(_KNOWN)}")
    _prepare(kind)
    try:
        from tinygrad.device import Device
    except ImportError as error:
        raise DeviceError(
            f"tinygrad:{name} needs the package tinygrad ({error}): pip install 'wsgrad[tinygrad]'"
        ) from error
    return Device


def open_wrapped(name: str) -> Any:  # noqa: ANN401
    """A device, by tinygrad's name for it, such as `CL` or `CL:1`.

    Raises:
        DeviceError: the package is missing, or its runtime can't open the device; says why.
    """
    devices = load_tinygrad(name)
    try:
        device = devices[name]
        dialect_of(device)
    except DeviceError:
        raise
    except Exception as error:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        reason = "; ".join(" ".join(str(cause).split()) or type(cause).__name__ for cause in causes)
        advice = _ADVICE[name.partition(":")[0]]
        raise DeviceError(f"tinygrad:{name} can't be opened: {reason:.400}; {advice}") from error
    return device


def dialect_of(device: Any) -> str:  # noqa: ANN401
    """The language that the device's compiler takes.

    Raises:
        DeviceError: it takes none that programs may be written in.
    """
    renderer = type(device.renderer).__name__
    dialect = _DIALECTS.get(renderer)
    if dialect is None:
        raise DeviceError(
            f"tinygrad:{device.device}: tinygrad compiles with {renderer} here, which takes no source that programs "
            "are written in; install the vendor's compiler"
        )
    return dialect


def is_host(device: Any) -> bool:  # noqa: ANN401
    """Whether kernels run on this machine's processor."""
    if device.device.startswith("CL"):
        from tinygrad.runtime.autogen import opencl as cl

        return bool(cl_info(device, cl.CL_DEVICE_TYPE) & cl.CL_DEVICE_TYPE_CPU)
    return bool(device.device.startswith("CPU"))


def cl_info(device: Any, what: int) -> int:  # noqa: ANN401
    """A number that an OpenCL device tells of itself."""
    from tinygrad.runtime.autogen import opencl as cl

    value = ctypes.c_uint64()
    cl.clGetDeviceInfo(device.cl_dev, what, ctypes.sizeof(value), ctypes.byref(value), None)
    return value.value


def describe(device: Any) -> dict[str, object]:  # noqa: ANN401
    """A device as clients are told of it."""
    from importlib.metadata import version

    dialect = dialect_of(device)
    kind = device.device.partition(":")[0]
    extensions = str(device.arch or "").split(",")
    if kind == "CL":
        arch = ",".join(name for name in _CL_EXTENSIONS if name in extensions)
    else:
        arch = str(device.arch or "")[:200]
    host = is_host(device)
    return {
        "kind": "tinygrad",
        "dialects": [dialect],
        "adapter": f"{kind}: {getattr(device, 'device_name', None) or arch or kind}"[:200],
        "compiler": f"{type(device.renderer).__name__.removesuffix('Renderer')} of tinygrad {version('tinygrad')}",
        "arch": arch,
        "alignment": 16,
        "f16": dialect != "opencl-c" or "cl_khr_fp16" in extensions,
        "f64": dialect not in ("msl", "opencl-c") or "cl_khr_fp64" in extensions,
        "timestamps": dialect != "c",
        "native_graphs": False,
        "software": host,
        "confined": False,
        "threads": 1,
    }


def _prepare(kind: str) -> None:
    """Settle what tinygrad reads of the environment when it is imported."""
    # What a user of this machine sets for his own programs is not meant for clients'.
    for variable in ("DEV", "DEBUG", "PROFILE", "VIZ", "BEAM"):
        os.environ.pop(variable, None)
    os.environ["CACHELEVEL"] = "0"  # its cache of compiled kernels is one file for all sessions
    if kind == "CPU" and "CC" not in os.environ:
        found = next(filter(None, map(shutil.which, _CLANGS)), None)
        if found is not None:
            os.environ["CC"] = found


def main() -> None:
    """Print `{"devices": […]}` or `{"error": text}`."""
    name = sys.argv[1]
    try:
        first = open_wrapped(name)
        devices = [describe(first)]
        for index in range(1, int(first.count())):
            with contextlib.suppress(DeviceError):  # a card in use by somebody else
                devices.append(describe(open_wrapped(f"{name}:{index}")))
        found: dict[str, object] = {"devices": devices}
    except DeviceError as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)
    os._exit(0)  # a driver's threads may not let an orderly end come to its end


if __name__ == "__main__":
    main()
