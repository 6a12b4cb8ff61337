"""BYOL (Grill 2020, arXiv 2006.07733): predict, from one view, a momentum teacher's projection of the other view.

B batch, D width of the features, d of the projections.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.images.augment.views import View
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import ByolSettings
from vitrail.tasks.metric import Metric
from vitrail.tasks.pretraining.parts.projection_heads import make_regression_projector
from vitrail.tasks.pretraining.parts.self_distillation import MomentumTeacher
from vitrail.tasks.pretraining.parts.views import TwoViewTask, make_view_augmentation
from vitrail.tasks.pretraining.pretraining import Pretraining, make_pretraining_kind
from vitrail.tasks.task import Source

JITTER = (0.4, 0.4, 0.2, 0.1)  # of brightness, contrast, saturation and hue
BLUR_RATES = (1.0, 0.1)  # of the first and the second view


class Byol(TwoViewTask):
    """Both views of an image get similar features, without negatives: predictor and teacher prevent a collapse.

    The teacher is the moving average of backbone and projector. It starts as their copy, so that a run from a
    checkpoint has a teacher as good as its model; the authors draw its weights separately. Its batch norms use the
    statistics of the batch. The two views go through the model one after the other, so each has its own statistics.
    """

    metrics = (*Pretraining.metrics, Metric(name="cosine", label="cosine similarity to the teacher"))
    averages_itself = True
    no_accumulation_reason = "its batch norms use the statistics of a micro-batch; use a smaller `batch`"

    def __init__(self, backbone: Any, settings: ByolSettings | None = None) -> None:
        settings = settings or ByolSettings()
        super().__init__(backbone, settings)
        self.settings, hidden, out = settings, settings.projector_width, settings.projection_width
        self.views = {
            name: View(
                make_view_augmentation(
                    settings, JITTER, area=settings.area, blur=settings.blur * blur, solarize=solarize
                ),
                settings.view_size,
            )
            for name, blur, solarize in zip(("first", "second"), BLUR_RATES, (0.0, settings.solarize), strict=True)
        }
        self.projector = make_regression_projector(self.feature_width, hidden, out)
        self.predictor = make_regression_projector(out, hidden, out)
        self.teacher = MomentumTeacher(self.student)

    @property
    def student(self) -> dict[str, nn.Module]:
        """The modules that the teacher has too."""
        return {"backbone": self.backbone, "projector": self.projector}

    def initialize(self, source: Source, recipe: Recipe) -> None:
        super().initialize(source, recipe)
        self.teacher.copy_student(self.student)

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ARG002
        views = [self.normalize(batch[name][0]) for name in ("first", "second")]
        features = [self.backbone(view) for view in views]
        predictions = [self.predictor(self.projector(each)) for each in features]
        with torch.no_grad():
            targets = [self.teacher["projector"](self.teacher["backbone"](view)) for view in views]
        loss, cosine = compare_with_targets(predictions, targets)
        return loss, {"cosine": cosine, "spread": self.measure_spread(torch.cat(features))}

    def after_step(self, clock: Clock) -> None:
        self.teacher.follow(self.student, self.settings.teacher_momentum.at(clock))

    def list_compiled_modules(self) -> list[nn.Module]:
        return [self.backbone, self.teacher["backbone"]]


def compare_with_targets(predictions: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and the mean cosine, of the predictions (B, d) from each view and the targets of the other view.

    The loss is ‖q − z‖² of unit vectors, 2 − 2·cos, averaged over the images and summed over both directions: from 0
    to 8. It is 0 if predictions and targets agree, and also if all of them are equal.
    """
    pairs = zip(predictions, reversed(targets), strict=True)
    cosines = torch.stack([F.cosine_similarity(mine.float(), its.float()).mean() for mine, its in pairs])
    return (2 - 2 * cosines).sum(), cosines.detach().mean()


TASK = make_pretraining_kind("byol", ByolSettings, Byol)
