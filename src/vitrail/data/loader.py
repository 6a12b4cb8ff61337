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

from vitrail.data.arrays import Arrays
from vitrail.data.augmentation import Augmentation
from vitrail.data.datasets import Pictures, Subset
from vitrail.data.draws import ORDER, keys, uniforms
from vitrail.data.foreign import Foreign
from vitrail.data.images import open_image
from vitrail.data.preprocessing import Preprocessing, resized_to
from vitrail.data.views import batch_views, is_batched, view
from vitrail.errors import DataError
from vitrail.models.checks import pair

MOST_IN_A_ROW = 1000  # unreadable pictures, before a batch goes on without


@dataclass(frozen=True)
class Places:
    """Which pictures make a batch, and as which of their views."""

    epoch: int
    indices: NDArray[np.int64]
    replicas: NDArray[np.int64]

    def part(self, of: int, parts: int) -> "Places":
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
class Order:
    """The shuffled order of all epochs. The last pictures of an epoch that fill no batch are left to other epochs."""

    pictures: int
    batch: int
    repeats: int = 1  # views of a picture in its batch, so that an epoch holds only each so many-th picture
    seed: int = 0

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return self.pictures // self.batch

    def at(self, step: int) -> Places:
        epoch, place = divmod(step, self.steps)
        apart = ceil(self.batch / self.repeats)  # of two views of one picture, so that mixing pairs it with others
        chosen = shuffled(self.pictures, self.seed, epoch)[place * apart : (place + 1) * apart]
        rows = np.arange(self.batch)
        return Places(epoch, chosen[rows % apart], rows // apart)


@lru_cache(maxsize=2)
def shuffled(pictures: int, seed: int, epoch: int) -> NDArray[np.int64]:
    drawn = uniforms(keys(seed, epoch, np.arange(pictures), 0), 1, purpose=ORDER)[:, 0]
    return np.argsort(drawn, kind="stable")


@dataclass(frozen=True, kw_only=True)
class Views(Dataset[Batch]):
    """The pictures of given places as one batch, in the form that torch's loader asks for."""

    pictures: Pictures
    augmentation: Augmentation
    preprocessing: Preprocessing
    seed: int = 0
    replacing: bool = False  # an unreadable picture by the next one; else it is left out
    transform: Callable[[Any], Any] | None = None  # a Pillow image to the model's input, by code of others
    ready: Arrays | None = field(init=False, default=None)  # where nothing is to be done one by one

    def __post_init__(self) -> None:
        if is_batched(self.augmentation) and self.transform is None:
            object.__setattr__(self, "ready", fitting(self.pictures, self.preprocessing))

    def __getitems__(self, places: Places) -> Batch:
        drawn = keys(self.seed, places.epoch, places.indices, places.replicas)
        if self.ready is not None:
            pixels = torch.from_numpy(self.ready.images[places.indices]).permute(0, 3, 1, 2).contiguous()
            pixels = pixels.expand(-1, len(self.preprocessing.mean), -1, -1)
            seen = batch_views(pixels, self.augmentation, drawn)
            labels = torch.from_numpy(self.ready.labels[places.indices])
            return Batch(seen, labels, torch.from_numpy(places.indices), drawn)
        images, indices, kept, skipped = list[Tensor](), list[int](), list[int](), list[str]()
        for row, index in enumerate(places.indices.tolist()):
            found = self.readable(index, int(drawn[row]), skipped)
            if found is not None:
                images.append(found[0])
                indices.append(found[1])
                kept.append(row)
        height, width = pair(self.preprocessing.image_size)
        empty = torch.empty(0, len(self.preprocessing.mean), height, width, dtype=torch.uint8)
        return Batch(
            torch.stack(images) if images else empty,
            torch.tensor([self.pictures.label(index) for index in indices], dtype=torch.int64),
            torch.tensor(indices, dtype=torch.int64),
            drawn[kept],
            tuple(skipped),
        )

    def readable(self, index: int, key: int, skipped: list[str]) -> tuple[Tensor, int] | None:
        """The view of the picture, or of the next one that can be read; why one cannot goes to `skipped`."""
        for tried in range(min(len(self.pictures), MOST_IN_A_ROW) if self.replacing else 1):
            place = (index + tried) % len(self.pictures)
            try:
                return self.seen(place, key), place
            except DataError as error:
                skipped.append(str(error))
        return None

    def seen(self, place: int, key: int) -> Tensor:
        """A view of the picture; what comes as a tensor of floats is the model's input already, and stays as it is."""
        with seeded(key) if self.transform or is_foreign(self.pictures) else nullcontext():
            source = self.pictures.source(place)
            if self.transform is not None:
                source = self.transform(open_image(source))
        if not (isinstance(source, Tensor) and source.is_floating_point()):
            return view(source, self.augmentation, self.preprocessing, key)
        expected = (len(self.preprocessing.mean), *pair(self.preprocessing.image_size))
        if source.shape != expected:
            raise DataError(f"{self.pictures.name(place)} is of shape {tuple(source.shape)}; expected {expected}")
        return source

    def __len__(self) -> int:
        return len(self.pictures)


@contextmanager
def seeded(key: int) -> Generator[None]:
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


def fitting(pictures: Pictures, preprocessing: Preprocessing) -> Arrays | None:
    """Arrays of the model's size already, which evaluation would neither resize nor crop."""
    if isinstance(pictures, Subset) and isinstance(pictures.pictures, Arrays):
        whole, chosen = pictures.pictures, pictures.indices
        pictures = Arrays(whole.images[chosen], whole.labels[chosen], whole.classes)
    if not isinstance(pictures, Arrays):
        return None
    _, rows, columns, channels = pictures.images.shape
    untouched = resized_to((rows, columns), preprocessing) == (rows, columns) == pair(preprocessing.image_size)
    return pictures if untouched and channels in (1, len(preprocessing.mean)) else None


def is_foreign(pictures: Pictures) -> bool:
    return isinstance(pictures.pictures if isinstance(pictures, Subset) else pictures, Foreign)


def training_batches(
    views: Views,
    order: Order,
    steps: range,
    *,
    accumulate: int = 1,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    pin: bool = False,
) -> Iterator[Batch]:
    """This rank's share of the batches of these steps; each step gives `accumulate` micro-batches, in order."""
    shares = (order.at(step).part(rank, world) for step in steps)
    return loaded(views, (share.part(each, accumulate) for share in shares for each in range(accumulate)), workers, pin)


def evaluation_batches(
    pictures: Pictures,
    preprocessing: Preprocessing,
    *,
    batch: int = 64,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """Every picture once over all ranks, as the model is meant to see it; what cannot be read is in `skipped`."""
    indices = np.arange(rank, len(pictures), world)
    starts = range(0, len(indices), batch)
    places = (indices[start : start + batch] for start in starts)
    views = Views(pictures=pictures, augmentation=Augmentation(), preprocessing=preprocessing)
    return loaded(views, (Places(0, each, np.zeros_like(each)) for each in places), workers)


def loaded(views: Views, places: Iterator[Places], workers: int, pin: bool = False) -> Iterator[Batch]:
    if not workers:
        return map(views.__getitems__, places)
    sampler: Any = places  # torch asks for lists of numbers, and hands over whatever it is given
    collate: Any = as_it_is  # as it does with the batch that `__getitems__` made of them
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than there are cores: as was asked for
        loader = DataLoader(
            views,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin,
            prefetch_factor=4,
            worker_init_fn=deaf,
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
def report_dead_workers(workers: int) -> Generator[None]:
    """Turns torch's traceback for a killed data worker into a one-line error."""
    try:
        yield
    except Exception as error:
        if not is_worker_death(error):
            raise
        raise DataError(
            f"one of {workers} data workers was killed, perhaps because memory ran out; "
            "use fewer --workers, or more memory"
        ) from None


def as_it_is(batch: Batch) -> Batch:
    return batch


def deaf(_: int) -> None:
    """Ctrl-C and torchrun signal a whole group of processes; a worker leaves it, so that the first can save."""
    os.setpgrp()
