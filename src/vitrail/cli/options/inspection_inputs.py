"""Inputs of `explain`, `look` and `report`: a model that can be explained, and images from the data."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options.values import check_minimum, parse_fields, read_labels_file
from vitrail.errors import DataError

if TYPE_CHECKING:
    from vitrail.data.image_items import ImageItem
    from vitrail.inspection.explain import Explainer
    from vitrail.loading import LoadedModel


def open_explainer(
    checkpoint: str,
    fields: Sequence[str] | None,
    preprocessing: Sequence[str] | None,
    device: str,
    labels: Path | None = None,
) -> "Explainer":
    """Open a model with the values of --set, --preprocessing, --device and --labels."""
    config_fields, how = parse_fields(fields), parse_fields(preprocessing, "--preprocessing")

    from vitrail.inspection.explain import Explainer
    from vitrail.loading import open_module
    from vitrail.train.distributed import Ranks, resolve_device

    return Explainer(
        open_module(
            checkpoint,
            fields=config_fields,
            preprocessing=how or None,
            labels=None if labels is None else read_labels_file(labels),
            device=resolve_device(device, Ranks()),
        )
    )


def select_images(loaded: "LoadedModel", data: str | None, count: int) -> "tuple[list[ImageItem], Sequence[str]]":
    """`count` images of the data, by default that of the run, and notes; without both there are no images.

    Images get the model's labels where the data's classes can be mapped to them: a folder 207 is a golden retriever.
    """
    check_minimum("--images", count, 1)
    from vitrail.checkpoint.class_mapping import map_classes
    from vitrail.data.image_items import evenly_spaced_indices, is_file_or_flat_folder, sample_evenly
    from vitrail.predict.image_list import collect_images
    from vitrail.train.evaluation_data import get_validation_images, open_evaluation_data

    if data is None and loaded.run is None:
        return [], ["no --data, so no images"]
    if data is not None and is_file_or_flat_folder(Path(data)):
        items, _ = collect_images([data])
        return [items[n] for n in evenly_spaced_indices(len(items), count)], []
    found = open_evaluation_data(data, None, loaded.run)
    chosen, labels = sample_evenly(get_validation_images(found), count), loaded.labels
    if labels:
        with suppress(DataError):  # other classes than the model's keep their own names
            columns, _ = map_classes(labels, len(labels), found.classes)
            meant = dict(zip(found.classes, columns, strict=True))
            chosen = [replace(each, label=labels[meant[each.label or ""]]) for each in chosen]
    return chosen, found.notes
