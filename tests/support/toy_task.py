"""A toy task with all that self-supervision needs: two views, a momentum teacher, a center, and schedules."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.data.batch import Batch
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.config import ViewAugmentation
from vitrail.data.images.augment.views import View
from vitrail.data.images.datasets import DatasetSplits
from vitrail.models.base.checks import MAY_BE_ZERO
from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock, Schedule
from vitrail.tasks.image_task import ImageTask, build_image_task
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.tasks.task import BuildContext, TaskKind, TaskSetup, parse_task_settings

RECIPE = Recipe(
    optimization=OptimizationSettings(lr=3e-3, layer_decay=0.8, clip=3.0),
    loop=LoopSettings(epochs=3, batch=8, seed=3),
    schedules={"weight_decay": {"start": 0.04, "end": 0.4}},
)


@dataclass(frozen=True, kw_only=True)
class ToySettings:
    outputs: int = 6
    momentum: Schedule = field(default=Schedule(start=0.9, end=1.0))
    frozen_epochs: int = field(default=1, metadata=MAY_BE_ZERO)  # of the last layer


class SelfDistillation(ImageTask):
    """The student predicts for one view what its momentum teacher, centered, predicts for the other."""

    metrics = (Metric(name="agreement", label="agreement", is_share=True), LOSS_METRIC)
    shares = ("agreement",)
    averages_itself = True
    views = MappingProxyType({"crops": View(ViewAugmentation(area=(0.4, 1.0)), count=2)})

    def __init__(self, backbone: Any, settings: ToySettings | None = None) -> None:
        super().__init__()
        self.settings = settings or ToySettings()
        self.backbone, outputs = backbone, self.settings.outputs
        self.projector = nn.Linear(backbone.levels[-1].width, outputs)
        self.last = nn.Linear(outputs, outputs, bias=False)
        self.teacher = deepcopy(nn.ModuleList([self.backbone, self.projector, self.last])).requires_grad_(False)
        self.register_buffer("center", torch.zeros(outputs))
        self.center: Tensor
        self.seen = list[Tensor]()  # means of the teacher's outputs, one per micro-batch of a step
        self.mean = self.center  # of the step, over all processes

    @property
    def result(self) -> nn.Module:
        return self.teacher[0]

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        crops = self.normalize(batch["crops"].flatten(0, 1))  # (2·B, C, h, w)
        student = compute_outputs(crops, self.backbone, self.projector, self.last)
        with torch.no_grad():
            teacher = compute_outputs(crops, *self.teacher).float()
        if self.training:
            self.seen.append(teacher.mean(0))
        goals = ((teacher - self.center) / 0.1).softmax(-1).unflatten(0, (2, -1)).flip(0).flatten(0, 1)
        alike = student.detach().argmax(-1) == goals.argmax(-1)
        return F.cross_entropy(student, goals), {"agreement": alike.float().mean()}

    def before_step(self, clock: Clock) -> None:
        parts = self.ranks.world_size * len(self.seen)
        self.mean = self.ranks.all_reduce_sum(torch.stack(self.seen).sum(0)) / parts
        self.seen.clear()
        if clock.epoch < self.settings.frozen_epochs:
            self.last.weight.grad = None

    @torch.no_grad()
    def after_step(self, clock: Clock) -> None:
        self.center.lerp_(self.mean, 0.1)
        momentum = self.settings.momentum.at(clock)
        student = [*self.backbone.parameters(), *self.projector.parameters(), *self.last.parameters()]
        for mine, its in zip(self.teacher.parameters(), student, strict=True):
            mine.lerp_(its, 1 - momentum)


def compute_outputs(crops: Tensor, backbone: Any, projector: nn.Module, last: nn.Module) -> Tensor:
    return last(F.gelu(projector(backbone.tokens(crops).mean(1))))


def make_backbone(**fields: Any) -> Any:
    torch.manual_seed(1)
    given = {"image_size": 8, "patch_size": 4, "width": 12, "depth": 2, "heads": 2, "classes": 0, **fields}
    return vitrail.create("vit_tiny_patch16_224", **given)


def make_task(**fields: Any) -> SelfDistillation:
    return SelfDistillation(make_backbone(**fields))


def make_data(count: int = 24) -> DatasetSplits:
    """Noise around one color per class."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % 3
    images = random.integers(40, 200, (3, 1, 1, 3))[labels] + random.integers(-40, 40, (count, 10, 10, 3))
    arrays = ArrayDataset(images.astype(np.uint8), labels, ("red", "green", "blue"), "colors")
    return DatasetSplits(name="colors", train=arrays, val=arrays, classes=arrays.classes)


def build_toy_task(request: Request, context: BuildContext) -> TaskSetup:
    settings = parse_task_settings(TASK, request.recipe)
    return build_image_task(request, context, lambda model: SelfDistillation(model, settings))


TASK = TaskKind(name="toy_task", settings=ToySettings, build=build_toy_task, needs_classes=False)
