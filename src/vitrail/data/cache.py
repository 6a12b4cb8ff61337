"""Pictures held decoded, for data sets that fit into memory; workers forked later share them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.datasets import Data, Pictures
from vitrail.data.image_formats import DEFAULT, open_undecoded, read_image_file
from vitrail.data.images import open_image
from vitrail.errors import DataError


class Cached:
    """Pictures decoded once and held; those that cannot be read fail each time they are asked for, as without it."""

    def __init__(self, pictures: Pictures, seen: Callable[[], object] = lambda: None) -> None:
        self.pictures = pictures
        self.classes = pictures.classes
        self.decoded: list[NDArray[np.uint8] | DataError] = []
        for index in range(len(pictures)):
            try:
                self.decoded.append(np.asarray(open_image(pictures.source(index))))
            except DataError as error:
                self.decoded.append(error)
            seen()

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.source(index), self.label(index)

    def source(self, index: int) -> NDArray[np.uint8]:
        found = self.decoded[index]
        if isinstance(found, DataError):
            raise DataError(str(found))  # a new one: each raise adds its frames to an error, and this one stays
        return found

    def label(self, index: int) -> int:
        return self.pictures.label(index)

    def name(self, index: int) -> str:
        return self.pictures.name(index)

    def answers(self, index: int) -> tuple[int, ...] | None:
        return self.pictures.answers(index)


def decoded_bytes(pictures: Pictures, samples: int = 32) -> float:
    """About what holding all pictures decoded would take, from the headers of a few; nothing to gain for arrays: 0."""
    sizes = list[int]()
    for index in np.linspace(0, len(pictures) - 1, min(samples, len(pictures))).astype(int).tolist():
        source = pictures.source(index)
        if isinstance(source, str | Path):
            with suppress(DataError):
                image = open_undecoded(read_image_file(source, str(source), DEFAULT), str(source), DEFAULT)
                sizes.append(3 * image.width * image.height)
    return len(pictures) * sum(sizes) / max(len(sizes), 1)


def held(data: Data, limit: float, seen: Callable[[], object] = lambda: None) -> Data:
    """The data with its pictures in memory, if they are files and all of them take at most `limit` bytes."""
    parts = {name: part for name in ("train", "val") if (part := getattr(data, name)) is not None}
    size = sum(decoded_bytes(part) for part in parts.values())
    if not 0 < size <= limit:
        return data
    return replace(data, **{name: Cached(part, seen) for name, part in parts.items()})
