"""Class folders: notes on unusual contents, one-line errors for unusable folders."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from support.toy_datasets import random_array, write_class_folders, write_image

from vitrail.base.errors import DataError
from vitrail.data.images.datasets import DatasetSplits, ImageDataset, open_data
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.formats.class_folders import IMAGE_SUFFIXES, FileDataset, quote_names


def names(data: DatasetSplits) -> dict[str, list[str]]:
    """File names of both splits."""
    sides = {"train": data.train, "val": data.val}
    return {side: [Path(part.name(index)).name for index in range(len(part))] for side, part in sides.items() if part}


def test_train_and_val(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", cat=3, dog=2)
    write_class_folders(tmp_path / "val", dog=1, cat=1)
    data = open_data(str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert data.notes == ()
    assert data.train is not None
    assert data.val is not None
    assert [data.train.label(index) for index in range(5)] == [0, 0, 0, 1, 1]
    assert data.val.source(1) == tmp_path / "val" / "dog" / "0.png"
    assert np.array_equal(np.asarray(data.train[4][0]), random_array(6, 5, 3, seed=101))


@pytest.mark.parametrize("train", ["train", "Train", "training"])
@pytest.mark.parametrize("val", ["val", "valid", "validation", "test", "VAL"])
def test_names_of_train_and_val_folders(tmp_path: Path, train: str, val: str) -> None:
    for part in (train, val):
        write_class_folders(tmp_path / "toys" / part, cat=2, dog=2)
    for where in (tmp_path / "toys", tmp_path):  # also one folder further down
        data = open_data(where)
        assert (len(data.train or ()), len(data.val or ())) == (4, 4)
        assert data.classes == ("cat", "dog")


def test_other_folders_next_to_train_and_val_are_not_used(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        write_class_folders(tmp_path / part, cat=2, dog=2)
    assert open_data(tmp_path).notes == (f"{tmp_path}: 'test' not used",)


def test_without_val_folder_the_seed_decides_the_split(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "toys" / "train", cat=10, dog=5)
    data = open_data(tmp_path / "toys")
    assert data.notes == ("toys: 3 of 15 images held out for validation, by seed 0",)
    assert names(data) == names(open_data(root))  # the split depends only on relative names
    assert names(data) != names(open_data(root, seed=1))
    assert (len(data.train or ()), len(data.val or ())) == (12, 3)
    nothing, everything = open_data(root, val_share=0), open_data(root, val_share=1)
    assert nothing.val is None
    assert everything.train is None
    assert len(everything.val or ()) == 15


def test_unlabeled_test_folder_is_not_used_for_validation(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", cat=5, dog=5)
    write_image(tmp_path / "test" / "1.png")
    data = open_data(tmp_path)
    assert len(data.val or ()) == 2
    assert data.notes[0] == f"{tmp_path}: 'test' not used"


def test_validation_alone(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "val", cat=1, dog=2)
    data = open_data(tmp_path)
    assert data.train is None
    assert len(data.val or ()) == 3
    assert data.notes == ()


def test_class_may_be_named_train(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "toys", bus=2, train=2)
    assert open_data(root).classes == ("bus", "train")


def test_numeric_class_names_are_sorted_by_value(tmp_path: Path) -> None:
    numbered = write_class_folders(tmp_path / "numbered", **{"10": 1, "9": 1, "010": 1, "2": 1})
    assert open_data(numbered).classes == ("2", "9", "010", "10")
    mixed = write_class_folders(tmp_path / "mixed", **{"10": 1, "9": 1, "猫": 1, "собака": 1, "a b": 1})
    assert open_data(mixed).classes == ("10", "9", "a b", "собака", "猫")


def test_every_suffix_in_any_case_at_any_depth(tmp_path: Path) -> None:
    for number, ending in enumerate(IMAGE_SUFFIXES):
        folder = tmp_path / "a" if number % 2 else tmp_path / "a" / "deep" / "deeper"
        write_image(folder / f"{number}{ending}").rename(folder / f"{number}{ending.upper()}")
    for hidden in (".DS_Store", ".1.png", ".git/1.png"):
        (tmp_path / "a" / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / hidden).write_bytes(b"")
    (tmp_path / "a" / "readme.txt").write_text("hello")
    (tmp_path / "list.csv").write_text("hello")
    write_image(tmp_path / "b" / "1.png")
    write_image(tmp_path / "2.png")
    data = open_data(tmp_path, val_share=0)
    assert data.train is not None
    assert len(data.train) == len(IMAGE_SUFFIXES) + 1
    assert data.notes[0] == f"{tmp_path}: skipped 1 image outside the class folders"
    assert data.notes[1] == f"{tmp_path}: skipped 2 files other than images, for example 'a/readme.txt'"
    for index in range(len(data.train)):
        assert data.train[index][0].size == (5, 6)


def test_links_are_followed_but_cycles_are_not(tmp_path: Path) -> None:
    store = write_class_folders(tmp_path / "store", things=2)
    root = write_class_folders(tmp_path / "toys", dog=1)
    (root / "cat").symlink_to(store / "things")
    (root / "dog" / "linked.png").symlink_to(store / "things" / "0.png")
    (root / "dog" / "up").symlink_to(root)
    (root / "dog" / "itself").symlink_to(root / "dog" / "itself")
    data = open_data(root, val_share=0)
    assert data.classes == ("cat", "dog")
    assert names(data)["train"] == ["0.png", "1.png", "0.png", "linked.png"]


def test_links_inside_links_are_followed_once(tmp_path: Path) -> None:
    store, root = write_class_folders(tmp_path / "store", last=1), write_class_folders(tmp_path / "toys", dog=1)
    for number in range(30):  # a billion paths to the end
        (store / f"{number}").mkdir()
        for name in ("a", "b"):
            (store / f"{number}" / name).symlink_to(store / ("last" if number == 29 else f"{number + 1}"))
    (root / "cat").symlink_to(store / "0")
    data = open_data(root, val_share=0)
    assert data.classes == ("cat", "dog")
    assert names(data)["train"] == ["0.png", "0.png"]


def test_names_with_other_normalization_or_invalid_utf8(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", é=1, x=1)
    write_class_folders(tmp_path / "val", **dict.fromkeys(("e\u0301", "x"), 1))  # as macOS stores it
    assert open_data(tmp_path).classes == ("x", "é")
    odd = os.fsencode(tmp_path) + b"/val/\xff"
    os.mkdir(odd)  # noqa: PTH102
    assert r"no images in '\udcff'; skipped" in open_data(tmp_path).notes[0]
    moved = tmp_path.rename(tmp_path.with_name("two\nlines"))
    assert all(note.isprintable() for note in open_data(moved).notes)


def test_classes_with_few_images_are_noted(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", cat=3, dog=1, bird=0, fish=2)
    write_class_folders(tmp_path / "val", cat=1, dog=1)
    data = open_data(tmp_path)
    assert data.classes == ("cat", "dog", "fish")
    assert data.notes == (
        f"{tmp_path / 'train'}: no images in 'bird'; skipped",
        f"{tmp_path / 'val'}: no images of 'fish'; they are not validated",
        f"{tmp_path / 'train'}: only one image of 'dog'",
    )
    split = open_data(tmp_path / "train")
    assert split.notes[1] == "train: only one image of 'dog'; not validated"
    assert "0.png" in names(split)["train"]
    singles = open_data(write_class_folders(tmp_path / "singles", cat=1, dog=1))
    assert singles.val is None


def refused(where: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_data(where)
    assert re.match(r"^[^\n]+; expected [^\n]+$", str(caught.value)), caught.value
    return str(caught.value)


def test_unusable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no images; expected one folder of images per class" in refused(empty)
    (empty / "cat").mkdir()
    assert "has no images" in refused(empty)
    write_image(empty / "1.png")
    assert "has 1 image but no class folders" in refused(empty)
    assert "does not exist" in refused(tmp_path / "nothing")
    assert "is a file" in refused(empty / "1.png")
    both = tmp_path / "both"
    write_class_folders(both / "train", cat=1, dog=0)
    write_class_folders(both / "val", cat=1, dog=1, bird=2)
    assert "has images of 'bird', 'dog'; expected only classes that" in refused(both)
    flat = write_class_folders(tmp_path / "flat" / "train", cat=1, dog=1).parent
    write_image(flat / "val" / "ILSVRC2012_val_00000001.JPEG")
    assert "val has 1 image but no class folders" in refused(flat)

    def locked(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", locked)
    assert "cannot be read: Permission denied; expected a readable folder" in refused(both)


def test_invalid_labels_are_refused() -> None:
    with pytest.raises(DataError, match="1 files and 2 labels; expected"):
        FileDataset(["a.png"], [0, 1], ["cat", "dog"])
    with pytest.raises(DataError, match="label 2 of image 0; expected 0 to 1"):
        FileDataset(["a.png"], [2], ["cat", "dog"])


def test_long_lists_of_names_are_shortened() -> None:
    assert quote_names(["a", "b"]) == "'a', 'b'"
    assert quote_names([str(number) for number in range(7)]) == "'0', '1', '2', '3', '4' and 2 more"


def test_images_of_every_mode_are_decoded(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    smooth = Image.fromarray(random_array(2, 3, 3)).resize((30, 20), Image.Resampling.BICUBIC)
    smooth.convert("CMYK").save(folder / "0 cmyk.jpg")
    Image.fromarray(random_array(20, 30).astype(np.uint16) * 257).save(folder / "1 deep.png")
    smooth.quantize(16).save(folder / "2 palette.png")
    frames = [Image.new("RGB", (30, 20), color) for color in ("red", "blue")]
    frames[0].save(folder / "3 animated.gif", save_all=True, append_images=frames[1:])
    smooth.save(folder / "4 turned.jpg", exif=exif)
    files = FileDataset(sorted(folder.iterdir()), [0] * 5, ["a"])
    sizes = [open_image(files.source(index)).size for index in range(5)]
    assert sizes == [(30, 20)] * 4 + [(20, 30)]
    assert {open_image(files.source(index)).mode for index in range(5)} == {"RGB"}
    assert open_image(files.source(3)).getpixel((0, 0)) == (255, 0, 0)


def test_files_that_are_not_images_are_refused_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_class_folders(tmp_path / "toys", cat=1)
    intact = (root / "cat" / "0.png").read_bytes()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.new("1", (100, 100)).save(root / "cat" / "1 gigantic.png")
    (root / "cat" / "2 cut.png").write_bytes(intact[:60])
    (root / "cat" / "3 empty.jpg").write_bytes(b"")
    (root / "cat" / "4 text.jpg").write_text("not an image")
    (root / "cat" / "5 lost.jpg").symlink_to(tmp_path / "nowhere")
    train = open_data(root, val_share=0).train  # no file is opened here
    assert train is not None
    assert len(train) == 6
    for index in range(1, 6):
        with pytest.raises(DataError, match=rf"toys/cat/{index} [^\n]+; expected [^\n]+$"):
            open_image(train.source(index))


def list_names(dataset: ImageDataset | None, root: Path) -> list[str]:
    assert dataset is not None
    assert dataset.classes == ()
    assert {dataset.label(index) for index in range(len(dataset))} == {-1}
    return [str(Path(dataset.name(index)).relative_to(root)) for index in range(len(dataset))]


def test_flat_folder_has_no_classes(tmp_path: Path) -> None:
    for number in range(10):
        write_image(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match="has 10 images but no class folders; expected one folder of images per class"):
        open_data(tmp_path)
    data, other = (open_data(tmp_path, need_classes=False, seed=seed) for seed in (0, 3))
    train, val = list_names(data.train, tmp_path), list_names(data.val, tmp_path)
    assert (data.classes, len(train), len(val)) == ((), 8, 2)
    assert sorted(train + val) == [f"{number}.png" for number in range(10)]
    assert list_names(other.val, tmp_path) != val
    assert any("1 file other than images" in note for note in data.notes)
    assert any("2 of 10 images held out" in note for note in data.notes)
    (tmp_path / "10.png").write_bytes((tmp_path / "0.png").read_bytes())
    assert set(list_names(open_data(tmp_path, need_classes=False).val, tmp_path)) & set(val), "split by name"


def test_images_at_several_depths_have_no_classes(tmp_path: Path) -> None:
    for path in ("cover.jpg", "2024/a.png", "2024/05/b.png", "2025/c.png"):
        write_image(tmp_path / path)
    data = open_data(tmp_path, need_classes=False, val_share=0)
    assert list_names(data.train, tmp_path) == ["2024/05/b.png", "2024/a.png", "2025/c.png", "cover.jpg"]
    assert any("4 images used without classes" in note for note in data.notes)
    assert open_data(tmp_path, val_share=0).classes == ("2024", "2025")
    (tmp_path / "2025" / "c.png").unlink()
    (tmp_path / "2025").rmdir()
    data = open_data(tmp_path, need_classes=False, val_share=0)
    assert len(data.train or ()) == 3, "not only the images of the single subfolder"


def test_train_and_val_folders_without_classes(tmp_path: Path) -> None:
    for path in ("train/a.png", "train/b.png", "val/c.png"):
        write_image(tmp_path / path)
    data = open_data(tmp_path, need_classes=False)
    assert list_names(data.train, tmp_path) == ["train/a.png", "train/b.png"]
    assert list_names(data.val, tmp_path) == ["val/c.png"]
    (tmp_path / "val" / "c.png").unlink()
    with pytest.raises(DataError, match=r"val has no images; expected at least one \(.jpg"):
        open_data(tmp_path, need_classes=False)


def test_class_folders_keep_their_classes_if_none_are_needed(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", ants=3, bees=3)
    write_class_folders(tmp_path / "val", bees=2)
    needed, free = (open_data(tmp_path, need_classes=need) for need in (True, False))
    assert needed.classes == free.classes == ("ants", "bees")
    assert needed.notes == free.notes
    write_image(tmp_path / "val" / "wasps" / "0.png")
    data = open_data(tmp_path, need_classes=False)
    assert len(list_names(data.train, tmp_path)) == 6
    assert len(list_names(data.val, tmp_path)) == 3
