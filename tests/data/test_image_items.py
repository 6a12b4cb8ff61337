"""Which pictures are shown, and what they are called."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from support.toy_datasets import write_class_folders, write_image

from vitrail.data.datasets import open_data
from vitrail.data.image_items import (
    ImageItem,
    evenly_spaced_indices,
    is_file_or_flat_folder,
    list_image_items,
    sample_evenly,
)
from vitrail.errors import DataError


@pytest.mark.parametrize("total", [1, 2, 5, 7, 32, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 32, 999])
def test_places_are_even(total: int, count: int) -> None:
    found = evenly_spaced_indices(total, count)
    assert len(found) == len(set(found)) == min(total, count)
    assert found == sorted(found)
    assert found[0] == 0
    if len(found) > 1:
        steps = {b - a for a, b in pairwise(found)}
        assert found[-1] == total - 1
        assert max(steps) - min(steps) <= 1


def test_no_places() -> None:
    assert evenly_spaced_indices(0, 5) == evenly_spaced_indices(5, 0) == []


def test_every_class_has_its_turn(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "photos", ants=5, bees=5, cats=5)
    data = open_data(str(root), val_share=1.0)
    assert data.val is not None
    found = sample_evenly(data.val, 3)
    assert [(Path(each.name).name, each.label) for each in found] == [
        ("0.png", "ants"),
        ("2.png", "bees"),
        ("4.png", "cats"),
    ]
    assert [str(each.source) for each in found] == [each.name for each in found]
    assert [each.label for each in sample_evenly(data.val, 99)] == ["ants"] * 5 + ["bees"] * 5 + ["cats"] * 5


def test_loose_or_with_classes(tmp_path: Path) -> None:
    classes = write_class_folders(tmp_path / "classes", ants=1, bees=1)
    loose = write_image(tmp_path / "loose" / "a.PNG").parent
    (loose / "notes.txt").write_text("")
    (loose / ".hidden").mkdir()
    (tmp_path / "empty").mkdir()
    assert is_file_or_flat_folder(loose)
    assert is_file_or_flat_folder(loose / "a.PNG")
    assert is_file_or_flat_folder(classes / "ants")
    for place in (classes, tmp_path / "empty", tmp_path / "nowhere", Path("fashion")):
        assert not is_file_or_flat_folder(place)
    write_image(classes / "beside.png")
    assert not is_file_or_flat_folder(classes), "a picture beside class folders is left out, as elsewhere"


def test_files_and_folders_in_the_order_given(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    for name in ("b.png", "a.jpg", "deep/c.png", ".hidden.png"):
        write_image(folder / name)
    (folder / "folder.png").mkdir()
    (folder / "notes.txt").write_text("")
    alone = tmp_path / "no picture.txt"
    found = list_image_items([str(alone), folder, tmp_path / "nowhere.png"])
    inside = [str(folder / "a.jpg"), str(folder / "b.png")]
    expected = [str(alone), *inside, str(tmp_path / "nowhere.png")]
    assert found == [ImageItem(name, name) for name in expected]


def test_a_name_that_no_disk_takes() -> None:
    long = "x" * 300
    assert list_image_items([long]) == [ImageItem(long, long)], "open_image says what is wrong, and the others are done"
    assert not is_file_or_flat_folder(Path(long))


def test_folders_without_pictures(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "classes", ants=1, bees=1)
    (tmp_path / "empty").mkdir()
    for name in ("classes", "empty"):
        with pytest.raises(DataError, match=rf"{name} holds no pictures; expected some right in it, or the names of"):
            list_image_items([tmp_path / name])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(DataError, match="closed cannot be read: "):
        list_image_items([tmp_path / "closed"])
