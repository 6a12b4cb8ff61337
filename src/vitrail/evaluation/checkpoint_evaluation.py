"""Evaluate a checkpoint, a run or an exported model on labeled images: what `vitrail eval` measures and writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.base.errors import ConfigError
from vitrail.base.files import make_writable_folder
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import ImageDataset
from vitrail.distributed import Ranks, resolve_device
from vitrail.evaluation.evaluate import TORCH_BATCH, evaluate
from vitrail.evaluation.evaluation_data import find_default_data, get_validation_images, open_evaluation_data
from vitrail.evaluation.metrics import Evaluation
from vitrail.evaluation.plots import EVALUATION_FILES
from vitrail.export.description import is_exported
from vitrail.models.base.checks import Size
from vitrail.opening import GivenPreprocessing, Opened, open_model, read_model_description
from vitrail.predict.engine_selection import EngineOptions, choose_engine_for_dataset
from vitrail.predict.pipeline import Engine
from vitrail.predict.predictor import EngineName

IMAGENET_CLASSES = 1000  # of ReaL labels


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation:
    """A model and the images that it is evaluated on."""

    loaded: Opened
    data: str  # its name
    images: ImageDataset
    mapping: Sequence[int]  # the model's class for each class of the data
    notes: Sequence[str]
    device: torch.device
    engine: Engine | None = None  # None for torch
    batch: int = TORCH_BATCH
    workers: int = 0
    strict: bool = False
    files: Sequence[str] = EVALUATION_FILES

    @property
    def examples(self) -> int:
        return len(self.images)

    def run(self, progress: Callable[[int], object] = lambda _: None) -> Evaluation:
        return evaluate(
            self.loaded.module,
            self.images,
            self.loaded.preprocessing,
            batch=self.batch,
            workers=self.workers,
            device=self.device,
            mapping=self.mapping,
            labels=self.loaded.labels,
            strict=self.strict,
            progress=progress,
            classes=self.loaded.classes,
            engine=self.engine,
        )


def open_checkpoint_evaluation(
    model: str,
    data: str | None = None,
    *,
    real: Path | None = None,
    head: Literal["both", "softmax", "class", "distill"] | None = None,
    wrong: Path | None = None,
    labels: Sequence[str] | None = None,
    image_size: Size | None = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    workers: int = 0,
    device: str = "auto",
    strict: bool = False,
    engine: EngineName = "auto",
    exact: bool = False,
    fast: bool = False,
    batch: int | None = None,
    streams: int | None = None,
    threads: int | None = None,
) -> CheckpointEvaluation:
    """Open a model and the data, by default that of the run, and map the classes of the data to the model's.

    `real` is the file of ReaL labels, `head` selects one of a model with a distillation token. `wrong` is the file that
    the caller writes the wrong predictions to; its folder is made. The last six options are those of `EngineOptions`.
    """
    options = EngineOptions(engine=engine, exact=exact, fast=fast, batch=batch, streams=streams, threads=threads)
    fields = {**(fields or {}), **({} if image_size is None else {"image_size": image_size})}
    if head is not None:
        if is_exported(model) or not read_model_description(model, fields).config.get("distilled"):
            raise ConfigError(
                f"`head` {head} for {model}, which has one head; expected a model with a distillation token, "
                "such as deit_tiny_distilled_patch16_224, or no `head`"
            )
        fields["answer"] = head
    place = resolve_device(device, Ranks())
    loaded = open_model(model, kind="image", fields=fields, preprocessing=preprocessing, labels=labels, device=place)
    if not loaded.classes:
        raise ConfigError(f"{model} has no head; expected a model with classes: `vitrail probe` measures its features")
    found = open_evaluation_data(data or find_default_data(loaded), real, loaded.run)
    images = get_validation_images(found)
    if real is not None and loaded.classes != IMAGENET_CLASSES:
        raise ConfigError(f"`real` for a model of {loaded.classes} classes; expected ImageNet's {IMAGENET_CLASSES}")
    mapping, note = match_data_classes_to_model(loaded.labels, loaded.classes, found.classes)
    notes = [*found.notes, *([note] if note else [])]
    if wrong is not None:
        make_writable_folder(wrong.parent)
    chosen = choose_engine_for_dataset(loaded, images, replace(options, device=str(place)))
    return CheckpointEvaluation(
        loaded=loaded,
        data=found.name,
        images=images,
        mapping=mapping,
        notes=[*notes, *(chosen.notes if chosen else ())],
        device=place,
        engine=chosen and chosen.predictor.engine,
        batch=chosen.batch if chosen else batch or TORCH_BATCH,
        workers=workers,
        strict=strict,
    )
