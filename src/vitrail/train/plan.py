"""A training about to begin: model, data and recipe that fit together, and what is made of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
import torch
from torch import nn

from vitrail.data.augment.batch_transforms import normalise
from vitrail.data.augment.config import Augmentation
from vitrail.data.datasets import DatasetSplits, DatasetSubset, ImageDataset
from vitrail.data.loader import Batch, BatchDataset, ShuffledSampler, evaluation_batches, training_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError, DataError
from vitrail.train.distributed import Ranks
from vitrail.train.losses import Objective, classification_loss
from vitrail.train.recipe import Recipe
from vitrail.train.trainer import Trainer

MAX_WHITENING_IMAGES = 2000  # pictures that filters are whitened by


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked when it is made; `transform` is code of others that takes the place of the recipe's augmentation."""

    model: Any
    data: DatasetSplits
    recipe: Recipe
    preprocessing: Preprocessing
    device: torch.device
    ranks: Ranks
    workers: int = 0
    objective: Objective = classification_loss
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        config, loop, classes = self.model.config, self.recipe.loop, len(self.data.classes)
        if classes < 2:
            only = ", ".join(self.data.classes)
            raise DataError(
                f"{self.data.name} has one class ({only}); expected two at least: does its path end too early?"
            )
        if config.classes != classes:
            raise ConfigError(
                f"a model of {config.classes} classes; expected {classes}, as many as {self.data.name} has"
            )
        if getattr(config, "answer", "both") != "both":
            raise ConfigError(f"answer is {config.answer!r}; expected 'both' in training: one head alone learns alone")
        if len(self.preprocessing.mean) != config.channels:
            means = len(self.preprocessing.mean)
            raise ConfigError(f"{means} means for a model of {config.channels} channels; expected one a channel")
        if loop.early_size and not getattr(config, "dynamic", False):
            raise ConfigError(
                f"early_size is {loop.early_size}; expected 0, or a model that is dynamic: --set dynamic=true"
            )
        if loop.whiten and not hasattr(getattr(self.model, "patch_embed", None), "whiten"):
            raise ConfigError("whiten is true; expected false, or a model with filters to whiten, such as cct_cpu_32")
        check_batch_size(self.recipe, len(self.train_images), self.ranks)

    @cached_property
    def train_images(self) -> ImageDataset:
        if self.data.train is None or not len(self.data.train):
            raise DataError(f"{self.data.name} has no pictures to train on; expected some in train/")
        return self.data.train

    @cached_property
    def sampler(self) -> ShuffledSampler:
        loop = self.recipe.loop
        repeats = self.recipe.augmentation.repeats
        return ShuffledSampler(image_count=len(self.train_images), batch=loop.batch, repeats=repeats, seed=loop.seed)

    @property
    def steps(self) -> int:
        """That the recipe's epochs come to."""
        return max(floor(self.recipe.loop.epochs * self.sampler.steps_per_epoch), 1)

    def with_model(self, model: nn.Module) -> "Plan":
        return replace(self, model=model)

    def create_trainer(self, steps: int) -> Trainer:
        return Trainer(
            self.model,
            self.recipe,
            steps=steps,
            steps_per_epoch=self.sampler.steps_per_epoch,
            classes=len(self.data.classes),
            preprocessing=self.preprocessing,
            objective=self.objective,
            device=self.device,
            ranks=self.ranks,
            log_every=max(1, min(50, self.sampler.steps_per_epoch // 10)),
        )

    def load_batches(self, steps: range) -> Iterator[Batch]:
        views = BatchDataset(
            dataset=self.train_images,
            augmentation=Augmentation() if self.transform else self.recipe.augmentation,
            preprocessing=self.preprocessing,
            seed=self.recipe.loop.seed,
            replace_unreadable=True,
            transform=self.transform,
        )
        return training_batches(
            views,
            self.sampler,
            steps,
            accumulate=self.recipe.loop.accumulate,
            workers=self.workers,
            rank=self.ranks.rank,
            world=self.ranks.world_size,
            pin=self.device.type == "cuda",
        )

    def whiten_first_layer(self) -> None:
        """Lets the model's first layer see some of the pictures, spread over all, before it begins."""
        count = len(self.train_images)
        some = DatasetSubset(
            self.train_images, np.linspace(0, count - 1, min(MAX_WHITENING_IMAGES, count)).astype(np.int64)
        )
        seen = (normalise(batch.images, self.preprocessing) for batch in evaluation_batches(some, self.preprocessing))
        self.model.patch_embed.whiten(seen)


def check_batch_size(recipe: Recipe, image_count: int, ranks: Ranks) -> None:
    batch, parts = recipe.loop.batch, ranks.world_size * recipe.loop.accumulate
    if batch > image_count:
        raise ConfigError(
            f"batch {batch} is more than the {image_count} pictures to train on; expected --batch "
            f"{image_count}, or less"
        )
    split = f"batch {batch} over {ranks.world_size} processes of {recipe.loop.accumulate} micro-batches"
    if batch % parts:
        raise ConfigError(f"{split}; expected equal parts: a multiple of {parts}")
    mixing = recipe.augmentation.mixup or recipe.augmentation.cutmix
    if mixing and batch // parts % 2 and (parts > 1 or batch == 1):
        raise ConfigError(f"{split}, with Mixup or CutMix; expected parts of an even size, since two and two are mixed")
