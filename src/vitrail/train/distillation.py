"""Distillation put together: a teacher, live or with its answers kept on disk, and the loss that a recipe asks for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.augment.config import Augmentation
from vitrail.data.datasets import DatasetSplits
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.train.distributed import Ranks
from vitrail.train.losses import DistillationLoss, LossInputs, Objective, classification_loss
from vitrail.train.recipe import Recipe
from vitrail.train.teacher import Teacher, TeacherView
from vitrail.train.teacher_cache import TeacherCache

DEFAULT_TEACHER_WEIGHT = {"hard": 0.5, "soft": 0.1}  # the paper's
RANDOM_AUGMENTATIONS = (
    "flip",
    "jitter",
    "erase",
    "mixup",
    "cutmix",
)  # what must be 0 for a picture to look the same each time


def check_distillation(recipe: Recipe, model: Any) -> None:
    """What is wrong with the settings alone, before a teacher is opened."""
    asked, distilled = recipe.distillation, bool(getattr(model.config, "distilled", False))
    if asked.distill == "none":
        return
    if asked.distill_token == "distill" and not distilled:
        raise ConfigError(
            "distill_token is 'distill' and the model has no distillation token; expected one that has, such as "
            "deit_tiny_distilled_patch16_224 (or --set distilled=true), or distill_token class"
        )
    if asked.distill_token == "class" and distilled:
        raise ConfigError(
            "distill_token is 'class' and the model has a distillation token, which would learn nothing; expected a "
            "model without (--set distilled=false), or distill_token auto"
        )


def build_distillation(
    teacher: Teacher | str | Path,
    model: nn.Module,
    data: DatasetSplits,
    recipe: Recipe,
    student_preprocessing: Preprocessing,
    device: torch.device,
    *,
    ranks: Ranks | None = None,
    cache_folder: Path | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[Objective, TeacherView | None]:
    """The loss of the recipe's distillation, and who gives the lessons; `kept` is a folder for the answers."""
    asked = recipe.distillation
    check_distillation(recipe, model)
    if asked.distill == "none":
        return classification_loss, None
    if cache_folder is not None:
        check_no_random_augmentation(recipe)
    if isinstance(teacher, str | Path):
        teacher = Teacher.from_name(str(teacher))
    if not isinstance(teacher, Teacher):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(teacher).__name__
        raise ConfigError(
            f"the teacher is a {kind}; expected its name, or for a module of your own "
            "vitrail.Teacher(model=…, preprocessing=…, labels=…)"
        )
    if teacher.model is model:
        raise ConfigError("the teacher is the student itself; expected another model, or a copy of it")
    lessons = TeacherView(teacher, data, student_preprocessing, device, compiled=recipe.loop.compile)

    def live(inputs: LossInputs) -> Tensor:
        return lessons(inputs.images)

    answers = (
        live if cache_folder is None else TeacherCache.build(cache_folder, lessons, data, ranks or Ranks(), progress)
    )
    objective = DistillationLoss(
        teacher_logits=answers,
        kind=asked.distill,
        weight=DEFAULT_TEACHER_WEIGHT[asked.distill] if asked.teacher_weight is None else asked.teacher_weight,
        temperature=asked.temperature,
        uses_distillation_token=bool(getattr(model.config, "distilled", False)),
    )
    return objective, lessons


def check_no_random_augmentation(recipe: Recipe) -> None:
    """Answers can be kept only if every picture looks the same each time."""
    augmentation = recipe.augmentation
    moving = [name for name in RANDOM_AUGMENTATIONS if getattr(augmentation, name)]
    moving += ["crop"] if augmentation.crop != "centre" else []
    moving += ["policy"] if augmentation.policy != "none" else []
    moving += ["early_size"] if recipe.loop.early_size else []
    if moving:
        hint = " ".join(f"--{name.replace('_', '-')} {getattr(Augmentation(), name, 0)}" for name in moving)
        raise ConfigError(
            f"kept answers of a teacher, and pictures that look different each time ({', '.join(moving)}); expected "
            f"one of the two: no --teacher-cache, or {hint}"
        )
