"""Evaluate a checkpoint, a run or an exported model on labelled images: what `vitrail eval` measures and writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.base.errors import ConfigError
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import ImageDataset
from vitrail.distributed import Ranks, resolve_device
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.evaluation_data import find_default_data, get_validation_images, open_evaluation_data
from vitrail.evaluation.metrics import Evaluation
from vitrail.export.description import is_exported
from vitrail.loaded_model import LoadedModel
from vitrail.opening import GivenPreprocessing, open_model, read_model_description

IMAGENET_CLASSES = 1000  # of ReaL labels


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation:
    """A model and the images that it is evaluated on."""

    loaded: LoadedModel
    data: str  # its name
    images: ImageDataset
    mapping: Sequence[int]  # the model's class for each class of the data
    notes: Sequence[str]
    device: torch.device

    def run(self, *, batch: int, workers: int, strict: bool, progress: Callable[[int], object]) -> Evaluation:
        return evaluate(
            self.loaded.module,
            self.images,
            self.loaded.preprocessing,
            batch=batch,
            workers=workers,
            device=self.device,
            mapping=self.mapping,
            labels=self.loaded.labels,
            strict=strict,
            progress=progress,
            classes=self.loaded.classes,
        )


def open_checkpoint_evaluation(
    checkpoint: str,
    data: str | None = None,
    *,
    real: Path | None = None,
    head: Literal["both", "class", "distill"] | None = None,
    labels: Sequence[str] | None = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    device: str = "auto",
) -> CheckpointEvaluation:
    """Open a model and the data, by default that of the run, and map the classes of the data to the model's.

    `real` is the file of ReaL labels, `head` selects one of a model with a distillation token.
    """
    fields = dict(fields or {})
    if head is not None:
        if is_exported(checkpoint) or not read_model_description(checkpoint, fields).config.get("distilled"):
            raise ConfigError(
                f"`head` {head} for {checkpoint}, which has one head; expected a model with a distillation token, "
                "such as deit_tiny_distilled_patch16_224, or no `head`"
            )
        fields["answer"] = head
    place = resolve_device(device, Ranks())
    loaded = open_model(checkpoint, fields=fields, preprocessing=preprocessing, labels=labels, device=place)
    if not loaded.classes:
        raise ConfigError(
            f"{checkpoint} has no head; expected a model with classes: `vitrail probe` measures its features"
        )
    found = open_evaluation_data(data or find_default_data(loaded), real, loaded.run)
    images = get_validation_images(found)
    if real is not None and loaded.classes != IMAGENET_CLASSES:
        raise ConfigError(f"`real` for a model of {loaded.classes} classes; expected ImageNet's {IMAGENET_CLASSES}")
    mapping, note = match_data_classes_to_model(loaded.labels, loaded.classes, found.classes)
    notes = [*found.notes, *([note] if note else [])]
    return CheckpointEvaluation(
        loaded=loaded, data=found.name, images=images, mapping=mapping, notes=notes, device=place
    )
