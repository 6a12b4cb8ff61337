"""Data sets of others: any object that gives (picture, label), as torchvision's do."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.arrays import labels_in_range
from vitrail.data.images import open_image
from vitrail.errors import DataError, VitrailError, one_line

UNKNOWN = -1
LARGEST = 2**20  # classes, where only the labels tell how many


class Dataset(Protocol):
    """Pictures and their labels as torchvision's data sets give them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...  # (picture, label)


class Foreign:
    """Pictures of such a data set: its own classes, or else the numbers up to its largest label."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.of = type(dataset).__name__
        inner: Any = getattr(dataset, "dataset", None)  # of torch's Subset
        names: Any = getattr(dataset, "classes", None) or getattr(inner, "classes", None) or ()
        known = targets(dataset)
        self.most = len(names) or LARGEST
        self.labels = np.full(len(dataset), UNKNOWN) if known is None else labels_in_range(known, self.most, self.of)
        largest = max((self.label(index) for index in range(len(self))), default=0) if not names else 0
        self.classes = tuple(str(name) for name in names or range(largest + 1))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return open_image(self.source(index)), self.label(index)

    def source(self, index: int) -> Any:
        expected = "expected (picture, label), the label a whole number"
        try:
            picture, label = self.dataset[index][:2]
            label = int(label)
        except VitrailError:
            raise
        except Exception as error:  # a data set of others raises anything
            raise DataError(f"{self.name(index)} cannot be read: {one_line(error)}; {expected}") from error
        if not 0 <= label < self.most:
            raise DataError(f"{self.name(index)} has the label {label}; {expected} from 0 to {self.most - 1}")
        self.labels[index] = label
        return picture

    def label(self, index: int) -> int:
        """Where the data set does not list its labels, that of the picture, decoded the first time."""
        if self.labels[index] == UNKNOWN:
            self.source(index)
        return int(self.labels[index])

    def name(self, index: int) -> str:
        return f"picture {index} of {self.of}"

    def answers(self, index: int) -> tuple[int, ...] | None:  # noqa: ARG002
        return None


def targets(dataset: Any) -> NDArray[Any] | None:
    """The labels, where they are listed and nothing changes them on the way."""
    if getattr(dataset, "target_transform", None) is not None:
        return None
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # torch's Subset
        inner = targets(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, np.int64)]
    listed: Any = getattr(dataset, "targets", None)
    labels = None if listed is None else np.asarray(listed)
    return labels if labels is not None and labels.shape == (len(dataset),) and labels.dtype.kind in "iu" else None
