"""Distillation: a student learns from a teacher's predictions, live or cached on disk, and from the labels.

Zs, Zt the logits of student and teacher, ψ the softmax, y the label, y_t = argmax Zt, τ a temperature, λ a weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.data.images.augment.config import Augmentation
from vitrail.distributed import Ranks
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import ImageModel
from vitrail.recipes.recipe import DistillationSettings, Recipe
from vitrail.recipes.request import Request
from vitrail.tasks.classification import Classification, LossInputs
from vitrail.tasks.feature_distillation import FeatureDistillation, compute_all_tokens
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.image_task import build_image_task, check_image_source
from vitrail.tasks.task import BuildContext, TaskKind, TaskSetup
from vitrail.tasks.teacher import Teacher, TeacherView
from vitrail.tasks.teacher_cache import TeacherCache

DEFAULT_TEACHER_WEIGHT = {"hard": 0.5, "soft": 0.1, "none": 0.0}  # as in the DeiT paper
RANDOM_AUGMENTATIONS = ("flip", "jitter", "erase", "mixup", "cutmix")  # must be 0 to cache logits


class Distillation(Classification):
    """Classification with the distillation loss of a teacher. See `make_distillation`."""

    shares = ("accuracy", "agreement")

    def __init__(
        self, model: Any, objective: "DistillationLoss", teacher: Teacher, features: FeatureDistillation | None = None
    ) -> None:
        super().__init__(model, objective)
        self.not_copied = (objective, teacher)
        self.teacher = (teacher,)  # not a submodule: it is neither trained nor saved
        self.features = features  # its projectors are trained
        if features is not None and features.relates_examples:
            self.no_accumulation_reason = "relations are between the images of a micro-batch; use a smaller `batch`"

    def compile_backbone(self) -> None:
        super().compile_backbone()
        self.backbone.encode = torch.compile(self.backbone.encode)  # called past `forward` for both heads

    def restore_eager(self) -> None:
        super().restore_eager()
        del self.backbone.encode


def soft_distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """τ²·KL(ψ(Zt/τ) ‖ ψ(Zs/τ)), averaged over the batch: DeiT's equation 2 without its factor λ (Hinton 2015)."""
    log_student, log_teacher = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean")


def hard_distillation_loss(student: Tensor, teacher: Tensor, smoothing: float = 0.0) -> Tensor:
    """CE(ψ(Zs), y_t), the second term of DeiT's equation 3: the teacher's top class is used as the label."""
    return F.cross_entropy(student, teacher.argmax(-1), label_smoothing=smoothing)


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """(1 − λ)·CE(class head, y) + λ·(soft or hard distillation of the head that learns from the teacher).

    Hints and relations are added, if there are `features`. The kind none is CE(y) with them alone.
    """

    teacher_logits: Callable[[LossInputs], Tensor]  # (B, classes)
    kind: Literal["soft", "hard", "none"]
    weight: float  # λ
    temperature: float  # τ, for soft distillation
    smoothing: float = 0.0  # of the teacher's top class, for hard distillation
    uses_distillation_token: bool  # otherwise the class head learns from labels and teacher

    features: FeatureDistillation | None = None

    def __call__(self, model: Any, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self.features is None:
            return self.compare_logits(self.predict(model, inputs.images), self.teacher_logits(inputs), inputs.targets)
        with self.features.record(model) as recorded:
            teacher = self.teacher_logits(inputs)
            loss, metrics = self.compare_logits(self.predict(model, inputs.images), teacher, inputs.targets)
        more, losses = self.features(recorded, teacher)
        return loss + more, {**metrics, **losses}

    def predict(self, model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        """The student's logits that learn from the labels, and those that learn from the teacher."""
        every_token = self.features is not None and self.features.reads_patches
        if self.uses_distillation_token and self.kind != "none":
            by_label, by_teacher = model.head_logits(model.encode(images, None if every_token else model.prefix))
            return by_label.float(), by_teacher.float()
        logits = (compute_all_tokens(model, images) if every_token else model(images)).float()
        return logits, logits

    def compare_logits(
        self, student: tuple[Tensor, Tensor], teacher: Tensor, targets: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        (by_label, by_teacher), teacher = student, teacher.float()
        loss = F.cross_entropy(by_label, targets)
        if self.kind == "soft":
            teacher_loss = soft_distillation_loss(by_teacher, teacher, self.temperature)
        else:
            teacher_loss = hard_distillation_loss(by_teacher, teacher, self.smoothing)
        teacher_loss = teacher_loss + 0 * teacher.sum()  # argmax hides NaN in the teacher's logits; this passes it on
        if self.kind != "none":
            loss = (1 - self.weight) * loss + self.weight * teacher_loss
        hits = by_label.detach().argmax(-1) == targets.argmax(-1)
        agrees = by_teacher.detach().argmax(-1) == teacher.argmax(-1)
        return loss, {"accuracy": hits.float().mean(), "agreement": agrees.float().mean()}


def make_distillation(
    model: Any,
    teacher: Teacher | str | Path,
    source: ImageSource,
    recipe: Recipe,
    *,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
    cache_folder: Path | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[Classification, list[str]]:
    """The task of the recipe's distillation, and notes about the teacher's classes.

    `cache_folder` is a folder for the teacher's logits.
    """
    settings, device, ranks = recipe.distillation, device or torch.device("cpu"), ranks or Ranks()
    check_distill_token_fits_model(recipe, model)
    if settings.distill == "none" and not settings.reads_features:
        return Classification(model), []
    if settings.reads_features and recipe.loop.compile:
        raise ConfigError("`compile` is true; expected false with hints and relations, which read single blocks")
    if cache_folder is not None:
        check_teacher_can_be_cached(recipe)
    raised = settings.teacher_size == "student"
    size = pair(source.preprocessing.image_size)
    if isinstance(teacher, str | Path):
        teacher = Teacher.from_name(str(teacher), **({"image_size": size} if raised else {}))
    if not isinstance(teacher, Teacher):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(teacher).__name__
        raise ConfigError(
            f"the teacher is a {kind}; expected its name, or for your own module "
            "vitrail.Teacher(model=…, preprocessing=…, labels=…)"
        )
    if raised:
        teacher = teacher.at_size(size)
    if teacher.model is model:
        raise ConfigError("the teacher is the student itself; expected another model, or a copy of it")
    features = None
    if settings.reads_features:
        features = FeatureDistillation(model, teacher.model, teacher.name, settings, ranks)
        features.to(device)
    view = TeacherView(
        teacher,
        source.data,
        source.preprocessing,
        device,
        compiled=recipe.loop.compile,
        every_token=features is not None and features.reads_patches,
    )

    def compute_logits(inputs: LossInputs) -> Tensor:
        return view(inputs.images)

    cache = None if cache_folder is None else TeacherCache.build(cache_folder, view, source.data, ranks, progress)
    objective = DistillationLoss(
        teacher_logits=compute_logits if cache is None else cache,
        kind=settings.distill,
        weight=DEFAULT_TEACHER_WEIGHT[settings.distill] if settings.teacher_weight is None else settings.teacher_weight,
        temperature=settings.temperature,
        smoothing=settings.teacher_smoothing,
        uses_distillation_token=has_distillation_head(model),
        features=features,
    )
    return Distillation(model, objective, teacher, features), view.notes


def check_distill_token_fits_model(recipe: Recipe, model: Any) -> None:
    """Check the settings before a teacher is opened."""
    settings, has_head = recipe.distillation, has_distillation_head(model)
    if settings.distill == "none":
        return
    if settings.distill_token == "distill" and not has_head:
        raise ConfigError(
            "`distill_token` is 'distill', but the model has no distillation token; expected one that has, such as "
            "deit_tiny_distilled_patch16_224 (or `fields` distilled=true), or `distill_token` class"
        )
    if settings.distill_token == "class" and has_head:
        raise ConfigError(
            "`distill_token` is 'class', but the model has a distillation token, which would learn nothing; expected "
            "a model without one (`fields` distilled=false), or `distill_token` auto"
        )


def has_distillation_head(model: nn.Module) -> bool:
    return isinstance(model, ImageModel) and len(model.classifiers) == 2


def check_teacher_can_be_cached(recipe: Recipe) -> None:
    """Refuse to cache a teacher's logits if more than these are needed, or images are augmented randomly."""
    if recipe.distillation.reads_features:
        raise ConfigError(
            "`teacher_cache` with hints or relations, which need the teacher's features; expected no `teacher_cache`"
        )
    augmentation = recipe.augmentation
    moving = [name for name in RANDOM_AUGMENTATIONS if vars(augmentation)[name]]
    moving += ["crop"] if augmentation.crop != "center" else []
    moving += ["policy"] if augmentation.policy != "none" else []
    moving += ["early_size"] if recipe.loop.early_size else []
    if moving:
        hint = " ".join(f"`{name}` {vars(Augmentation()).get(name, 0)}" for name in moving)
        raise ConfigError(
            f"`teacher_cache` with random augmentation ({', '.join(moving)}), which changes the logits; expected "
            f"no `teacher_cache`, or {hint}"
        )


def build_distillation(request: Request, context: BuildContext) -> TaskSetup:
    if request.teacher is None:
        raise ConfigError("the task distillation has no `teacher`; set it to a trained model")
    setup = build_image_task(request, context, Classification)
    source = check_image_source(setup.source, setup.task)
    if request.teacher_cache is not None:
        check_teacher_can_be_cached(request.recipe)
    cache_folder = None if request.teacher_cache is None or context.dry_run else Path(request.teacher_cache)
    fields = dict(request.teacher_fields or {})
    if request.recipe.distillation.teacher_size == "student":
        fields["image_size"] = pair(source.preprocessing.image_size)
    with context.progress(source.example_count if cache_folder else 0, "teacher") as advance:
        teacher = Teacher.from_name(request.teacher, **fields) if fields else request.teacher
        task, notes = make_distillation(
            setup.task.backbone,
            teacher,
            source,
            request.recipe,
            device=context.device,
            ranks=context.ranks,
            cache_folder=cache_folder,
            progress=advance,
        )
    for note in notes:
        context.report(f"note   {note}")
    if not isinstance(task, Distillation):  # turned off by the recipe
        return replace(setup, task=task)
    about = {"name": request.teacher, "fingerprint": task.teacher[0].fingerprint()}
    return replace(setup, task=task, facts={**setup.facts, "teacher": about})


TASK = TaskKind(name="distillation", settings=DistillationSettings, build=build_distillation)
