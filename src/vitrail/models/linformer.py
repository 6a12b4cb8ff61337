"""A ViT with Linformer attention (Wang 2020, arXiv 2006.04768): tokens attend to k mixtures of all tokens.

B batch, n = h·w patches, N = 1 + n tokens, D width, H heads, K width of a head, k mixtures, P projections
per layer. The cost grows linearly with N.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import attention, merge_heads, split_heads
from vitrail.layers.block import Block
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample
from vitrail.models.base.checkpoint_side import RESAMPLED, CheckpointSide
from vitrail.models.base.checks import pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.parts.encoder import EncoderConfig, PatchEncoder, make_blocks, make_head, zero_head


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(EncoderConfig):
    projected: int = 64  # the paper's k: mixtures of all tokens that serve as keys and values
    shared: Literal["none", "heads", "kv", "layers"] = (
        "kv"  # share a projection between heads, also k and v, also layers
    )


class Linformer(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the class token (B, D)."""

    config: LinformerConfig
    prefix_tokens = classifier_tokens = ("class",)
    first_filters = "patch_embed.proj.weight"
    no_maps_reason = "its keys are mixtures of all tokens, so there are no weights per token"
    no_dropping_reason = "its projections mix a fixed number of tokens"

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        width, depth, patch = config.width, config.depth, pair(config.patch_size)
        self.declare_level(patch)
        tokens = self.prefix + math.prod(self.grid)
        projections = {"none": 2 * config.heads, "heads": 2, "kv": 1, "layers": 0}[config.shared]

        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, width))
        self.projection = None if projections else nn.Parameter(torch.empty(1, tokens, config.projected))
        self.pos_drop = nn.Dropout(config.dropout)
        rates, eps = (config.dropout, 0.0, config.stochastic_depth), config.norm_eps
        mlp_width = config.mlp_width or 4 * width
        self.blocks = make_blocks(depth, width, config.heads, mlp_width, norm_eps=eps, rates=rates, kind=LinformerBlock)
        for block in self.blocks:
            table = nn.Parameter(torch.empty(projections, tokens, config.projected)) if projections else None
            block.attn = LinformerAttention(width, config.heads, self.grid, table, dropout=config.attention_dropout)
        self.norm = nn.LayerNorm(width, eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in a ViT, and the projections as in Linformer's code; the head is zero."""
        init_layers(self)
        nn.init.zeros_(self.cls_token)
        nn.init.normal_(self.pos_embed, std=0.02)
        for name, tables in self.named_parameters():
            if name.endswith("projection"):
                for table in tables:
                    nn.init.xavier_uniform_(table, gain=1 / math.sqrt(2))
        zero_head(self.head)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:
        shared = None if self.projection is None else resample_projection(self.projection, self.grid, grid)
        for layer, block in enumerate(self.blocks):
            x = block(x, grid, queries if layer == len(self.blocks) - 1 else None, shared)
        return x


class LinformerBlock(Block):
    """The encoder block, which also passes the projection shared by all layers to its attention."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # its attention takes no mask
        self, x: Tensor, grid: Grid | None = None, queries: int | None = None, shared: Tensor | None = None
    ) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, grid, queries, shared, use_reentrant=False)
        return self.compute(x, grid, queries, shared)

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, grid: Grid | None, queries: int | None, shared: Tensor | None = None
    ) -> Tensor:
        x = x[:, :queries] + self.drop_path(self.drop(self.attn(self.norm1(x), grid, queries, shared)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class LinformerAttention(nn.Module):
    """Queries from all tokens, keys and values from k mixtures of them: (B, N, D) → (B, N, D).

    `projection` is (P, N, k): one for keys and values; or one for each; or one for each per head. Keys and values have
    no bias: that of keys would not change the softmax, that of values is redundant with the bias of `proj`.
    """

    def __init__(
        self, width: int, heads: int, grid: Grid, projection: nn.Parameter | None = None, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.grid, self.dropout = heads, grid, dropout
        self.projection = projection  # None: passed with every call
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, grid: Grid | None = None, queries: int | None = None, shared: Tensor | None = None
    ) -> Tensor:
        table = self.projection if shared is None else shared
        if table is None:
            raise ConfigError("no projection; expected one in this layer, or the shared one with every call")
        table = table if grid is None or shared is not None else resample_projection(table, self.grid, grid)
        if table.shape[1] != x.shape[1]:
            raise ConfigError(
                f"{x.shape[1]} tokens; expected {table.shape[1]}, the length of the projection: "
                "pass a grid to resample it, or another projection"
            )
        e, f = (table, table) if len(table) == 1 else table.chunk(2)  # each (1 or H, N, k)
        dropout = self.dropout if self.training else 0.0
        q = split_heads(self.q(x[:, :queries]), self.heads)
        if len(e) == 1:  # (eᵀx)·W = eᵀ(x·W), so W is applied to k tokens instead of N
            mixed = e[0].T @ x  # (B, k, D)
            k = split_heads(self.k(mixed), self.heads)
            v = split_heads(self.v(mixed if e is f else f[0].T @ x), self.heads)
            return self.proj(merge_heads(attention(q, k, v, dropout=dropout)))
        k, v = split_heads(self.k(x), self.heads), split_heads(self.v(x), self.heads)
        return self.proj(merge_heads(linear_attention(q, k, v, e, f, dropout)))


def linear_attention(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor, dropout: float = 0.0) -> Tensor:
    """softmax(q·(eᵀk)ᵀ/√K)·(fᵀv), eq. 7: (B, H, Nq, K), twice (B, H, N, K), twice (1 or H, N, k) → (B, H, Nq, K)."""
    return attention(q, e.transpose(-2, -1) @ k, f.transpose(-2, -1) @ v, dropout=dropout)


def resample_projection(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """The projections resampled (bicubic) to another grid and rescaled to keep their sums: (P, N, k)."""
    resized = resample(table, old, new)
    if resized is table:
        return table
    prefix, patches = resized.tensor_split([table.shape[1] - math.prod(old)], dim=1)
    return torch.cat((prefix, patches * (math.prod(old) / (new[0] * new[1]))), dim=1)


SIZES = {
    "tiny": LinformerConfig(width=192, heads=3),
    "small": LinformerConfig(width=384, heads=6),
    "base": LinformerConfig(),
}
SHAPES = ((16, 224), (16, 384), (8, 224))  # of 197, 577 and 785 tokens
PRESETS = Presets(
    lambda: {
        f"linformer_{size}_patch{patch}_{pixels}": replace(SIZES[size], patch_size=patch, image_size=pixels)
        for size in SIZES
        for patch, pixels in SHAPES
    }
)
CHECKPOINT = CheckpointSide(resampled={**RESAMPLED, "projection": "sums"})
FAMILY = Family("linformer", LinformerConfig, Linformer, PRESETS, checkpoint=CHECKPOINT)
