"""Random weights for tests: a head of zeros would hide every difference."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def add_weight_noise(module: M, std: float = 0.05) -> M:
    """Add noise to every parameter, so that no bias, scale or token keeps its initial value."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=std)
    return module.eval()


@torch.no_grad()
def randomize_batch_norms(module: M) -> M:
    """Set the running statistics of batch norms to random values, as after training."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            for buffer, low, high in ((norm.running_mean, -0.2, 0.2), (norm.running_var, 0.5, 2.0)):
                assert buffer is not None
                buffer.uniform_(low, high)
    return module
