"""Evaluate a model on a data set: every image once, with the model's own preprocessing."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, DataError, unusable_device_error
from vitrail.base.kinds import check_kind
from vitrail.base.progress import Progress, track_progress
from vitrail.data.batch import Batch, wrap_dead_worker_errors
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.datasets import DatasetSplits, ImageDataset, TorchDataset, TorchDatasetAdapter
from vitrail.data.images.loader import deferred_evaluation_batches, evaluation_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.distributed import Ranks, resolve_device
from vitrail.evaluation.metrics import Evaluation, MetricAccumulator
from vitrail.evaluation.wrong_predictions import list_wrong_predictions
from vitrail.models.base.checks import ImageConfig, check_count, find_image_config
from vitrail.models.base.contract import check_reads_images
from vitrail.opening import Opened
from vitrail.predict.pipeline import Engine, map_in_order

TORCH_BATCH = 64  # images


def evaluate(
    model: nn.Module | Opened,
    dataset: ImageDataset | TorchDataset,
    preprocessing: Preprocessing | None = None,
    *,
    batch: int = TORCH_BATCH,
    workers: int = 0,
    device: str | torch.device | None = None,
    mapping: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
    strict: bool = False,
    progress: Progress = None,
    ranks: Ranks | None = None,
    classes: int | None = None,
    on_logits: Callable[[Tensor, Tensor], object] | None = None,
    engine: Engine | None = None,
) -> Evaluation:
    """Compute accuracy, loss, calibration, confusion and the wrong predictions; the model's train/eval mode is kept.

    A model from `vitrail.open_model` has its preprocessing, class names and number of classes; for a module,
    `preprocessing` is by default no crop and pixels from −1 to 1, and `classes` that of its `config`. `mapping` has the
    model's class for each class of the data if they differ, `labels` the names of the model's classes, by default those
    of the data. Unreadable images are skipped and listed in the result, or raise an error if `strict`. By default, a
    progress bar is shown in a notebook and on a terminal; a function is called after each batch with its number of
    images. `on_logits` is called with the indices and logits of each batch. With several processes, each evaluates a
    share; all return the same result. `engine` computes the logits in place of torch: that of a `vitrail.Predictor` of
    this model. By default the model stays on its `device`; "auto" is a GPU if there is one.

    >>> loaded, data = vitrail.open_model("vit_fashion"), vitrail.open_data("fashion")
    >>> found = vitrail.evaluate(loaded, data.val)
    >>> found.images, found.top1 > 0.85
    (1000, True)
    >>> worst = found.wrong[0]  # the most confident mistake
    >>> worst.predicted != worst.label, worst.probability > worst.label_probability
    (True, True)
    """
    start, ranks = perf_counter(), ranks or Ranks()
    check_count("batch", batch)
    if isinstance(model, Opened):
        check_kind(model.kind, "image", model.source)
        preprocessing, labels = preprocessing or model.preprocessing, labels or model.labels
        model, classes = model.module, classes or model.classes
    dataset = adapt_dataset(dataset)
    preprocessing = check_preprocessing(model, preprocessing)
    tally, skipped = MetricAccumulator(classes or get_config(model).classes), list[str]()
    to_model = None if mapping is None else torch.tensor(mapping)
    with (
        wrap_dead_worker_errors(workers),
        temporary_eval_mode(model, device),
        torch.inference_mode(),
        track_progress(progress, len(dataset), "evaluating") as advance,
    ):
        place, number = next(model.parameters()).device, next(model.parameters()).dtype

        def compute_logits(each: Batch) -> Tensor | None:
            if not each.size:
                return None
            if engine is not None:
                return run_engine(engine, each)
            return model(normalize(each["images"].to(place), preprocessing).to(number))

        for each, logits in compute_batches(
            compute_logits,
            dataset,
            preprocessing,
            batch=batch,
            workers=workers,
            streams=0 if engine is None else engine.streams,
            rank=ranks.rank,
            world=ranks.world_size,
        ):
            skipped += each.skipped
            if strict and skipped:
                raise DataError(skipped[0])
            if logits is not None:
                right = each["labels"] if to_model is None else to_model[each["labels"]]
                real_labels = [dataset.real_labels(index) for index in each["indices"].tolist()]
                tally.add_batch(logits, right, real_labels, each["indices"])
                if on_logits is not None:
                    on_logits(each["indices"], logits)
            advance(each.size + len(each.skipped))
    wrong = tally.wrong
    if ranks.world_size > 1:
        share, tally = tally.get_sums(), MetricAccumulator(tally.classes)
        tally.add_sums(ranks.all_reduce_sum(share.to(place)))
        wrong = [rows for each in ranks.all_gather_objects(wrong) for rows in each]
    names = labels or name_model_classes(dataset.classes, mapping, tally.classes)
    return tally.compute_evaluation(
        names,
        wrong=list_wrong_predictions(wrong, names, dataset.name),
        skipped=skipped,
        seconds=perf_counter() - start,
    )


def adapt_dataset(dataset: Any) -> ImageDataset:
    if isinstance(dataset, ImageDataset):
        return dataset
    if isinstance(dataset, str | Path | DatasetSplits) or not isinstance(dataset, TorchDataset):
        kind = type(dataset).__name__
        raise DataError(f"the data is a {kind}; expected images with labels, such as vitrail.open_data(…).val")
    return TorchDatasetAdapter(dataset)


def check_preprocessing(model: Any, given: Preprocessing | None) -> Preprocessing:
    if not isinstance(given, Preprocessing | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"`preprocessing` is {given!r}; expected vitrail.Preprocessing(…)")
    return given or default_preprocessing(model)


def default_preprocessing(model: Any) -> Preprocessing:
    """Preprocessing for a model that specifies none: no crop, pixels from −1 to 1."""
    config = get_config(model)
    gray = (0.5,) * config.channels
    return Preprocessing(image_size=config.image_size, crop=1.0, mean=gray, std=gray)


def get_config(model: Any) -> ImageConfig:
    check_reads_images(model)
    config = find_image_config(model)
    if config is None:
        kind = type(model).__name__
        raise ConfigError(f"{kind} has no config; expected a model whose config has image_size, channels and classes")
    return config


@contextmanager
def temporary_eval_mode(model: nn.Module, device: str | torch.device | None = None) -> Generator[None]:
    """Put the model into eval mode, on the device if one is given; afterwards restore the mode of each module."""
    try:
        model.to(resolve_device(device, Ranks()) if device == "auto" else device)
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        raise unusable_device_error(str(device), error) from None
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def name_model_classes(data_classes: Sequence[str], mapping: Sequence[int] | None, classes: int) -> list[str]:
    """Names for the model's classes: those of the data, and numbers for classes that the data does not have."""
    names = [str(index) for index in range(classes)]
    for index, name in zip(mapping or range(classes), data_classes, strict=False):
        names[index] = name
    return names


Result = TypeVar("Result")


def compute_batches(
    compute: Callable[[Batch], Result],
    dataset: ImageDataset,
    preprocessing: Preprocessing,
    *,
    batch: int,
    workers: int = 0,
    streams: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[Batch, Result]]:
    """Each batch of the images and what `compute` makes of it, in order.

    With `streams`, threads call it, so many at the same time, and decode other batches meanwhile.
    """
    how: Any = {"batch": batch, "workers": workers, "rank": rank, "world": world}
    if not streams:
        for each in evaluation_batches(dataset, preprocessing, **how):
            yield each, compute(each)
        return
    gate = Semaphore(streams)

    def load_and_compute(load: Callable[[], Batch]) -> tuple[Batch, Result]:
        each = load()
        with gate:
            return each, compute(each)

    yield from map_in_order(
        load_and_compute, deferred_evaluation_batches(dataset, preprocessing, **how), max(2, streams)
    )


def run_engine(engine: Engine, batch: Batch) -> Tensor:
    """The outputs of an engine for the images of a batch."""
    images = batch["images"]
    if images.dtype != torch.uint8:
        raise ConfigError("`engine` for tensors of floats; expected pixels: images before ToTensor and Normalize")
    return torch.from_numpy(engine.run(images.permute(0, 2, 3, 1).contiguous().numpy()))
