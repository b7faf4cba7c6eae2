"""Dtypes that travel, and arrays with gaps cut into bytes and put together again."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsgrad.client import arrays
from wsgrad.client.arrays import bytes_of, check_dtype, sink_of, source_of

DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    "S3",
    "U2",
    "V5",
    "M8[us]",
    "m8[D]",
    np.dtype([("a", "i1"), ("b", "f8"), ("c", "u2", (3,))]),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_fixed_size_has_its_bytes(dtype):
    array = np.zeros((3, 2), check_dtype(dtype))
    view = bytes_of(array)
    assert view.nbytes == array.nbytes
    view[0] = 1
    assert array.tobytes()[0] == 1


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (object, "holds Python objects"),
        (np.dtype([("a", object)]), "holds Python objects"),
        (">f4", ">f4 is big-endian"),
        (np.dtype([("a", "<i2"), ("b", ">i4")]), "big-endian"),
        ("S", "no size"),
        ("U", "no size"),
        (np.dtypes.StringDType(), "holds Python objects"),
    ],
    ids=str,
)
def test_other_dtypes_are_refused_by_name(dtype, why):
    with pytest.raises(TypeError, match=why):
        check_dtype(dtype)


@st.composite
def gapped_arrays(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    dtype = np.dtype(draw(st.sampled_from(["u1", "i2", "V3", "f8"])))
    size = int(np.prod(shape))
    array = np.arange(size * dtype.itemsize * 4, dtype=np.uint64).astype(np.uint8)
    whole = array.view(dtype)[: size * 2].reshape([*shape[:-1], shape[-1] * 2])
    cut = whole[..., :: draw(st.sampled_from([2, -2]))]
    return cut.transpose(draw(st.permutations(range(cut.ndim))))


@settings(max_examples=80, deadline=None)
@given(gapped_arrays(), st.data())
def test_an_array_with_gaps_is_cut_and_put_together_in_c_order(array, data):
    piece, arrays._PIECE_NBYTES = arrays._PIECE_NBYTES, data.draw(st.integers(1, 40))
    try:
        source, target = source_of(array), np.zeros_like(array, order="K")[...]
        sink = sink_of(target)
        expected, sent = array.tobytes(), b""
        while len(sent) < len(expected):
            chunk = source.take(min(data.draw(st.integers(1, 50)), len(expected) - len(sent)))
            sent += bytes(chunk)
            place = sink.destination(len(chunk))
            if place is None:
                sink.accept(memoryview(bytearray(chunk)))
            else:
                place[:] = chunk
                sink.accept(place)
    finally:
        arrays._PIECE_NBYTES = piece
    assert sent == expected
    assert target.tobytes() == expected


def test_contiguous_memory_is_neither_copied_to_be_sent_nor_to_be_received():
    array = np.arange(10, dtype=np.int32)
    source = source_of(array)
    source.take(4)
    chunk = source.take(8)
    assert np.shares_memory(np.frombuffer(chunk, np.uint8), array)
    sink = sink_of(array)
    assert np.shares_memory(np.frombuffer(sink.destination(8), np.uint8), array)
