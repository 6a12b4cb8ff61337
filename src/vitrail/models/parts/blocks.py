"""Stacks of encoder blocks: made, and found in a model."""

from collections.abc import Callable

from torch import nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import SelfAttention
from vitrail.layers.block import Activation, Block
from vitrail.layers.positions import RelativePositions, RotaryPositions
from vitrail.models.base.contract import ImageModel

Rates = tuple[float, float, float]  # dropout, attention dropout, stochastic depth


def make_blocks(
    depth: int,
    width: int,
    heads: int,
    mlp_width: int,
    *,
    norm_eps: float,
    rates: Rates,
    kind: type[Block] = Block,
    activation: Activation = "gelu",
    qkv_bias: bool = True,
    layer_scale: float | None = None,
    positions: Callable[[], RelativePositions | RotaryPositions | None] = lambda: None,
) -> nn.ModuleList:
    """Equal blocks, each with its own weights and positions; stochastic depth grows from 0 to the rate of the last."""
    dropout, attention_dropout, stochastic_depth = rates
    return nn.ModuleList(
        kind(
            width,
            heads,
            mlp_width,
            activation=activation,
            qkv_bias=qkv_bias,
            norm_eps=norm_eps,
            layer_scale=layer_scale,
            dropout=dropout,
            attention_dropout=attention_dropout,
            stochastic_depth=scale_rate(stochastic_depth, layer, depth),
            positions=positions(),
        )
        for layer in range(depth)
    )


def scale_rate(last: float, layer: int, depth: int) -> float:
    """The rate of a layer if it grows linearly from 0 at the first to `last`."""
    return last * layer / max(depth - 1, 1)


def list_plain_blocks(model: nn.Module, wrapper: type[nn.Module], verb: str, hint: str) -> list[Block]:
    """The blocks of a model that a wrapper of all blocks can run; an error for models with other blocks."""
    kind = type(model).__name__
    if not isinstance(model, ImageModel) or len(model.levels) > 1 or not model.final_norm:
        raise ConfigError(f"{kind} has no blocks of tokens to {verb}; {hint}")
    blocks = [model.get_submodule(name) for level in model.levels for name in level.blocks]
    if isinstance(blocks[0], wrapper):
        raise ConfigError(f"this {kind} {verb}s tokens already; expected the model it was made from")
    plain = [block for block in blocks if type(block) is Block and type(block.attn) is SelfAttention]
    if len(plain) < len(blocks):
        raise ConfigError(f"{kind} has its own kind of blocks, so that it cannot {verb} tokens; {hint}")
    return plain
