"""Adds a teacher to a plan: its logits, live or cached on disk, and the distillation loss of the recipe."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.data.augment.config import Augmentation
from vitrail.errors import ConfigError
from vitrail.recipes.recipe import Recipe
from vitrail.tasks.losses import DistillationLoss, LossInputs
from vitrail.tasks.teacher import Teacher, TeacherView
from vitrail.tasks.teacher_cache import TeacherCache
from vitrail.train.plan import Plan

DEFAULT_TEACHER_WEIGHT = {"hard": 0.5, "soft": 0.1}  # as in the DeiT paper
RANDOM_AUGMENTATIONS = ("flip", "jitter", "erase", "mixup", "cutmix")  # must be 0 to cache logits


def check_distill_token_fits_model(recipe: Recipe, model: Any) -> None:
    """Check the settings before a teacher is opened."""
    asked, distilled = recipe.distillation, bool(getattr(model.config, "distilled", False))
    if asked.distill == "none":
        return
    if asked.distill_token == "distill" and not distilled:
        raise ConfigError(
            "`distill_token` is 'distill', but the model has no distillation token; expected one that has, such as "
            "deit_tiny_distilled_patch16_224 (or `fields` distilled=true), or `distill_token` class"
        )
    if asked.distill_token == "class" and distilled:
        raise ConfigError(
            "`distill_token` is 'class', but the model has a distillation token, which would learn nothing; expected "
            "a model without one (`fields` distilled=false), or `distill_token` auto"
        )


def add_distillation_to_plan(
    plan: Plan,
    teacher: Teacher | str | Path,
    *,
    cache_folder: Path | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[Plan, list[str]]:
    """The plan with the loss of the recipe's distillation, and notes about the teacher's classes.

    `cache_folder` is a folder for the teacher's logits.
    """
    settings = plan.recipe.distillation
    check_distill_token_fits_model(plan.recipe, plan.model)
    if settings.distill == "none":
        return plan, []
    if cache_folder is not None:
        check_no_random_augmentation(plan.recipe)
    if isinstance(teacher, str | Path):
        teacher = Teacher.from_name(str(teacher))
    if not isinstance(teacher, Teacher):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(teacher).__name__
        raise ConfigError(
            f"the teacher is a {kind}; expected its name, or for a module of your own "
            "vitrail.Teacher(model=…, preprocessing=…, labels=…)"
        )
    if teacher.model is plan.model:
        raise ConfigError("the teacher is the student itself; expected another model, or a copy of it")
    view = TeacherView(teacher, plan.data, plan.preprocessing, plan.device, compiled=plan.recipe.loop.compile)

    def compute_logits(inputs: LossInputs) -> Tensor:
        return view(inputs.images)

    objective = DistillationLoss(
        teacher_logits=compute_logits
        if cache_folder is None
        else TeacherCache.build(cache_folder, view, plan.data, plan.ranks, progress),
        kind=settings.distill,
        weight=DEFAULT_TEACHER_WEIGHT[settings.distill] if settings.teacher_weight is None else settings.teacher_weight,
        temperature=settings.temperature,
        uses_distillation_token=bool(getattr(plan.model.config, "distilled", False)),
    )
    return replace(plan, objective=objective, teacher=teacher), view.notes


def check_no_random_augmentation(recipe: Recipe) -> None:
    """Refuse to cache a teacher's logits if images are augmented randomly."""
    augmentation = recipe.augmentation
    moving = [name for name in RANDOM_AUGMENTATIONS if getattr(augmentation, name)]
    moving += ["crop"] if augmentation.crop != "centre" else []
    moving += ["policy"] if augmentation.policy != "none" else []
    moving += ["early_size"] if recipe.loop.early_size else []
    if moving:
        hint = " ".join(f"`{name}` {getattr(Augmentation(), name, 0)}" for name in moving)
        raise ConfigError(
            f"`teacher_cache` with random augmentation ({', '.join(moving)}), which changes the logits; expected "
            f"no `teacher_cache`, or {hint}"
        )
