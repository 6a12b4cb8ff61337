"""Arrays of numbers in MATLAB's files of version 5, read from untrusted bytes within limits."""

import zlib
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import read_bytes

MAX_FILE_BYTES = 2**31
MAX_UNPACK_RATIO, UNPACK_ALLOWANCE = 8, 2**24  # all variables unpack to at most RATIO × the file + ALLOWANCE
MAX_DIMENSIONS = 8
MATRIX, COMPRESSED = 14, 15
TYPES = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}  # of stored numbers
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}  # of arrays


class FormatError(Exception):
    """The bytes are not such a file; the message says why."""


def read_matlab_arrays(path: Path, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """The arrays of these names, all of which the file must have."""
    expected = "expected a MATLAB file of version 5 (-v7.3 files are HDF5: save with -v7)"
    try:
        data = memoryview(read_bytes(path, MAX_FILE_BYTES))
        arrays = dict(list_arrays(data, names))
    except (OSError, FormatError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; {expected}") from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(f"{path} has no array {missing[0]!r}; expected {', '.join(names)}")
    return arrays


def list_arrays(data: memoryview, names: Collection[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    if len(data) < 128 or bytes(data[126:128]) not in (b"IM", b"MI"):
        raise FormatError("it does not begin with a header of MATLAB")
    order = "<" if bytes(data[126:128]) == b"IM" else ">"
    left = min(MAX_UNPACK_RATIO * len(data) + UNPACK_ALLOWANCE, MAX_FILE_BYTES)
    for kind, content in split_elements(data[128:], order):
        if kind == COMPRESSED:
            unpacked = unpack(content, left)
            left -= len(unpacked)
            kind, content = next(split_elements(unpacked, order), (0, content))
        if kind == MATRIX:
            found = read_array(content, order, names)
            if found is not None:
                yield found


def unpack(content: memoryview, limit: int) -> memoryview:
    reader = zlib.decompressobj()
    data = reader.decompress(content, limit + 1)
    if len(data) > limit:
        raise FormatError(f"a variable of {len(content):,} bytes would unpack to more than {limit:,}")
    if not reader.eof:
        raise FormatError("a compressed variable is truncated")
    return memoryview(data)


def split_elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and content of each element; those of at most four bytes are packed into their header."""
    while len(data) >= 8:
        kind, size = np.frombuffer(data[:8], f"{order}u4").tolist()
        if kind >> 16:
            kind, size, start, step = kind & 0xFFFF, kind >> 16, 4, 8
        else:
            start, step = 8, 8 + size + (-size % 8 if kind != COMPRESSED else 0)
        if start == 4 and size > 4:
            raise FormatError(f"a short element has {size} bytes, more than 4")
        if start + size > len(data):
            raise FormatError(f"it ends within an element of {size:,} bytes")
        yield kind, data[start : start + size]
        data = data[step:]


def read_array(content: memoryview, order: str, names: Collection[str]) -> tuple[str, NDArray[Any]] | None:
    """Name and values of a real array; None for other variables, of which nothing more is read."""
    parts = split_elements(content, order)
    header = [part for _, part in zip(range(3), parts, strict=False)]  # flags, dimensions, name
    if len(header) < 3 or len(header[0][1]) != 8:
        raise FormatError("a variable has no name")
    flags = int(np.frombuffer(header[0][1], f"{order}u4")[0])
    name = bytes(header[2][1]).decode("ascii")
    if name not in names:
        return None
    dtype, is_complex = CLASSES.get(flags & 0xFF), flags & 0x800
    if dtype is None or is_complex:
        raise FormatError(f"{name!r} is not an array of real numbers")
    if len(header[1][1]) % 4:
        raise FormatError(f"the dimensions of {name!r} have {len(header[1][1])} bytes")
    shape: list[int] = np.frombuffer(header[1][1], f"{order}i4").tolist()
    kind, values = next(parts, (0, memoryview(b"")))
    stored = TYPES.get(kind)
    if stored is None or not 1 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 0:
        raise FormatError(f"{name!r} has no values")
    if prod(shape) * np.dtype(stored).itemsize != len(values):
        raise FormatError(f"{name!r} has {len(values):,} bytes of values, which do not fit {shape}")
    array = np.frombuffer(values, f"{order}{stored}").reshape(shape, order="F")
    return name, array.astype(dtype, copy=False)
