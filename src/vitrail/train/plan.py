"""A resolved training run: the model, data, recipe and device of a request. Its JSON is run.json."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.util import find_spec
from math import floor
from typing import Any

import numpy as np
import torch
from torch import nn

from vitrail import __version__
from vitrail.checkpoint.reading import Checkpoint, get_built_in_family
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.data.array_dataset import ArrayDataset
from vitrail.data.augment.batch_transforms import normalise
from vitrail.data.augment.config import Augmentation
from vitrail.data.batch import Batch
from vitrail.data.datasets import DatasetSplits, DatasetSubset, ImageDataset
from vitrail.data.loader import BatchDataset, ShuffledSampler, evaluation_batches, training_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.distributed import Ranks
from vitrail.errors import ConfigError, DataError
from vitrail.loading import open_torch_model, read_model_description, refuse_models_without_layers
from vitrail.models.catalog import find_preset
from vitrail.models.checks import pair
from vitrail.models.family import Family
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.tasks.losses import Objective, classification_loss
from vitrail.tasks.teacher import Teacher

MAX_WHITENING_IMAGES = 2000  # training images used to whiten the first filters


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a training run needs; checked on creation."""

    model: Any  # with its initial weights
    data: DatasetSplits
    recipe: Recipe
    preprocessing: Preprocessing
    fixed_steps: int | None = None  # None: computed from the recipe's epochs
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    ranks: Ranks = Ranks()  # noqa: RUF009  # immutable
    workers: int = 0
    threads: int | None = None  # None: torch's default
    strict: bool = False  # an unreadable image is an error
    objective: Objective = classification_loss
    transform: Callable[[Any], Any] | None = None  # external code that replaces the recipe's augmentation
    teacher: Teacher | None = None
    request: Request | None = None  # None if `fit` received a model
    family: Family | None = None
    resampling: ResamplingPolicy = "timm"
    started_from: str | None = None  # checkpoint of the initial weights

    def __post_init__(self) -> None:
        config, loop, classes = self.model.config, self.recipe.loop, len(self.data.classes)
        if classes < 2:
            only = ", ".join(self.data.classes)
            raise DataError(
                f"{self.data.name} has one class ({only}); expected at least two, each in a folder of its own"
            )
        if config.classes != classes:
            raise ConfigError(
                f"a model of {config.classes} classes; expected {classes}, as many as {self.data.name} has"
            )
        if getattr(config, "answer", "both") != "both":
            raise ConfigError(f"answer is {config.answer!r}; expected 'both' in training, so that both heads learn")
        if len(self.preprocessing.mean) != config.channels:
            means = len(self.preprocessing.mean)
            raise ConfigError(f"{means} means for a model of {config.channels} channels; expected one per channel")
        if loop.early_size and not getattr(config, "dynamic", False):
            raise ConfigError(
                f"`early_size` is {loop.early_size}; expected 0, or a dynamic model: `fields` dynamic=true"
            )
        if loop.whiten and not hasattr(getattr(self.model, "patch_embed", None), "whiten"):
            raise ConfigError("`whiten` is true; expected false, or a model with filters to whiten, such as cct_cpu_32")
        check_batch_size(self.recipe, len(self.train_images), self.ranks)

    @cached_property
    def train_images(self) -> ImageDataset:
        if self.data.train is None or not len(self.data.train):
            raise DataError(f"{self.data.name} has no images to train on; expected some in train/")
        return self.data.train

    @cached_property
    def sampler(self) -> ShuffledSampler:
        loop = self.recipe.loop
        repeats = self.recipe.augmentation.repeats
        return ShuffledSampler(image_count=len(self.train_images), batch=loop.batch, repeats=repeats, seed=loop.seed)

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    @property
    def steps(self) -> int:
        return self.fixed_steps or max(floor(self.recipe.loop.epochs * self.steps_per_epoch), 1)

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    @property
    def model_name(self) -> str:
        return self.recipe.model or (self.family.name if self.family else type(self.model).__name__)

    def with_steps(self, steps: int | None) -> "Plan":
        return replace(self, fixed_steps=steps)

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
        """Fit the model's first filters to some of the training images, evenly spaced over all of them."""
        count = len(self.train_images)
        some = DatasetSubset(
            self.train_images, np.linspace(0, count - 1, min(MAX_WHITENING_IMAGES, count)).astype(np.int64)
        )
        seen = (
            normalise(batch["images"], self.preprocessing) for batch in evaluation_batches(some, self.preprocessing)
        )
        self.model.patch_embed.whiten(seen)

    def to_json(self) -> dict[str, Any]:
        """The contents of run.json: the request and the resolved settings."""
        if self.request is None or self.family is None:
            raise ValueError("a plan without a request cannot be resumed from run.json")
        request, data = self.request.to_json(), self.data
        teacher = self.teacher and {"name": self.request.teacher, "fingerprint": self.teacher.fingerprint()}
        return {
            "vitrail": __version__,
            "torch": torch.__version__,
            "simplejpeg": find_spec("simplejpeg") is not None,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv[1:],
            "request": request,
            "data": {
                "name": data.name,
                "train": len(data.train or ()),
                "val": len(data.val or ()),
                "classes": list(data.classes),
            },
            "model": {
                "name": self.model_name,
                "family": self.family.name,
                "config": json.loads(json.dumps(asdict(self.model.config))),  # tuples as lists, as read from a file
                "preprocessing": json.loads(json.dumps(asdict(self.preprocessing))),
            },
            "init": self.request.init,
            "teacher": teacher,
            "recipe": request["recipe"],
            "epochs": self.epochs,
            "steps": self.steps,
            "steps_per_epoch": self.steps_per_epoch,
            "world": self.ranks.world_size,
            "threads": self.threads or torch.get_num_threads(),
        }


def check_batch_size(recipe: Recipe, image_count: int, ranks: Ranks) -> None:
    batch, parts = recipe.loop.batch, ranks.world_size * recipe.loop.accumulate
    if batch > image_count:
        raise ConfigError(f"`batch` {batch} is more than the {image_count} training images; use {image_count} or less")
    split = f"`batch` {batch} over {ranks.world_size} processes of {recipe.loop.accumulate} micro-batches"
    if batch % parts:
        raise ConfigError(f"{split}; expected equal parts: a multiple of {parts}")
    mixing = recipe.augmentation.mixup or recipe.augmentation.cutmix
    if mixing and batch // parts % 2 and (parts > 1 or batch == 1):
        raise ConfigError(
            f"{split}, with Mixup or CutMix; expected parts of an even size, since images are mixed in pairs"
        )


def plan_request(request: Request, data: DatasetSplits | None = None) -> Plan:
    """Open the data and build the model of a request, from its seed or a checkpoint; on the CPU, in one process."""
    data = request.open_data() if data is None else data
    torch.manual_seed(request.recipe.loop.seed)
    return plan_from_checkpoint(request, data) if request.init else plan_from_scratch(request, data)


def plan_from_scratch(request: Request, data: DatasetSplits) -> Plan:
    """A plan with a new model; grey images get a model of one channel."""
    recipe = request.recipe
    if recipe.model is None:
        raise ConfigError(
            "no model is named; use `init` to fine-tune one (`init` vit_tiny_patch16_224), or `model` to train from "
            "scratch (`model` ViT-Ti/16)"
        )
    family, preset = find_preset(recipe.model, trusted=request.trusted)
    images = data.train.images if isinstance(data.train, ArrayDataset) else None
    channels = preset.channels if images is None else images.shape[3]
    channels = len(recipe.preprocessing.get("mean", (0,) * channels))  # a recipe for colours makes grey images RGB
    config = family.configure(preset, **{"channels": channels, "classes": len(data.classes), **recipe.fields})
    if config.classes != len(data.classes):
        raise ConfigError(f"classes is {config.classes}; expected {len(data.classes)}, as many as {data.name} has")
    size = pair(config.image_size)
    uncropped = images is not None and images.shape[1:3] == size
    grey = (0.5,) * config.channels
    preprocessing = Preprocessing(image_size=size, crop=1.0 if uncropped else 0.9, mean=grey, std=grey)
    return Plan(
        model=family.build(config),
        data=data,
        recipe=recipe,
        preprocessing=preprocessing.with_fields(recipe.preprocessing),
        request=request,
        family=family,
    )


def plan_from_checkpoint(request: Request, data: DatasetSplits) -> Plan:
    """A plan with the model of a checkpoint. Its head is kept if the classes are the same; a new one starts at zero."""
    recipe, fields = request.recipe, dict(request.recipe.fields)
    refuse_models_without_layers(str(request.init))
    if "classes" in fields or read_model_description(str(request.init), fields).labels != data.classes:
        fields["classes"] = len(data.classes)
    loaded = open_torch_model(str(request.init), fields=fields, preprocessing=recipe.preprocessing)
    assert loaded.checkpoint is not None
    init, description = str(loaded.source if loaded.run is None else loaded.run.model), loaded.checkpoint.description
    if recipe.model is not None:
        family, preset = find_preset(recipe.model, trusted=request.trusted)
        check_preset_matches_checkpoint(family, preset, loaded.checkpoint, init)
    model = copy_weights_as_float32(loaded.module)
    size = pair(model.config.image_size)
    return Plan(
        model=model,
        data=data,
        recipe=recipe,
        preprocessing=replace(loaded.preprocessing, image_size=size).with_fields(recipe.preprocessing),
        request=request,
        family=get_built_in_family(description.family, init),
        resampling=description.resampling,
        started_from=init,
    )


def check_preset_matches_checkpoint(family: Family, preset: Any, found: Checkpoint, init: str) -> None:
    config = found.model.config
    for name in ("width", "depth", "heads", "patch_size", "stages", "block", "widths"):
        expected, value = getattr(preset, name, None), getattr(config, name, None)
        if family.name != found.description.family or expected != value:
            raise ConfigError(
                f"`model` is not the model in {init}, a {found.description.family} of {name} {value}; "
                "expected no `model` together with `init`"
            )


def copy_weights_as_float32(model: nn.Module) -> Any:
    """The model with its weights copied into memory: loaded ones may be mapped from their file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.float().clone() if tensor.is_floating_point() else tensor.data.clone()
    return model
