"""Random weights for tests: a head that starts at zero would hide every difference."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def shake(module: M, std: float = 0.05) -> M:
    """Adds noise to every parameter, so that no bias, scale or token stays at its starting value."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=std)
    return module.eval()
