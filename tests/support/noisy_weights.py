"""Random weights for tests: a head that starts at zero would hide every difference."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def add_weight_noise(module: M, std: float = 0.05) -> M:
    """Adds noise to every parameter, so that no bias, scale or token stays at its starting value."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=std)
    return module.eval()


@torch.no_grad()
def randomise_batch_norms(module: M) -> M:
    """Batch norms as if they had seen pictures: no mean at 0, no variance at 1."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for buffer, low, high in ((norm.running_mean, -0.2, 0.2), (norm.running_var, 0.5, 2.0)):
                assert buffer is not None
                buffer.uniform_(low, high)
    return module
