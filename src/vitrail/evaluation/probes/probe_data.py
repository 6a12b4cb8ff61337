"""The images of a probe: a training part, which is the bank, and a part that the probes are measured on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.text import abbreviate_list, format_count
from vitrail.data.images.datasets import DatasetSplits, ImageDataset, TorchDataset, open_data, take_images_by_index
from vitrail.evaluation.evaluation_data import find_default_data, get_validation_images, is_same_data_path
from vitrail.loaded_model import LoadedModel

EXAMPLES_OF_SEVERAL = 1000  # training images of each data set, if there are several (VTAB-1k)
DEFAULT_NEIGHBOURS = (10, 20, 100, 200)
DEFAULT_SHOTS = (1, 5, 10, 25)
SUBSET_SEED = 0
DEFAULT_VAL_SHARE = 0.2

GivenData = str | Path | DatasetSplits | TorchDataset


@dataclass(frozen=True, kw_only=True)
class ProbeData:
    """Labelled images, and the settings of the probes that fit them."""

    name: str
    classes: tuple[str, ...]
    bank: ImageDataset
    bank_labels: NDArray[np.int64]
    queries: ImageDataset
    query_labels: NDArray[np.int64]
    neighbours: tuple[int, ...]
    shots: tuple[int, ...]
    notes: tuple[str, ...]


def open_probe_data(
    given: Sequence[GivenData],
    models: Sequence[LoadedModel],
    *,
    neighbours: Sequence[int] | None,
    shots: Sequence[int] | None,
    examples: int | None,
    val_share: float,
) -> list[ProbeData]:
    """Open every data set and check that the probes can be measured on it, before any image is read."""
    if not given:
        usual = next(filter(None, map(find_default_data, models)), None)
        if usual is None:
            raise ConfigError("no `data`; expected fashion, or a folder of images: CLASS/*.jpg or train/ and val/")
        given = [usual]
    if examples is None and len(given) > 1:
        examples = EXAMPLES_OF_SEVERAL
    opened = [open_splits(each, models, val_share) for each in given]
    return [prepare_data(each, neighbours, shots, examples) for each in opened]


def open_splits(given: GivenData, models: Sequence[LoadedModel], val_share: float) -> DatasetSplits:
    """The data of a run is split as in its training; other data without a validation part by `val_share` and seed 0."""
    runs = [(each.source, each.run) for each in models if each.run is not None]
    own = [
        (name, run) for name, run in runs if isinstance(given, str | Path) and is_same_data_path(run.data, str(given))
    ]
    if not own:
        return open_data(given, val_share=val_share)
    seed, share = own[0][1].seed, own[0][1].val_share
    splits = open_data(given, seed=seed, val_share=share)
    if val_share not in (share, DEFAULT_VAL_SHARE):
        note = f"{splits.name}: split as in the training of {own[0][0]}, so `val_share` {val_share:g} is not used"
        splits = replace(splits, notes=(*splits.notes, note))
    others = [name for name, run in own if (run.seed, run.val_share) != (seed, share)]
    if others and open_data(given, val_share=1.0).train is None:  # no validation part that all runs held out
        note = f"{', '.join(others)}: held out other images, and was trained on some of these"
        return replace(splits, notes=(*splits.notes, note))
    return splits


def prepare_data(
    splits: DatasetSplits, neighbours: Sequence[int] | None, shots: Sequence[int] | None, examples: int | None
) -> ProbeData:
    if len(splits.classes) < 2:
        found = f"one class, {splits.classes[0]}" if splits.classes else "no classes"
        raise DataError(f"{splits.name} has {found}; a probe needs labels of at least two: expected CLASS/*.jpg")
    if splits.train is None or not len(splits.train):
        raise DataError(f"{splits.name} has no training images; expected some, for instance in train/CLASS/")
    bank, queries, notes = splits.train, get_validation_images(splits), list(splits.notes)
    labels = get_labels(bank)
    if examples is not None and examples < len(bank):
        chosen = np.sort(np.random.default_rng(SUBSET_SEED).permutation(len(bank))[:examples])
        notes.append(f"{splits.name}: {examples:,} of {len(bank):,} training images, by seed {SUBSET_SEED}")
        bank, labels = take_images_by_index(bank, chosen), labels[chosen]
    counts, new_notes = choose_neighbours(splits.name, len(bank), neighbours)
    fitting_shots, shot_notes = choose_shots(splits, labels, shots)
    return ProbeData(
        name=splits.name,
        classes=splits.classes,
        bank=bank,
        bank_labels=labels,
        queries=queries,
        query_labels=get_labels(queries),
        neighbours=counts,
        shots=fitting_shots,
        notes=(*notes, *new_notes, *shot_notes),
    )


def get_labels(dataset: ImageDataset) -> NDArray[np.int64]:
    return np.fromiter((dataset.label(index) for index in range(len(dataset))), np.int64, len(dataset))


def choose_neighbours(name: str, bank: int, given: Sequence[int] | None) -> tuple[tuple[int, ...], list[str]]:
    """The given numbers of neighbours, which must fit, or those of the usual ones that do."""
    if given is not None:
        if given and max(given) > bank:
            raise ConfigError(
                f"`knn` {max(given)} for {name}, which has {format_count(bank, 'training image')}; use {bank} or less"
            )
        return tuple(given), []
    fitting = tuple(count for count in DEFAULT_NEIGHBOURS if count <= bank) or (bank,)
    if len(fitting) == len(DEFAULT_NEIGHBOURS):
        return fitting, []
    used = ", ".join(map(str, fitting))
    return fitting, [f"{name}: {format_count(bank, 'training image')}, so k-NN uses k {used} only"]


def choose_shots(
    splits: DatasetSplits, labels: NDArray[np.int64], given: Sequence[int] | None
) -> tuple[tuple[int, ...], list[str]]:
    """The given numbers of shots, which every class must have, or those of the usual ones that do."""
    per_class = np.bincount(labels, minlength=len(splits.classes))
    smallest, wanted = int(per_class.argmin()), DEFAULT_SHOTS if given is None else tuple(given)
    fitting = tuple(count for count in wanted if count <= per_class[smallest])
    if len(fitting) == len(wanted):
        return fitting, []
    missing = [count for count in wanted if count not in fitting]
    short = [f"{splits.classes[n]} has {per_class[n]}" for n in np.flatnonzero(per_class < max(missing))]
    if given is not None:
        raise ConfigError(
            f"`shots` {max(missing)} for {splits.name}, but {abbreviate_list(short, 3)} training images; expected at "
            f"least {max(missing)} of each class: use {per_class[smallest]} or less, or more images"
        )
    left_out = ", ".join(map(str, missing))
    return fitting, [f"{splits.name}: {abbreviate_list(short, 3)} training images, so shots {left_out} are left out"]
