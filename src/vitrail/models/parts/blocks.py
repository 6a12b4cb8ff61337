"""A stack of encoder blocks."""

from collections.abc import Callable

from torch import nn

from vitrail.layers.block import Activation, Block
from vitrail.layers.positions import RelativePositions, RotaryPositions

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
