"""Objectives: functions (model, inputs) → (loss, metrics) that the training loop minimises.

Zs, Zt the logits of student and teacher, ψ the softmax, y the label, y_t = argmax Zt, τ a temperature, λ a weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LossInputs:
    """A batch as the model receives it: after normalisation, random erasing and mixing."""

    images: Tensor  # float (B, C, H, W)
    targets: Tensor  # (B, classes), rows sum to 1; include label smoothing, Mixup and CutMix
    labels: Tensor  # int64 (B,), before mixing
    indices: Tensor  # int64 (B,), positions in the data set


Objective = Callable[[nn.Module, LossInputs], tuple[Tensor, Mapping[str, Tensor]]]


def classification_loss(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy −Σ targets·log softmax(logits), averaged over the batch."""
    logits = model(inputs.images)
    hits = logits.detach().argmax(-1) == inputs.targets.argmax(-1)
    return F.cross_entropy(logits, inputs.targets), {"accuracy": hits.float().mean()}


def soft_distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """τ²·KL(ψ(Zt/τ) ‖ ψ(Zs/τ)), averaged over the batch: DeiT's equation 2 without its factor λ (Hinton 2015)."""
    said, meant = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(said, meant, log_target=True, reduction="batchmean")


def hard_distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """CE(ψ(Zs), y_t), the second term of DeiT's equation 3: the teacher's top class is used as the label."""
    return F.cross_entropy(student, teacher.argmax(-1))


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """(1 − λ)·CE(class head, y) + λ·(soft or hard distillation of the head that learns from the teacher)."""

    teacher_logits: Callable[[LossInputs], Tensor]  # (B, classes)
    kind: Literal["soft", "hard"]
    weight: float  # λ
    temperature: float  # τ, for soft distillation
    uses_distillation_token: bool  # otherwise the class head learns from labels and teacher

    def __call__(self, model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        teacher = self.teacher_logits(inputs)
        by_label, by_teacher = (
            model(inputs.images, apart=True) if self.uses_distillation_token else 2 * (model(inputs.images),)
        )
        if self.kind == "soft":
            taught = soft_distillation_loss(by_teacher, teacher, self.temperature)
        else:
            taught = hard_distillation_loss(by_teacher, teacher)
        taught = taught + 0 * teacher.sum()  # argmax hides NaN in the teacher's logits; this passes it on
        loss = (1 - self.weight) * F.cross_entropy(by_label, inputs.targets) + self.weight * taught
        hits = by_label.detach().argmax(-1) == inputs.targets.argmax(-1)
        alike = by_teacher.detach().argmax(-1) == teacher.argmax(-1)
        return loss, {"accuracy": hits.float().mean(), "agreement": alike.float().mean()}
