"""Headers of .npy files: numpy reads ours, and we read numpy's."""

from io import BytesIO

import numpy as np
import pytest

from vitrail.base.npy_header import HEADER_BYTES, make_npy_header, parse_npy_header

SHAPES = [(3,), (0, 768), (3, 197, 768), (10**12, 16385, 1280), (1, 2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_numpy_reads_our_header(shape: tuple[int, ...]) -> None:
    start = BytesIO(make_npy_header(shape))
    assert np.lib.format.read_magic(start) == (1, 0)
    assert np.lib.format.read_array_header_1_0(start) == (shape, False, np.dtype(np.float32))
    assert start.tell() == len(start.getvalue()) == HEADER_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_our_headers_and_those_of_numpy_are_parsed(shape: tuple[int, ...]) -> None:
    written = BytesIO()
    np.lib.format.write_array_header_1_0(written, {"descr": "<f4", "fortran_order": False, "shape": shape})
    assert parse_npy_header(written.getvalue()) == parse_npy_header(make_npy_header(shape)) == shape


def test_other_headers_are_refused() -> None:
    for array in (np.zeros(3), np.zeros((2, 3), np.float32, order="F"), np.array(0, np.float32)):
        written = BytesIO()
        np.save(written, array)
        assert parse_npy_header(written.getvalue()[:HEADER_BYTES]) is None
    ours = make_npy_header((3, 4))
    for place in (0, 8, 12, 50, 100, 127):
        assert parse_npy_header(ours[:place] + b"\x00" + ours[place + 1 :]) is None
    assert parse_npy_header(ours[:-1]) is None
