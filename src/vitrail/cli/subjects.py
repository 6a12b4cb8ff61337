"""What `explain`, `look` and `report` are shown: a model to look into, and pictures to look at."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.summary import parse_fields
from vitrail.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vitrail.data.shown import Shown
    from vitrail.inspection.explain import Explainer
    from vitrail.train.opened import Opened


def open_subject(
    checkpoint: str, labels: Path | None, device: str, fields: Sequence[str] | None = None
) -> "tuple[Opened, Explainer]":
    """The model of that name, as something that can be asked; `fields` are the values of --set."""
    from vitrail.cli.convert import lines_of
    from vitrail.inspection.explain import Explainer
    from vitrail.train.distributed import Team, device_of
    from vitrail.train.opened import TIMM, open_model

    if checkpoint.startswith(TIMM):
        raise ConfigError(
            f"{checkpoint} runs on timm's code, not to be looked into; expected its weights: hf-hub:timm/…"
        )
    place = device_of(device, Team())
    opened = open_model(checkpoint, **parse_fields(fields))
    names = opened.labels if labels is None else lines_of(labels)
    return opened, Explainer(opened.model, preprocessing=opened.preprocessing, labels=names, device=place)


def pictures_for(
    opened: "Opened", data: str | None, count: int, labels: Sequence[str] | None = None
) -> "tuple[list[Shown], Sequence[str]]":
    """So many pictures of the data, and notes; without data those of the run, and without a run none.

    `labels` are the model's classes: a folder called 207 holds what the model calls by its name.
    """
    if count < 1:
        raise ConfigError(f"--images {count}; expected 1 or more")
    from vitrail.checkpoint.class_names import class_mapping
    from vitrail.data.shown import evenly, is_loose, pictures_at, places
    from vitrail.train.opened import opened_data, validation_pictures

    if data is None and opened.run is None:
        return [], ["no --data, so no pictures"]
    if data is not None and is_loose(Path(data)):
        loose = pictures_at([data])
        return [loose[n] for n in places(len(loose), count)], []
    found = opened_data(data, None, opened.run)
    chosen = evenly(validation_pictures(found), count)
    if labels:
        with suppress(DataError):  # other classes than the model's keep their own names
            columns, _ = class_mapping(labels, len(labels), found.classes)
            meant = dict(zip(found.classes, columns, strict=True))
            chosen = [replace(each, label=labels[meant[each.label or ""]]) for each in chosen]
    return chosen, found.notes
