"""What `explain`, `look` and `report` are shown: a model to look into, and pictures to look at."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.summary import parse_fields
from vitrail.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vitrail.data.image_items import ImageItem
    from vitrail.inspection.explain import Explainer
    from vitrail.train.opened import LoadedModel


def open_explainer(
    checkpoint: str, labels: Path | None, device: str, fields: Sequence[str] | None = None
) -> "tuple[LoadedModel, Explainer]":
    """The model of that name, as something that can be asked; `fields` are the values of --set."""
    from vitrail.cli.convert import read_labels_file
    from vitrail.inspection.explain import Explainer
    from vitrail.train.distributed import Ranks, resolve_device
    from vitrail.train.opened import TIMM_PREFIX, open_model

    if checkpoint.startswith(TIMM_PREFIX):
        raise ConfigError(
            f"{checkpoint} runs on timm's code, not to be looked into; expected its weights: hf-hub:timm/…"
        )
    place = resolve_device(device, Ranks())
    opened = open_model(checkpoint, **parse_fields(fields))
    names = opened.labels if labels is None else read_labels_file(labels)
    return opened, Explainer(opened.model, preprocessing=opened.preprocessing, labels=names, device=place)


def select_images(
    opened: "LoadedModel", data: str | None, count: int, labels: Sequence[str] | None = None
) -> "tuple[list[ImageItem], Sequence[str]]":
    """So many pictures of the data, and notes; without data those of the run, and without a run none.

    `labels` are the model's classes: a folder called 207 holds what the model calls by its name.
    """
    if count < 1:
        raise ConfigError(f"--images {count}; expected 1 or more")
    from vitrail.checkpoint.class_mapping import map_classes
    from vitrail.data.image_items import evenly_spaced_indices, is_file_or_flat_folder, sample_evenly
    from vitrail.predict.image_list import collect_images
    from vitrail.train.opened import get_validation_images, open_evaluation_data

    if data is None and opened.run is None:
        return [], ["no --data, so no pictures"]
    if data is not None and is_file_or_flat_folder(Path(data)):
        loose, _ = collect_images([data])
        return [loose[n] for n in evenly_spaced_indices(len(loose), count)], []
    found = open_evaluation_data(data, None, opened.run)
    chosen = sample_evenly(get_validation_images(found), count)
    if labels:
        with suppress(DataError):  # other classes than the model's keep their own names
            columns, _ = map_classes(labels, len(labels), found.classes)
            meant = dict(zip(found.classes, columns, strict=True))
            chosen = [replace(each, label=labels[meant[each.label or ""]]) for each in chosen]
    return chosen, found.notes
