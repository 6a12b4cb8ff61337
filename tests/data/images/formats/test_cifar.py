"""CIFAR-10 and CIFAR-100, binary and pickled: equal to torchvision; damaged files are one-line errors."""

import hashlib
import pickle
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.toy_datasets import CIFAR_CLASSES, random_array, write_cifar10_binary, write_cifar10_python, write_cifar100
from torchvision.datasets import CIFAR10

from vitrail.base.errors import DataError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits, open_data


def arrays(data: DatasetSplits) -> tuple[ArrayDataset, ArrayDataset]:
    assert isinstance(data.train, ArrayDataset)
    assert isinstance(data.val, ArrayDataset)
    return data.train, data.val


@pytest.mark.parametrize("below", ["", "cifar-10"])
@pytest.mark.parametrize("write", [write_cifar10_binary, write_cifar10_python])
def test_cifar_10(tmp_path: Path, write: Callable[[Path], Path], below: str) -> None:
    write(tmp_path / "data" / below)
    data = open_data(tmp_path / "data")
    train, val = arrays(data)
    assert data.classes == CIFAR_CLASSES
    assert data.notes == ()
    assert train.labels.tolist() == [1, 2, 3, 2, 3, 4, 3, 4, 5, 4, 5, 6, 5, 6, 7]
    assert val.labels.tolist() == [0, 1, 2]
    expected = random_array(3, 3072, seed=2)[1].reshape(3, 32, 32)
    assert np.array_equal(train.source(4), expected.transpose(1, 2, 0))


@pytest.mark.parametrize("binary", [True, False])
def test_cifar_100(tmp_path: Path, binary: bool) -> None:
    data = open_data(write_cifar100(tmp_path / "cifar", binary=binary))
    train, val = arrays(data)
    assert data.classes[99] == "thing_99"
    assert train.labels.tolist() == [99, 0, 5]
    assert val.labels.tolist() == [7, 8]
    assert np.array_equal(train.source(1), random_array(3, 3072, seed=3)[1].reshape(3, 32, 32).transpose(1, 2, 0))


@pytest.mark.parametrize("protocol", range(6))
def test_equals_torchvision(tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_cifar10_python(tmp_path / "cifar-10-batches-py", protocol=protocol)
    monkeypatch.setattr(CIFAR10, "_check_integrity", Mock(return_value=True))
    meta = {**CIFAR10.meta, "md5": hashlib.md5((folder / "batches.meta").read_bytes()).hexdigest()}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    names = pickle.loads((folder / "batches.meta").read_bytes())[b"label_names"]
    as_text = {"label_names": [name.decode() for name in names]}  # torchvision does not read bytes as keys
    train, val = arrays(open_data(tmp_path))
    (folder / "batches.meta").write_bytes(pickle.dumps(as_text))
    meta["md5"] = hashlib.md5((folder / "batches.meta").read_bytes()).hexdigest()
    for file in folder.glob("*_batch*"):
        batch = pickle.loads(file.read_bytes())
        file.write_bytes(pickle.dumps({key.decode(): value for key, value in batch.items()}))
    theirs: Any
    for mine, theirs in ((train, CIFAR10(str(tmp_path))), (val, CIFAR10(str(tmp_path), train=False))):
        assert np.array_equal(mine.images, theirs.data)
        assert mine.labels.tolist() == theirs.targets
        assert list(mine.classes) == theirs.classes
    assert np.array_equal(arrays(open_data(tmp_path))[0].images, train.images)  # text keys are read too


def test_missing_files_are_noted(tmp_path: Path) -> None:
    folder = write_cifar10_binary(tmp_path / "cifar")
    (folder / "batches.meta.txt").unlink()
    (folder / "data_batch_3.bin").unlink()
    data = open_data(folder)
    assert data.classes == tuple("0123456789")
    assert "data_batch_3.bin is missing" in data.notes[0]
    assert "named by their numbers" in data.notes[1]
    (folder / "test_batch.bin").unlink()
    data = open_data(folder, val_share=0.5)
    assert "images held out for validation" in data.notes[-1]
    assert len(data.train or ()) + len(data.val or ()) == 12


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("data_batch_2.bin", b"\x01" * 3072, "has 3072 bytes; expected a multiple of 3073: is it truncated?"),
        ("data_batch_2.bin", b"", "has 0 bytes; expected a multiple of 3073"),
        ("data_batch_2.bin", b"\x0a" * 3073, "data_batch_2.bin: label 10 of image 0; expected 0 to 9"),
        ("batches.meta.txt", b"cat\ndog\n", "has 2 class names; expected 10"),
    ],
)
def test_damaged_binary_file_is_refused(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    (write_cifar10_binary(tmp_path / "cifar") / name).write_bytes(data)
    with pytest.raises(DataError, match=expected.replace("?", r"\?")):
        open_data(tmp_path)


IMAGES = random_array(2, 3072)
DOUBLED: Any = reduce(lambda inner, _: [inner, inner], range(50), [0])  # an array of it would have 2^50 numbers


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([1, 2], "holds a list; expected the dictionary of a CIFAR batch"),
        ({"data": IMAGES}, "has no images; expected 'data' of bytes"),
        ({"data": IMAGES[:, :5], "labels": [0, 1]}, "has no images; expected 'data' of bytes"),
        ({"data": IMAGES, "labels": [0]}, "has 2 images and 1 labels; expected"),
        ({"data": IMAGES, "labels": [0, 11]}, "label 11 of image 1; expected 0 to 9"),
        ({"data": IMAGES.astype(float), "labels": [0, 1]}, "an array of 'f8', not of bytes"),
        ({"data": IMAGES, "labels": [DOUBLED, DOUBLED]}, "has no images; expected 'data' of bytes"),
    ],
)
def test_invalid_pickled_batch_is_refused(tmp_path: Path, batch: Any, expected: str) -> None:
    file = write_cifar10_python(tmp_path / "cifar") / "data_batch_4"
    file.write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match=expected) as caught:
        open_data(tmp_path)
    assert "\n" not in str(caught.value)
    assert "data_batch_4" in str(caught.value)
