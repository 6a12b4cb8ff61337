"""Pictures to be shown one by one: some of a data set, or files and folders of them with no classes at all."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vitrail.data.folders import entries, is_picture
from vitrail.data.image_formats import DEFAULT
from vitrail.errors import DataError

if TYPE_CHECKING:
    from vitrail.data.datasets import Pictures

STDIN = "-"


@dataclass(frozen=True)
class Shown:
    """A picture with its name, and what it is where that is known."""

    source: Any  # what open_image takes
    name: str
    label: str | None = None


def places(total: int, count: int) -> list[int]:
    """So many of them, from the first to the last at even steps, so that every class has its turn."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def evenly(pictures: "Pictures", count: int) -> list[Shown]:
    chosen = places(len(pictures), count)
    return [Shown(pictures.source(n), pictures.name(n), pictures.classes[pictures.label(n)]) for n in chosen]


def is_loose(place: Path) -> bool:
    """A file, or a folder with pictures right in it and no folders: one without classes."""
    if not os.path.isdir(place):  # noqa: PTH112, which for a name too long would raise, and so would the next
        return os.path.isfile(place)  # noqa: PTH113
    inside = entries(place)
    return any(is_picture(name) for name, *_ in inside) and not any(is_folder for *_, is_folder in inside)


def pictures_at(paths: Sequence[str | Path], stdin: BinaryIO | None = None) -> list[Shown]:
    """Each file, whether it can be read or not, of each folder the images directly in it, and `-` for `stdin`."""
    found = list[Shown]()
    for place in paths:
        if place == STDIN and stdin is not None:
            found.append(Shown(stdin.read(DEFAULT.bytes + 1), "stdin"))
            continue
        if not os.path.isdir(place):  # noqa: PTH112  # of a name that is too long Path.is_dir is an error
            found.append(Shown(str(place), str(place)))
            continue
        inside = [path for name, path, is_folder in entries(place) if is_picture(name) and not is_folder]
        if not inside:
            raise DataError(f"{place} holds no pictures; expected some right in it, or the names of files")
        found += [Shown(path, path) for path in inside]
    return found
