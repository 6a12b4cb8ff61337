"""Images with captions: tables, Flickr8k's published layout, splits and bad files."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.captions.captions import CaptionSplits, open_captions
from vitrail.data.captions.collages import CollageImages


def write_images(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / name, format="png")


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def make_table_folder(folder: Path, rows: Sequence[str], images: Sequence[str] = ("a.png", "b.png", "c.png")) -> Path:
    write_images(folder, images)
    write_lines(folder / "captions.tsv", rows)
    return folder


def captions_by_name(data: CaptionSplits, part: str = "train") -> dict[str, tuple[str, ...]]:
    found = vars(data)[part]
    return {Path(found.images.name(index)).name: found.captions[index] for index in range(len(found))}


def test_collages_are_generated_with_one_sentence_each() -> None:
    data = open_captions("collages")
    assert data.val is not None
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (20_000, 1_000, 1_000)
    assert isinstance(data.train.images, CollageImages)
    assert data.train.captions[7] == (data.train.images.collage(7).sentence,)
    assert open_captions(data) is data


def test_a_table_gives_every_image_its_captions(tmp_path: Path) -> None:
    rows = ["a.png\tA red square.", "b.png\t Zwei  Äpfel ", "a.png\tone red thing", "c.png\tblack"]
    data = open_captions(make_table_folder(tmp_path / "set", rows), val_share=0)
    assert data.val is None
    assert data.name == "set"
    assert captions_by_name(data) == {
        "a.png": ("A red square.", "one red thing"),
        "b.png": ("Zwei Äpfel",),
        "c.png": ("black",),
    }
    assert sum(map(len, data.train.captions)) == 4
    assert data.train.images[1][0].getpixel((0, 0)) == (1, 1, 1)


def test_a_table_may_be_a_file_with_a_header_and_packed(tmp_path: Path) -> None:
    write_images(tmp_path / "set" / "photos" / "inner", ["a.png"])
    table = tmp_path / "set" / "words.tsv.gz"
    table.write_bytes(gzip.compress(b"file\tcaption\r\nphotos/inner/a.png\tA dog\r\n"))
    data = open_captions(table, val_share=0)
    assert (data.name, data.train.captions) == ("set", (("A dog",),))


def test_images_may_be_in_a_folder_next_to_the_table(tmp_path: Path) -> None:
    write_images(tmp_path / "images", ["a.png", "b.png"])
    write_lines(tmp_path / "captions.tsv", ["a.png\tA dog", "b.png\tA cat"])
    data = open_captions(tmp_path, val_share=0)
    assert data.train.images.name(0) == str(tmp_path / "images" / "a.png")


def test_images_are_held_out_with_all_their_captions(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(10)]
    rows = [f"{name}\tcaption {number} of {name}" for number in range(3) for name in names]
    folder = make_table_folder(tmp_path, rows, names)
    data = open_captions(folder, val_share=0.3)
    train, val = captions_by_name(data), captions_by_name(data, "val")
    assert (len(train), len(val)) == (7, 3)
    assert not train.keys() & val.keys()
    assert all(len(each) == 3 for each in (train | val).values())
    assert data.notes == ("3 of 10 images held out for validation, by seed 0",)
    assert captions_by_name(open_captions(folder, val_share=0.3), "val") == val
    assert captions_by_name(open_captions(folder, val_share=0.3, seed=1), "val") != val
    with pytest.raises(ConfigError, match="val_share is 2; expected"):
        open_captions(folder, val_share=2)


def test_tables_of_parts_are_used_as_they_are(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png", "c.png"])
    for part, name in (("train", "a.png"), ("dev", "b.png"), ("test", "c.png")):
        write_lines(tmp_path / f"{part}.tsv", [f"{name}\tfor {part}"])
    data = open_captions(tmp_path)
    found = [captions_by_name(data, part) for part in ("train", "val", "test")]
    assert found == [{"a.png": ("for train",)}, {"b.png": ("for dev",)}, {"c.png": ("for test",)}]
    write_lines(tmp_path / "test.tsv", ["a.png\ttwice"])
    with pytest.raises(DataError, match=r"1 image of train is also in test: .* expected each image in one part"):
        open_captions(tmp_path)


def make_flickr_folder(root: Path, *, kaggle: bool = False) -> Path:
    """Flickr8k as published: images and text in two folders, and one name without a file; or its copy on Kaggle."""
    names = [f"{number}_{number:x}.jpg" for number in range(100)]
    write_images(root / ("Images" if kaggle else "Flicker8k_Dataset"), names)
    captions = [f"A man , a dog and number {number} ." for number in range(5)]
    if kaggle:
        rows = [
            f'{name},"{caption}"' if number else f"{name},A dog ."
            for name in names
            for number, caption in enumerate(captions)
        ]
        write_lines(root / "captions.txt", ["image,caption", *rows])
        return root
    every = [*names, "2258277193_586949ec62.jpg.1"]
    text = root / "Flickr8k_text"
    write_lines(
        text / "Flickr8k.token.txt",
        [f"{name}#{number}\t{each}" for name in every for number, each in enumerate(captions)],
    )
    for part, chosen in (("train", names[:60]), ("dev", names[60:70]), ("test", names[70:80])):
        write_lines(text / f"Flickr_8k.{part}Images.txt", chosen)
    return root


def test_the_published_files_of_flickr8k_have_their_own_parts(tmp_path: Path) -> None:
    data = open_captions(make_flickr_folder(tmp_path / "flickr8k"))
    assert data.val is not None
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (60, 10, 10)
    assert sum(map(len, data.train.captions)) == 300
    assert data.train.captions[0][4] == "A man , a dog and number 4 ."
    assert data.train.images.name(0).endswith("Flicker8k_Dataset/0_0.jpg")
    missing, unlisted = data.notes
    assert missing.startswith("1 image with captions missing in ")
    assert missing.endswith(": '2258277193_586949ec62.jpg.1'")
    assert unlisted == "20 images in none of the lists not used"


def test_the_copy_of_flickr8k_with_commas_is_split_by_image(tmp_path: Path) -> None:
    data = open_captions(make_flickr_folder(tmp_path, kaggle=True))
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (80, 20)
    assert data.train.captions[0][:2] == ("A dog .", "A man , a dog and number 1 .")


def test_a_list_may_name_images_without_captions(tmp_path: Path) -> None:
    root = make_flickr_folder(tmp_path)
    write_lines(root / "Flickr8k_text" / "Flickr_8k.devImages.txt", ["60_3c.jpg", "none.jpg"])
    data = open_captions(root)
    assert data.val is not None
    assert len(data.val) == 1
    assert "Flickr_8k.devImages.txt: 1 image without a caption: 'none.jpg'" in data.notes


def test_empty_captions_and_images_without_captions_are_counted(tmp_path: Path) -> None:
    rows = ["a.png\tA dog", "a.png\t ", "b.png\t"]
    data = open_captions(make_table_folder(tmp_path, rows), val_share=0)
    assert captions_by_name(data) == {"a.png": ("A dog",)}
    assert data.notes == (
        "captions.tsv: 2 empty captions left out",
        "captions.tsv: 1 image without a caption: 'b.png'",
        "2 images without a caption not used: 'b.png', 'c.png'",
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "captions.tsv has no captions; expected at least one caption"),
        (["file\tcaption"], "captions.tsv has no captions"),
        (["a.png\t", "b.png\t "], "captions.tsv has 2 lines without a caption"),
        (
            ["a.png\tA dog", "b.png A cat"],
            "line 2 of .*captions.tsv is 'b.png A cat'; expected a file, a tab and a caption",
        ),
        (["a.png\tA dog\tA cat"], "line 1 of .* expected a file, a tab and a caption"),
        (["\tA dog"], "line 1 of .* expected a file, a tab and a caption"),
        (["../a.png\tA dog"], "line 1 of .* names '../a.png'; expected a file in the folder"),
        (["/etc/a.png\tA dog"], "line 1 of .* names '/etc/a.png'"),
        (
            ["a.png\tA dog", "x.png\tA cat", "y.png\tA cow"],
            r"2 of 3 images with captions are missing in .*: 'x.png', 'y.png'; add",
        ),
        (
            ["x.png\tA cat"],
            "none of the 1 image in .*captions.tsv is in .*, for example 'x.png'; expected the images next",
        ),
    ],
)
def test_a_bad_table_is_one_line(tmp_path: Path, rows: Sequence[str], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_captions(make_table_folder(tmp_path, rows), val_share=0)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_not_utf8_names_its_line(tmp_path: Path) -> None:
    folder = make_table_folder(tmp_path, [])
    (folder / "captions.tsv").write_bytes("a.png\tA dog\nb.png\tÄpfel\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"captions.tsv is not UTF-8 \(line 2\)"):
        open_captions(folder)


def test_data_without_captions_is_one_line(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", ["a.png"])
    with pytest.raises(DataError, match="photos has no captions; expected 'collages', or a folder of images with"):
        open_captions(tmp_path / "photos")
    with pytest.raises(DataError, match="'nothing' does not exist; expected 'collages'"):
        open_captions("nothing")
    with pytest.raises(DataError, match="cannot be opened; expected 'collages'"):
        open_captions("a" * 5000)


def test_a_list_without_captions_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    root = make_flickr_folder(tmp_path)
    write_lines(root / "Flickr8k_text" / "Flickr_8k.trainImages.txt", [])
    with pytest.raises(DataError, match="has no images to train on"):
        open_captions(root)
