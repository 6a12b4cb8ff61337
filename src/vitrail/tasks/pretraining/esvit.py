"""EsViT (Li 2021, arXiv 2106.09785): DINO for crops, and in addition for pairs of patches that match.

B batch, V crops of an image, of which the first 2 are global, n patches of a crop, D width, K prototypes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import EsvitSettings
from vitrail.tasks.metric import CollapseSign
from vitrail.tasks.pretraining.parts.self_distillation import (
    GLOBAL_CROPS,
    ONE_HOT_SIGN,
    UNIFORM_SIGN,
    SelfDistillation,
    cross_entropy_between_crops,
)
from vitrail.tasks.pretraining.pretraining import make_pretraining_kind


class Esvit(SelfDistillation):
    """Each patch of the student also predicts the prototypes of the teacher's patch that is most similar to it."""

    collapse_signs: ClassVar[tuple[CollapseSign, ...]] = (
        *SelfDistillation.collapse_signs,
        *(replace(sign, metric="region_entropy") for sign in (UNIFORM_SIGN, ONE_HOT_SIGN)),
    )
    settings: EsvitSettings

    def __init__(self, backbone: Any, settings: EsvitSettings) -> None:
        super().__init__(backbone, settings, heads=("head", "head_dense"))  # the authors' names

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        crops, size, temperature = self.load_crops(batch), batch.size, self.settings.student_temperature
        features, patches = encode_crops(self.backbone, crops, size)
        student = self.heads["head"](features).unflatten(0, (-1, size))  # (V, B, K)
        student_patches = apply_to_patches(self.heads["head_dense"], patches)
        of_teacher = GLOBAL_CROPS * size  # crops
        with torch.no_grad():
            teacher_features, teacher_patches = encode_crops(self.teacher["backbone"], [crops[0][:of_teacher]], size)
            teacher = self.teacher["head"](teacher_features).unflatten(0, (-1, size))
            targets, entropy = self.compute_targets(teacher, self.centres["head"], clock)
            regions = torch.stack(apply_to_patches(self.teacher["head_dense"], teacher_patches))  # (2, B, n, K)
            region_targets, region_entropy = self.compute_targets(regions, self.centres["head_dense"], clock)
            matches = match_patches(patches, teacher_patches)
        view_loss = cross_entropy_between_crops(student, targets, temperature)
        region_loss = cross_entropy_between_patches(student_patches, region_targets, matches, temperature)
        weight = self.settings.region_weight
        return (1 - weight) * view_loss + weight * region_loss, {
            "view_loss": view_loss.detach(),
            "region_loss": region_loss.detach(),
            **self.measure_step(features[:of_teacher], targets, view_loss, entropy),
            "region_entropy": region_entropy / math.log(self.settings.prototypes),
        }


def encode_crops(backbone: Any, crops: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Pooled features of all crops, (V·B, D), and the patches of each crop after the final norm: V times (B, n, D)."""
    tokens = [backbone.tokens(each) for each in crops]
    pooled = torch.cat([backbone.logits(each) for each in tokens])
    return pooled, [crop for each in tokens for crop in each[:, backbone.prefix :].split(size)]


def apply_to_patches(head: nn.Module, patches: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a head for the patches of each crop, in one pass: V times (B, n, D) → V times (B, n, K)."""
    rows = head(torch.cat([each.flatten(0, 1) for each in patches])).split([each[..., 0].numel() for each in patches])
    return [row.unflatten(0, each.shape[:2]) for row, each in zip(rows, patches, strict=True)]


def match_patches(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[list[Tensor]]:
    """By crop of the student and of the teacher, the teacher's patch with the largest cosine: indices (B, n)."""
    units = [F.normalize(each.detach(), dim=-1).transpose(1, 2) for each in teacher]
    return [[(each.detach() @ unit).argmax(-1) for unit in units] for each in student]


def cross_entropy_between_patches(
    student: Sequence[Tensor], targets: Tensor, matches: Sequence[Sequence[Tensor]], temperature: float
) -> Tensor:
    """Mean over pairs of crops, and then patches of the student's crop: V times (B, n, K), (2, B, n, K)."""
    total, pairs = torch.zeros((), device=targets.device), 0
    for crop, outputs in enumerate(student):
        others = [teacher for teacher in range(len(targets)) if teacher != crop]
        chosen = [gather_patches(targets[teacher], matches[crop][teacher]) for teacher in others]
        outputs = outputs.float() / temperature
        rest = len(others) * outputs.logsumexp(-1) - (sum(chosen[1:], chosen[0]) * outputs).sum(-1)
        total, pairs = total + rest.mean(), pairs + len(others)
    return total / pairs


def gather_patches(values: Tensor, indices: Tensor) -> Tensor:
    """(B, m, K) at the indices (B, n) → (B, n, K)."""
    return values.gather(1, indices[..., None].expand(-1, -1, values.shape[-1]))


TASK = make_pretraining_kind("esvit", EsvitSettings, Esvit)
