"""Data sets by name, by folder or from an object."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.toy_datasets import random_array, write_cifar10_binary, write_cifar10_python, write_class_folders
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset
from torchvision.datasets import ImageFolder

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits, DatasetSubset, ImageDataset, TorchDatasetAdapter, open_data


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
        (
            tmp_path / "birds",
            "CIFAR-100 or MNIST, or a name that `vitrail data` lists$",
        ),  # a long common path is not a similar name
        ("CIFAR-100", ": did you mean 'cifar100'?"),
        ("tiny_imagenet", ": did you mean 'tiny-imagenet'?"),
        ("multi30k", "multi30k has sentence pairs; expected images"),
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


class Toy:
    """Counts how often an image is read."""

    def __init__(self, *labels: Any) -> None:
        self.labels = labels
        self.reads = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return random_array(4, 4, 3, seed=index), self.labels[index]


def test_image_folder_of_torchvision_equals_ours(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "toys", cat=3, dog=5)
    theirs = TorchDatasetAdapter(ImageFolder(str(root)))
    mine = open_data(root, val_share=0).train
    assert mine is not None
    assert theirs.classes == mine.classes == ("cat", "dog")
    assert len(theirs) == len(mine) == 8
    for index in range(8):
        assert np.array_equal(np.asarray(theirs[index][0]), np.asarray(mine[index][0]))
        assert theirs.label(index) == mine.label(index)


def test_listed_labels_are_used_without_decoding(tmp_path: Path) -> None:
    toy = Toy(2, 0, 1, 0)
    setattr(toy, "targets", torch.tensor([2, 0, 1, 0]))  # noqa: B010
    adapter = TorchDatasetAdapter(toy)
    assert adapter.classes == ("0", "1", "2")
    assert [adapter.label(index) for index in range(4)] == [2, 0, 1, 0]
    part: Any = TorchSubset(toy, [0, 3])  # pyright: ignore[reportArgumentType, reportUnknownVariableType]
    assert [TorchDatasetAdapter(part).label(index) for index in range(2)] == [2, 0]
    assert toy.reads == 0
    setattr(toy, "target_transform", int)  # noqa: B010  # the list may differ from the labels that are returned
    TorchDatasetAdapter(toy)
    assert toy.reads == 4


def test_unlisted_labels_are_read_once_per_image() -> None:
    toy = Toy(1, np.int64(0), torch.tensor(1))
    adapter = TorchDatasetAdapter(toy)
    assert adapter.classes == ("0", "1")
    assert [adapter.label(index) for index in range(3)] == [1, 0, 1]
    assert toy.reads == 3
    assert adapter.real_labels(0) is None
    image, label = adapter[2]
    assert np.array_equal(np.asarray(image), random_array(4, 4, 3, seed=2))
    assert label == 1


def test_tensors_are_accepted_as_images() -> None:
    adapter = TorchDatasetAdapter(TensorDataset(torch.rand(3, 3, 4, 4), torch.tensor([0, 1, 1])))
    assert adapter[0][0].size == (4, 4)
    assert adapter.classes == ("0", "1")


@pytest.mark.parametrize("labels", [("cat",), (None,), (-1,), (0, 2**40)])
def test_invalid_labels_are_refused(labels: tuple[Any, ...]) -> None:
    with pytest.raises(DataError, match=rf"^image {len(labels) - 1} of Toy [^\n]+; expected \(image, label\)"):
        TorchDatasetAdapter(Toy(*labels))


def test_labels_outside_its_classes_are_refused() -> None:
    toy = Toy(0, 2)
    setattr(toy, "classes", ["cat", "dog"])  # noqa: B010
    adapter = TorchDatasetAdapter(toy)
    assert toy.reads == 0
    with pytest.raises(DataError, match=r"image 1 of Toy has the label 2; expected .* from 0 to 1"):
        adapter.source(1)


def test_split_by_index_and_class() -> None:
    data = open_data(Toy(*[0] * 10, *[1] * 5))
    assert data.name == "Toy"
    assert data.val is not None
    assert sorted(data.val.label(index) for index in range(len(data.val))) == [0, 0, 1]


@pytest.mark.parametrize("rest", [None, (), (-1,), ("a cat",)])
def test_items_without_labels_have_no_classes(rest: tuple[Any, ...] | None) -> None:
    images = list(random_array(10, 4, 4, 3))
    items = images if rest is None else [(image, *rest) for image in images]
    data = open_data(items, need_classes=False)
    assert (data.classes, len(data.train or ()), len(data.val or ())) == ((), 8, 2)
    assert data.train is not None
    assert {data.train.label(index) for index in range(8)} == {-1}
    assert any(np.array_equal(data.train.source(0), image) for image in images)
    assert data.train[0][1] == -1


def test_labels_are_kept_if_classes_are_not_needed() -> None:
    data = open_data([(image, n % 3) for n, image in enumerate(random_array(9, 4, 4, 3))], need_classes=False)
    assert data.classes == ("0", "1", "2")
    with pytest.raises(DataError, match=r"image 0 of list cannot be read: .*; expected"):
        open_data(list(random_array(3, 4, 4, 3)))


def test_unreadable_items_without_labels() -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise KeyError("gone")

    data = TorchDatasetAdapter(Broken([1, 2]), need_classes=False)
    with pytest.raises(DataError, match="image 1 of Broken cannot be read: 'gone'; expected an image"):
        data.source(1)
