"""MNIST's files under every name, compressed or not: equal to torchvision; damaged files are one-line errors."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.toy_datasets import encode_idx, random_array, write_idx_files
from torchvision.datasets import MNIST

from vitrail.base.errors import DataError
from vitrail.data.images.datasets import open_data
from vitrail.data.images.formats.mnist_idx import FASHION_FIRST_LABELS, read_mnist_folder

TRAIN, VAL = np.array([5, 0, 4, 1, 9, 2]), np.array([7, 2, 1])


@pytest.mark.parametrize("dash", ["-", "."])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "raw", "MNIST/raw"])
def test_every_naming_scheme_is_read(tmp_path: Path, dash: str, packed: bool, below: str) -> None:
    write_idx_files(tmp_path / below, TRAIN, VAL, dash=dash, packed=packed)
    data = open_data(tmp_path)
    assert data.classes == tuple("0123456789")
    assert data.train is not None
    assert data.val is not None
    assert [data.train.label(index) for index in range(6)] == TRAIN.tolist()
    assert [data.val.label(index) for index in range(3)] == VAL.tolist()
    assert np.array_equal(data.train.source(2)[..., 0], random_array(6, 28, 28, seed=6)[2])


def test_equals_torchvision(tmp_path: Path) -> None:
    write_idx_files(tmp_path / "MNIST" / "raw", TRAIN, VAL)
    for mine, is_train in zip(read_mnist_folder(tmp_path / "MNIST"), (True, False), strict=True):
        theirs = MNIST(str(tmp_path), train=is_train)
        assert mine is not None
        assert mine.labels.tolist() == theirs.targets.tolist()
        for index in range(len(mine)):
            assert np.array_equal(mine.source(index)[..., 0], np.asarray(theirs[index][0]))


def test_fashion_is_recognized_by_its_labels_or_its_folder(tmp_path: Path) -> None:
    first, second = write_idx_files(tmp_path / "a", np.array(FASHION_FIRST_LABELS), VAL), tmp_path / "Fashion-MNIST"
    assert open_data(first).classes[9] == "Ankle boot"
    assert open_data(write_idx_files(second, TRAIN, VAL)).classes[0] == "T-shirt/top"


def test_train_or_test_alone(tmp_path: Path) -> None:
    write_idx_files(tmp_path, TRAIN, VAL)
    for file in tmp_path.glob("train*"):
        file.unlink()
    train, val = read_mnist_folder(tmp_path)
    assert train is None
    assert len(val or ()) == 3
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="has no labels next to it; expected both"):
        read_mnist_folder(tmp_path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "begins with nothing; expected 00 00 08 03"),
        (encode_idx(random_array(6)), "begins with 00 00 08 01; expected 00 00 08 03"),
        (encode_idx(random_array(6, 28, 28))[:10], "begins with 00 00 08 03; expected"),
        (encode_idx(random_array(6, 28, 28))[:-1], "has 4703 bytes of values; expected 4704"),
        (bytes((0, 0, 8, 3)) + b"\xff" * 12, f"has 0 bytes of values; expected {(2**32 - 1) ** 3}"),
        (bytes((0, 0, 8, 3)) + b"\xff" * 4 + bytes(4) + b"\xff" * 4, "has the sizes"),
        (encode_idx(random_array(5, 28, 28)), "5 images and 6 labels; expected"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    write_idx_files(tmp_path, TRAIN, VAL)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(data)
    with pytest.raises(DataError, match=expected):
        open_data(tmp_path)


def test_damaged_gzip_and_invalid_label_are_refused(tmp_path: Path) -> None:
    write_idx_files(tmp_path, TRAIN, VAL, packed=True)
    file = tmp_path / "train-labels-idx1-ubyte.gz"
    whole = file.read_bytes()
    for data in (whole[:-9], b"text", whole[:15] + b"\xff\xff" + whole[17:]):
        file.write_bytes(data)
        with pytest.raises(DataError, match=r"cannot be read: [^\n]+; expected a complete and readable idx file"):
            open_data(tmp_path)
    file.write_bytes(gzip.compress(encode_idx(np.array([*FASHION_FIRST_LABELS[:5], 10], np.uint8))))
    fashion = tmp_path.rename(tmp_path.with_name("fashion"))
    with pytest.raises(DataError, match="label 10 of image 5; expected 0 to 9"):
        open_data(fashion)


BOMBS = """
import resource, sys
from pathlib import Path
from vitrail.data.images.formats.mnist_idx import read_idx_file
from vitrail.base.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_idx_file(Path(sys.argv[1]), 3)
except DataError as error:
    print(error)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize("shape", [(6, 28, 28), (2000, 512, 512)], ids=["more than it says", "what it says"])
def test_gzip_bomb_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(bytes((0, 0, 8, 3)) + np.array(shape, ">u4").tobytes())
        for _ in range(500):
            file.write(b"\0" * 2**20)
    done = subprocess.run([sys.executable, "-c", BOMBS, path], capture_output=True, text=True, check=True)
    message, grown = done.stdout.splitlines()
    assert path.name in message
    assert "bytes of values; expected 4704" in message or "would unpack to more than" in message
    assert int(grown) < 64 * path.stat().st_size + 2**27
