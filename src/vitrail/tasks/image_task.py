"""What tasks on images share: normalization, the model that training starts from, and how a request becomes a task."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import get_family
from vitrail.checkpoint.reading import Checkpoint
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.augment.views import View
from vitrail.data.images.datasets import DatasetSplits, TorchDataset, cache_if_small, open_data
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import default_preprocessing
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import ImageModel, check_declarations, check_reads_images, takes_other_sizes
from vitrail.models.base.family import Family
from vitrail.models.catalog.families import find_preset
from vitrail.opening import open_checkpoint, refuse_models_without_layers
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.tasks import find_task
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.task import BuildContext, Source, Task, TaskSetup, check_task

MAX_WHITENING_IMAGES = 2000  # training images used to whiten the first filters


class ImageTask(Task):
    """A task whose batches hold `labels`, `indices`, and `images`, uint8 (B, C, H, W), or its `views`.

    A view of `count` crops is uint8 (count, B, C, h, w) under its name, with one random key per crop.
    """

    views: Mapping[str, View] | None = None  # None: `images`, by the augmentation of the recipe
    preprocessing: Preprocessing | None = None  # known after `setup`

    def initialize(self, source: Source, recipe: Recipe) -> None:
        if recipe.loop.whiten:
            images = check_image_source(source, self).load_evenly_spaced_images(MAX_WHITENING_IMAGES)
            self.backbone.whiten(images)

    def setup(self, source: Source, recipe: Recipe) -> None:  # noqa: ARG002  # the recipe is for subclasses
        self.preprocessing = check_image_source(source, self).preprocessing

    def describe(self) -> str:
        return f"{super().describe()}, {'×'.join(map(str, self.backbone.config.image_size))} pixels"

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8 pixels as the model's input."""
        assert self.preprocessing is not None, "called before `setup`"
        return normalize(pixels, self.preprocessing)

    normalise = normalize  # the former name, for tasks outside the package

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:  # noqa: ARG002  # ranks are for subclasses
        images, config = check_image_source(source, self), self.backbone.config
        if len(images.preprocessing.mean) != config.channels:
            means = len(images.preprocessing.mean)
            raise ConfigError(f"{means} means for a model of {config.channels} channels; expected one per channel")
        size, own = pair(images.preprocessing.image_size), pair(config.image_size)
        if size != own and not takes_other_sizes(self.backbone):
            given, expected = ("×".join(map(str, each)) for each in (size, own))
            raise ConfigError(f"images of {given} pixels for a model of {expected}; expected the same size")
        if images.views is not None:
            images.make_batch_dataset()  # raises an error if the images cannot give these views
        if recipe.loop.whiten and not (isinstance(self.backbone, ImageModel) and self.backbone.whitens):
            raise ConfigError("`whiten` is true; expected false, or a model with filters to whiten, such as cct_cpu_32")


def check_image_source(source: Source, task: Task) -> ImageSource:
    if not isinstance(source, ImageSource):
        raise ConfigError(f"{type(task).__name__} trains on images; expected images, not {source.name}")
    return source


def check_patches_can_be_masked(task: str, model: ImageModel) -> None:
    """For tasks that replace patches by a mask token."""
    if reason := model.no_masking_reason:
        raise ConfigError(
            f"{task} needs patches that can be masked; this {type(model).__name__} has none, since {reason}; "
            "use another model"
        )


def check_patches_can_be_dropped(task: str, model: ImageModel) -> None:
    """For tasks whose blocks process only some of the patches."""
    if reason := model.no_masking_reason or model.no_dropping_reason:
        raise ConfigError(
            f"{task} needs patches that can be dropped; this {type(model).__name__} has none, since {reason}; "
            "use another model"
        )


@dataclass(frozen=True, kw_only=True)
class StartingModel:
    """The model that training starts from, and how its images are prepared."""

    model: Any
    preprocessing: Preprocessing
    family: Family
    resampling: ResamplingPolicy = "timm"
    started_from: str | None = None  # a checkpoint


def open_image_source(
    task: Task,
    data: DatasetSplits | TorchDataset | str | Path,
    recipe: Recipe,
    preprocessing: Preprocessing | None = None,
    transform: Callable[[Any], Any] | None = None,
    *,
    need_classes: bool = True,
) -> ImageSource:
    """The images that a task is trained on; `data` is anything that `open_data` takes."""
    return ImageSource(
        data=open_data(data, seed=recipe.loop.seed, need_classes=need_classes),
        preprocessing=preprocessing or default_preprocessing(task.backbone),
        augmentation=recipe.augmentation,
        batch=recipe.loop.batch,
        seed=recipe.loop.seed,
        transform=transform,
        views=task.views if isinstance(task, ImageTask) else None,
    )


def build_image_task(request: Request, context: BuildContext, make_task: Callable[[Any], Task]) -> TaskSetup:
    """Open the data and the model of a request, make its task, and keep the images in memory if they fit."""
    data = request.open_data(need_classes=find_task(request.task_name).needs_classes)
    setup = assemble_image_task(request, data, make_task)
    check_task(setup.task, setup.source, request.recipe, context.ranks)
    for note in data.notes:
        context.report(f"note   {note}")
    with context.progress(None, "decoding") as advance:
        data = cache_if_small(data, request.cache * 1e9, lambda: advance(1))
    return replace(setup, source=replace(check_image_source(setup.source, setup.task), data=data))


def assemble_image_task(request: Request, data: DatasetSplits, make_task: Callable[[Any], Task]) -> TaskSetup:
    """The task of a request on data that is open; nothing is decoded."""
    start = make_starting_model(request, data)
    name, task = request.recipe.model or start.family.name, make_task(start.model)
    return TaskSetup(
        task=task,
        source=open_image_source(task, data, request.recipe, start.preprocessing),
        model_name=name,
        facts={
            "model": {
                "name": name,
                "family": start.family.name,
                "config": json.loads(json.dumps(asdict(start.model.config))),  # tuples as lists, as read from a file
                "preprocessing": json.loads(json.dumps(asdict(start.preprocessing))),
            }
        },
        write_options={"resampling": start.resampling, "family": start.family},
        started_from=start.started_from,
    )


def make_starting_model(request: Request, data: DatasetSplits) -> StartingModel:
    """The model of a request; it has no head if the task needs no classes."""
    classes = data.classes if find_task(request.task_name).needs_classes else ()
    if request.init:
        return open_starting_checkpoint(request, classes)
    return create_starting_model(request, data, classes)


def create_starting_model(request: Request, data: DatasetSplits, classes: tuple[str, ...]) -> StartingModel:
    """A new model; gray images get a model of one channel."""
    recipe = request.recipe
    if recipe.model is None:
        raise ConfigError(
            "no model is named; use `init` to fine-tune one (`init` vit_tiny_patch16_224), or `model` to train from "
            "scratch (`model` ViT-Ti/16)"
        )
    family, preset = find_preset(recipe.model, trusted=request.trusted)
    check_reads_images(family.build)
    images = data.train.images if isinstance(data.train, ArrayDataset) else None
    channels = preset.channels if images is None else images.shape[3]
    channels = len(recipe.preprocessing.get("mean", (0,) * channels))  # a recipe for colors makes gray images RGB
    config = family.configure(preset, **{"channels": channels, "classes": len(classes), **recipe.fields})
    if config.classes != len(classes):
        reason = f"as many as {data.name} has" if classes else f"since the task {request.task_name} has no classes"
        raise ConfigError(f"classes is {config.classes}; expected {len(classes)}, {reason}")
    size = pair(config.image_size)
    uncropped = images is not None and images.shape[1:3] == size
    gray = (0.5,) * config.channels
    preprocessing = Preprocessing(image_size=size, crop=1.0 if uncropped else 0.9, mean=gray, std=gray)
    model = family.build(config)
    check_declarations(model)
    return StartingModel(model=model, preprocessing=preprocessing.with_fields(recipe.preprocessing), family=family)


def open_starting_checkpoint(request: Request, classes: tuple[str, ...]) -> StartingModel:
    """The model of a checkpoint. Its head is kept if the classes are the same; a new one starts at zero."""
    recipe, name = request.recipe, str(request.init)

    def choose_head(about: Description) -> dict[str, int]:
        kept = about.labels == classes and "classes" not in recipe.fields
        return {} if kept else {"classes": len(classes)}

    refuse_models_without_layers(name)
    loaded = open_checkpoint(name, recipe.fields, recipe.preprocessing, choose_head)
    assert loaded.checkpoint is not None
    init, description = str(loaded.source if loaded.run is None else loaded.run.model), loaded.checkpoint.description
    if recipe.model is not None:
        family, preset = find_preset(recipe.model, trusted=request.trusted)
        check_preset_matches_checkpoint(family, preset, loaded.checkpoint, init)
    model = copy_weights_as_float32(loaded.module)
    size = pair(model.config.image_size)
    return StartingModel(
        model=model,
        preprocessing=replace(loaded.preprocessing, image_size=size).with_fields(recipe.preprocessing),
        family=get_family(description, init),
        resampling=description.resampling,
        started_from=init,
    )


def check_preset_matches_checkpoint(family: Family, preset: Any, found: Checkpoint, init: str) -> None:
    expected, value = asdict(preset), asdict(found.model.config)
    for name in ("width", "depth", "heads", "patch_size", "stages", "block", "widths"):
        if family.name != found.description.family or expected.get(name) != value.get(name):
            raise ConfigError(
                f"`model` is not the model in {init}, a {found.description.family} of {name} {value.get(name)}; "
                "expected no `model` together with `init`"
            )


def copy_weights_as_float32(model: nn.Module) -> Any:
    """The model with its weights copied into memory: loaded ones may be mapped from their file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.float().clone() if tensor.is_floating_point() else tensor.data.clone()
    return model
