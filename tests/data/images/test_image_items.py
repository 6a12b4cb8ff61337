"""Which images are chosen from many, and what they are called."""

from itertools import pairwise
from pathlib import Path

import pytest
from support.toy_datasets import write_class_folders, write_image

from vitrail.data.images.image_items import (
    evenly_spaced_indices,
    is_file_or_flat_folder,
    spread_over_labels,
)


@pytest.mark.parametrize("total", [1, 2, 5, 7, 32, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 32, 999])
def test_indices_are_evenly_spaced(total: int, count: int) -> None:
    found = evenly_spaced_indices(total, count)
    assert len(found) == len(set(found)) == min(total, count)
    assert found == sorted(found)
    assert found[0] == 0
    if len(found) > 1:
        steps = {b - a for a, b in pairwise(found)}
        assert found[-1] == total - 1
        assert max(steps) - min(steps) <= 1


def test_no_images_no_indices() -> None:
    assert evenly_spaced_indices(0, 5) == evenly_spaced_indices(5, 0) == []


def test_a_folder_without_subfolders_has_no_classes(tmp_path: Path) -> None:
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
    write_image(classes / "outside.png")
    assert not is_file_or_flat_folder(classes), "an image next to class folders is not used, as in training"
    assert not is_file_or_flat_folder(Path("x" * 300)), "a name that is too long for any disk"


@pytest.mark.parametrize(
    ("labels", "count", "expected"),
    [
        ("abcabcabc", 3, [0, 1, 2]),
        ("aaaabbbbc", 3, [0, 4, 8]),
        ("aaaabbbbc", 5, [0, 3, 4, 7, 8]),
        ("aaaabbbbc", 2, [0, 8]),
        ("abc", 9, [0, 1, 2]),
        ("aaaa", 2, [0, 3]),
        ("", 3, []),
        ("abc", 0, []),
    ],
)
def test_images_are_spread_over_labels(labels: str, count: int, expected: list[int]) -> None:
    assert spread_over_labels(labels, count) == expected
