"""Open a data set by name, by folder or from an object: training and validation images with their classes."""

import operator
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.errors import DataError, VitrailError, describe_error, find_nearest_name
from vitrail.base.files import suggest_sibling
from vitrail.base.text import escape_unprintable
from vitrail.data import fashion
from vitrail.data.images.array_dataset import NO_LABEL, ArrayDataset, check_label_range
from vitrail.data.images.decoding.rgb_image import open_image, open_undecoded_file
from vitrail.data.images.formats import cifar, mnist_idx, packed_images
from vitrail.data.images.formats.class_folders import (
    FileDataset,
    list_entries,
    quote_names,
    read_class_folders,
    read_real_labels,
)
from vitrail.data.images.formats.listed_images import find_listed_format
from vitrail.data.images.image_items import evenly_spaced_indices
from vitrail.data.public.catalog import find_public_dataset, list_public_names
from vitrail.data.public.download import fetch_dataset
from vitrail.data.validation_split import check_val_share, choose_validation_mask

BUILT_IN_DATASETS = ("fashion",)  # bundled with the package
MANUAL_DATASETS = {  # by name without punctuation: what to download, from which page, and the folder to pass
    "mnist": ("the four idx .gz files", "http://yann.lecun.com/exdb/mnist", "their folder"),
    "fashionmnist": ("the four idx .gz files", "https://github.com/zalandoresearch/fashion-mnist", "their folder"),
    "imagenet": ("ILSVRC2012", "https://image-net.org", "the folder with train/CLASS and val/CLASS"),
}
ARCHIVE_SUFFIXES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
EXPECTED_DATA = (
    "expected 'fashion', or a folder with one subfolder per class, with train and val folders of this kind, "
    "or with the files of CIFAR-10, CIFAR-100 or MNIST, or a name that `vitrail data` lists"
)
UNKNOWN_LABEL = NO_LABEL  # until the image is read
MAX_CLASSES = 2**20  # if only the labels tell their number


@runtime_checkable
class ImageDataset(Protocol):
    """What the package needs from a data set: source, label and name of an image without decoding it."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Any, int]: ...
    def source(self, index: int, /) -> Any: ...  # an input of open_image: a path, or uint8 (H, W, C)
    def label(self, index: int, /) -> int: ...
    def name(self, index: int, /) -> str: ...  # for messages
    def real_labels(self, index: int, /) -> tuple[int, ...] | None: ...  # all correct classes, if ReaL lists them


@dataclass(frozen=True, kw_only=True)
class DatasetSplits:
    """Training and validation images, and notes for the user."""

    name: str
    train: ImageDataset | None
    val: ImageDataset | None
    classes: tuple[str, ...]  # empty without classes; every label is then -1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts: dict[str, Any] = {"train": self.train, "val": self.val}
        for part, given in parts.items():  # adapts data sets such as torchvision's
            if given is not None and not isinstance(given, ImageDataset):
                object.__setattr__(self, part, TorchDatasetAdapter(given, need_classes=bool(self.classes)))


class DatasetSubset:
    """The images of a data set at given indices."""

    def __init__(self, dataset: ImageDataset, indices: Sequence[int] | NDArray[np.int64]) -> None:
        inner = isinstance(dataset, DatasetSubset)
        self.dataset: ImageDataset = dataset.dataset if inner else dataset
        self.indices = dataset.indices[np.asarray(indices, np.int64)] if inner else np.asarray(indices, np.int64)
        self.classes = dataset.classes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.dataset[int(self.indices[index])]

    def source(self, index: int) -> Any:
        return self.dataset.source(int(self.indices[index]))

    def label(self, index: int) -> int:
        return self.dataset.label(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.dataset.name(int(self.indices[index]))

    def real_labels(self, index: int) -> tuple[int, ...] | None:
        return self.dataset.real_labels(int(self.indices[index]))


class CachedDataset:
    """Images decoded once and kept; an unreadable image raises its error at every access, as without the cache."""

    def __init__(self, dataset: ImageDataset, on_image: Callable[[], object] = lambda: None) -> None:
        self.dataset = dataset
        self.classes = dataset.classes
        self.decoded_images: list[NDArray[np.uint8] | DataError] = []
        for index in range(len(dataset)):
            try:
                self.decoded_images.append(np.asarray(open_image(dataset.source(index))))
            except DataError as error:
                self.decoded_images.append(error)
            on_image()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.source(index), self.label(index)

    def source(self, index: int) -> NDArray[np.uint8]:
        image = self.decoded_images[index]
        if isinstance(image, DataError):
            raise DataError(str(image))  # a new one: every raise would add frames to the stored error
        return image

    def label(self, index: int) -> int:
        return self.dataset.label(index)

    def name(self, index: int) -> str:
        return self.dataset.name(index)

    def real_labels(self, index: int) -> tuple[int, ...] | None:
        return self.dataset.real_labels(index)


@runtime_checkable
class TorchDataset(Protocol):
    """A map-style data set of (image, label), such as torchvision's."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...  # (image, label), or an image where no classes are needed


class TorchDatasetAdapter:
    """Makes it an ImageDataset; classes are its own, or else the numbers up to its largest label.

    Unless classes are needed, items may be images or (image, …) without labels; there are then no classes.
    """

    def __init__(self, dataset: TorchDataset, *, need_classes: bool = True) -> None:
        self.dataset = dataset
        self.dataset_name = type(dataset).__name__
        inner = read_attribute(dataset, "dataset")  # of torch's Subset
        names = read_attribute(dataset, "classes") or read_attribute(inner, "classes") or ()
        targets = find_targets(dataset)
        self.has_labels = need_classes or targets is not None or self.has_label(0)
        names = names if self.has_labels else ()  # torchvision's STL10 names classes, but its unlabeled part has none
        self.class_limit = len(names) or MAX_CLASSES
        self.labels = (
            np.full(len(dataset), UNKNOWN_LABEL)
            if targets is None
            else check_label_range(targets, self.class_limit, self.dataset_name)
        )
        largest = max((self.label(index) for index in range(len(self))), default=0) if not names else 0
        self.classes = tuple(str(name) for name in names or range(largest + 1))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return open_image(self.source(index)), self.label(index)

    def source(self, index: int) -> Any:
        expected = "expected (image, label), the label a whole number" if self.has_labels else "expected an image"
        try:
            item = self.dataset[index]
            if not self.has_labels:
                return item[0] if isinstance(item, tuple | list) else item
            image, label = item[:2]
            label = int(label)
        except VitrailError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise DataError(f"{self.name(index)} cannot be read: {describe_error(error)}; {expected}") from error
        if not 0 <= label < self.class_limit:
            raise DataError(f"{self.name(index)} has the label {label}; {expected} from 0 to {self.class_limit - 1}")
        self.labels[index] = label
        return image

    def has_label(self, index: int) -> bool:
        """Whether the item is (image, label, …), with an integer label."""
        try:
            item = self.dataset[index]
            return isinstance(item, tuple | list) and operator.index(item[1]) >= 0
        except Exception:  # foreign code may raise anything; `source` reports it
            return False

    def label(self, index: int) -> int:
        """The label; if the data set does not list its labels, the image is decoded once to get it."""
        if self.has_labels and self.labels[index] == UNKNOWN_LABEL:
            self.source(index)
        return int(self.labels[index])

    def name(self, index: int) -> str:
        return f"image {index} of {self.dataset_name}"

    def real_labels(self, index: int) -> tuple[int, ...] | None:  # noqa: ARG002
        return None


def read_attribute(dataset: Any, name: str) -> Any:
    """An attribute that data sets of other libraries may have, or None."""
    return getattr(dataset, name, None)  # they have no class in common


def find_targets(dataset: Any) -> NDArray[Any] | None:
    """The labels, if they are listed and no transform changes them."""
    if read_attribute(dataset, "target_transform") is not None:
        return None
    inner, indices = read_attribute(dataset, "dataset"), read_attribute(dataset, "indices")
    if inner is not None and indices is not None:  # torch's Subset
        targets = find_targets(inner)
        return None if targets is None else targets[np.asarray(indices, np.int64)]
    listed = read_attribute(dataset, "targets")
    labels = None if listed is None else np.asarray(listed)
    return labels if labels is not None and labels.shape == (len(dataset),) and labels.dtype.kind in "iu" else None


def open_data(
    where: str | Path | TorchDataset | DatasetSplits,
    *,
    seed: int = 0,
    val_share: float = 0.2,
    real: str | Path | None = None,
    need_classes: bool = True,
) -> DatasetSplits:
    """Open a data set by name, from a folder or from an object; `real` is the file of ImageNet's ReaL labels.

    Without a validation set, `val_share` of each class is held out, chosen by the seed (0: nothing, 1: everything).

    If `need_classes` is False, images without classes are accepted too: a folder that holds images itself, then with
    all images below it, and a data set whose items are images. Its classes are (), all labels are -1, and `val_share`
    of all images is held out. Data with classes keep them.

    >>> data = vitrail.open_data("fashion")  # or a folder with one subfolder per class, or a data set of torchvision
    >>> len(data.train), len(data.val), data.classes[0]
    (6000, 1000, 'T-shirt/top')
    """
    check_val_share(val_share)
    if isinstance(where, DatasetSplits):
        return where
    real_labels = None if real is None else read_real_labels(Path(real))
    train: ImageDataset | None
    val: ImageDataset | None
    if isinstance(where, str) and where in BUILT_IN_DATASETS:
        name, (train, val), notes = where, fashion.read_fashion(), list[str]()
    elif (public := find_public_dataset(where)) is not None:
        if public.is_text:
            raise DataError(f"{where} has sentence pairs; expected images: see the public data sets in `vitrail data`")
        name, notes = public.name, note_folder_of_same_name(public.name)
        train, val, own_notes = read_data_folder(fetch_dataset(public), real_labels, need_classes)
        notes += own_notes
    elif isinstance(where, str | Path):
        root = check_data_folder(where)
        name = root.resolve().name
        train, val, notes = read_data_folder(root, real_labels, need_classes)
    elif isinstance(where, TorchDataset):  # pyright: ignore[reportUnnecessaryIsInstance]
        name, val, notes = type(where).__name__, None, []
        train = where if isinstance(where, ImageDataset) else TorchDatasetAdapter(where, need_classes=need_classes)
    else:
        raise DataError(f"the data is a {type(where).__name__}; {EXPECTED_DATA}, or a data set such as torchvision's")
    if any(each is not None and not len(each) for each in (train, val)):
        raise DataError(f"{name} has no images; expected at least one")
    if real_labels is not None and not any(has_imagenet_real_labels(each) for each in (train, val)):
        raise DataError(f"{real} has no ReaL labels for {name}; expected images named ILSVRC2012_val_….JPEG")
    if train is not None and val is None:
        train, val, split_notes = split_dataset(train, seed, val_share)
        notes += [f"{name}: {note}" for note in split_notes]
    classes = next(each.classes for each in (train, val) if each is not None)
    return DatasetSplits(name=name, train=train, val=val, classes=classes, notes=tuple(map(escape_unprintable, notes)))


def check_data_folder(where: str | Path) -> Path:
    """Return the folder, or raise an error that suggests the nearest name."""
    path = Path(where)
    try:
        if path.is_dir() and str(where):
            return path
        exists = path.exists() and str(where)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; {EXPECTED_DATA}") from None
    if exists:
        hint = ": unpack it first" if path.name.lower().endswith(ARCHIVE_SUFFIXES) else ""
        raise DataError(f"{path} is a file; {EXPECTED_DATA}{hint}")
    raise missing_data_error(str(where))


def check_data_exists(name: str, built_in: Collection[str]) -> None:
    """Refuse data that does not exist. Sentence pairs may be named by the beginning of their files."""
    place, known = Path(name), name in (*BUILT_IN_DATASETS, *built_in) or os.path.lexists(name)
    known = known or find_public_dataset(name) is not None
    if name and not known and not any(place.parent.glob(f"{escape(place.name)}.*")):
        raise missing_data_error(name)


def missing_data_error(where: str) -> DataError:
    """Error for data that does not exist: how to get it if it is public, or the nearest name."""
    plain = re.sub(r"[\W_]", "", where.lower())
    manual = MANUAL_DATASETS.get(plain)
    if manual is not None:
        files, page, folder = manual
        return DataError(f"{where!r} is not a folder here; download {files} from {page}, unpack it, and pass {folder}")
    names = {re.sub(r"[\W_]", "", name): name for name in list_public_names(is_text=False)}
    nearest = names.get(plain) or find_nearest_name(where, (*BUILT_IN_DATASETS, *names.values()))
    hint = f": did you mean {nearest!r}?" if nearest else suggest_sibling(where)
    return DataError(f"{where!r} does not exist; {EXPECTED_DATA}{hint}")


def note_folder_of_same_name(name: str) -> list[str]:
    if Path(name).is_dir():
        return [f"{name} is the public data set; pass ./{name} for the folder in the current directory"]
    return []


def read_data_folder(
    root: Path, real: list[tuple[int, ...]] | None, need_classes: bool
) -> tuple[ImageDataset | None, ImageDataset | None, list[str]]:
    """Read a folder of any supported layout, which may be one folder further down."""
    subfolders = [Path(path) for _, path, is_folder in list_entries(root) if is_folder]
    readers = [(folder, reader) for folder in (root, *subfolders) if (reader := find_reader(folder)) is not None]
    if len(readers) > 1 and readers[0][0] != root:
        raise DataError(f"{root} holds {len(readers)} data sets; expected one: pass {readers[0][0]} or {readers[1][0]}")
    if readers:
        folder, reader = readers[0]
        return reader(folder)
    train, val, notes = read_class_folders(root, real, need_classes=need_classes)
    if train is not None and val is None and is_imagenet_v2(train.root):
        return None, train, [*notes, "ImageNet-V2 is a test set: validated on all its images"]
    return train, val, notes


Splits = tuple[ImageDataset | None, ImageDataset | None, list[str]]  # training, validation, notes


def find_reader(folder: Path) -> Callable[[Path], Splits] | None:
    """The reader of a published layout, by the files in the folder; None for folders of classes."""
    if (layout := cifar.find_cifar_layout(folder)) is not None:
        return lambda found: cifar.read_cifar(found, layout)
    if mnist_idx.find_idx_files(folder):
        return lambda found: (*mnist_idx.read_mnist_folder(found), [])
    if packed_images.is_svhn(folder):
        return packed_images.read_svhn
    if packed_images.is_stl10(folder):
        return packed_images.read_stl10
    listed = find_listed_format(folder)
    return None if listed is None else listed.open


def is_imagenet_v2(folder: Path) -> bool:
    """Its folders are numbers, which class folders are sorted by."""
    return folder.resolve().name.startswith("imagenetv2-")


def has_imagenet_real_labels(dataset: ImageDataset | None) -> bool:
    return dataset is not None and any(dataset.real_labels(index) is not None for index in range(len(dataset)))


def split_dataset(
    dataset: ImageDataset, seed: int, share: float
) -> tuple[ImageDataset | None, ImageDataset | None, list[str]]:
    """Training and validation parts (None if empty) and notes; files are split by name, other images by index."""
    names = dataset.paths if isinstance(dataset, FileDataset) else [str(index) for index in range(len(dataset))]
    labels = np.array([dataset.label(index) for index in range(len(dataset))], np.int64)
    held_out = choose_validation_mask(names, labels, seed=seed, share=share)
    train, val = (
        take_images_by_index(dataset, np.flatnonzero(part)) if part.any() else None for part in (~held_out, held_out)
    )
    if share in (0, 1):
        return train, val, []
    single = [dataset.classes[label] for label in np.flatnonzero(np.bincount(labels[labels != NO_LABEL]) == 1)]
    notes = [f"only one image of {quote_names(single)}; not validated"] if single else []
    return train, val, [*notes, f"{held_out.sum()} of {len(held_out)} images held out for validation, by seed {seed}"]


def take_images_by_index(dataset: ImageDataset, indices: NDArray[np.int64]) -> ImageDataset:
    """A subset; arrays stay arrays, so that a batch is taken from them at once."""
    if isinstance(dataset, ArrayDataset):
        return ArrayDataset(dataset.images[indices], dataset.labels[indices], dataset.classes, dataset.dataset_name)
    return DatasetSubset(dataset, indices)


def estimate_decoded_bytes(dataset: ImageDataset, samples: int = 32) -> float:
    """Estimate the size of all images decoded from the headers of a few; 0 for arrays, which are decoded already."""
    sizes = list[int]()
    for index in evenly_spaced_indices(len(dataset), samples):
        source = dataset.source(index)
        if isinstance(source, str | Path):
            with suppress(DataError):
                image = open_undecoded_file(source)
                sizes.append(3 * image.width * image.height)
    return len(dataset) * sum(sizes) / max(len(sizes), 1)


def cache_if_small(data: DatasetSplits, limit: float, on_image: Callable[[], object] = lambda: None) -> DatasetSplits:
    """Decode all images into memory if they are files and take at most `limit` bytes."""
    parts = {name: part for name, part in (("train", data.train), ("val", data.val)) if part is not None}
    size = sum(estimate_decoded_bytes(part) for part in parts.values())
    if not 0 < size <= limit:
        return data
    return replace(data, **{name: CachedDataset(part, on_image) for name, part in parts.items()})
