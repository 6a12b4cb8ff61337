"""The images that a model is evaluated on: the validation part of the data, for a run those it was not trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.text import format_count
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.data.fashion import FASHION_CLASSES
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import BUILT_IN_DATASETS, DatasetSplits, ImageDataset, open_data
from vitrail.data.images.image_items import ImageItem, evenly_spaced_indices, is_file_or_flat_folder, spread_over_labels
from vitrail.data.photos import EXAMPLE_PREFIX, list_example_photos
from vitrail.opening import Opened
from vitrail.predict.image_list import collect_images

RGB_CHANNELS = 3


def open_evaluation_data(
    data: str | None, real: Path | None, run: FinishedRun | None, *, need_classes: bool = True
) -> DatasetSplits:
    """Open `data`, by default that of the run. The run's own data is split as in training, other data is not."""
    where = data or (run.data if run else None)
    if where is None:
        raise ConfigError("no `data`; expected fashion, or a folder of images: val/CLASS/*.jpg or CLASS/*.jpg")
    if run is not None and is_same_data_path(run.data, where):
        return open_data(where, seed=run.seed, val_share=run.val_share, real=real, need_classes=need_classes)
    return open_data(where, val_share=1.0, real=real, need_classes=need_classes)


def find_default_data(loaded: Opened) -> str | None:
    """The data of the run, or the bundled data set that the checkpoint was trained on."""
    if loaded.run is not None:
        return loaded.run.data
    if loaded.checkpoint is None:
        return None
    about = loaded.checkpoint.description
    name = about.provenance.get("data")  # a folder of the same name has other classes
    return name if name in BUILT_IN_DATASETS and about.labels == FASHION_CLASSES else None


def is_same_data_path(data: str | None, other: str) -> bool:
    """Whether two paths mean the same folder."""
    return data is not None and Path(data).resolve() == Path(other).resolve()


def get_validation_images(data: DatasetSplits) -> ImageDataset:
    if data.val is None or not len(data.val):
        raise DataError(f"{data.name} has no validation images; expected some, for instance in val/CLASS/")
    return data.val


@dataclass(frozen=True, kw_only=True)
class LabeledImages:
    """Images with classes, and the classes of a model that they correspond to."""

    name: str
    images: ImageDataset
    mapping: tuple[int, ...] | None  # the model's class for each class of the data; None if they differ
    no_mapping_reason: str  # empty if there is a mapping
    labels: tuple[str, ...]  # of the data's classes, by the model's names if there is a mapping
    notes: Sequence[str]

    def take(self, indices: Sequence[int]) -> list[ImageItem]:
        return [
            ImageItem(
                self.images.source(n), self.images.name(n), self.labels[self.images.label(n)] if self.labels else None
            )
            for n in indices
        ]


@dataclass(frozen=True, kw_only=True)
class SelectedImages:
    """Some images of the data, with notes for the user and, if they have classes, all of them."""

    items: Sequence[ImageItem] = ()
    notes: Sequence[str] = ()
    labeled: LabeledImages | None = None

    def take_evenly(self, count: int) -> Sequence[ImageItem]:
        """Evenly spaced images of all that there are, if they have classes; otherwise the selected ones."""
        found = self.labeled
        return self.items if found is None else found.take(evenly_spaced_indices(len(found.images), count))


def select_images(loaded: Opened, data: str | None, count: int, *, by_class: bool = False) -> SelectedImages:
    """`count` images of the data, by default that of the run or else the example photos.

    They are evenly spaced over the data, or over each class if `by_class`.
    """
    if count < 1:
        raise ConfigError(f"`images` {count}; expected at least 1")
    data = find_default_data(loaded) if data is None else data
    if data is None and loaded.run is None:
        return take_example_photos(loaded, count)
    if data is not None and is_file_or_flat_folder(Path(data)):
        items, _ = collect_images([data])
        return SelectedImages(items=[items[n] for n in evenly_spaced_indices(len(items), count)])
    found = open_labeled_images(loaded, data)
    total = len(found.images)
    chosen = evenly_spaced_indices(total, count)
    if by_class:
        chosen = spread_over_labels([found.images.label(n) for n in range(total)], count)
    return SelectedImages(items=found.take(chosen), notes=found.notes, labeled=found)


def take_example_photos(loaded: Opened, count: int) -> SelectedImages:
    """Up to `count` example photos for a model of RGB images, with a note; no images for other models."""
    if len(loaded.preprocessing.mean) != RGB_CHANNELS:
        return SelectedImages(notes=["no `data`, so no images"])
    photos = list_example_photos()
    chosen = [photos[n] for n in evenly_spaced_indices(len(photos), count)]
    items = [ImageItem(path, f"{EXAMPLE_PREFIX}{path.stem}") for path in chosen]
    shown = format_count(len(items), "example photo")
    return SelectedImages(items=items, notes=[f"no `data`, so the figures show {shown}"])


def open_labeled_images(loaded: Opened, data: str | None) -> LabeledImages:
    """The validation images of `data`, by default that of the run, with the classes of the model."""
    found = open_evaluation_data(data, None, loaded.run, need_classes=bool(loaded.classes))
    images, labels, reason = get_validation_images(found), found.classes, ""
    mapping: tuple[int, ...] | None = None
    if not loaded.classes:
        reason = "this model has no head"
    else:
        try:
            columns, _ = match_data_classes_to_model(loaded.labels, loaded.classes, found.classes)
        except DataError as error:  # other classes than the model's keep their own names
            reason = str(error)
        else:
            mapping = tuple(columns)
            labels = labels if loaded.labels is None else tuple(loaded.labels[n] for n in mapping)
    return LabeledImages(
        name=found.name, images=images, mapping=mapping, no_mapping_reason=reason, labels=labels, notes=found.notes
    )
