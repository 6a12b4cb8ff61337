"""Layers between a branch and the residual stream: layer scale and stochastic depth."""

import torch
from torch import Tensor, nn


class LayerScale(nn.Module):
    """A learned factor for each channel, small at first, so that deep networks start as the identity (Touvron 2021)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class StochasticDepth(nn.Module):
    """In training, drops the branch of a sample with the given rate and scales the others up to match (Huang 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        return x * x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)
