"""The loss of tasks that predict the next token of a text. B batch, M target tokens, V vocabulary."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def compute_token_loss(
    logits: Tensor, target: Tensor, share: Tensor, *, pad: int, smoothing: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy of logits (B, M, V) and targets (B, M), and the accuracy: means over real tokens, times the share.

    The share is the number of this part's tokens relative to the mean of all parts of a step, micro-batches and
    processes, so that the mean over the parts is that over all tokens of the step.
    """
    logits, target = logits.flatten(0, 1), target.flatten()
    loss = F.cross_entropy(logits, target, ignore_index=pad, label_smoothing=smoothing)
    kept = target != pad
    hits = ((logits.detach().argmax(-1) == target) & kept).sum() / kept.sum()
    return loss * share, {"accuracy": hits * share}
