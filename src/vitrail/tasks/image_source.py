"""Images for training and validation, with the augmentation and preprocessing of a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.base.errors import DataError
from vitrail.base.text import format_count
from vitrail.data.batch import Batch
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.views import View
from vitrail.data.images.datasets import CachedDataset, DatasetSplits, DatasetSubset, ImageDataset
from vitrail.data.images.loader import BatchDataset, ShuffledSampler, evaluation_batches, training_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Batches of images, each a function of the seed and the step."""

    data: DatasetSplits
    preprocessing: Preprocessing
    augmentation: Augmentation
    batch: int
    seed: int = 0
    transform: Callable[[Any], Any] | None = None  # external code that replaces the augmentation
    views: Mapping[str, View] | None = None  # by the task; None: `images`, one view of each

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def notes(self) -> tuple[str, ...]:
        return self.data.notes

    @cached_property
    def train_images(self) -> ImageDataset:
        if self.data.train is None or not len(self.data.train):
            raise DataError(f"{self.data.name} has no images to train on; expected some in train/")
        return self.data.train

    @property
    def example_count(self) -> int:
        return len(self.train_images)

    @property
    def validation_count(self) -> int:
        return len(self.data.val or ())

    @property
    def in_memory(self) -> bool:
        return isinstance(self.data.train, CachedDataset | ArrayDataset)

    @cached_property
    def sampler(self) -> ShuffledSampler:
        repeats = self.augmentation.repeats
        return ShuffledSampler(image_count=self.example_count, batch=self.batch, repeats=repeats, seed=self.seed)

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def load_batches(
        self, steps: range, *, accumulate: int = 1, workers: int = 0, ranks: Ranks | None = None, pin: bool = False
    ) -> Iterator[Batch]:
        ranks = ranks or Ranks()
        return training_batches(
            self.make_batch_dataset(),
            self.sampler,
            steps,
            accumulate=accumulate,
            workers=workers,
            rank=ranks.rank,
            world=ranks.world_size,
            pin=pin,
        )

    def make_batch_dataset(self) -> BatchDataset:
        """Training images as batches; raises an error if the images cannot give the views."""
        return BatchDataset(
            dataset=self.train_images,
            augmentation=Augmentation() if self.transform else self.augmentation,
            preprocessing=self.preprocessing,
            seed=self.seed,
            replace_unreadable=True,
            transform=self.transform,
            views=self.views,
        )

    def load_validation_batches(
        self, *, batch: int, workers: int = 0, ranks: Ranks | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Every validation image once, or the first `limit`, without augmentation."""
        ranks, dataset = ranks or Ranks(), self.select_validation_images(limit)
        if dataset is None:
            return iter(())
        return evaluation_batches(
            dataset,
            self.preprocessing,
            batch=batch,
            workers=workers,
            rank=ranks.rank,
            world=ranks.world_size,
            views=self.views,
            seed=self.seed,
        )

    def select_validation_images(self, limit: int | None = None) -> ImageDataset | None:
        val = self.data.val
        return val if val is None or limit is None or limit >= len(val) else DatasetSubset(val, range(limit))

    def load_evenly_spaced_images(self, count: int) -> Iterator[Tensor]:
        """Batches of at most `count` normalized training images, evenly spaced over all of them."""
        total = self.example_count
        some = DatasetSubset(self.train_images, np.linspace(0, total - 1, min(count, total)).astype(np.int64))
        batches = evaluation_batches(some, self.preprocessing)
        return (normalize(batch["images"], self.preprocessing) for batch in batches)

    def describe(self) -> str:
        return (
            f"{self.name}: {format_count(self.example_count, 'training image')}, "
            f"{format_count(self.validation_count, 'validation image')}, "
            f"{format_count(len(self.data.classes), 'class') if self.data.classes else 'no classes'}"
        )

    def to_json(self) -> dict[str, Any]:
        data = self.data
        return {
            "name": data.name,
            "train": len(data.train or ()),
            "val": len(data.val or ()),
            "classes": list(data.classes),
        }

    def describe_model_input(self, model: Any) -> dict[str, Any]:
        """A model without a head has no labels, even if the images have classes."""
        classes = self.data.classes
        labels = classes if classes and model.config.classes == len(classes) else None
        return {"preprocessing": self.preprocessing, "labels": labels}
