"""ReaL labels are matched with ImageNet's validation images by their file names."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.toy_datasets import write_class_folders, write_image

from vitrail.base.errors import DataError
from vitrail.data.images.datasets import open_data
from vitrail.data.images.formats.class_folders import match_real_labels, read_real_labels


@pytest.fixture
def real(tmp_path: Path) -> Path:
    path = tmp_path / "real.json"
    path.write_text(json.dumps([[], [970, 795], *[[7]] * 49_998]))
    return path


def test_labels_are_matched_by_the_number_in_the_file_name(tmp_path: Path, real: Path) -> None:
    root = tmp_path / "imagenet"
    for part, name in (
        ("train", "n01440764_1"),
        ("val", "ILSVRC2012_val_00000001"),
        ("val", "ILSVRC2012_val_00000002"),
    ):
        write_image(root / part / "n01440764" / f"{name}.JPEG")
    data = open_data(root, real=real)
    assert data.train is not None
    assert data.val is not None
    assert data.train.real_labels(0) is None
    assert [data.val.real_labels(0), data.val.real_labels(1)] == [(), (970, 795)]
    assert (open_data(root).val or data.val).real_labels(0) is None
    everything = open_data(root / "val", real=real, val_share=1).val
    assert everything is not None
    assert everything.real_labels(1) == (970, 795)


def test_similar_file_names_have_no_labels(real: Path) -> None:
    names = ("a/ILSVRC2012_val_00000003.png", "ILSVRC2012_val_00050001.JPEG", "ILSVRC2012_val_00000000.JPEG", "3.JPEG")
    assert match_real_labels(names, read_real_labels(real)) == [(7,), None, None, None]


def test_labels_that_match_no_image_are_refused(tmp_path: Path, real: Path) -> None:
    root = write_class_folders(tmp_path / "toys", cat=2, dog=2)
    for where in (root, "fashion"):
        with pytest.raises(DataError, match=r"has no ReaL labels for (toys|fashion); expected images named ILSVRC2012"):
            open_data(where, real=real)


@pytest.mark.parametrize("text", ["", "{}", "[[1], [2]]", json.dumps([[1000]] * 50_000), json.dumps([["1"]] * 50_000)])
def test_invalid_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "real.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"real.json (holds no|cannot be read).*; expected real.json: a list of 50000"):
        read_real_labels(path)


def test_published_labels_match_published_images(shared: Callable[[str], Path]) -> None:
    real, photos = shared("imagenet-real.json"), shared("imagenet-val-1000")
    val = open_data(photos, val_share=1, real=real).val
    assert val is not None
    assert val.classes[:2] == ("000", "001")
    answers = [val.real_labels(index) for index in range(1000)]
    right = sum(val.label(index) in (answer or ()) for index, answer in enumerate(answers))
    assert None not in answers
    assert right == 861  # the folders are ImageNet's own labels, which ReaL often corrects
