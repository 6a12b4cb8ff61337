"""Weight initialization as in BEiT's code, which EVA-02's code shares."""

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from vitrail.layers.residual import LayerScale
from vitrail.models.parts.qv_bias import KeylessBiasLinear


def init_scaled_layers(model: nn.Module, blocks: Iterable[Any]) -> None:
    """Initialize every layer; the last maps of the branches are divided by √(2·number of the block)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.start)
        if isinstance(module, KeylessBiasLinear):
            nn.init.zeros_(module.qv_bias)
    for number, block in enumerate(blocks, start=1):
        for last in (block.attn.proj, block.mlp.fc2):
            last.weight.div_(math.sqrt(2 * number))
