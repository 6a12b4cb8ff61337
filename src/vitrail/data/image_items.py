"""Pictures to be shown one by one: some of a data set, or files and folders of them with no classes at all."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vitrail.data.decoding.image_formats import DEFAULT_LIMITS
from vitrail.data.formats.class_folders import is_image_name, list_entries
from vitrail.errors import DataError

if TYPE_CHECKING:
    from vitrail.data.datasets import ImageDataset

STDIN = "-"


@dataclass(frozen=True)
class ImageItem:
    """A picture with its name, and what it is where that is known."""

    source: Any  # what open_image takes
    name: str
    label: str | None = None


def evenly_spaced_indices(total: int, count: int) -> list[int]:
    """So many of them, from the first to the last at even steps, so that every class has its turn."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def sample_evenly(dataset: "ImageDataset", count: int) -> list[ImageItem]:
    chosen = evenly_spaced_indices(len(dataset), count)
    return [ImageItem(dataset.source(n), dataset.name(n), dataset.classes[dataset.label(n)]) for n in chosen]


def is_file_or_flat_folder(place: Path) -> bool:
    """A file, or a folder with pictures right in it and no folders: one without classes."""
    if not os.path.isdir(place):  # noqa: PTH112, which for a name too long would raise, and so would the next
        return os.path.isfile(place)  # noqa: PTH113
    inside = list_entries(place)
    return any(is_image_name(name) for name, *_ in inside) and not any(is_folder for *_, is_folder in inside)


def list_image_items(paths: Sequence[str | Path], stdin: BinaryIO | None = None) -> list[ImageItem]:
    """Each file, whether it can be read or not, of each folder the images directly in it, and `-` for `stdin`."""
    found = list[ImageItem]()
    for place in paths:
        if place == STDIN and stdin is not None:
            found.append(ImageItem(stdin.read(DEFAULT_LIMITS.bytes + 1), "stdin"))
            continue
        if not os.path.isdir(place):  # noqa: PTH112  # of a name that is too long Path.is_dir is an error
            found.append(ImageItem(str(place), str(place)))
            continue
        inside = [path for name, path, is_folder in list_entries(place) if is_image_name(name) and not is_folder]
        if not inside:
            raise DataError(f"{place} holds no pictures; expected some right in it, or the names of files")
        found += [ImageItem(path, path) for path in inside]
    return found
