"""Decoded images in memory, for data sets that fit; workers forked later share them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError
from vitrail.data.images.datasets import DatasetSplits, ImageDataset
from vitrail.data.images.decoding.image_formats import DEFAULT_LIMITS, open_undecoded, read_image_file
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import evenly_spaced_indices


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


def estimate_decoded_bytes(dataset: ImageDataset, samples: int = 32) -> float:
    """Estimate the size of all images decoded from the headers of a few; 0 for arrays, which are decoded already."""
    sizes = list[int]()
    for index in evenly_spaced_indices(len(dataset), samples):
        source = dataset.source(index)
        if isinstance(source, str | Path):
            with suppress(DataError):
                where = str(source)
                image = open_undecoded(read_image_file(source, where, DEFAULT_LIMITS), where, DEFAULT_LIMITS)
                sizes.append(3 * image.width * image.height)
    return len(dataset) * sum(sizes) / max(len(sizes), 1)


def cache_if_small(data: DatasetSplits, limit: float, on_image: Callable[[], object] = lambda: None) -> DatasetSplits:
    """Decode all images into memory if they are files and take at most `limit` bytes."""
    parts = {name: part for name, part in (("train", data.train), ("val", data.val)) if part is not None}
    size = sum(estimate_decoded_bytes(part) for part in parts.values())
    if not 0 < size <= limit:
        return data
    return replace(data, **{name: CachedDataset(part, on_image) for name, part in parts.items()})
