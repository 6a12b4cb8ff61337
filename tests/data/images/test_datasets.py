"""Data sets by name, by folder or from an object."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.toy_datasets import random_array, write_cifar10_binary, write_cifar10_python, write_class_folders

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits, DatasetSubset, ImageDataset, open_data


def test_bundled_data_set() -> None:
    data = open_data("fashion")
    assert (data.name, len(data.train or ()), len(data.val or ()), len(data.classes)) == ("fashion", 6000, 1000, 10)
    assert data.notes == ()


def test_folder_named_fashion_is_opened_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path / "fashion", cat=2, dog=2)
    monkeypatch.chdir(tmp_path)
    assert open_data("./fashion").classes == ("cat", "dog")
    assert open_data(Path("fashion")).classes == ("cat", "dog")


def test_subset_has_the_images_at_its_indices() -> None:
    arrays = ArrayDataset(random_array(5, 4, 4, 3), [0, 1, 0, 1, 1], ["cat", "dog"], "toys")
    part = DatasetSubset(arrays, [4, 0])
    assert isinstance(part, ImageDataset)
    assert isinstance(arrays, ImageDataset)
    assert len(part) == 2
    assert part.classes == ("cat", "dog")
    assert [part.label(0), part.label(1)] == [1, 0]
    assert np.array_equal(part.source(0), arrays.source(4))
    assert part[1][1] == 0
    assert (part.name(0), part.real_labels(0)) == ("image 4 of toys", None)
    assert pickle.loads(pickle.dumps(part)).label(0) == 1


def test_data_set_objects_are_used_directly() -> None:
    arrays = ArrayDataset(random_array(20, 4, 4, 3), np.arange(20) % 2, ["cat", "dog"], "toys")
    data = open_data(arrays)
    assert (len(data.train or ()), len(data.val or ())) == (16, 4)
    assert data.notes == ("ArrayDataset: 4 of 20 images held out for validation, by seed 0",)
    given = DatasetSplits(name="mine", train=arrays, val=None, classes=arrays.classes)
    assert open_data(given) is given


@pytest.mark.parametrize("where", [5, None, iter(()), object()])
def test_other_objects_are_refused(where: Any) -> None:
    with pytest.raises(DataError, match=f"^the data is a {type(where).__name__}; expected 'fashion', or a folder"):
        open_data(where)


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="ArrayDataset has no images; expected"):
        open_data(ArrayDataset(random_array(0, 4, 4, 3), [], ["cat"]))


def test_wrong_name_or_path_suggests_the_nearest(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "flowers", rose=1)
    (tmp_path / "toys.zip").write_bytes(b"")
    for where, expected in (
        ("fashon", "'fashon' does not exist; expected 'fashion', or a folder .*: did you mean 'fashion'?"),
        ("nothing", "^'nothing' does not exist; expected 'fashion', or a folder with one subfolder per class"),
        (tmp_path / "flower", f": did you mean '{tmp_path / 'flowers'}'?"),
        (tmp_path / "birds", "CIFAR-100 or MNIST$"),  # a long common path is not a similar name
        ("cifar10", "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, .*cifar-10-batches-bin$"),
        ("CIFAR-100", "cifar-100-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html"),
        ("fashion-mnist", "is not a folder here; download the four idx .gz files"),
        ("imagenet", "https://image-net.org, .*train/CLASS and val/CLASS"),
        ("", "'' does not exist; expected"),
        ("a\0b", r"'a\\x00b' does not exist; expected"),
        ("x" * 300, "cannot be read: File name too long; expected"),
        (tmp_path / "toys.zip", "toys.zip is a file; expected .*: unpack it first"),
    ):
        with pytest.raises(DataError, match=expected.replace("?", r"\?")) as caught:
            open_data(where)
        assert re.fullmatch(r"[^\n]+", str(caught.value))


def test_two_data_sets_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path / "a")
    write_cifar10_python(tmp_path / "b")
    with pytest.raises(DataError, match=r"holds 2 data sets; expected one: pass .*a or .*b$"):
        open_data(tmp_path)


def test_invalid_val_share_is_refused_even_if_unused() -> None:
    with pytest.raises(ConfigError, match="val_share is 20; expected"):
        open_data("fashion", val_share=20)
