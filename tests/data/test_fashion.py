"""The bundled data set."""

import hashlib
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from make_fashion_sheets import make_sheets
from PIL import Image
from support.toy_datasets import random_array, write_idx_files

from vitrail.base.errors import DataError
from vitrail.data import fashion
from vitrail.data.fashion import write_photos
from vitrail.data.images.datasets import open_data

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist


def test_classes_are_balanced_and_interleaved() -> None:
    train, val = fashion.read_fashion()
    assert train.images.shape == (6000, 28, 28, 1)
    assert val.images.shape == (1000, 28, 28, 1)
    for part in (train, val):
        assert part.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
        assert set(np.bincount(part.labels).tolist()) == {len(part) // 10}
    assert train.classes == fashion.FASHION_CLASSES
    assert hashlib.md5(train.images.tobytes()).hexdigest() == "ea77b9df5610360910fc6a88abf6637b"
    assert hashlib.md5(val.images.tobytes()).hexdigest() == "02a4597b3575c84faab148a412f643a7"


def test_sheets_are_small_and_have_a_licence() -> None:
    assert sum(file.stat().st_size for file in fashion.FASHION_FOLDER.glob("*.png")) < 3_000_000
    assert "Copyright 2017 Zalando SE" in (fashion.FASHION_FOLDER / "LICENSE").read_text("utf-8")


def test_sheets_have_the_first_images_of_each_class(tmp_path: Path) -> None:
    labels = np.array([9, 0, 9, 9, *range(9), *range(1, 9)])
    source = write_idx_files(tmp_path / "fashion", labels, np.arange(10), packed=True)
    make_sheets(source, tmp_path, train=2, test=1)
    train, val = fashion.read_fashion(tmp_path)
    images = random_array(len(labels), 28, 28, seed=len(labels))
    assert len(train) == 20
    assert len(val) == 10
    for label in range(10):
        for number in range(2):
            index = np.flatnonzero(labels == label)[number]
            assert np.array_equal(train.source(10 * number + label)[..., 0], images[index])
    with pytest.raises(DataError, match="has too few train images; expected idx files with 3 per class"):
        make_sheets(source, tmp_path, train=3, test=1)


def test_sheets_equal_those_made_from_the_full_data_set(tmp_path: Path) -> None:
    if not DEBIAN.exists():
        pytest.skip(f"needs {DEBIAN}")
    make_sheets(DEBIAN, tmp_path)
    for mine, made in zip(fashion.read_fashion(), fashion.read_fashion(tmp_path), strict=True):
        assert np.array_equal(mine.images, made.images)


def test_photos_are_written_as_class_folders(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", ("Bag", "Sneaker"), train=2, val=1)
    found = open_data(tmp_path / "photos")
    assert found.classes == ("Bag", "Sneaker")
    assert (len(found.train or ()), len(found.val or ())) == (4, 2)
    bag = fashion.read_fashion()[0].source(10 + fashion.FASHION_CLASSES.index("Bag")).squeeze()
    with Image.open(tmp_path / "photos" / "train" / "Bag" / "001.png") as image:
        assert np.array_equal(np.asarray(image), bag)
    with pytest.raises(DataError, match="photos exists"):
        write_photos(tmp_path / "photos")


def test_wrong_calls_of_the_module_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], [str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["fashion", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("vitrail.data.fashion", run_name="__main__")
        assert ended.value.code == 2
        assert re.fullmatch(r"vitrail\.data\.fashion: .*; expected .*\n", capsys.readouterr().err)
