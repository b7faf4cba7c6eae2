"""NumPy arrays as bytes to send and places to receive: which dtypes travel, and arrays whose memory has gaps.

Nothing here knows a device or a message. A contiguous array is sent from and received into its own memory. One
with gaps goes through pieces of about 1 MiB, so a transfer never needs a second copy of the whole.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike

Array: TypeAlias = "np.ndarray[Any, Any]"

_PIECE_NBYTES = 1 << 20
_EMPTY = memoryview(b"")


def check_dtype(dtype: DTypeLike | None) -> np.dtype[Any]:
    """Return the dtype, if elements of it can live on a device.

    Raises:
        TypeError: it holds Python objects, has no fixed size, or is not in this machine's byte order.
    """
    checked = np.dtype(dtype)
    if checked.hasobject:
        raise TypeError(f"dtype {checked} holds Python objects, which can't leave this process; use one of fixed size")
    if checked.itemsize == 0:
        raise TypeError(f"dtype {checked.str!r} has no size; give its length, as in 'S8' or 'U8'")
    if not checked.isnative or sys.byteorder != "little":
        order = "big" if sys.byteorder == "little" or checked.isnative else "little"
        raise TypeError(
            f"dtype {checked.str if checked.names is None else checked} is {order}-endian, devices are little-endian; "
            "convert it first: array.astype(array.dtype.newbyteorder('<'))"
        )
    return checked


def bytes_of(array: Array) -> memoryview:
    """The memory of a C-contiguous array as unsigned bytes; works for every dtype, unlike `memoryview(array)`."""
    if array.nbytes == 0:
        return _EMPTY
    if array.dtype.kind in "iufb" and array.dtype.itemsize <= 8:
        return array.data.cast("B")  # the quick way, which knows few dtypes
    view: memoryview = array.reshape(-1).view(np.uint8).data
    return view


class Source(Protocol):
    """Bytes to send, asked for once and in order."""

    def take(self, nbytes: int) -> memoryview:
        """The next `nbytes` bytes; they don't change until the peer has them."""


class Sink(Protocol):
    """A place for bytes that arrive in order.

    Attributes:
        owner: the object whose memory `destination` gives out views of, or None.
    """

    owner: object

    def destination(self, nbytes: int) -> memoryview | None:
        """Where the next `nbytes` bytes may be received, if they can be received straight into their place."""

    def accept(self, data: memoryview | bytes) -> None:
        """These bytes have come: those of `destination`, or a copy elsewhere."""


class MemorySource:
    """Sends contiguous memory where it lies."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = 0

    def take(self, nbytes: int) -> memoryview:
        start = self._position
        self._position = start + nbytes
        return self._memory[start : self._position]


class PieceSource:
    """Sends an array with gaps through contiguous copies of its pieces, in C order."""

    def __init__(self, array: Array) -> None:
        self._pieces = _pieces(array)
        self._rest = _EMPTY

    def take(self, nbytes: int) -> memoryview:
        if len(self._rest) >= nbytes:
            taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            return taken
        joined = memoryview(bytearray(nbytes))
        filled = 0
        while filled < nbytes:
            if not self._rest:
                self._rest = bytes_of(np.ascontiguousarray(next(self._pieces)))
            n = min(nbytes - filled, len(self._rest))
            joined[filled : filled + n] = self._rest[:n]
            self._rest = self._rest[n:]
            filled += n
        return joined


class MemorySink:
    """Receives into contiguous memory."""

    def __init__(self, memory: memoryview) -> None:
        self.owner: object = memory.obj
        self._memory = memory
        self._position = 0
        self._given: memoryview | None = None

    def destination(self, nbytes: int) -> memoryview | None:
        self._given = self._memory[self._position : self._position + nbytes]
        return self._given

    def accept(self, data: memoryview | bytes) -> None:
        start = self._position
        self._position = start + len(data)
        if data is not self._given:
            self._memory[start : self._position] = data


class PieceSink:
    """Receives into an array with gaps: collects a piece, then lets NumPy scatter it."""

    def __init__(self, array: Array) -> None:
        self.owner: object = None
        self._pieces = _pieces(array)
        self._piece: Array | None = None
        self._collected = bytearray()

    def destination(self, nbytes: int) -> memoryview | None:
        return None

    def accept(self, data: memoryview | bytes) -> None:
        while data:
            if self._piece is None:
                self._piece = next(self._pieces)
            piece = self._piece
            missing = piece.nbytes - len(self._collected)
            self._collected += data[:missing]
            data = data[missing:]
            if len(self._collected) == piece.nbytes:
                piece[...] = np.frombuffer(self._collected, piece.dtype).reshape(piece.shape)
                self._collected = bytearray()
                self._piece = None


def source_of(array: Array) -> Source:
    """How to send an array: its own memory, or pieces."""
    return MemorySource(bytes_of(array)) if array.flags.c_contiguous else PieceSource(array)


def sink_of(array: Array) -> Sink:
    """How to receive into an array: its own memory, or pieces."""
    return MemorySink(bytes_of(array)) if array.flags.c_contiguous else PieceSink(array)


def _pieces(array: Array) -> Iterator[Array]:
    """Views that together are the array in C order, of about 1 MiB each; never a scalar, so each can be assigned to."""
    if array.nbytes <= _PIECE_NBYTES or array.ndim == 0 or (array.ndim == 1 and len(array) == 1):
        yield array
        return
    row_nbytes = array.nbytes // len(array)
    if row_nbytes > _PIECE_NBYTES and array.ndim > 1:
        for row in array:
            yield from _pieces(row)
        return
    step = max(1, _PIECE_NBYTES // row_nbytes)
    for start in range(0, len(array), step):
        yield array[start : start + step]
