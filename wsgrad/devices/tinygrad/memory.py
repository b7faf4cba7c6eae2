"""Moves bytes to, from and between the buffers of one of tinygrad's devices; knows no launches and no limits.

tinygrad's allocators move whole buffers. Parts of them are reached through the memory itself where the processor sees
it, through views where a runtime has them, and in OpenCL by its own calls.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Any, Final

_CHUNK: Final = 1 << 20
_LEAST: Final = 16


class Store(ABC):
    """The memory of one device.

    Attributes:
        alignment: where a view may begin.
    """

    alignment: int = 16

    def __init__(self, device: Any) -> None:  # noqa: ANN401  # tinygrad's classes are its own
        from tinygrad.device import BufferSpec

        self.device = device
        self.allocator = device.allocator
        self._spec = BufferSpec(nolru=True)

    def new(self, nbytes: int) -> Any:  # noqa: ANN401
        """A buffer, whose bytes may be anything.

        Raises:
            MemoryError: there is no room.
        """
        return self.allocator.alloc(_size(nbytes), self._spec)

    def free(self, buffer: Any, nbytes: int) -> None:  # noqa: ANN401
        """Give a buffer back that no launch uses any more."""
        self.allocator.free(buffer, _size(nbytes), self._spec)

    @abstractmethod
    def view(self, buffer: Any, offset: int, nbytes: int) -> Any:  # noqa: ANN401
        """A part of a buffer as launches take it, with an aligned offset."""

    def drop_view(self, view: Any) -> None:  # noqa: B027, ANN401  # most views own nothing
        """Give a view back that no launch uses any more."""

    @abstractmethod
    def write(self, buffer: Any, offset: int, data: memoryview) -> None:  # noqa: ANN401
        """Put bytes in; `data` may change once this returns."""

    @abstractmethod
    def read(self, buffer: Any, offset: int, target: memoryview) -> None:  # noqa: ANN401
        """Get bytes, when all launches so far are over."""

    def copy(self, target: Any, to: int, source: Any, at: int, nbytes: int) -> None:  # noqa: ANN401
        """Copy between two ranges, which may overlap."""
        held = memoryview(bytearray(nbytes))
        self.read(source, at, held)
        self.write(target, to, held)

    def fill(self, buffer: Any, offset: int, nbytes: int, pattern: bytes) -> None:  # noqa: ANN401
        """Repeat a pattern."""
        piece = bytearray(pattern * max(1, min(_CHUNK, nbytes) // len(pattern)))
        for at in range(0, nbytes, len(piece)):
            self.write(buffer, offset + at, memoryview(piece)[: nbytes - at])


class HostStore(Store):
    """Memory that the processor sees."""

    def view(self, buffer: Any, offset: int, nbytes: int) -> Any:  # noqa: ANN401
        return self.allocator._offset(buffer, nbytes, offset)

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:  # noqa: ANN401
        self._seen(buffer)[offset : offset + data.nbytes] = data

    def read(self, buffer: Any, offset: int, target: memoryview) -> None:  # noqa: ANN401
        target[:] = self._seen(buffer)[offset : offset + target.nbytes]

    def copy(self, target: Any, to: int, source: Any, at: int, nbytes: int) -> None:  # noqa: ANN401
        there, here = self._seen(target), self._seen(source)
        there[to : to + nbytes] = here[at : at + nbytes]  # memmove, which bears overlap

    def _seen(self, buffer: Any) -> memoryview:  # noqa: ANN401
        self.device.synchronize()
        return memoryview(self.allocator._as_buffer(buffer)).cast("B")


class OffsetStore(Store):
    """Memory of a device that views of a buffer can be copied to and from."""

    def view(self, buffer: Any, offset: int, nbytes: int) -> Any:  # noqa: ANN401
        return self.allocator._offset(buffer, nbytes, offset)

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:  # noqa: ANN401
        if data.nbytes:
            held = memoryview(bytearray(data)) if data.readonly else data
            self.allocator._copyin(self.view(buffer, offset, data.nbytes), held)
            self.device.synchronize()

    def read(self, buffer: Any, offset: int, target: memoryview) -> None:  # noqa: ANN401
        if target.nbytes:
            self.allocator._copyout(target, self.view(buffer, offset, target.nbytes))
            self.device.synchronize()


class ClStore(Store):
    """Memory of an OpenCL device, whose queue keeps everything in order."""

    def __init__(self, device: Any) -> None:  # noqa: ANN401
        super().__init__(device)
        from tinygrad.runtime.autogen import opencl
        from tinygrad.runtime.ops_cl import check, checked

        from wsgrad.devices.tinygrad.library import cl_info

        self._cl: Any = opencl
        self._check: Any = check
        self._checked: Any = checked
        self.alignment = max(_LEAST, cl_info(device, opencl.CL_DEVICE_MEM_BASE_ADDR_ALIGN) // 8)

    def free(self, buffer: Any, nbytes: int) -> None:  # noqa: ANN401
        self._check(self._cl.clReleaseMemObject(buffer))  # it goes when the queue is done with it

    def view(self, buffer: Any, offset: int, nbytes: int) -> Any:  # noqa: ANN401
        cl = self._cl
        region = cl.cl_buffer_region(offset, nbytes)
        status = ctypes.c_int32()
        made = cl.clCreateSubBuffer(
            buffer, cl.CL_MEM_READ_WRITE, cl.CL_BUFFER_CREATE_TYPE_REGION, ctypes.byref(region), status
        )
        return self._checked(made, status)

    def drop_view(self, view: Any) -> None:  # noqa: ANN401
        self._check(self._cl.clReleaseMemObject(view))

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:  # noqa: ANN401
        if data.nbytes:
            held = (ctypes.c_char * data.nbytes).from_buffer(bytearray(data) if data.readonly else data)
            self._check(
                self._cl.clEnqueueWriteBuffer(
                    self.device.queue, buffer, True, offset, data.nbytes, ctypes.addressof(held), 0, None, None
                )
            )

    def read(self, buffer: Any, offset: int, target: memoryview) -> None:  # noqa: ANN401
        if target.nbytes:
            held = (ctypes.c_char * target.nbytes).from_buffer(target)
            self._check(
                self._cl.clEnqueueReadBuffer(
                    self.device.queue, buffer, True, offset, target.nbytes, ctypes.addressof(held), 0, None, None
                )
            )

    def copy(self, target: Any, to: int, source: Any, at: int, nbytes: int) -> None:  # noqa: ANN401
        if not nbytes:
            return
        if target is source and to < at + nbytes and at < to + nbytes:
            between = self.new(nbytes)
            try:
                self.copy(between, 0, source, at, nbytes)
                self.copy(target, to, between, 0, nbytes)
            finally:
                self.free(between, nbytes)
            return
        self._check(self._cl.clEnqueueCopyBuffer(self.device.queue, source, target, at, to, nbytes, 0, None, None))

    def fill(self, buffer: Any, offset: int, nbytes: int, pattern: bytes) -> None:  # noqa: ANN401
        if len(pattern) > _LEAST or len(pattern) & (len(pattern) - 1) or offset % len(pattern):
            super().fill(buffer, offset, nbytes, pattern)
        elif nbytes:
            held = ctypes.create_string_buffer(pattern, len(pattern))
            self._check(
                self._cl.clEnqueueFillBuffer(
                    self.device.queue, buffer, ctypes.addressof(held), len(pattern), offset, nbytes, 0, None, None
                )
            )


def store_of(device: Any) -> Store:  # noqa: ANN401
    """What moves bytes on this device."""
    if device.device.partition(":")[0] == "CL":
        return ClStore(device)
    if device.device.partition(":")[0] in ("CPU", "METAL", "QCOM"):
        return HostStore(device)
    return OffsetStore(device)


def _size(nbytes: int) -> int:
    return max(_LEAST, (nbytes + _LEAST - 1) & -_LEAST)
