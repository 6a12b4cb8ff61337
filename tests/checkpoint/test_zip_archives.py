"""Zip files and arrays with inconsistent or hostile headers are refused."""

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.bad_checkpoints import (
    BOMB_BYTES,
    OS_SYSTEM,
    PickledCall,
    assert_refused,
    change_zip_directory,
    npy_bytes,
    npz_bytes,
    tensor_pickle,
    write_file,
    zip_bomb,
    zip_pickle,
)

from vitrail.checkpoint.weight_files import read_raw_contents


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    array = np.array([PickledCall(OS_SYSTEM, f"touch {sentinel}")], dtype=object)
    np.savez(tmp_path / "weights.npz", a=array)
    assert_refused(tmp_path / "weights.npz", r"contains pickled objects \(a\.npy\), which could run code; refused")
    lying = npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", pickle.dumps(array))
    assert_refused(write_file(tmp_path / "lying.npz", npz_bytes(content=lying)))
    assert not sentinel.exists()


def test_compressed_torch_files_are_unpacked(tmp_path: Path) -> None:
    numbers = torch.randn(16)
    content = zip_pickle(tensor_pickle(16, "zip"), numbers.numpy().tobytes(), zipfile.ZIP_DEFLATED)
    contents = read_raw_contents(write_file(tmp_path / "a.pth", content))
    assert torch.equal(contents.tensors["a"], numbers)


@pytest.mark.parametrize(
    "shape", ["(1000000000,)", "(1000000000000000000,)", "(-1,)", "(-2, -2)", "(4,)", "(2.5,)", "'abc'", "(True,)"]
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_arrays_with_a_wrong_size_are_refused(shape: str, compression: int, tmp_path: Path) -> None:
    content = npy_bytes(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}", b"\0" * 12)
    assert_refused(write_file(tmp_path / "a.npz", npz_bytes(content=content, compression=compression)))


@pytest.mark.parametrize(
    "header", ["", "{", "{'descr': '|O', 'fortran_order': False, 'shape': ()}", "[" * 90, "'\\d' + L", "1L, (", "\0"]
)
def test_arrays_with_an_invalid_header_are_refused(header: str, tmp_path: Path) -> None:
    assert_refused(write_file(tmp_path / "a.npz", npz_bytes(content=npy_bytes(header, b"\0" * 12))))


def test_arrays_without_a_header_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x93NUMPY", b"\x93NUMPY\x09\x09abc", b"\x93NUMPY\x02\0\xff\xff\xff\xff{"):
        assert_refused(write_file(tmp_path / "a.npz", npz_bytes(content=content)))


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_bombs_are_refused(compression: int, tmp_path: Path) -> None:
    content = zip_bomb(compression)
    assert_refused(write_file(tmp_path / "a.npz", content), r"would unpack to 60000128|neither torch nor NumPy uses")
    if compression == zipfile.ZIP_DEFLATED:
        for size in (128 + 12, 2 * len(content)):  # with a false size in the directory
            lying = content.replace(struct.pack("<L", BOMB_BYTES + 128), struct.pack("<L", size))
            assert_refused(write_file(tmp_path / f"{size}.npz", lying))
    assert_refused(
        write_file(tmp_path / "a.pth", zip_pickle(pickle.dumps({}, 2), b"\0" * 10**6, compression)),
        r"would unpack|neither torch nor",
    )


def test_inconsistent_zip_files_are_refused(tmp_path: Path) -> None:
    one = npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", b"\0" * 8)
    whole = npz_bytes(content=one)
    assert read_raw_contents(write_file(tmp_path / "whole.npz", whole)).tensors["a"].tolist() == [0, 0]

    def twice(directory: bytearray) -> None:
        directory.extend(bytes(directory))

    def overlapping(directory: bytearray) -> None:
        directory.extend(directory.replace(b"a.npy", b"b.npy"))

    def larger(directory: bytearray) -> None:
        directory[20:28] = struct.pack("<2L", 10**9, 10**9)

    def encrypted(directory: bytearray) -> None:
        directory[8] |= 1

    def elsewhere(directory: bytearray) -> None:
        directory[42:46] = struct.pack("<L", 2**31)

    def unknown(directory: bytearray) -> None:
        directory[10] = 99

    for change in (twice, overlapping, larger, encrypted, elsewhere, unknown):
        assert_refused(write_file(tmp_path / f"{change.__name__}.npz", change_zip_directory(whole, change)))
    assert_refused(write_file(tmp_path / "comment.npz", whole[:-2] + b"\x03\0abc"), r"without its end")
    assert_refused(write_file(tmp_path / "behind.npz", b"PK\x03\x04" + whole), r"not where the end record says")
    assert_refused(write_file(tmp_path / "empty.npz", b"PK\x05\x06" + b"\0" * 18), r"without tensors")
    assert_refused(
        write_file(tmp_path / "many.npz", change_zip_directory(whole, lambda each: each.extend(bytes(each) * 30000))),
        r"directory of",
    )
    assert_refused(write_file(tmp_path / "other.zip", npz_bytes("readme.txt", b"hello")), r"zip file without tensors")
