"""Tokens before the patches."""

import torch
from torch import Tensor


def prepend_tokens(patches: Tensor, *tokens: Tensor | None) -> Tensor:
    """Put learned tokens, each (1, E, D), before the patches of every image: (B, n, D) → (B, N, D)."""
    return torch.cat([*(each.expand(patches.shape[0], -1, -1) for each in tokens if each is not None), patches], dim=1)
