"""LARS (You 2017, arXiv 1708.03888), as SimCLR, BYOL and MAE use it: SGD whose step follows the norm of each weight.

You divides by |gradient| + decay · |weight|, as timm.optim.Lars does; here it is |gradient + decay · weight|, as in
the code of the three. Without weight decay both are equal. The learning rate multiplies the momentum, as in BYOL, MAE
and torch's SGD; in SimCLR it is inside, which differs only while the learning rate changes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.train.weightwise_optimizer import WeightwiseOptimizer


class Lars(WeightwiseOptimizer):
    """Momentum SGD with a trust ratio; biases and norms (at most one axis) have neither a ratio nor weight decay."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def update_weight(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if weight.ndim > 1:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
            size, slope = weight.norm(), gradient.norm()
            ratio = torch.where((size > 0) & (slope > 0), group["trust"] * size / slope, 1.0)
            gradient = gradient * ratio
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        weight.add_(state["momentum_buffer"].mul_(group["momentum"]).add_(gradient), alpha=-group["lr"])
