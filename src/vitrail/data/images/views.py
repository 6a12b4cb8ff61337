"""Views that a task requests: random crops of every image; each kind has its augmentation, size and count."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.view_config import ViewAugmentation
from vitrail.data.images.datasets import DatasetSubset, ImageDataset
from vitrail.data.images.image_cache import CachedDataset
from vitrail.models.base.checks import Size, check_count, pair

DEFAULT_VIEW_NAME = "images"
RESERVED_NAMES = ("labels", "indices")  # tensors of every batch


@dataclass(frozen=True)
class View:
    """`count` random views of every image, requested by a task under one name.

    `augmentation` is a ViewAugmentation, computed for a batch at once, an Augmentation, computed image by image, or
    None for that of the recipe. `size` (rows, columns, or one number) is None for the size of the preprocessing.

    >>> large, small = ViewAugmentation(area=(0.4, 1.0)), ViewAugmentation(area=(0.05, 0.4))
    >>> views = {"global": View(large, size=224, count=2), "local": View(small, size=96, count=8)}
    """

    augmentation: Augmentation | ViewAugmentation | None = None
    size: Size | None = None
    count: int = 1

    def __post_init__(self) -> None:
        check_count("count", self.count)
        sides: Any = (self.size, self.size) if isinstance(self.size, int) else self.size
        if self.size is not None and not (
            isinstance(sides, tuple) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
        ):
            raise ConfigError(f"`size` is {self.size!r}; expected the rows and columns of a view, 1 or more")


def are_default_views(views: Mapping[str, View] | None) -> bool:
    """Whether a batch is the same as without views: `images`, (B, C, H, W), by the augmentation of the recipe."""
    return views is None or views == {DEFAULT_VIEW_NAME: View()}


def check_views(views: Mapping[str, View], dataset: ImageDataset) -> None:
    """Raise an error for reserved names, and for views that are larger than the images in memory."""
    if not isinstance(views, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"views is a {type(views).__name__}; expected a mapping of names to View(…)")
    if not views:
        raise ConfigError("`views` is empty; expected at least one view")
    for name, view in views.items():
        if not isinstance(name, str) or not isinstance(view, View):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"views has {name!r}: {view!r}; expected a name as text, and a View(…)")
    for name in RESERVED_NAMES:
        if name in views:
            raise ConfigError(
                f"a view is named {name!r}, but every batch has another tensor of this name; use another name"
            )
    largest = find_largest_stored_size(dataset)
    for name, view in views.items():
        if largest is None or view.size is None:
            continue
        rows, columns = pair(view.size)
        if rows > largest[0] or columns > largest[1]:
            raise ConfigError(
                f"the view {name!r} has a size of {rows}×{columns} pixels, but the images in memory have at most "
                f"{largest[0]}×{largest[1]}; use {min(largest)} or less, or larger images"
            )


def find_largest_stored_size(dataset: ImageDataset) -> tuple[int, int] | None:
    """The most rows and columns of the images in memory; None for files, whose sizes are not known yet."""
    dataset = dataset.dataset if isinstance(dataset, DatasetSubset) else dataset
    if isinstance(dataset, ArrayDataset):
        return dataset.images.shape[1], dataset.images.shape[2]
    if isinstance(dataset, CachedDataset):
        sizes = [each.shape for each in dataset.decoded_images if not isinstance(each, Exception)]
        return (max(size[0] for size in sizes), max(size[1] for size in sizes)) if sizes else None
    return None
