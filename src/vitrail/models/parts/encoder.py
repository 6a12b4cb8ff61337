"""What plain encoders of patches share: fields of configs, kinds of positions, prefix tokens, blocks and the head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import SelfAttention
from vitrail.layers.block import Activation, Block
from vitrail.layers.positions import (
    Grid,
    RelativePositions,
    RotaryPositions,
    join_axes,
    resample,
    sinusoid_1d,
    sinusoid_2d,
)
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_patch_config
from vitrail.models.base.contract import ImageModel


@dataclass(frozen=True, kw_only=True)
class DropRates:
    dropout: float = field(default=0.0, metadata=RATE)  # of tokens and of what branches add to them
    attention_dropout: float = field(default=0.0, metadata=RATE)  # of attention weights
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of the last block; linear from 0 at the first


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DropRates):
    """Of a plain encoder of patches; the defaults are those of ViT-B/16."""

    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 16
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    width: int = 768  # channels of a token
    depth: int = 12  # blocks
    heads: int = 12  # attention heads, each width / heads wide
    mlp_width: int | None = None  # default: 4·width
    norm_eps: float = 1e-6
    dynamic: bool = False  # accept any multiple of the patch size at run time; tables by position are resampled

    def __post_init__(self) -> None:
        check_patch_config(self)


def sinusoid_simple(grid: Grid, width: int) -> Tensor:
    """SimpleViT's table (Beyer 2022, arXiv 2205.01580): sines, then cosines of the column, then of the row: (h·w, D).

    Rates go from 1 to 1/10,000, the last one included. big_vision computes it, and its files do not contain it.
    """
    rates = 10_000.0 ** -torch.linspace(0, 1, width // 4)
    rows, columns = (torch.arange(count)[:, None] * rates for count in grid)
    return join_axes(*(torch.cat((angles.sin(), angles.cos()), dim=1) for angles in (rows, columns)))


FIXED_TABLES: Mapping[str, Callable[[Grid, int], Tensor]] = {
    "sincos": sinusoid_1d,
    "sincos_2d": sinusoid_2d,
    "sincos_simple": sinusoid_simple,
}


def in_attention(kind: str, head_width: int, grid: Grid) -> RelativePositions | RotaryPositions | None:
    """The kinds of positions inside the attention; None for any other kind."""
    if kind == "relative":
        return RelativePositions(head_width, grid)
    return RotaryPositions(head_width) if kind == "rotary" else None


def prepend_tokens(patches: Tensor, *tokens: Tensor | None) -> Tensor:
    """Put learned tokens, each (1, E, D), before the patches of every image: (B, n, D) → (B, N, D)."""
    return torch.cat([*(each.expand(patches.shape[0], -1, -1) for each in tokens if each is not None), patches], dim=1)


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
    """Identical blocks with separate weights and positions; stochastic depth grows from 0 to the rate of the last."""
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


def make_encoder_blocks(
    config: Any,
    mlp_width: int,
    *,
    kind: type[Block] = Block,
    activation: Activation = "gelu",
    qkv_bias: bool = True,
    layer_scale: float | None = None,
    positions: Callable[[], RelativePositions | RotaryPositions | None] = lambda: None,
) -> nn.ModuleList:
    """The same, with the width, depth, heads, eps and rates of a config."""
    return make_blocks(
        config.depth,
        config.width,
        config.heads,
        mlp_width,
        norm_eps=config.norm_eps,
        rates=(config.dropout, config.attention_dropout, config.stochastic_depth),
        kind=kind,
        activation=activation,
        qkv_bias=qkv_bias,
        layer_scale=layer_scale,
        positions=positions,
    )


def scale_rate(last: float, layer: int, depth: int) -> float:
    """The rate of a layer if it grows linearly from 0 at the first to `last`."""
    return last * layer / max(depth - 1, 1)


class PatchEncoder(ImageModel):
    """A model of one level with a table of positions, added to the patches and the class token if there is one."""

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        x = prepend_tokens(patches, self.cls_token) if self.prefix_tokens else patches
        return self.pos_drop(x + self.tables(grid))

    def tables(self, grid: Grid) -> Tensor:
        return resample(self.pos_embed, self.grid, grid)


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


def make_head(width: int, classes: int) -> nn.Linear | nn.Identity:
    """A linear map to the logits; without classes the features are returned unchanged."""
    return nn.Linear(width, classes) if classes else nn.Identity()


def zero_head(*heads: nn.Module | None) -> None:
    """Set the weights to 0, so that training starts from equal probabilities."""
    for head in heads:
        if isinstance(head, nn.Linear):
            nn.init.zeros_(head.weight)
