"""One pass over labeled images by an engine: a batch is decoded while another is computed."""

from collections.abc import Callable, Iterator
from threading import Semaphore
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.loader import deferred_evaluation_batches, evaluation_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.predict.pipeline import Engine, map_in_order

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
