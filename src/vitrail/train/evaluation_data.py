"""The images that a model is evaluated on: the validation part of the data, for a run those it was not trained on."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vitrail.checkpoint.class_mapping import match_data_classes_to_model
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.data.datasets import BUILT_IN_DATASETS, DatasetSplits, ImageDataset, open_data
from vitrail.data.fashion import FASHION_CLASSES
from vitrail.data.image_items import ImageItem, evenly_spaced_indices, is_file_or_flat_folder, sample_evenly
from vitrail.data.photos import EXAMPLE_PREFIX, list_example_photos
from vitrail.errors import ConfigError, DataError
from vitrail.loading import LoadedModel
from vitrail.predict.image_list import collect_images

RGB_CHANNELS = 3


def open_evaluation_data(data: str | None, real: Path | None, run: FinishedRun | None) -> DatasetSplits:
    """Open `data`, by default that of the run. The run's own data is split as in training, other data is not."""
    where = data or (run.data if run else None)
    if where is None:
        raise ConfigError(
            "no `data`; expected fashion, or a folder of images: val/CLASS/*.jpg or CLASS/*.jpg", ("data",)
        )
    if run is not None and is_same_data_path(run.data, where):
        return open_data(where, seed=run.seed, val_share=run.val_share, real=real)
    return open_data(where, val_share=1.0, real=real)


def find_default_data(loaded: LoadedModel) -> str | None:
    """The data of the run, or the bundled data set that the checkpoint was trained on."""
    if loaded.run is not None:
        return loaded.run.data
    if loaded.checkpoint is None:
        return None
    about = loaded.checkpoint.description
    name = about.provenance.get("data")  # a folder of the same name has other classes
    return name if name in BUILT_IN_DATASETS and about.labels == FASHION_CLASSES else None


def take_example_photos(loaded: LoadedModel, count: int) -> tuple[list[ImageItem], Sequence[str]]:
    """Up to `count` example photos for a model of RGB images, and a note; no images for other models."""
    if len(loaded.preprocessing.mean) != RGB_CHANNELS:
        return [], ["no `data`, so no images"]
    photos = list_example_photos()
    chosen = [photos[n] for n in evenly_spaced_indices(len(photos), count)]
    items = [ImageItem(path, f"{EXAMPLE_PREFIX}{path.stem}") for path in chosen]
    return items, [f"no `data`, so the figures show {len(items)} example photos"]


def is_same_data_path(data: str | None, other: str) -> bool:
    """Whether two paths mean the same folder."""
    return data is not None and Path(data).resolve() == Path(other).resolve()


def get_validation_images(data: DatasetSplits) -> ImageDataset:
    if data.val is None or not len(data.val):
        raise DataError(f"{data.name} has no validation images; expected some, for instance in val/CLASS/")
    return data.val


def select_images(loaded: LoadedModel, data: str | None, count: int) -> tuple[list[ImageItem], Sequence[str]]:
    """`count` images of the data, by default that of the run or else the example photos, and notes.

    Images get the model's labels where the data's classes can be mapped to them: a folder 207 is a golden retriever.
    """
    if count < 1:
        raise ConfigError(f"`images` {count}; expected at least 1", ("images",))
    data = find_default_data(loaded) if data is None else data
    if data is None and loaded.run is None:
        return take_example_photos(loaded, count)
    if data is not None and is_file_or_flat_folder(Path(data)):
        items, _ = collect_images([data])
        return [items[n] for n in evenly_spaced_indices(len(items), count)], []
    found = open_evaluation_data(data, None, loaded.run)
    chosen, labels = sample_evenly(get_validation_images(found), count), loaded.labels
    if labels:
        with suppress(DataError):  # other classes than the model's keep their own names
            columns, _ = match_data_classes_to_model(labels, len(labels), found.classes)
            meant = dict(zip(found.classes, columns, strict=True))
            chosen = [replace(each, label=labels[meant[each.label or ""]]) for each in chosen]
    return chosen, found.notes
