"""Single images with their names, and how a few are chosen from many."""

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.images.formats.class_folders import is_image_name, list_entries


@dataclass(frozen=True)
class ImageItem:
    """An image, its name, and its label if it is known."""

    source: Any  # what open_image takes
    name: str
    label: str | None = None


def evenly_spaced_indices(total: int, count: int) -> list[int]:
    """`count` indices from the first to the last at even steps, so that every class is represented."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def spread_over_labels(labels: Sequence[Hashable], count: int) -> list[int]:
    """`count` indices with as many labels as possible, grouped by label; evenly spaced among those of a label."""
    groups = dict[Hashable, list[int]]()
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    chosen = [[*groups.values()][n] for n in evenly_spaced_indices(len(groups), count)]
    rounds = sorted((turn, n) for n, group in enumerate(chosen) for turn in range(len(group)))[:count]
    shares = Counter(n for _, n in rounds)
    return [group[n] for number, group in enumerate(chosen) for n in evenly_spaced_indices(len(group), shares[number])]


def is_file_or_flat_folder(place: Path) -> bool:
    """Whether it is a file, or a folder with images and without subfolders: images without classes."""
    if not os.path.isdir(place):  # noqa: PTH112  # Path.is_dir raises if a name is too long
        return os.path.isfile(place)  # noqa: PTH113
    inside = list_entries(place)
    return any(is_image_name(name) for name, *_ in inside) and not any(is_folder for *_, is_folder in inside)
