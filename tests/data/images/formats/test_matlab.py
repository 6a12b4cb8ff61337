"""MATLAB files as scipy writes them, and damaged ones."""

import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from vitrail.base.errors import DataError
from vitrail.data.images.formats.matlab import read_matlab_arrays


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "i8", "f4", "f8"])
def test_arrays_as_scipy_writes_them(tmp_path: Path, dtype: str, compressed: bool) -> None:
    values = np.random.default_rng(0).integers(0, 100, (3, 4, 2, 5)).astype(dtype)
    other: dict[str, Any] = {"text": "words", "cell": np.array([1, "a"], object), "X": values, "y": values[:, :1, 0, 0]}
    savemat(tmp_path / "a.mat", other, do_compression=compressed)
    found = read_matlab_arrays(tmp_path / "a.mat", ("y", "X"))
    assert found["X"].dtype == dtype
    np.testing.assert_array_equal(found["X"], values)
    np.testing.assert_array_equal(found["y"], values[:, :1, 0, 0])


def test_numbers_stored_in_a_smaller_type_and_of_the_other_byte_order(tmp_path: Path) -> None:
    """MATLAB stores doubles that are small whole numbers as bytes."""

    def element(kind: int, content: bytes) -> bytes:
        return struct.pack(">II", kind, len(content)) + content + bytes(-len(content) % 8)

    parts = (
        element(6, struct.pack(">II", 6, 0)) + element(5, struct.pack(">ii", 1, 3)) + struct.pack(">HH4s", 1, 1, b"a")
    )
    data = bytes(124) + struct.pack(">H", 0x0100) + b"MI" + element(14, parts + struct.pack(">HH4s", 3, 2, b"\1\2\3"))
    (tmp_path / "a.mat").write_bytes(data)
    found = read_matlab_arrays(tmp_path / "a.mat", ("a",))["a"]
    assert found.dtype == np.float64
    assert found.tolist() == [[1.0, 2.0, 3.0]]


def test_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    savemat(path, {"X": np.arange(12.0), "z": np.ones(2) * 1j, "text": "words"})
    whole = path.read_bytes()
    for name, message in (("y", "has no array 'y'"), ("z", "'z' is not an array"), ("text", "'text' is not an array")):
        with pytest.raises(DataError, match=message):
            read_matlab_arrays(path, (name,))
    header = whole[:128]
    bomb = zlib.compress(bytes(2**25))
    half = zlib.compress(bytes(2**23 + 2**20))  # a variable that is within the limit, but not twice
    for data, message in (
        (b"", "does not begin with a header"),
        (b"\x89HDF" + bytes(200), "does not begin with a header"),
        (whole[:150], "ends within an element"),
        (header + struct.pack("<II", 15, len(bomb)) + bomb, "would unpack to more than"),
        (header + 2 * (struct.pack("<II", 15, len(half)) + half), "would unpack to more than"),
        (header + struct.pack("<II", 15, 8) + b"notzlib!", "cannot be read"),
        (header + struct.pack("<II", 14, 8) + bytes(8), "a variable has no name"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=message) as caught:
            read_matlab_arrays(path, ("X",))
        assert "\n" not in str(caught.value)


def test_damaged_files_are_read_or_refused(tmp_path: Path, mutations: int) -> None:
    path, rng = tmp_path / "a.mat", np.random.default_rng(0)
    savemat(path, {"X": np.arange(60, dtype="u1").reshape(3, 4, 5), "y": np.arange(5.0)})
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    for _ in range(max(100, mutations // 10)):
        damaged = whole.copy()
        damaged[rng.integers(126, len(whole), 3)] = rng.integers(0, 256, 3)
        path.write_bytes(damaged[: rng.integers(126, len(whole) + 1)].tobytes())
        with suppress(DataError):  # anything else is a bug
            read_matlab_arrays(path, ("X", "y"))
