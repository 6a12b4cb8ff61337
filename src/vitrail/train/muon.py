"""Muon (Jordan 2024): each matrix is updated by the orthogonal matrix nearest to its momentum.

torch.optim.Muon uses the same rule, but orthogonalises in bfloat16, which is 17 times slower than float32 on a CPU
without bfloat16, and supports neither convolution kernels nor matrices that hold several maps, such as q, k, v.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.train.weightwise_optimizer import WeightwiseOptimizer

# Jordan's: steep at zero, so five rounds bring all singular values to about 1
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(WeightwiseOptimizer):
    """Parameter groups may have `parts`, the number of maps stacked in each matrix: 3 for q, k, v."""

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})

    def update_weight(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])  # Nesterov momentum
        parts = ahead.flatten(1).chunk(group["parts"])  # one row per filter of a kernel
        # scaled to the size of AdamW's updates, so that both use the same learning rate (Liu 2025, arXiv 2502.16982)
        moves = [orthogonalise(part) * (0.2 * max(part.shape) ** 0.5) for part in parts]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(torch.cat(moves).view_as(weight), alpha=-group["lr"])


def orthogonalise(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Approximate U Vᵀ of the SVD U S Vᵀ by Newton–Schulz iteration; singular values end between 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
