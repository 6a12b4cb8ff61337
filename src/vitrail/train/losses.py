"""What a training minimises: functions (model, inputs) → (loss, metrics), given to the one loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Inputs:
    """A batch as the model sees it: normalised, erased, mixed."""

    images: Tensor  # float (B, C, H, W)
    targets: Tensor  # (B, classes), each row sums to 1: label smoothing, Mixup and CutMix are in it
    labels: Tensor  # int64 (B,), before mixing


Objective = Callable[[nn.Module, Inputs], tuple[Tensor, Mapping[str, Tensor]]]


def classify(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy −Σ targets·log softmax(logits), the mean over the batch."""
    logits = model(inputs.images)
    hits = logits.detach().argmax(-1) == inputs.targets.argmax(-1)
    return F.cross_entropy(logits, inputs.targets), {"accuracy": hits.float().mean()}
