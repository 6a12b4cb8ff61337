"""What a training minimises: functions (model, inputs) → (loss, metrics), given to the one loop.

Zs, Zt the logits of student and teacher, ψ the softmax, y the label, y_t = argmax Zt, τ a temperature, λ a weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LossInputs:
    """A batch as the model sees it: normalised, erased, mixed."""

    images: Tensor  # float (B, C, H, W)
    targets: Tensor  # (B, classes), each row sums to 1: label smoothing, Mixup and CutMix are in it
    labels: Tensor  # int64 (B,), before mixing
    indices: Tensor  # int64 (B,), which pictures of the data set


Objective = Callable[[nn.Module, LossInputs], tuple[Tensor, Mapping[str, Tensor]]]


def classification_loss(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy −Σ targets·log softmax(logits), the mean over the batch."""
    logits = model(inputs.images)
    hits = logits.detach().argmax(-1) == inputs.targets.argmax(-1)
    return F.cross_entropy(logits, inputs.targets), {"accuracy": hits.float().mean()}


def soft_distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """τ²·KL(ψ(Zt/τ) ‖ ψ(Zs/τ)), the mean over the batch: DeiT's equation 2 without its factor λ (Hinton 2015)."""
    said, meant = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(said, meant, log_target=True, reduction="batchmean")


def hard_distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """CE(ψ(Zs), y_t), the second half of DeiT's equation 3: what the teacher decides is a label like any other."""
    return F.cross_entropy(student, teacher.argmax(-1))


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """(1 − λ)·CE(class head, y) + λ·(soft or hard distillation of the head that learns from the teacher)."""

    teacher_logits: Callable[[LossInputs], Tensor]  # the teacher's logits (B, classes) to a batch
    kind: Literal["soft", "hard"]
    weight: float  # λ
    temperature: float  # τ, of soft
    uses_distillation_token: (
        bool  # the distillation token's head learns from the teacher; else the class token's learns from both
    )

    def __call__(self, model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        teacher = self.teacher_logits(inputs)
        by_label, by_teacher = (
            model(inputs.images, apart=True) if self.uses_distillation_token else 2 * (model(inputs.images),)
        )
        if self.kind == "soft":
            taught = soft_distillation_loss(by_teacher, teacher, self.temperature)
        else:
            taught = hard_distillation_loss(by_teacher, teacher)
        taught = taught + 0 * teacher.sum()  # the largest of NaNs is a class like any other: they must not go unseen
        loss = (1 - self.weight) * F.cross_entropy(by_label, inputs.targets) + self.weight * taught
        hits = by_label.detach().argmax(-1) == inputs.targets.argmax(-1)
        alike = by_teacher.detach().argmax(-1) == teacher.argmax(-1)
        return loss, {"accuracy": hits.float().mean(), "agreement": alike.float().mean()}
