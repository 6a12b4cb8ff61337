"""Batches of images. A batch depends only on the seed and the step, not on workers, ranks or resuming.

B batch, C channels, H and W rows and columns of the model's input.
"""

import os
import random
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.batch import Batch
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import augment_image, can_augment_as_batch, shift_and_flip_batch
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.views import View, ViewMaker, are_default_views, check_views
from vitrail.data.images.datasets import DatasetSubset, ImageDataset, TorchDatasetAdapter
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, compute_resize_size
from vitrail.data.rng import ORDER_PURPOSE, make_view_keys, uniform_randoms
from vitrail.models.base.checks import pair

T = TypeVar("T")
MAX_UNREADABLE_IN_A_ROW = 1000  # then a batch is one image smaller


@dataclass(frozen=True)
class BatchIndices:
    """The images of a batch, and which view of each."""

    epoch: int
    indices: NDArray[np.int64]
    replicas: NDArray[np.int64]

    def take_part(self, part: int, parts: int) -> "BatchIndices":
        """One of `parts` equal contiguous parts: a rank's part of the batch, or a micro-batch of a rank."""
        size = len(self.indices) // parts
        rows = slice(part * size, (part + 1) * size)
        return replace(self, indices=self.indices[rows], replicas=self.replicas[rows])


@dataclass(frozen=True, kw_only=True)
class ShuffledSampler:
    """The shuffled order of every epoch. Images left over after the last full batch of an epoch are skipped."""

    image_count: int
    batch: int
    repeats: int = 1  # views of an image per batch; an epoch then covers only 1/repeats of the images
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return self.image_count // self.batch

    def batch_at(self, step: int) -> BatchIndices:
        epoch, number = divmod(step, self.steps_per_epoch)
        images = ceil(self.batch / self.repeats)  # also the distance of an image's views: Mixup pairs neighbors
        chosen = shuffle_indices(self.image_count, self.seed, epoch)[number * images : (number + 1) * images]
        rows = np.arange(self.batch)
        return BatchIndices(epoch, chosen[rows % images], rows // images)


@lru_cache(maxsize=2)
def shuffle_indices(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    randoms = uniform_randoms(make_view_keys(seed, epoch, np.arange(count), 0), 1, purpose=ORDER_PURPOSE)[:, 0]
    return np.argsort(randoms, kind="stable")


@dataclass(frozen=True, kw_only=True)
class BatchDataset(Dataset[Batch]):
    """Makes a batch from indices, in the form that torch's DataLoader expects.

    Without views, or with {"images": View()}, `images` is uint8 (B, C, H, W) and its keys are (B,). With other views
    each name is uint8 (count, B, C, h, w), its keys (count, B), and an image is decoded once for all of them.
    """

    dataset: ImageDataset
    augmentation: Augmentation
    preprocessing: Preprocessing
    seed: int = 0
    replace_unreadable: bool = False  # use the next readable image instead; otherwise the image is left out
    transform: Callable[[Any], Any] | None = None  # user code: Pillow image → model input
    views: Mapping[str, View] | None = None  # by name
    view_maker: ViewMaker | None = field(init=False, default=None)  # None without views
    model_sized_arrays: ArrayDataset | None = field(init=False, default=None)  # set if a batch can be augmented at once

    def __post_init__(self) -> None:
        if self.views is not None and not are_default_views(self.views):
            self.check_views(self.views)
            object.__setattr__(self, "view_maker", ViewMaker(self.views, self.augmentation, self.preprocessing))
        elif can_augment_as_batch(self.augmentation) and self.transform is None:
            object.__setattr__(self, "model_sized_arrays", find_model_sized_arrays(self.dataset, self.preprocessing))

    def check_views(self, views: Mapping[str, View]) -> None:
        """Raise an error before the first batch if the data cannot give these views."""
        if self.transform is not None:
            raise ConfigError(
                "`transform` makes one view of an image, but the task requests its own views; leave `transform` out"
            )
        check_views(views, self.dataset)
        with suppress(DataError):  # an unreadable image is replaced or left out later
            if len(self.dataset) and is_float_tensor(self.read_source(0, key=0)):
                raise ConfigError(
                    f"{self.dataset.name(0)} is a tensor of floats, but views are cropped from pixels; expected images "
                    "before ToTensor and Normalize: remove the transform of the data set"
                )

    def __getitems__(self, batch_indices: BatchIndices) -> Batch:
        if self.view_maker is not None:
            return self.make_view_batch(self.view_maker, batch_indices)
        keys = make_view_keys(self.seed, batch_indices.epoch, batch_indices.indices, batch_indices.replicas)
        if (arrays := self.model_sized_arrays) is not None:
            pixels = torch.from_numpy(arrays.images[batch_indices.indices]).permute(0, 3, 1, 2).contiguous()
            pixels = pixels.expand(-1, len(self.preprocessing.mean), -1, -1)
            views = shift_and_flip_batch(pixels, self.augmentation, keys)
            labels = torch.from_numpy(arrays.labels[batch_indices.indices])
            return make_image_batch(views, labels, torch.from_numpy(batch_indices.indices), keys)
        views, indices, loaded_rows, skipped = self.load_readable(
            batch_indices, lambda index, row: self.load_view(index, int(keys[row]))
        )
        height, width = pair(self.preprocessing.image_size)
        empty = torch.empty(0, len(self.preprocessing.mean), height, width, dtype=torch.uint8)
        return make_image_batch(
            torch.stack(views) if views else empty,
            self.collect_labels(indices),
            torch.tensor(indices, dtype=torch.int64),
            keys[loaded_rows],
            skipped,
        )

    def make_view_batch(self, maker: ViewMaker, batch_indices: BatchIndices) -> Batch:
        keys = maker.make_keys(self.seed, batch_indices.epoch, batch_indices.indices, batch_indices.replicas)

        def crop_image(index: int, row: int) -> list[Tensor]:
            source = self.read_source(index, int(keys[0, row]))
            if is_float_tensor(source):
                raise DataError(f"{self.dataset.name(index)} is a tensor of floats; expected pixels")
            return maker.crop_image(source, keys[:, row])

        crops, indices, loaded_rows, skipped = self.load_readable(batch_indices, crop_image)
        tensors, keys_by_name = maker.join(crops, keys[:, loaded_rows])
        tensors["labels"] = self.collect_labels(indices)
        tensors["indices"] = torch.tensor(indices, dtype=torch.int64)
        return Batch(tensors, keys_by_name, len(indices), skipped)

    def load_readable(
        self, batch_indices: BatchIndices, load: Callable[[int, int], T]
    ) -> tuple[list[T], list[int], list[int], tuple[str, ...]]:
        """What `load` makes of (index, row of the batch), the indices, the rows, and why other images failed.

        If an image is unreadable, the next readable one takes its place, or its row is left out.
        """
        loaded, indices, rows, skipped = list[T](), list[int](), list[int](), list[str]()
        tries = min(len(self.dataset), MAX_UNREADABLE_IN_A_ROW) if self.replace_unreadable else 1
        for row, index in enumerate(batch_indices.indices.tolist()):
            for candidate in range(index, index + tries):
                try:
                    loaded.append(load(candidate % len(self.dataset), row))
                except DataError as error:
                    skipped.append(str(error))
                else:
                    indices.append(candidate % len(self.dataset))
                    rows.append(row)
                    break
        return loaded, indices, rows, tuple(skipped)

    def collect_labels(self, indices: list[int]) -> Tensor:
        return torch.tensor([self.dataset.label(index) for index in indices], dtype=torch.int64)

    def read_source(self, index: int, key: int) -> Any:
        """The image before decoding; the code of a torch data set runs with its random generators seeded by the key."""
        with temporary_seed(key) if is_torch_dataset(self.dataset) else nullcontext():
            return self.dataset.source(index)

    def load_view(self, index: int, key: int) -> Tensor:
        """A view of the image; a tensor of floats is taken as model input, unchanged."""
        with temporary_seed(key) if self.transform or is_torch_dataset(self.dataset) else nullcontext():
            source = self.dataset.source(index)
            if self.transform is not None:
                source = self.transform(open_image(source))
        if not is_float_tensor(source):
            return augment_image(source, self.augmentation, self.preprocessing, key)
        expected = (len(self.preprocessing.mean), *pair(self.preprocessing.image_size))
        if source.shape != expected:
            raise DataError(f"{self.dataset.name(index)} has shape {tuple(source.shape)}; expected {expected}")
        return source

    def __len__(self) -> int:
        return len(self.dataset)


def make_image_batch(
    images: Tensor, labels: Tensor, indices: Tensor, keys: NDArray[np.uint64], skipped: tuple[str, ...] = ()
) -> Batch:
    """A batch of `images`, uint8 (B, C, H, W), `labels`, int64 (B,), and `indices` in the data set, int64 (B,)."""
    tensors = {"images": images, "labels": labels, "indices": indices}
    return Batch(tensors, {"images": keys}, len(labels), skipped)


@contextmanager
def temporary_seed(key: int) -> Generator[None]:
    """Seed all random generators from the key for user code inside, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(key % 2**63)
        random.seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def find_model_sized_arrays(dataset: ImageDataset, preprocessing: Preprocessing) -> ArrayDataset | None:
    """The arrays, if they have the model's size, so that evaluation neither resizes nor crops them."""
    if isinstance(dataset, DatasetSubset) and isinstance(dataset.dataset, ArrayDataset):
        arrays, indices = dataset.dataset, dataset.indices
        dataset = ArrayDataset(arrays.images[indices], arrays.labels[indices], arrays.classes)
    if not isinstance(dataset, ArrayDataset):
        return None
    _, rows, columns, channels = dataset.images.shape
    same_size = compute_resize_size((rows, columns), preprocessing) == (rows, columns) == pair(preprocessing.image_size)
    return dataset if same_size and channels in (1, len(preprocessing.mean)) else None


def is_float_tensor(source: Any) -> bool:
    return isinstance(source, Tensor) and source.is_floating_point()


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
    """This rank's part of the batch of every step, as `accumulate` micro-batches per step."""
    rank_parts = (sampler.batch_at(step).take_part(rank, world) for step in steps)
    micro_batches = (part.take_part(each, accumulate) for part in rank_parts for each in range(accumulate))
    return load_batches_by_indices(batches, micro_batches, workers, pin)


def evaluation_batches(
    dataset: ImageDataset,
    preprocessing: Preprocessing,
    *,
    batch: int = 64,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    views: Mapping[str, View] | None = None,
    seed: int = 0,
) -> Iterator[Batch]:
    """Every image once over all ranks, without augmentation; unreadable images are listed in `skipped`.

    With `views` each image has the same random views in every evaluation.
    """
    batches = BatchDataset(
        dataset=dataset, augmentation=Augmentation(), preprocessing=preprocessing, views=views, seed=seed
    )
    return load_batches_by_indices(batches, list_evaluation_indices(len(dataset), batch, rank, world), workers)


def deferred_evaluation_batches(
    dataset: ImageDataset,
    preprocessing: Preprocessing,
    *,
    batch: int = 64,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Callable[[], Batch]]:
    """The same batches as functions that load them, in any thread; what only one thread may load is loaded already."""
    if workers or is_torch_dataset(dataset):  # whose code draws from the random generators of the process
        loaded = evaluation_batches(dataset, preprocessing, batch=batch, workers=workers, rank=rank, world=world)
        return (partial(identity_collate, each) for each in loaded)
    batches = BatchDataset(dataset=dataset, augmentation=Augmentation(), preprocessing=preprocessing)
    indices = list_evaluation_indices(len(dataset), batch, rank, world)
    return (partial(batches.__getitems__, each) for each in indices)


def list_evaluation_indices(count: int, batch: int, rank: int, world: int) -> Iterator[BatchIndices]:
    indices = np.arange(rank, count, world)
    chunks = (indices[start : start + batch] for start in range(0, len(indices), batch))
    return (BatchIndices(0, each, np.zeros_like(each)) for each in chunks)


def load_batches_by_indices(
    batches: BatchDataset, batch_indices: Iterator[BatchIndices], workers: int, pin: bool = False
) -> Iterator[Batch]:
    if not workers:
        return map(batches.__getitems__, batch_indices)
    sampler: Any = batch_indices  # typed as lists of integers, but torch passes on any object
    collate: Any = identity_collate  # `__getitems__` returns a complete batch
    with warnings.catch_warnings():
        # more workers than cores are the user's choice
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            batches,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin,
            prefetch_factor=4,
            worker_init_fn=leave_unix_process_group,
            generator=torch.Generator(),  # its own: starting would otherwise advance the generator of dropout
        )
        return iter(loader)


def identity_collate(batch: Batch) -> Batch:
    return batch


def leave_unix_process_group(_: int) -> None:
    """Leave the group of processes that Ctrl-C and torchrun signal, so that workers live until the run is saved."""
    os.setpgrp()
