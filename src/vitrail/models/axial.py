"""A ViT with axial attention (Ho 2019, arXiv 1912.12180; Wang 2020, arXiv 2003.07853): along rows, then columns.

B batch, n = h·w tokens, D width, H heads, K width of a head. No class token: it would be in no row and no column.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention, attention, join_masks, merge_heads
from vitrail.layers.block import Mlp, StochasticDepth
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, join_axes, resample
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.parts.encoder import EncoderConfig, make_head, scale_rate, zero_head


@dataclass(frozen=True, kw_only=True)
class AxialConfig(EncoderConfig):
    depth: int = 9  # blocks; each has 4/3 of a ViT's weights, so 9 have as many as a ViT's 12


class Axial(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the mean of the tokens (B, D)."""

    config: AxialConfig
    first_filters = "patch_embed.proj.weight"
    no_dropping_reason = "its attention along rows and columns needs a complete grid"

    def __init__(self, config: AxialConfig) -> None:
        super().__init__(config)
        width, patch = config.width, pair(config.patch_size)
        self.declare_level(patch)
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            AxialBlock(
                width,
                config.heads,
                config.mlp_width or 4 * width,
                self.grid,
                norm_eps=config.norm_eps,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                stochastic_depth=scale_rate(config.stochastic_depth, layer, config.depth),
            )
            for layer in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in a ViT; the head is zero."""
        init_layers(self)
        for module in self.modules():
            if isinstance(module, AxialAttention):
                nn.init.normal_(module.table, std=0.02)
        zero_head(self.head)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002  # each attention adds its own
        return self.drop(patches)

    def tables(self, grid: Grid) -> Tensor:
        """The position tables of the first block, column and row concatenated: (1, n, 2·D)."""
        block: Any = self.blocks[0]
        return join_axes(block.attn_columns.resample_table(grid), block.attn_rows.resample_table(grid))


class AxialBlock(nn.Module):
    """x += rows(LN(x)); x += columns(LN(x)); x += MLP(LN(x)): (B, n, D) → (B, n, D)."""

    recompute = False  # set on a block: trades time for memory, activations are computed again in the backward pass

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        grid: Grid,
        *,
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, norm_eps)
        self.attn_rows = AxialAttention(width, heads, grid[1], rows=True, dropout=attention_dropout)
        self.norm2 = nn.LayerNorm(width, norm_eps)
        self.attn_columns = AxialAttention(width, heads, grid[0], rows=False, dropout=attention_dropout)
        self.norm3 = nn.LayerNorm(width, norm_eps)
        self.mlp = Mlp(width, mlp_width, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.drop_path = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002  # all are computed
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, grid, use_reentrant=False)
        return self.compute(x, grid)

    def compute(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path(self.drop(self.attn_rows(self.norm1(x), grid)))
        x = x + self.drop_path(self.drop(self.attn_columns(self.norm2(x), grid)))
        return x + self.drop_path(self.mlp(self.norm3(x)))


class AxialAttention(SelfAttention):
    """Self-attention within each row, or each column, of a grid, with a learned position table along it.

    A token attends to w or h others, not h·w: `forward` never makes an n×n matrix. `project` expresses the same by a
    mask, for attention maps.
    """

    def __init__(self, width: int, heads: int, length: int, *, rows: bool, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout=dropout)
        self.rows = rows
        table = nn.Parameter(torch.empty(1, length, width))
        self.pos_columns, self.pos_rows = (
            (table, None) if rows else (None, table)
        )  # along a row the position is the column

    @property
    def table(self) -> Tensor:
        return self.get_parameter("pos_columns" if self.rows else "pos_rows")

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        """q, k, v, and the mask joined with the mask of the rows or columns."""
        grid = check_token_grid(x.shape[1], grid)
        q, k, v, _ = super().project(self.add_positions(x, grid), queries=queries)
        return q, k, v, join_masks(same_line_mask(grid, rows=self.rows, device=x.device)[:queries], mask)

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        if mask is not None or queries is not None:
            return super().forward(x, grid, mask, queries)
        grid = check_token_grid(x.shape[1], grid)
        q, k, v, _ = super().project(self.add_positions(x, grid))
        y = axial_attention(q, k, v, grid, rows=self.rows, dropout=self.dropout if self.training else 0.0)
        return self.proj(merge_heads(y))

    def add_positions(self, x: Tensor, grid: Grid) -> Tensor:
        """Add the position tables to the tokens: (B, n, D) → (B, n, D)."""
        return (x.unflatten(1, grid) + self.resample_table(grid).unsqueeze(1 if self.rows else 2)).flatten(1, 2)

    def resample_table(self, grid: Grid) -> Tensor:
        """The table resampled to this grid: (1, w, D) along rows, (1, h, D) along columns."""
        return resample(self.table, (self.table.shape[1], 1), (grid[1] if self.rows else grid[0], 1))


def axial_attention(q: Tensor, k: Tensor, v: Tensor, grid: Grid, *, rows: bool, dropout: float = 0.0) -> Tensor:
    """softmax(q·kᵀ/√K)·v within each row, or each column: q, k, v of (B, H, n, K) → (B, H, n, K)."""
    grid = check_token_grid(q.shape[2], grid)
    order = (0, 2, 1, 3, 4) if rows else (0, 3, 1, 2, 4)
    q, k, v = (x.unflatten(2, grid).permute(order).flatten(0, 1) for x in (q, k, v))  # (B·h, H, w, K) or (B·w, H, h, K)
    lines = attention(q, k, v, dropout=dropout).unflatten(0, (-1, grid[0] if rows else grid[1]))
    return lines.permute((0, 2, 1, 3, 4) if rows else (0, 2, 3, 1, 4)).flatten(2, 3)


def same_line_mask(grid: Grid, *, rows: bool, device: torch.device | None = None) -> Tensor:
    """Whether two tokens are in the same row, or in the same column: (n, n)."""
    place = torch.arange(grid[0] * grid[1], device=device)
    line = place // grid[1] if rows else place % grid[1]
    return line[:, None] == line


def check_token_grid(tokens: int, grid: Grid | None) -> Grid:
    """Return the grid if it has as many places as there are tokens."""
    if grid is None or grid[0] * grid[1] != tokens:
        rows = next(n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
        given = "no grid" if grid is None else f"a grid of {grid[0]}×{grid[1]}"
        raise ConfigError(
            f"{tokens} tokens and {given}; expected (rows, columns) of {tokens} tokens, for example "
            f"{rows}×{tokens // rows}: axial attention needs a complete grid, without a class token"
        )
    return grid


SIZES = {"tiny": AxialConfig(width=192, heads=3), "small": AxialConfig(width=384, heads=6), "base": AxialConfig()}
PATCH_SIZES = {"tiny": (16, 8, 4), "small": (16, 8, 4), "base": (16, 8)}  # rows of 14, 28 and 56 tokens
PRESETS = Presets(
    lambda: {f"axial_{s}_patch{p}_224": replace(SIZES[s], patch_size=p) for s in SIZES for p in PATCH_SIZES[s]}
)
FAMILY = Family("axial", AxialConfig, Axial, PRESETS)
