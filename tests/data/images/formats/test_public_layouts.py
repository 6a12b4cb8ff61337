"""Small copies of published data sets in their layouts, with the traps that their labels have."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import DTD, STL10, SVHN, Flowers102, Food101, OxfordIIITPet

from vitrail.base.errors import DataError
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import DatasetSplits, open_data
from vitrail.data.images.formats.listed_images import FLOWER_NAMES


def write_images(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 20 % 256, 0, 0)).save(path, "JPEG")


def write_lines(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def list_labels(data: DatasetSplits, part: str = "val") -> dict[str, str]:
    """Class names by file."""
    images: Any = getattr(data, part)
    return {images.paths[n]: images.classes[images.label(n)] for n in range(len(images))}


def make_pets(root: Path) -> Path:
    """Classes are numbered by name without regard to case; ASCII order would have Bengal before beagle."""
    write_images(root, "images/Abyssinian_1.jpg", "images/beagle_2.jpg", "images/Bengal_3.jpg", "images/beagle_4.jpg")
    write_lines(root / "annotations/trainval.txt", "Abyssinian_1 1 1 1", "beagle_2 2 2 1", "Bengal_3 3 1 2")
    write_lines(root / "annotations/test.txt", "beagle_4 2 2 1")
    return root


def test_pets(tmp_path: Path) -> None:
    data = open_data(make_pets(tmp_path / "oxford-iiit-pet"))
    assert data.classes == ("Abyssinian", "beagle", "Bengal")
    assert list_labels(data, "train")["images/Bengal_3.jpg"] == "Bengal"
    assert list_labels(data) == {"images/beagle_4.jpg": "beagle"}
    peer = OxfordIIITPet(tmp_path, split="test")
    assert [peer[n][1] for n in range(len(peer))] == [1]
    (tmp_path / "oxford-iiit-pet/images/Bengal_3.jpg").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 3 listed images, for example images/Bengal_3.jpg; unpack"):
        open_data(tmp_path / "oxford-iiit-pet")
    (tmp_path / "oxford-iiit-pet/annotations/test.txt").unlink()
    with pytest.raises(DataError, match=r"is Oxford-IIIT Pet without annotations/test.txt"):
        open_data(tmp_path / "oxford-iiit-pet")


def test_flowers(tmp_path: Path) -> None:
    """Numbers count from 1, and tstid is the test set."""
    root = tmp_path / "flowers-102"
    write_images(root, *(f"jpg/image_{number:05}.jpg" for number in range(1, 7)))
    with pytest.raises(DataError, match=r"is Flowers-102 without imagelabels.mat, setid.mat; put the file there"):
        open_data(root)
    savemat(root / "imagelabels.mat", {"labels": np.array([[77, 1, 102, 1, 5, 5]], np.uint8)})
    numbers: dict[str, Any] = {"trnid": [[1]], "valid": [[3]], "tstid": [[2, 4, 5, 6]]}
    savemat(root / "setid.mat", {name: np.array(rows, np.uint16) for name, rows in numbers.items()})
    data = open_data(root)
    assert (len(data.classes), len(set(FLOWER_NAMES))) == (102, 102)
    assert list_labels(data, "train") == {
        "jpg/image_00001.jpg": FLOWER_NAMES[76],
        "jpg/image_00003.jpg": "blackberry lily",
    }
    peer: Any = Flowers102
    assert [data.val.label(n) for n in range(4)] == [0, 0, 4, 4]  # pyright: ignore[reportOptionalMemberAccess]
    assert peer._splits_map["test"] == "tstid"
    savemat(root / "setid.mat", {name: np.array([[1, 7]], np.uint16) for name in numbers})
    with pytest.raises(DataError, match=r"setid.mat does not fit imagelabels.mat; expected different numbers from 1"):
        open_data(root)


def test_food(tmp_path: Path) -> None:
    root = tmp_path / "food-101"
    write_images(root, "images/pizza/1.jpg", "images/apple_pie/2.jpg", "images/pizza/3.jpg")
    (root / "meta").mkdir()
    (root / "meta/train.json").write_text(json.dumps({"pizza": ["pizza/1"], "apple_pie": ["apple_pie/2"]}))
    (root / "meta/test.json").write_text(json.dumps({"pizza": ["pizza/3"], "apple_pie": []}))
    data = open_data(tmp_path)  # one folder down
    assert data.classes == ("apple_pie", "pizza")
    peer = Food101(tmp_path, split="test")
    assert (list_labels(data), peer[0][1]) == ({"images/pizza/3.jpg": "pizza"}, 1)
    (root / "meta/test.json").write_text("[1]")
    with pytest.raises(DataError, match=r"test.json has no lists of images"):
        open_data(root)


def test_dtd(tmp_path: Path) -> None:
    root = tmp_path / "dtd/dtd"
    files = [f"{name}/{name}_{number}.jpg" for name in ("zigzagged", "banded") for number in range(3)]
    write_images(root / "images", *files)
    for number, part in enumerate(("train", "val", "test")):
        write_lines(root / f"labels/{part}1.txt", files[number], files[number + 3])
    data = open_data(root)
    assert data.classes == ("banded", "zigzagged")
    assert len(data.train or ()) == 4
    peer = DTD(tmp_path, split="test")
    assert sorted(list_labels(data).values()) == sorted(peer.classes[peer[n][1]] for n in range(2))


def test_tiny_imagenet(tmp_path: Path) -> None:
    """The validation images lie in one folder; wnids.txt is not sorted."""
    root = tmp_path / "tiny-imagenet-200"
    ids = ("n02124075", "n01443537")
    write_lines(root / "wnids.txt", *ids)
    write_images(root, *(f"train/{name}/images/{name}_0.JPEG" for name in ids), "val/images/val_0.JPEG")
    write_lines(root / f"train/{ids[0]}/{ids[0]}_boxes.txt", f"{ids[0]}_0.JPEG\t0\t0\t62\t62")
    write_lines(root / "val/val_annotations.txt", f"val_0.JPEG\t{ids[0]}\t0\t32\t44\t62")
    write_images(root, "test/images/test_0.JPEG")
    data = open_data(root)
    assert data.classes == tuple(sorted(ids))
    assert (list_labels(data), len(data.train or ())) == ({"val/images/val_0.JPEG": ids[0]}, 2)
    write_lines(root / "wnids.txt", *ids, *ids)
    assert len(open_data(root).train or ()) == 2, "each class counts once"
    write_lines(root / "wnids.txt", *ids, "n09999999")
    with pytest.raises(DataError, match=r"train has no images of n09999999; unpack its archive again"):
        open_data(root)


@pytest.mark.parametrize("path", ["../pets/images/a", "./a", "/a", "b/../a"])
def test_other_spellings_of_a_path_are_refused(tmp_path: Path, path: str) -> None:
    """A list could name one folder, or one outside, in any number of ways, and each would be listed."""
    root = make_pets(tmp_path / "pets")
    write_lines(root / "annotations/test.txt", f"{path}_1 9")
    with pytest.raises(DataError, match=r"lists 'images/.*'; expected a plain path below it"):
        open_data(root)
    tiny = tmp_path / "tiny-imagenet-200"
    write_lines(tiny / "wnids.txt", path)
    write_lines(tiny / "val/val_annotations.txt", "val_0.JPEG\ta")
    write_images(tiny, "train/a/images/a.JPEG", "val/images/val_0.JPEG")
    with pytest.raises(DataError, match="expected a plain path below it"):
        open_data(tiny)


def test_imagenet_v2_has_class_numbers_and_is_a_test_set(tmp_path: Path) -> None:
    """Sorted as text, 10 would come before 2."""
    root = tmp_path / "imagenetv2-matched-frequency-format-val"
    write_images(root, *(f"{number}/a.jpeg" for number in (0, 1, 2, 10)))
    data = open_data(tmp_path)
    assert data.train is None
    assert list_labels(data)["10/a.jpeg"] == "10"
    names = [f"name {number}" for number in range(1000)]
    assert match_data_classes_to_model(names, 1000, data.classes)[0] == (0, 1, 2, 10)


def test_svhn(tmp_path: Path) -> None:
    """The label 10 is the digit 0, and the image number is the last axis."""
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), np.uint8)
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": np.array([[1], [10], [9], [2]], np.uint8)})
    data, peer = open_data(tmp_path), SVHN.__new__(SVHN)
    val: Any = data.val
    assert [data.classes[val.label(n)] for n in range(4)] == ["1", "0", "9", "2"]
    np.testing.assert_array_equal(val.source(2), images[..., 2])
    assert peer.split_list["test"][1] == "test_32x32.mat"
    savemat(tmp_path / "test_32x32.mat", {"X": images, "y": np.array([[0], [1], [2], [3]], np.uint8)})
    with pytest.raises(DataError, match=r"has labels from 0 to 3; expected 1 to 10"):
        open_data(tmp_path)


def test_stl10(tmp_path: Path) -> None:
    """Channels are stored column by column; labels count from 1."""
    root = tmp_path / "stl10_binary"
    root.mkdir()
    stored = np.random.default_rng(0).integers(0, 256, (3, 3, 96, 96), np.uint8)
    for part in ("train", "test"):
        (root / f"{part}_X.bin").write_bytes(stored.tobytes())
        (root / f"{part}_y.bin").write_bytes(bytes([8, 1, 10]))
    data, peer = open_data(tmp_path), STL10.__new__(STL10)
    val: Any = data.val
    assert [data.classes[val.label(n)] for n in range(3)] == ["monkey", "airplane", "truck"]
    peer.root, peer.base_folder = str(tmp_path), "stl10_binary"
    images, labels = peer._STL10__loadfile("test_X.bin", "test_y.bin")  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_array_equal(val.images, images.transpose(0, 2, 3, 1))
    assert labels.tolist() == val.labels.tolist()
    (root / "test_X.bin").write_bytes(stored.tobytes()[:-1])
    with pytest.raises(DataError, match=r"test_X.bin has 82,943 bytes; expected a multiple of 27648: is it truncated"):
        open_data(tmp_path)
