"""DINO: self-distillation without labels (Caron 2021, arXiv 2104.14294)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import DinoSettings
from vitrail.tasks.pretraining.parts.self_distillation import (
    GLOBAL_CROPS,
    SelfDistillation,
    cross_entropy_between_crops,
)
from vitrail.tasks.pretraining.pretraining import make_pretraining_kind


class Dino(SelfDistillation):
    """The teacher receives the two global crops, the student all crops."""

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        crops = self.load_crops(batch)
        features = torch.cat([self.backbone(each) for each in crops])  # (V·B, D)
        student = self.heads["head"](features).unflatten(0, (-1, batch.size))  # (V, B, K)
        of_teacher = GLOBAL_CROPS * batch.size  # crops
        with torch.no_grad():
            teacher = self.teacher["head"](self.teacher["backbone"](crops[0][:of_teacher]))
            targets, entropy = self.compute_targets(teacher.unflatten(0, (-1, batch.size)), self.centres["head"], clock)
        loss = cross_entropy_between_crops(student, targets, self.settings.student_temperature)
        return loss, self.measure_step(features[:of_teacher], targets, loss, entropy)


TASK = make_pretraining_kind("dino", DinoSettings, Dino)
