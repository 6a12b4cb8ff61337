"""Starting values as the ViT authors' code draws them, whatever the model the leaves stand in."""

import math

from torch import nn

from vitrail.layers.pool import AttentionPool
from vitrail.layers.positions import RelativePositions
from vitrail.layers.residual import LayerScale


def init_leaves(model: nn.Module) -> None:
    """Fills every layer inside the model; its own bare parameters (tokens, tables) and head are left to the model."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            for matrix in module.weight.data.chunk({"qkv": 3, "kv": 2}.get(name, 1)):  # each drawn for itself
                nn.init.xavier_uniform_(matrix)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=1e-6 if name in ("fc1", "fc2") else 0.0)
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module)
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.reset_parameters()
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.start)
        elif isinstance(module, RelativePositions):
            nn.init.normal_(module.offsets, std=0.02)
        elif isinstance(module, AttentionPool):
            nn.init.xavier_uniform_(module.latent.data[0])


def lecun_normal_(layer: nn.Linear | nn.Conv2d) -> None:
    """Variance 1/fan-in, cut at two deviations; no bias."""
    std = 1 / math.sqrt(layer.weight[0].numel()) / 0.87962566103423978  # the deviation that the cut takes away
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
