"""Probe the features of models: k-NN, few-shot least squares and a linear classifier, next to two baselines.

The training part of a data set is the bank; the probes are measured on the other part.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitrail.base.errors import ConfigError, DataError, OutputError
from vitrail.base.progress import Progress, track_progress
from vitrail.base.text import abbreviate_list, format_count
from vitrail.checkpoint.run_files import try_read_plan
from vitrail.data.images.datasets import DatasetSplits, ImageDataset, TorchDataset, open_data, take_images_by_index
from vitrail.data.validation_split import check_val_share
from vitrail.distributed import Ranks, resolve_device
from vitrail.evaluation.evaluation_data import find_default_data, get_validation_images, is_same_data_path
from vitrail.evaluation.probes.feature_measures import (
    MAX_RANK_FEATURES,
    classify_by_neighbors,
    effective_rank,
    feature_spread,
    fit_linear_probe,
    measure_few_shot,
    read_rows,
)
from vitrail.evaluation.probes.feature_sources import (
    MAX_PIXEL_SIDE,
    FeatureSource,
    find_pixel_factor,
    make_model_source,
    make_pixel_source,
    make_untrained_source,
)
from vitrail.evaluation.probes.probe_results import ProbeResult, ProbeRow, ProbeTable
from vitrail.evaluation.probes.stored_features import (
    DatasetFeatures,
    FeatureStore,
    get_feature_cache_folder,
    store_features,
)
from vitrail.models.base.checks import check_count, pair
from vitrail.models.catalog.preset_costs import shorten_model_names
from vitrail.opening import Opened, open_model
from vitrail.predict.engine_selection import EngineOptions

MAE = "mae"  # the task of a run and the layout of a checkpoint
GivenModel = str | Path | nn.Module | Opened
EXAMPLES_OF_SEVERAL = 1000  # training images of each data set, if there are several (VTAB-1k)
DEFAULT_NEIGHBORS = (10, 20, 100, 200)
DEFAULT_SHOTS = (1, 5, 10, 25)
SUBSET_SEED = 0
DEFAULT_VAL_SHARE = 0.2

GivenData = str | Path | DatasetSplits | TorchDataset


def probe(
    models: GivenModel | Sequence[GivenModel],
    data: GivenData | Sequence[GivenData] | None = None,
    *,
    knn: Sequence[int] | None = None,
    shots: Sequence[int] | None = None,
    seeds: int = 3,
    linear: bool = True,
    examples: int | None = None,
    layer: str | int = "last",
    pixels: bool = True,
    untrained: bool = True,
    val_share: float = DEFAULT_VAL_SHARE,
    batch: int = 64,
    workers: int = 0,
    device: str | torch.device | None = None,
    strict: bool = False,
    progress: Progress = None,
    options: EngineOptions | None = None,
) -> ProbeResult:
    """Measure how well the frozen features of models classify, next to raw pixels and the untrained model.

    A model is a name as for `open_model`, a module or a Opened. The training part of `data` is the bank, the
    validation part is classified; a run's data is split as in training, other data by `val_share`. `knn` and
    `shots` are by default 10, 20, 100, 200 and 1, 5, 10, 25, those for which there are enough images. With several data
    sets, 1,000 training `examples` of each are used (VTAB-1k), and the last table is the mean. `layer` is a block, by
    number or "middle"; by default the features are what the head reads. Features are cached on disk. With `options`,
    those that are not are computed by the fastest engine that they allow.

    >>> found = vitrail.probe("vit_fashion", "fashion", shots=[10], examples=500, linear=False)  # print it
    >>> [row.name for row in found.tables[0].rows]
    ['vit_fashion', 'raw pixels', 'untrained']
    """
    start = perf_counter()
    given_models = [models] if isinstance(models, str | Path | nn.Module | Opened) else [*models]
    check_settings(given_models, knn, shots, seeds, examples, batch)
    check_val_share(val_share)
    loaded = [open_model(each, kind="image") for each in given_models]
    sources, baselines, notes = make_sources(loaded, layer, pixels=pixels, untrained=untrained)
    given_data = [] if data is None else [*data] if isinstance(data, list | tuple) else [data]
    opened = open_probe_data(given_data, loaded, neighbors=knn, shots=shots, examples=examples, val_share=val_share)
    notes += [note for each in opened for note in each.notes]
    place = resolve_device(device or "cpu", Ranks())
    with ExitStack() as stack:
        store = FeatureStore(
            cache=get_feature_cache_folder(),
            temporary=Path(stack.enter_context(TemporaryDirectory(prefix="vitrail-"))),
            batch=batch,
            workers=workers,
            device=place,
            strict=strict,
            options=None if options is None or place.type != "cpu" else options,
        )
        datasets = [part for each in opened for part in (each.bank, each.queries)]
        try:
            stored = store_features(sources, datasets, store, progress, notes)
        except OutputError as error:
            if store.cache is None:
                raise
            notes.append(f"features are not cached: {error}")
            stored = store_features(sources, datasets, replace(store, cache=None), progress, notes)
        shown = False if callable(progress) else progress
        tables, skipped = list[ProbeTable](), dict[str, None]()
        with track_progress(shown, len(opened) * len(sources), "probing") as advance:
            for number, each in enumerate(opened):
                rows, used = list[ProbeRow](), (0, 0)
                for place, source in enumerate(sources):
                    bank, queries = stored[2 * number, place], stored[2 * number + 1, place]
                    skipped.update(dict.fromkeys((*bank.unreadable.values(), *queries.unreadable.values())))
                    used = len(bank.rows), len(queries.rows)
                    rows.append(measure_row(source, baselines[place], each, bank, queries, seeds, linear))
                    advance(1)
                tables.append(
                    ProbeTable(
                        data=each.name,
                        classes=len(each.classes),
                        bank_images=used[0],
                        query_images=used[1],
                        rows=tuple(rows),
                    )
                )
    return ProbeResult(
        tables=tuple(tables),
        layer=str(layer),
        skipped=tuple(skipped),
        notes=tuple(dict.fromkeys(notes)),
        seconds=perf_counter() - start,
    )


@dataclass(frozen=True, kw_only=True)
class ProbeData:
    """Labeled images, and the settings of the probes that fit them."""

    name: str
    classes: tuple[str, ...]
    bank: ImageDataset
    bank_labels: NDArray[np.int64]
    queries: ImageDataset
    query_labels: NDArray[np.int64]
    neighbors: tuple[int, ...]
    shots: tuple[int, ...]
    notes: tuple[str, ...]


def open_probe_data(
    given: Sequence[GivenData],
    models: Sequence[Opened],
    *,
    neighbors: Sequence[int] | None,
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
    return [prepare_data(each, neighbors, shots, examples) for each in opened]


def open_splits(given: GivenData, models: Sequence[Opened], val_share: float) -> DatasetSplits:
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
    splits: DatasetSplits, neighbors: Sequence[int] | None, shots: Sequence[int] | None, examples: int | None
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
    counts, new_notes = choose_neighbors(splits.name, len(bank), neighbors)
    fitting_shots, shot_notes = choose_shots(splits, labels, shots)
    return ProbeData(
        name=splits.name,
        classes=splits.classes,
        bank=bank,
        bank_labels=labels,
        queries=queries,
        query_labels=get_labels(queries),
        neighbors=counts,
        shots=fitting_shots,
        notes=(*notes, *new_notes, *shot_notes),
    )


def get_labels(dataset: ImageDataset) -> NDArray[np.int64]:
    return np.fromiter((dataset.label(index) for index in range(len(dataset))), np.int64, len(dataset))


def choose_neighbors(name: str, bank: int, given: Sequence[int] | None) -> tuple[tuple[int, ...], list[str]]:
    """The given numbers of neighbors, which must fit, or those of the usual ones that do."""
    if given is not None:
        if given and max(given) > bank:
            raise ConfigError(
                f"`knn` {max(given)} for {name}, which has {format_count(bank, 'training image')}; use {bank} or less"
            )
        return tuple(given), []
    fitting = tuple(count for count in DEFAULT_NEIGHBORS if count <= bank) or (bank,)
    if len(fitting) == len(DEFAULT_NEIGHBORS):
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


def check_settings(
    models: Sequence[GivenModel],
    knn: Sequence[int] | None,
    shots: Sequence[int] | None,
    seeds: int,
    examples: int | None,
    batch: int,
) -> None:
    if not models:
        raise ConfigError("no models were given; expected at least one: a run folder, a checkpoint or a name")
    for name, values in (("knn", knn or ()), ("shots", shots or ()), ("seeds", [seeds]), ("batch", [batch])):
        for value in values:
            check_count(name, value)
    if examples is not None:
        check_count("examples", examples)


def make_sources(
    loaded: Sequence[Opened], layer: str | int, *, pixels: bool, untrained: bool
) -> tuple[list[FeatureSource], list[tuple[int, ...]], list[str]]:
    """The sources of all rows, the baselines of each by index, and notes; models with equal baselines share them."""
    names = shorten_model_names([each.source for each in loaded], taken=("raw pixels", "untrained"))
    notes = list[str]()
    sources = [make_model_source(each, name, layer) for each, name in zip(loaded, names, strict=True)]
    of_model: list[list[int]] = [[] for _ in loaded]
    inputs = dict.fromkeys(each.preprocessing for each in loaded) if pixels else {}
    for how in inputs:
        name = "raw pixels" if len(inputs) == 1 else f"raw pixels {'×'.join(map(str, pair(how.image_size)))}"
        if find_pixel_factor(how) > 1:
            notes.append(f"{name}: averaged to at most {MAX_PIXEL_SIDE} pixels per side")
        for mine, each in zip(of_model, loaded, strict=True):
            if each.preprocessing == how:
                mine.append(len(sources))
        sources.append(make_pixel_source(how, name))
    by_digest = dict[str, int]()
    for mine, each, name in zip(of_model, loaded, names, strict=True):
        shown = "untrained" if len(loaded) == 1 else f"untrained {name}"
        found = make_untrained_source(each, shown, layer) if untrained else None
        if found is not None:
            key = found.digest or shown
            if key not in by_digest:
                by_digest[key] = len(sources)
                sources.append(found)
            mine.append(by_digest[key])
        elif untrained:
            notes.append(f"{name}: its architecture cannot be built without its weights, so there is no untrained row")
        if is_masked_autoencoder(each):
            notes.append(
                f"{name} is a masked autoencoder, whose k-NN accuracy is low even if it is well trained (published: "
                "11% where fine-tuning reaches 81%); judge it by fine-tuning"
            )
    return sources, [tuple(each) for each in of_model] + [()] * (len(sources) - len(loaded)), notes


def is_masked_autoencoder(loaded: Opened) -> bool:
    """Whether the model was only pre-trained by MAE: by a run of this task, or from a checkpoint without a head."""
    if loaded.run is not None:
        recipe = try_read_plan(loaded.run.model.parent)[0].get("recipe")
        task = recipe.get("task") if isinstance(recipe, dict) else None
        return isinstance(task, dict) and task.get("name") == MAE
    return loaded.checkpoint is not None and loaded.checkpoint.layout == MAE and not loaded.classes


def measure_row(
    source: FeatureSource,
    baselines: tuple[int, ...],
    data: ProbeData,
    bank: DatasetFeatures,
    queries: DatasetFeatures,
    seeds: int,
    linear: bool,
) -> ProbeRow:
    """All probes of the features of one source on one data set."""
    labels, truth = bank.select_readable(data.bank_labels), queries.select_readable(data.query_labels)
    query_features = read_rows(queries.rows, 0, len(truth))
    votes = (
        classify_by_neighbors(bank.rows, torch.from_numpy(labels), query_features, counts=data.neighbors)
        if data.neighbors
        else {}
    )
    shots = measure_few_shot(
        bank.rows, labels, query_features, truth, classes=len(data.classes), shots=data.shots, seeds=range(seeds)
    )
    fitted = fit_linear_probe(bank.rows, labels, classes=len(data.classes)) if linear else None
    count = min(MAX_RANK_FEATURES, len(query_features))
    some = query_features[np.linspace(0, len(query_features) - 1, count).astype(np.int64)]
    return ProbeRow(
        name=source.name,
        kind=source.kind,
        width=bank.rows.shape[1],
        knn={count: float((predicted.numpy() == truth).mean()) for count, predicted in votes.items()},
        few_shot=shots,
        linear=None if fitted is None else float((fitted.predict(query_features) == truth).mean()),
        weight_decay=None if fitted is None else fitted.weight_decay,
        spread=float(feature_spread(some)),
        effective_rank=effective_rank(some),
        baselines=baselines,
    )
