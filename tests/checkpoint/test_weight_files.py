"""Files without weights are refused in one line that names them, without blocking or filling the memory."""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.bad_checkpoints import (
    LEGACY_HEADER,
    TENSORS,
    VALID_FILES,
    assert_refused,
    change_zip_directory,
    legacy_torch_bytes,
    make_model_folder,
    npy_bytes,
    npz_bytes,
    repeat_step,
    safetensors_bytes,
    tensor_pickle,
    torch_save_bytes,
    write_file,
    zip_bomb,
    zip_pickle,
)

from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.weight_files import RawContents, read_raw_contents


@pytest.mark.parametrize("name", VALID_FILES)
def test_complete_files_are_read_and_truncated_ones_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    VALID_FILES[name](path)
    contents = read_raw_contents(path)
    assert all(torch.equal(contents.tensors[key], tensor) for key, tensor in TENSORS.items())
    del contents
    content = path.read_bytes()
    for length in {*range(0, len(content), max(len(content) // 50, 1)), *range(20), len(content) - 1}:
        # in a new file, so that earlier contents stay readable
        assert_refused(write_file(tmp_path / f"cut at {length}", content[:length]))


@pytest.mark.parametrize(
    "content",
    [
        safetensors_bytes({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4]}}, b"\0" * 4),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"\0" * 4),
        safetensors_bytes({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
        safetensors_bytes(
            {str(n): {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in range(2)}, b"\0" * 4
        ),
        safetensors_bytes({str(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(50_000)}),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 5),
        # of 240,000 large numbers, the product takes minutes
        safetensors_bytes({"a": {"dtype": "F32", "shape": [1] * 17, "data_offsets": [0, 4]}}, b"\0" * 4),
        safetensors_bytes([]),
        struct.pack("<Q", 100_001) + b'{"a":' + b"[" * 99_996,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 1) + b"{",
    ],
)
def test_wrong_safetensors_headers_are_refused(content: bytes, tmp_path: Path) -> None:
    assert_refused(write_file(tmp_path / "a.safetensors", content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty; expected \.safetensors"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            r"Git LFS pointer \(get the file itself",
        ),
        (b"<!DOCTYPE html><html>", r"a web page \(perhaps a failed download\)"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 100, r"an HDF5 file"),
        (b"\x93NUMPY\x01\x00", r"a single NumPy array"),
        (b"hello", r"of an unknown kind; expected"),
        (b"PK", r"zip file without its end record"),
        (b"PK\x03\x04" + b"\0" * 200, r"zip file without its end record"),
        (b"\x80", r"cannot be read"),
        (pickle.dumps({"a": 1}), r"is a plain pickle; refused|protocol"),
    ],
)
@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "a.npz", "a"])
def test_files_of_other_kinds_are_refused_by_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    assert_refused(write_file(tmp_path / name, content), message)


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for first in (
        b"",
        b"PK\x03\x04",
        b"\x80\x02",
        b"\x80\x04",
        LEGACY_HEADER,
        b"\x40\0\0\0\0\0\0\0{",
        b"\x93NUMPY",
        b"\x89HDF",
    ):
        for size in (1, 9, 100, 10_000):
            assert_refused(write_file(tmp_path / "random.bin", first + draw.bytes(size)))


def test_paths_that_are_not_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "raise_file_not_found.pth").symlink_to(tmp_path / "nowhere")
    (tmp_path / "weights.pth").mkdir()
    assert_refused(tmp_path / "pipe.pth", r"is neither a file nor a folder")
    assert_refused(Path("/dev/zero"), r"is neither a file nor a folder")
    assert_refused(tmp_path / "loop")
    assert_refused(tmp_path / "raise_file_not_found.pth", r"does not exist")
    assert_refused(tmp_path / "weights.pth", r"is a folder without weights")
    with pytest.raises(CheckpointError, match=r"cannot be read: File name too long"):
        read_raw_contents(tmp_path / ("long" * 1000))
    with pytest.raises(CheckpointError, match=r"does not exist"):
        read_raw_contents(tmp_path / "null\0byte")


def test_tensors_stay_after_their_file_is_deleted(tmp_path: Path) -> None:
    for name, save in VALID_FILES.items():
        save(tmp_path / name)
        contents: RawContents = read_raw_contents(tmp_path / name)
        (tmp_path / name).unlink()
        assert all(torch.equal(contents.tensors[key], tensor) for key, tensor in TENSORS.items())


CHANGE_FILES = """
import sys
from pathlib import Path
from vitrail.checkpoint.weight_files import read_raw_contents

for name in sys.argv[1:]:
    path = Path(name)
    contents = read_raw_contents(path).tensors
    before = {name: tensor.clone() for name, tensor in contents.items()}
    with path.open("r+b") as file:
        file.write(b"\\xff" * path.stat().st_size)
    assert all(contents[name].equal(tensor) for name, tensor in before.items()), path
    with path.open("r+b") as file:
        file.truncate(0)
    assert all(contents[name].equal(tensor) for name, tensor in before.items()), path
    print(path.name)
"""


def test_tensors_stay_after_their_file_is_overwritten_or_truncated(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(100_000), "b": torch.randn(3, 7, dtype=torch.float64), "c": torch.ones(())}
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "zip.pth")
    torch.save(tensors, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    arrays: Any = {name: each.numpy() for name, each in tensors.items()}
    np.savez(tmp_path / "a.npz", **arrays)
    files = sorted(tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-c", CHANGE_FILES, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)  # -7 is SIGBUS
    assert done.stdout.split() == [path.name for path in files]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.pth", b"\x80")
    path.chmod(0)
    assert_refused(path, r"cannot be read: Permission denied")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{" + b'"a":[],' * 200_000 + b'"a":1}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b" " * 5_000_000 + b"{}",
        b"\xff\xfe{}",
        b"",
        b"null",
        b'"\\ud800"',
    ],
)
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_invalid_json_next_to_the_weights_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    place = make_model_folder(tmp_path / "folder", **{name: content})
    with pytest.raises(CheckpointError, match=rf"/{name.replace('.', '[.]')} ") as caught:
        read_raw_contents(place)
    assert len(str(caught.value).splitlines()) == 1


def test_folders_with_invalid_files_are_refused(tmp_path: Path) -> None:
    place = make_model_folder(tmp_path / "folder")
    os.mkfifo(place / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: it is a named pipe"):
        read_raw_contents(place)
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "pipe.safetensors"}}).encode()
    place = make_model_folder(tmp_path / "shards", **{"model.safetensors": None, "model.safetensors.index.json": index})
    save_file({"a": torch.ones(1)}, place / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is missing or is not a file"):
        read_raw_contents(place)
    os.mkfifo(place / "pipe.safetensors")
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is missing or is not a file"):
        read_raw_contents(place)
    for weight_map in ({"a": "../folder/model.safetensors"}, {"a": "/dev/zero"}, {"a": 1}, ["a"], None):
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert_refused(place, r"index\.json (refers to files outside its folder|has no weight_map)")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert_refused(place)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode()
    place = make_model_folder(tmp_path / "shards", **{"model.safetensors": None, "model.safetensors.index.json": index})
    save_file({"a": torch.ones(1)}, place / "1.safetensors")
    (place / "2.safetensors").symlink_to("1.safetensors")
    assert_refused(place, r"1\.safetensors and .*2\.safetensors both contain a; expected each tensor in one file")
    (place / "2.safetensors").unlink()
    save_file({"b": torch.zeros(1), "a": torch.zeros(1)}, place / "2.safetensors")
    assert_refused(place, "both contain a")
    save_file({"b": torch.zeros(1)}, place / "2.safetensors")
    assert set(read_raw_contents(place).tensors) == {"a", "b"}


def test_names_with_line_breaks_are_escaped(tmp_path: Path) -> None:
    torch.save({"a\nb\x1b[31m\ud800": torch.eye(2).to_sparse()}, tmp_path / "a.pth")
    assert r"a\nb\x1b[31m\ud800 is sparse" in assert_refused(tmp_path / "a.pth")
    torch.save({"a" * 10**6: torch.eye(2).to_sparse()}, tmp_path / "a.pth")
    assert len(assert_refused(tmp_path / "a.pth")) < 3000


MEASURE = """
import resource, sys
from pathlib import Path
import torch, numpy, safetensors.torch
from vitrail.checkpoint.weight_files import read_raw_contents
from vitrail.base.errors import CheckpointError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def read(path):
    try:
        return read_raw_contents(path)
    except CheckpointError:
        return None

for path in sorted(Path(sys.argv[1]).glob("warm*")):  # imports and caches of the first use
    assert read(path)
for path in sorted(Path(sys.argv[1]).glob("bad*"), key=lambda path: path.stat().st_size):
    before = peak()
    contents = read(path)
    print(path.name, peak() - before, path.stat().st_size, contents is not None)
"""


def test_reading_takes_at_most_twice_the_file_size(tmp_path: Path) -> None:
    for name, save in VALID_FILES.items():
        save(tmp_path / f"warm {name}")
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    rebuilt = b"ctorch\nTensor\nq\0" + b"h\0)R" * 30_000
    whole = npz_bytes(content=npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }"))
    bad = {
        "bomb.npz": zip_bomb(zipfile.ZIP_DEFLATED),
        "bzip2.npz": zip_bomb(zipfile.ZIP_BZIP2),
        "lzma.npz": zip_bomb(zipfile.ZIP_LZMA),
        "billion.npz": npz_bytes(
            content=npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000,), }")
        ),
        "billion.pth": zip_pickle(tensor_pickle(10**9, "zip")),
        "billion legacy.pth": legacy_torch_bytes(tensor_pickle(10**9, "legacy")),
        "billion.safetensors": safetensors_bytes(
            {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}
        ),
        "dicts.pth": zip_pickle(repeat_step(b"}", 60_000)),
        "million dicts.pth": zip_pickle(repeat_step(b"}")),
        "tensors.pth": zip_pickle(repeat_step(rebuilt, 1)),
        "tensors legacy.pth": legacy_torch_bytes(repeat_step(rebuilt, 1)),
        "empty.safetensors": safetensors_bytes({str(n): empty for n in range(16_000)}),
        "many empty.safetensors": safetensors_bytes({str(n): empty for n in range(200_000)}),
        "directory.npz": change_zip_directory(whole, lambda each: each.extend(bytes(each) * 100_000)),
        "bytearray.pth": zip_pickle(b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85R."),
        "expanded.pth": torch_save_bytes({"a": torch.ones(1).expand(10**9)}),
        "whole.pth": torch_save_bytes({"a": torch.ones(5_000_000)}),
        "whole legacy.pth": torch_save_bytes({"a": torch.ones(5_000_000)}, _use_new_zipfile_serialization=False),
    }
    for name, content in bad.items():
        (tmp_path / f"bad {name}").write_bytes(content)
    json_bomb = make_model_folder(tmp_path / "bad folder", **{"config.json": b"{" + b'"a":[],' * 500_000 + b'"a":1}'})
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=False)
    lines = [line.rsplit(" ", 3) for line in done.stdout.splitlines()]
    assert len(lines) == len(bad) + 1, done.stderr
    read = [name for name, _, _, contents in lines if contents == "True"]
    assert sorted(read) == ["bad empty.safetensors", "bad whole legacy.pth", "bad whole.pth"]
    for name, grown, size, _ in lines:
        size = sum(each.stat().st_size for each in json_bomb.iterdir()) if name == json_bomb.name else int(size)
        assert int(grown) <= 2 * size + 2**25, name
