"""Data sets of other libraries: any object that returns (image, label), such as torchvision's, or only images."""

import operator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.errors import DataError, VitrailError, describe_error
from vitrail.data.images.array_dataset import NO_LABEL, check_label_range
from vitrail.data.images.decoding.rgb_image import open_image

UNKNOWN_LABEL = NO_LABEL  # until the image is read
MAX_CLASSES = 2**20  # if only the labels tell their number


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
        names = names if self.has_labels else ()  # torchvision's STL10 names classes, but its unlabelled part has none
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
        if not self.has_labels:
            return self.read_unlabelled_image(index)
        expected = "expected (image, label), the label a whole number"
        try:
            image, label = self.dataset[index][:2]
            label = int(label)
        except VitrailError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise DataError(f"{self.name(index)} cannot be read: {describe_error(error)}; {expected}") from error
        if not 0 <= label < self.class_limit:
            raise DataError(f"{self.name(index)} has the label {label}; {expected} from 0 to {self.class_limit - 1}")
        self.labels[index] = label
        return image

    def read_unlabelled_image(self, index: int) -> Any:
        try:
            item = self.dataset[index]
            return item[0] if isinstance(item, tuple | list) else item
        except VitrailError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise DataError(f"{self.name(index)} cannot be read: {describe_error(error)}; expected an image") from error

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
