"""Memory on a device as both faces show it: shape, views, what may be copied to and from it. A face adds waiting."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np

from wsgrad.client.arrays import Array, bytes_of, check_dtype, sink_of, source_of
from wsgrad.client.handle import Handle
from wsgrad.client.recorders import OPEN, recorder_of, refuse
from wsgrad.client.transfers import copy_between
from wsgrad.client.waits import settled
from wsgrad.errors import DeviceError, LaunchError
from wsgrad.transport.commands import Copy, Fill, View, Write
from wsgrad.transport.messages import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from wsgrad.client.base import BaseDevice
    from wsgrad.client.queue import Queue
    from wsgrad.client.recording import Recorder
    from wsgrad.client.waits import Wait

T = TypeVar("T")

COPIED_BYTES = 1 << 20
"""Uploads below this are copied, so that the caller may change its array at once."""
_PATTERN_SIZES = (1, 2, 4, 8, 16)


class BaseBuffer:
    """An array on a device, or a view of one. Freed with its last reference, by `free`, or at the end of `with`."""

    __slots__ = (
        "__weakref__",
        "_base",
        "_device",
        "_handle",
        "_id",
        "_life",
        "_nbytes",
        "_offset",
        "_owned",
        "_region",
        "_shape",
        "_type",
    )

    def __init__(
        self,
        device: BaseDevice[Any, Any],
        handle: Handle,
        base: Handle,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._device = device
        self._handle = handle
        self._base = base  # of the whole memory; `handle` itself where this is no view
        self._offset = offset
        self._shape = shape
        self._type = dtype
        self._nbytes = dtype.itemsize
        for size in shape:
            self._nbytes *= size
        # What a launch looks at: no longer an integer once it is freed.
        self._id: int | None = handle.id
        self._life = handle.life
        self._owned = False  # by a graph: usable only while that is recorded
        # What is recorded with it as an argument, and which one it is or lies in there.
        self._region: tuple[Recorder, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        return self._type

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self._nbytes // self._type.itemsize

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self._nbytes

    @property
    def device(self) -> BaseDevice[Any, Any]:
        """Where it is."""
        return self._device

    @property
    def freed(self) -> bool:
        """Whether `free` was called."""
        return self._id is None and not self._owned

    def free(self) -> None:
        """Give the memory back, in order after what was issued before. Views keep it until they go. Idempotent.

        Raises:
            LaunchError: inside a recording, which may use it.
        """
        if self._owned:
            return  # it goes with its graph
        refuse(self._device, "freeing a buffer")
        self._id = None
        self._handle.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("a buffer without dimensions has no length")
        return self._shape[0]

    def __iter__(self) -> Iterator[Self]:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> NoReturn:
        raise TypeError("a buffer is neither true nor false: its values are on the device; use .numpy()")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a buffer does not turn into an array by itself: its values are on the device; use .numpy()")

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ", lost" if self._life.dead is not None else ""
        view = "" if self._base is self._handle else ", view"
        size = size_in_words(self._nbytes)
        return f"<{type(self).__name__} {self._type} {self._shape} on {self._device.id!r}, {size}{view}{state}>"

    def __getitem__(self, key: int | slice) -> Self:
        """A view of rows along the first axis: of one, without that axis, or of several in a row. Copies nothing."""
        if not self._shape:
            raise IndexError("a buffer without dimensions can't be cut")
        count, rest = self._shape[0], self._shape[1:]
        row_nbytes = self._type.itemsize
        for size in rest:
            row_nbytes *= size
        if isinstance(key, slice):
            start, stop, step = key.indices(count)
            if step != 1:
                raise ValueError(f"a view with step {step} is not possible; a view is one range of memory")
            rows = max(0, stop - start)
            return self._view(min(start, count) * row_nbytes, (rows, *rest))
        try:
            index = operator.index(key)
        except TypeError:
            raise TypeError("a buffer is cut along its first axis only, by an integer or a slice") from None
        if not -count <= index < count:
            raise IndexError(f"index {index} is outside a first axis of {count}")
        return self._view((index % count) * row_nbytes, rest)

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """A view of the same bytes in another shape; one size may be -1."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            sizes = [operator.index(size) for size in shape[0]]
        else:
            sizes = [operator.index(size) for size in shape]  # type: ignore[arg-type]
        known = 1
        for size in sizes:
            known *= size if size != -1 else 1
        if sizes.count(-1) == 1 and known > 0 and self.size % known == 0:
            sizes[sizes.index(-1)] = self.size // known
            known = self.size
        if known != self.size or any(size < 0 for size in sizes):
            raise ValueError(f"a buffer of shape {self._shape} can't be seen as {tuple(sizes)}")
        return self._view(0, tuple(sizes))

    def fill(self, value: Any) -> None:  # noqa: ANN401
        """Set every element to a value that NumPy can convert to the dtype. Never waits."""
        element = np.zeros((), self._type)
        element[...] = value
        pattern = element.tobytes()
        if pattern == pattern[:1] * len(pattern):
            pattern = pattern[:1]
        self._device._make_room()
        self._device._server._call(lambda: self._fill(pattern))

    def _view(self, offset: int, shape: tuple[int, ...]) -> Self:
        self._device._make_room()
        return self._device._server._call(lambda: self._make_view(offset, shape))

    def _make_view(self, offset: int, shape: tuple[int, ...]) -> Self:
        self._check()
        if self._base.freed:
            raise DeviceError(f"{self!r} can't be cut: the buffer it is a view of was freed; cut before freeing")
        queue = self._device._usable_queue()
        handle = Handle(queue.life.buffers.take(), self._life)
        view = type(self)(self._device, handle, self._base, self._offset + offset, shape, self._type)
        queue.command(View(handle.id, self._base.id, view._offset, view._nbytes), line=self._device._line())
        view._region = self._region
        if self._owned:
            recorder = recorder_of(self._device)
            if recorder is not None:
                recorder.own(view)
        return view

    def _check(self) -> int:
        """The id, of a buffer that can be used.

        Raises:
            DeviceError: it was freed.
            LaunchError: it belongs to a graph.
            WsgradError: what it was lost by.
        """
        if self._id is None and self._owned:
            raise LaunchError(
                f"{self!r} was allocated inside a recording and belongs to its graph: allocate what you want to use "
                "outside before record(…)"
            )
        if self._id is None:
            raise DeviceError(f"{self!r} can't be used any more")
        if self._life.dead is not None:
            queue = self._device._queue
            if queue is not None and queue.life is self._life:
                queue.raise_unraised()
            raise self._life.dead.lost_error(f"{self!r}")
        return self._id

    def _fill(self, pattern: bytes) -> None:
        identity = self._check()
        queue = self._device._usable_queue()
        recorder = recorder_of(self._device) if OPEN else None
        if recorder is not None:
            recorder.fill(self, pattern)
            return
        line = self._device._line()
        if not self._nbytes:
            return
        if len(pattern) in _PATTERN_SIZES:
            queue.command(Fill(identity, 0, self._nbytes, pattern), nbytes=64, line=line)
            return
        # No pattern of this size on the wire: a first piece is written, then what is there is copied over and over.
        piece = (pattern * max(1, INLINE_BYTES // len(pattern)))[: self._nbytes]
        for start in range(0, len(piece), INLINE_BYTES):
            part = piece[start : start + INLINE_BYTES]
            queue.command(Write(identity, start, part), nbytes=64 + len(part), line=line)
        done = len(piece)
        while done < self._nbytes:
            nbytes = min(done, self._nbytes - done)
            queue.command(Copy(identity, done, identity, 0, nbytes), line=line)
            done += nbytes

    def _upload(
        self,
        queue: Queue,
        data: Array,
        finish: Callable[[object], T],
        digest: bytes | None = None,
        *,
        copied_bytes: int = COPIED_BYTES,
    ) -> Wait[T]:
        """Issue the copy of an array of this very shape and dtype.

        Args:
            queue: the device's.
            data: the array; below `copied_bytes` it is copied and there is nothing to wait for.
            finish: makes the result.
            digest: what the server's cache is asked for, if at all.
            copied_bytes: more than a message holds.
        """
        identity = self._check()
        line = self._device._line()
        if self._nbytes >= copied_bytes:
            return queue.upload(identity, self._nbytes, source_of(data), finish, digest=digest, line=line)
        if self._nbytes:
            memory = bytes_of(np.ascontiguousarray(data))
            if self._nbytes <= INLINE_BYTES:
                queue.write(identity, memory, line=line)
            else:
                queue.upload_copy(identity, bytes(memory), line=line)
        return settled(finish(None))

    def _copy_across(self, source: BaseBuffer) -> bool:
        """Issue the copy of a buffer of another device; returns False if it is of this one, or to be recorded."""
        if source._device is self._device or (OPEN and recorder_of(self._device) is not None):
            return False
        if OPEN:
            refuse(source._device, "a copy to a device outside of the recording")
        for device in (source._device, self._device):
            device._make_room()
        copy_between(self, source)
        return True

    def _start_copy_from(self, source: Array | BaseBuffer, digest: bytes | None = None) -> Wait[None]:
        identity = self._check()
        recorder = recorder_of(self._device) if OPEN and isinstance(source, BaseBuffer) else None
        if recorder is not None and isinstance(source, BaseBuffer):
            recorder.copy(self, source)
            return settled(None)
        queue = self._device._waiting_queue()
        if not isinstance(source, BaseBuffer):
            return self._upload(queue, source, lambda _: None, digest)
        other = source._check()
        if self._nbytes:
            queue.command(Copy(identity, 0, other, 0, self._nbytes), line=self._device._line())
        return settled(None)

    def _start_numpy(self) -> Wait[Array]:
        result: Array = np.empty(self._shape, self._type)
        return self._start_read(result, lambda _: result)

    def _start_copy_to(self, target: Array) -> Wait[None]:
        return self._start_read(target, lambda _: None)

    def _start_read(self, target: Array, finish: Callable[[object], T]) -> Wait[T]:
        identity = self._check()
        queue = self._device._waiting_queue()
        return queue.read(identity, self._nbytes, sink_of(target), finish, line=self._device._line())

    def _checked_source(self, source: Any) -> Array | BaseBuffer:  # noqa: ANN401
        """What `copy_from` was given, if it fits.

        Raises:
            TypeError: another dtype.
            ValueError: another shape.
        """
        if not isinstance(source, BaseBuffer):
            source = np.asarray(source, None if isinstance(source, np.ndarray | np.generic) else self._type)
            check_dtype(source.dtype)
        self._compare("copied from", source.shape, source.dtype)
        checked: Array | BaseBuffer = source
        return checked

    def _checked_target(self, target: Array) -> Array:
        if not isinstance(target, np.ndarray):
            raise TypeError(f"copy_to writes into a NumPy array, not into {type(target).__name__}")
        if not target.flags.writeable:
            raise ValueError("copy_to can't write into a read-only array")
        self._compare("copied to", target.shape, target.dtype)
        return target

    def _compare(self, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if dtype != self._type:
            raise TypeError(f"{self!r} can't be {what} dtype {dtype}; convert it: array.astype({str(self._type)!r})")
        if shape != self._shape:
            raise ValueError(f"{self!r} can't be {what} shape {shape}")


def numbered_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of Python integers.

    Raises:
        ValueError: a size is negative.
    """
    sizes = tuple(operator.index(size) for size in ((shape,) if isinstance(shape, int | np.integer) else shape))
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape has no negative sizes: {sizes}")
    return sizes


def size_in_words(nbytes: int) -> str:
    """A number of bytes for people."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    unit = "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        size /= 1024
        if size < 1024:
            break
    return f"{size:.1f} {unit}"
