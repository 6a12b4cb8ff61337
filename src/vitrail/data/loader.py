"""Pictures into batches. What stands in one depends on the seed and the step alone: not on workers, ranks or resuming.

B batch, C channels, H and W rows and columns of the model's input.
"""

import os
import random
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.data.array_dataset import ArrayDataset
from vitrail.data.augment.config import Augmentation
from vitrail.data.augment.image_transforms import augment_image, can_augment_as_batch, shift_and_flip_batch
from vitrail.data.datasets import DatasetSubset, ImageDataset
from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.preprocessing import Preprocessing, compute_resize_size
from vitrail.data.rng import ORDER_PURPOSE, make_view_keys, uniform_randoms
from vitrail.data.torch_dataset import TorchDatasetAdapter
from vitrail.errors import DataError
from vitrail.models.checks import pair

MAX_UNREADABLE_IN_A_ROW = 1000  # unreadable pictures, before a batch goes on without


@dataclass(frozen=True)
class BatchIndices:
    """Which pictures make a batch, and as which of their views."""

    epoch: int
    indices: NDArray[np.int64]
    replicas: NDArray[np.int64]

    def take_part(self, of: int, parts: int) -> "BatchIndices":
        """An even share, side by side, of the places: a rank's part of the batch, a micro-batch's part of a rank's."""
        share = len(self.indices) // parts
        rows = slice(of * share, (of + 1) * share)
        return replace(self, indices=self.indices[rows], replicas=self.replicas[rows])


@dataclass(frozen=True)
class Batch:
    images: Tensor  # uint8 (B, C, H, W)
    labels: Tensor  # int64 (B,)
    indices: Tensor  # int64 (B,), which pictures of the data set
    keys: NDArray[np.uint64]  # (B,), what their random choices are drawn from
    skipped: tuple[str, ...] = ()  # why pictures could not be read, one line each

    def pin_memory(self) -> "Batch":
        """Called by torch's loader, to copy faster to a GPU."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


@dataclass(frozen=True, kw_only=True)
class ShuffledSampler:
    """The shuffled order of all epochs. The last pictures of an epoch that fill no batch are left to other epochs."""

    image_count: int
    batch: int
    repeats: int = 1  # views of a picture in its batch, so that an epoch holds only each so many-th picture
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.image_count // self.batch

    def batch_at(self, step: int) -> BatchIndices:
        epoch, place = divmod(step, self.steps_per_epoch)
        apart = ceil(self.batch / self.repeats)  # of two views of one picture, so that mixing pairs it with others
        chosen = shuffle_indices(self.image_count, self.seed, epoch)[place * apart : (place + 1) * apart]
        rows = np.arange(self.batch)
        return BatchIndices(epoch, chosen[rows % apart], rows // apart)


@lru_cache(maxsize=2)
def shuffle_indices(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    drawn = uniform_randoms(make_view_keys(seed, epoch, np.arange(count), 0), 1, purpose=ORDER_PURPOSE)[:, 0]
    return np.argsort(drawn, kind="stable")


@dataclass(frozen=True, kw_only=True)
class BatchDataset(Dataset[Batch]):
    """The pictures of given places as one batch, in the form that torch's loader asks for."""

    dataset: ImageDataset
    augmentation: Augmentation
    preprocessing: Preprocessing
    seed: int = 0
    replace_unreadable: bool = False  # an unreadable picture by the next one; else it is left out
    transform: Callable[[Any], Any] | None = None  # a Pillow image to the model's input, by code of others
    model_sized_arrays: ArrayDataset | None = field(init=False, default=None)  # where nothing is to be done one by one

    def __post_init__(self) -> None:
        if can_augment_as_batch(self.augmentation) and self.transform is None:
            object.__setattr__(self, "model_sized_arrays", find_model_sized_arrays(self.dataset, self.preprocessing))

    def __getitems__(self, batch_indices: BatchIndices) -> Batch:
        drawn = make_view_keys(self.seed, batch_indices.epoch, batch_indices.indices, batch_indices.replicas)
        if self.model_sized_arrays is not None:
            pixels = (
                torch.from_numpy(self.model_sized_arrays.images[batch_indices.indices]).permute(0, 3, 1, 2).contiguous()
            )
            pixels = pixels.expand(-1, len(self.preprocessing.mean), -1, -1)
            seen = shift_and_flip_batch(pixels, self.augmentation, drawn)
            labels = torch.from_numpy(self.model_sized_arrays.labels[batch_indices.indices])
            return Batch(seen, labels, torch.from_numpy(batch_indices.indices), drawn)
        images, indices, kept, skipped = list[Tensor](), list[int](), list[int](), list[str]()
        for row, index in enumerate(batch_indices.indices.tolist()):
            found = self.load_readable_view(index, int(drawn[row]), skipped)
            if found is not None:
                images.append(found[0])
                indices.append(found[1])
                kept.append(row)
        height, width = pair(self.preprocessing.image_size)
        empty = torch.empty(0, len(self.preprocessing.mean), height, width, dtype=torch.uint8)
        return Batch(
            torch.stack(images) if images else empty,
            torch.tensor([self.dataset.label(index) for index in indices], dtype=torch.int64),
            torch.tensor(indices, dtype=torch.int64),
            drawn[kept],
            tuple(skipped),
        )

    def load_readable_view(self, index: int, key: int, skipped: list[str]) -> tuple[Tensor, int] | None:
        """The view of the picture, or of the next one that can be read; why one cannot goes to `skipped`."""
        for tried in range(min(len(self.dataset), MAX_UNREADABLE_IN_A_ROW) if self.replace_unreadable else 1):
            place = (index + tried) % len(self.dataset)
            try:
                return self.load_view(place, key), place
            except DataError as error:
                skipped.append(str(error))
        return None

    def load_view(self, place: int, key: int) -> Tensor:
        """A view of the picture; what comes as a tensor of floats is the model's input already, and stays as it is."""
        with temporary_seed(key) if self.transform or is_torch_dataset(self.dataset) else nullcontext():
            source = self.dataset.source(place)
            if self.transform is not None:
                source = self.transform(open_image(source))
        if not (isinstance(source, Tensor) and source.is_floating_point()):
            return augment_image(source, self.augmentation, self.preprocessing, key)
        expected = (len(self.preprocessing.mean), *pair(self.preprocessing.image_size))
        if source.shape != expected:
            raise DataError(f"{self.dataset.name(place)} is of shape {tuple(source.shape)}; expected {expected}")
        return source

    def __len__(self) -> int:
        return len(self.dataset)


@contextmanager
def temporary_seed(key: int) -> Generator[None]:
    """Whatever code of others draws inside is a function of the key; what is drawn after is as if it had not been."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(key % 2**63)
        random.seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def find_model_sized_arrays(dataset: ImageDataset, preprocessing: Preprocessing) -> ArrayDataset | None:
    """Arrays of the model's size already, which evaluation would neither resize nor crop."""
    if isinstance(dataset, DatasetSubset) and isinstance(dataset.dataset, ArrayDataset):
        whole, chosen = dataset.dataset, dataset.indices
        dataset = ArrayDataset(whole.images[chosen], whole.labels[chosen], whole.classes)
    if not isinstance(dataset, ArrayDataset):
        return None
    _, rows, columns, channels = dataset.images.shape
    untouched = compute_resize_size((rows, columns), preprocessing) == (rows, columns) == pair(preprocessing.image_size)
    return dataset if untouched and channels in (1, len(preprocessing.mean)) else None


def is_torch_dataset(dataset: ImageDataset) -> bool:
    return isinstance(dataset.dataset if isinstance(dataset, DatasetSubset) else dataset, TorchDatasetAdapter)


def training_batches(
    batches: BatchDataset,
    sampler: ShuffledSampler,
    steps: range,
    *,
    accumulate: int = 1,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    pin: bool = False,
) -> Iterator[Batch]:
    """This rank's share of the batches of these steps; each step gives `accumulate` micro-batches, in order."""
    shares = (sampler.batch_at(step).take_part(rank, world) for step in steps)
    return iterate_batches(
        batches, (share.take_part(each, accumulate) for share in shares for each in range(accumulate)), workers, pin
    )


def evaluation_batches(
    dataset: ImageDataset,
    preprocessing: Preprocessing,
    *,
    batch: int = 64,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """Every picture once over all ranks, as the model is meant to see it; what cannot be read is in `skipped`."""
    indices = np.arange(rank, len(dataset), world)
    starts = range(0, len(indices), batch)
    places = (indices[start : start + batch] for start in starts)
    views = BatchDataset(dataset=dataset, augmentation=Augmentation(), preprocessing=preprocessing)
    return iterate_batches(views, (BatchIndices(0, each, np.zeros_like(each)) for each in places), workers)


def iterate_batches(
    batches: BatchDataset, batch_indices: Iterator[BatchIndices], workers: int, pin: bool = False
) -> Iterator[Batch]:
    if not workers:
        return map(batches.__getitems__, batch_indices)
    sampler: Any = batch_indices  # torch asks for lists of numbers, and hands over whatever it is given
    collate: Any = identity_collate  # as it does with the batch that `__getitems__` made of them
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than there are cores: as was asked for
        loader = DataLoader(
            batches,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin,
            prefetch_factor=4,
            worker_init_fn=leave_process_group,
            generator=torch.Generator(),  # of its own, or starting it would take a draw from dropout's
        )
        return iter(loader)


def is_worker_death(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, means that a data worker was killed.

    torch raises it from a signal handler, so at any point of the main thread, not only where a batch is requested.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def report_dead_workers(workers: int, describe_loss: Callable[[], str] = str) -> Generator[None]:
    """Turn torch's traceback for a killed data worker into a one-line error that ends in what was lost."""
    try:
        yield
    except Exception as error:
        if not is_worker_death(error):
            raise
        raise DataError(
            f"one of {workers} data workers was killed, perhaps because memory ran out; "
            f"use fewer `workers`, or more memory{describe_loss()}",
            fields=("workers", "resume"),
        ) from None


def identity_collate(batch: Batch) -> Batch:
    return batch


def leave_process_group(_: int) -> None:
    """Ctrl-C and torchrun signal a whole group of processes; a worker leaves it, so that the first can save."""
    os.setpgrp()
