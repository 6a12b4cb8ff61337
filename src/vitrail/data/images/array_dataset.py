"""Images in memory: an array of pixels, an array of labels and the class names."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.errors import DataError
from vitrail.data.images.decoding.rgb_image import open_image

NO_LABEL = -1  # of every image of a data set without classes


class ArrayDataset:
    """Images of one size, uint8 (N, H, W, C) with 1 or 3 channels, and class indices (N,), or None without classes."""

    def __init__(self, images: NDArray[Any], labels: Any, classes: Sequence[str], name: str = "the arrays") -> None:
        self.classes = tuple(classes)
        self.dataset_name = name
        images = images[..., None] if images.ndim == 3 else images
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape[1:]:
            given = f"{name}: images of {images.dtype} {images.shape}"
            raise DataError(f"{given}; expected uint8 (images, rows, columns, 1 or 3)")
        self.images: NDArray[np.uint8] = np.require(images, requirements=["C", "W"])  # torch warns about others
        labels = np.full(len(images), NO_LABEL) if labels is None else labels
        self.labels = check_label_range(labels, len(self.classes), name)
        if len(self.labels) != len(images):
            raise DataError(f"{name}: {len(images)} images and {len(self.labels)} labels; expected one label per image")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return open_image(self.source(index)), self.label(index)

    def source(self, index: int) -> NDArray[np.uint8]:
        return self.images[index]

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def name(self, index: int) -> str:
        return f"image {index} of {self.dataset_name}"

    def real_labels(self, index: int) -> tuple[int, ...] | None:  # noqa: ARG002
        return None


def check_label_range(labels: Any, classes: int, name: str) -> NDArray[np.int64]:
    try:
        given = np.asarray(labels)
    except ValueError:  # lists of different lengths
        given = np.array(None)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise DataError(f"{name}: labels of {given.dtype} {given.shape}; expected whole numbers, one per image")
    lowest = 0 if classes else NO_LABEL
    wrong = np.flatnonzero((given < lowest) | (given >= classes))
    if wrong.size:
        first = int(wrong[0])
        expected = f"0 to {classes - 1}" if classes else f"{NO_LABEL}, since there are no classes"
        raise DataError(f"{name}: label {given[first]} of image {first}; expected {expected}")
    return given.astype(np.int64)
