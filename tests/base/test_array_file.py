"""Rows on disk: valid or missing after a kill, found if damaged, filled by several processes, and a full disk."""

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vitrail.base.array_file import HEADER_BYTES, ArrayFile, make_npy_header, parse_npy_header
from vitrail.base.errors import OutputError

ROWS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
FILLER = """
import sys
from pathlib import Path
import numpy as np
from vitrail.base.array_file import ArrayFile

rows = np.load(sys.argv[2])
file = ArrayFile(Path(sys.argv[1]), len(rows), "rows")
with file.lock() as missing:
    for index in missing.tolist():
        file.write(np.array([index]), rows[index : index + 1])
        print(index, flush=True)
"""


def write_file(path: Path, rows: NDArray[np.float32] = ROWS) -> ArrayFile:
    file = ArrayFile(path, len(rows), "rows")
    file.write(np.arange(len(rows)), rows)
    return file


def open_file(path: Path) -> ArrayFile:
    return ArrayFile(path, 16, "rows")


def test_rows_are_written_by_index_and_found_again(tmp_path: Path) -> None:
    file = open_file(tmp_path / "a.npy")
    assert not file.valid.any()
    assert not (tmp_path / "a.npy").exists(), "the width is known with the first row"
    file.write(np.array([3, 1]), ROWS[[3, 1]])
    again = open_file(tmp_path / "a.npy")
    assert [*np.flatnonzero(again.valid)] == [1, 3] == [*np.flatnonzero(file.valid)]
    assert again.damaged == 0
    with again.lock() as missing:
        again.write(missing, ROWS[missing])
    assert open_file(tmp_path / "a.npy").valid.all()
    for rows in (again.open_rows(), np.load(tmp_path / "a.npy")):
        assert np.array_equal(rows, ROWS)
    assert [each.name for each in tmp_path.iterdir()] == ["a.npy"]


def test_rows_of_another_description_are_computed_again(tmp_path: Path) -> None:
    write_file(tmp_path / "a.npy")
    other = ArrayFile(tmp_path / "a.npy", 16, "other rows")
    assert other.damaged == 16
    assert not other.valid.any()
    longer = ArrayFile(tmp_path / "a.npy", 17, "rows")
    assert not longer.valid.any()
    longer.write(np.array([16]), np.ones((1, 5), np.float32))
    assert np.load(tmp_path / "a.npy").shape == (17, 5)


def test_a_flipped_bit_is_found_in_its_row(tmp_path: Path, mutations: int) -> None:
    write_file(tmp_path / "a.npy")
    content, chance, found = (tmp_path / "a.npy").read_bytes(), random.Random(0), 0
    for _ in range(max(mutations // 10, 100)):
        position = chance.randrange(len(content))
        changed = bytes([content[position] ^ (1 << chance.randrange(8))])
        (tmp_path / "a.npy").write_bytes(content[:position] + changed + content[position + 1 :])
        file = open_file(tmp_path / "a.npy")
        valid = file.valid.copy()
        assert np.array_equal(file.open_rows()[valid], ROWS[valid] if file.width else ROWS[:0, :0])
        assert valid.sum() >= (15 if position >= 128 else 0)
        found += not valid.all()
        file.write(np.flatnonzero(~valid), ROWS[~valid])
        assert np.array_equal(np.load(tmp_path / "a.npy"), ROWS)
    assert found


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"PK\x03\x04", b"text", b"\0" * 5000])
def test_another_file_is_replaced(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(damage)
    assert open_file(tmp_path / "a.npy").damaged == 16
    assert write_file(tmp_path / "a.npy").valid.all()
    for size in (10, 300, len((tmp_path / "a.npy").read_bytes()) - 1):
        write_file(tmp_path / "a.npy")
        os.truncate(tmp_path / "a.npy", size)
        assert not open_file(tmp_path / "a.npy").valid.any()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_special_file_is_a_one_line_error(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a.npy")
    with pytest.raises(OutputError, match=r"a\.npy cannot be used: it is a "):
        open_file(tmp_path / "a.npy")


def test_rows_before_a_kill_are_kept(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(20000, 8)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    command = [sys.executable, "-c", FILLER, str(tmp_path / "a.npy"), str(tmp_path / "rows.npy")]
    written = list[int]()
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            written += [int(process.stdout.readline()) for _ in range(50)]
            process.send_signal(signal.SIGKILL)
            written += [int(line) for line in process.stdout]
        file = ArrayFile(tmp_path / "a.npy", len(rows), "rows")
        valid = np.flatnonzero(file.valid)
        assert set(written) <= set(valid.tolist()) < set(range(len(rows)))
        assert np.array_equal(file.open_rows()[valid], rows[valid])
        assert file.damaged == 0
    assert len(written) == len(set(written)), "no row is written twice"


def fill(path: Path, rows: range, results: Any) -> None:
    file, written = open_file(path), list[int]()
    for start in range(rows.start, rows.stop, 4):
        with file.lock(range(start, start + 4)) as missing:
            file.write(missing, ROWS[missing])
            written += missing.tolist()
    results.put(written)


@pytest.mark.parametrize("shares", [(range(16), range(16)), (range(8), range(8, 16))])
def test_two_processes_fill_one_file(shares: tuple[range, range], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    processes = [context.Process(target=fill, args=(tmp_path / "a.npy", rows, results)) for rows in shares]
    for each in processes:
        each.start()
    written = [index for _ in processes for index in results.get(timeout=60)]
    for each in processes:
        each.join(60)
    assert sorted(written) == [*range(16)]
    assert np.array_equal(np.load(tmp_path / "a.npy"), ROWS)
    assert [each.name for each in tmp_path.iterdir()] == ["a.npy"]


def test_a_full_disk_is_an_error_and_the_rows_before_it_stay(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    file = open_file(tmp_path / "a.npy")
    file.write(np.arange(2), ROWS[:2])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 4 * 16 * 4 + 4 * 5, before[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*a\.npy: .*; free some space"):
            file.write(np.arange(2, 16), ROWS[2:])
        with pytest.raises(OutputError, match=r"cannot write .*b\.npy: "):
            write_file(tmp_path / "b.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for each in (file, open_file(tmp_path / "a.npy")):
        assert [*np.flatnonzero(each.valid)] == [*range(5)]
    assert [each.name for each in tmp_path.iterdir()] == ["a.npy"]


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
