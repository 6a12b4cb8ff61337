"""Swin (Liu 2021, arXiv 2103.14030) and Swin-V2 (Liu 2021, arXiv 2111.09883): attention within windows that shift.

B batch, n = h·w tokens, D width, H heads, K width of a head, r×c tokens of a window; h, w and D change by stage. Every
second block shifts its windows by half their size. Maps that are not made of whole windows are padded with zeros, as in
torchvision and transformers; timm shifts before it pads, so that its outputs differ for such sizes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.block import Block
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_grid, check_heads, pair
from vitrail.models.base.contract import Level, make_patch_sizes
from vitrail.models.base.family import Family
from vitrail.models.base.init import init_small_linear
from vitrail.models.names import swin_names
from vitrail.models.parts.blocks import scale_rate
from vitrail.models.parts.config_fields import DropRates
from vitrail.models.parts.head import make_head, zero_head
from vitrail.models.parts.qv_bias import KeylessBiasLinear
from vitrail.models.parts.stages import StagedModel, check_stages
from vitrail.models.parts.windows import OffsetBias, WindowAttention, check_windows, init_offset_biases, look_up_offsets

NORM_EPS = 1e-5
BIAS_WIDTH = 512  # of the MLP that computes the biases of Swin-V2
MAX_BIAS = 16.0


@dataclass(frozen=True, kw_only=True)
class SwinConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 4
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    version: Literal[1, 2] = 1  # 2: cosine attention, computed biases, norms after the branches
    stages: tuple[int, ...] = (2, 2, 6, 2)  # blocks per stage; each stage but the first halves the grid
    widths: tuple[int, ...] = (96, 192, 384, 768)  # channels of a token, per stage
    heads: tuple[int, ...] = (3, 6, 12, 24)  # attention heads per stage, each width / heads wide
    windows: int | tuple[int, ...] = 7  # rows and columns of a window, per stage or one number for all
    trained_windows: tuple[int, ...] | None = None  # of version 2 in pre-training, which scale offsets; none: `windows`
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    dynamic: bool = False  # accept any multiple of the patch size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        windows = (self.windows,) * len(self.stages) if isinstance(self.windows, int) else self.windows
        object.__setattr__(self, "windows", windows)
        trained = windows if self.trained_windows is None else self.trained_windows
        check_stages(self.stages, widths=self.widths, heads=self.heads, windows=windows, trained_windows=trained)
        for width, heads in zip(self.widths, self.heads, strict=True):
            check_heads(width, heads)
        if self.trained_windows is not None and self.version == 1:
            raise ConfigError("trained_windows of a Swin of version 1, whose biases are a table; expected none")
        patch = pair(self.patch_size)
        if self.version == 1:  # a file of version 2 fits any window, and does not say which it was trained with
            check_windows(windows, pair(self.image_size), patch, patch)
        check_grid(pair(self.image_size), patch)


class Swin(StagedModel):
    """Attention within windows, which every second block shifts by half a window."""

    config: SwinConfig
    first_filters = "patch_embed.proj.weight"

    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config)
        patch, total, count = pair(config.patch_size), sum(config.stages), 0
        self.levels = make_levels(config)
        self.sizes = make_patch_sizes(patch, dynamic=config.dynamic)
        self.heads = (("mean", "head"),) if config.classes else ()
        self.patch_embed = PatchEmbed(config.widths[0], patch, config.channels)
        self.patch_norm = nn.LayerNorm(config.widths[0], NORM_EPS)
        self.pos_drop = nn.Dropout(config.dropout)
        self.layers, kind = nn.ModuleList(), Block if config.version == 1 else PostNormBlock
        for stage, (level, depth) in enumerate(zip(self.levels, config.stages, strict=True)):
            blocks, hidden = nn.ModuleList(), round(config.mlp_ratio * level.width)
            for number in range(depth):
                rate = scale_rate(config.stochastic_depth, count + number, total)
                width, heads, dropout = level.width, config.heads[stage], config.dropout
                block = kind(width, heads, hidden, norm_eps=NORM_EPS, dropout=dropout, stochastic_depth=rate)
                block.attn = make_attention(config, stage, level.grid, shifted=number % 2 == 1)
                blocks.append(block)
            count += depth
            merge = PatchMerge(config.widths[stage - 1], level.width, norm_first=config.version == 1) if stage else None
            self.layers.append(SwinStage(merge, blocks))
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code: version 2 starts as the identity, since its last norms are zero; so is the head."""
        init_small_linear(self)
        init_offset_biases(self)
        for module in self.modules():
            if isinstance(module, CosineAttention):
                nn.init.constant_(module.logit_scale, math.log(10))
                nn.init.zeros_(module.qkv.get_parameter("qv_bias"))
            elif isinstance(module, PostNormBlock):
                nn.init.zeros_(module.norm1.weight)
                nn.init.zeros_(module.norm2.weight)
        zero_head(self.head)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.check_images(images)
        return self.patch_norm(self.patch_embed(images)), grid

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002  # each attention adds its own
        return self.pos_drop(patches)

    def run_stages(self, x: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Grid]]:
        for stage in self.layers:
            x, grid = stage(x, grid)
            yield x, grid


def make_levels(config: SwinConfig) -> tuple[Level, ...]:
    stride, levels = pair(config.patch_size), list[Level]()
    grid = check_grid(pair(config.image_size), stride)
    for stage, (depth, width) in enumerate(zip(config.stages, config.widths, strict=True)):
        blocks = tuple(f"layers.{stage}.blocks.{number}" for number in range(depth))
        levels.append(Level(grid=grid, stride=stride, width=width, blocks=blocks))
        grid, stride = (-(-grid[0] // 2), -(-grid[1] // 2)), (2 * stride[0], 2 * stride[1])
    return tuple(levels)


def make_attention(config: SwinConfig, stage: int, grid: Grid, *, shifted: bool) -> WindowAttention:
    """The attention of a stage; a window larger than the grid shrinks to it."""
    assert isinstance(config.windows, tuple)
    width, heads = config.widths[stage], config.heads[stage]
    window = (min(config.windows[stage], grid[0]), min(config.windows[stage], grid[1]))
    if config.version == 1:
        bias = OffsetBias(heads, window)
        return WindowAttention(width, heads, window, bias, shifted=shifted, dropout=config.attention_dropout)
    trained = window if config.trained_windows is None else pair(config.trained_windows[stage])
    bias = LogOffsetBias(heads, trained)
    return CosineAttention(width, heads, window, bias, shifted=shifted, dropout=config.attention_dropout)


class SwinStage(nn.Module):
    """Merges 2×2 tokens, then blocks: (B, n, D) and the grid → the same at half the size."""

    def __init__(self, downsample: "PatchMerge | None", blocks: nn.ModuleList) -> None:
        super().__init__()
        self.downsample, self.blocks = downsample, blocks

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        if self.downsample is not None:
            x, grid = self.downsample(x, grid)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


class PatchMerge(nn.Module):
    """A linear map of 2×2 neighbours; an odd grid is padded with zeros."""

    def __init__(self, width: int, out_width: int, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm = nn.LayerNorm(4 * width if norm_first else out_width, NORM_EPS)
        self.reduction = nn.Linear(4 * width, out_width, bias=False)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        x = x.unflatten(1, grid)
        if grid[0] % 2 or grid[1] % 2:
            x = F.pad(x, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
        x = (
            x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5)
        )  # (B, h/2, w/2, 2 columns, 2 rows, D)
        half = (x.shape[1], x.shape[2])
        x = x.flatten(3).flatten(1, 2)
        return self.reduction(self.norm(x)) if self.norm_first else self.norm(self.reduction(x)), half


class PostNormBlock(Block):
    """z' = LN(MSA(z)) + z; z = LN(MLP(z')) + z', so that the residual stream grows slowly with depth."""

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop_path(self.norm1(self.drop(self.attn(x, grid, mask, queries))))
        return x + self.drop_path(self.norm2(self.mlp(x)))


class CosineAttention(WindowAttention):
    """Attention within windows by the cosine of q and k times a learned factor of at most 100; k has no bias."""

    def __init__(
        self, width: int, heads: int, window: Grid, position_bias: nn.Module, *, shifted: bool, dropout: float = 0.0
    ) -> None:
        super().__init__(width, heads, window, position_bias, shifted=shifted, bias=False, dropout=dropout)
        self.qkv = KeylessBiasLinear(width)
        self.logit_scale = nn.Parameter(torch.empty(heads, 1, 1))  # its logarithm

    def project(
        self, x: Tensor, grid: Grid | None = None, mask: Tensor | None = None, queries: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, mask = super().project(x, grid, mask, queries)
        scale = self.logit_scale.clamp(max=math.log(100)).exp() * math.sqrt(q.shape[-1])  # attention divides by √K
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), v, mask


class LogOffsetBias(nn.Module):
    """The bias of each offset computed by an MLP from its logarithm, so that it extends to larger windows."""

    def __init__(self, heads: int, trained: Grid) -> None:
        super().__init__()
        self.trained = trained  # rows and columns of the window that scales the offsets
        self.mlp = nn.Sequential(nn.Linear(2, BIAS_WIDTH), nn.ReLU(), nn.Linear(BIAS_WIDTH, heads, bias=False))

    def forward(self, size: Grid) -> Tensor:
        """For all pairs of tokens of a window: (H, r·c, r·c)."""
        weight = self.mlp[0].get_parameter("weight")
        rows, columns = (
            torch.arange(side - 1, -side, -1, device=weight.device) * (8 / max(trained - 1, 1))
            for side, trained in zip(size, self.trained, strict=True)
        )  # query − key
        offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)  # (2r−1, 2c−1, 2)
        offsets = offsets.sign() * (offsets.abs() + 1).log2() / 3
        table = MAX_BIAS * self.mlp(offsets.to(weight.dtype)).sigmoid()
        return look_up_offsets(table.permute(2, 0, 1), size)


SIZES = {
    "tiny": SwinConfig(),
    "small": SwinConfig(stages=(2, 2, 18, 2)),
    "base": SwinConfig(stages=(2, 2, 18, 2), widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32)),
    "large": SwinConfig(stages=(2, 2, 18, 2), widths=(192, 384, 768, 1536), heads=(6, 12, 24, 48)),
}
LARGER = [(size, window, pixels) for size in ("base", "large") for window, pixels in ((16, 256), (24, 384))]


def configure_v2(size: str, window: int, pixels: int, trained: tuple[int, ...] | None = None) -> SwinConfig:
    return replace(SIZES[size], version=2, windows=window, image_size=pixels, trained_windows=trained)


PRESETS = {
    **{f"swin_{size}_patch4_window7_224": config for size, config in SIZES.items()},
    **{f"swin_{s}_patch4_window12_384": replace(SIZES[s], windows=12, image_size=384) for s in ("base", "large")},
    "swin_s3_tiny_224": replace(SIZES["tiny"], windows=(7, 7, 14, 7)),  # windows found by a search (Chen 2021)
    "swin_s3_small_224": replace(SIZES["small"], windows=(14, 14, 14, 7)),
    "swin_s3_base_224": replace(SIZES["small"], stages=(2, 2, 30, 2), windows=(7, 7, 14, 7)),
    **{f"swinv2_{s}_window{w}_256": configure_v2(s, w, 256) for s in ("tiny", "small", "base") for w in (8, 16)},
    **{f"swinv2_{s}_window12_192": configure_v2(s, 12, 192) for s in ("base", "large")},
    **{f"swinv2_{s}_window12to{w}_192to{px}": configure_v2(s, w, px, (12, 12, 12, 6)) for s, w, px in LARGER},
}
ALIASES = {
    **{f"Swin-{size[0].upper()}": f"swin_{size}_patch4_window7_224" for size in SIZES},
    **{f"Swin-{size[0].upper()}@384": f"swin_{size}_patch4_window12_384" for size in ("base", "large")},
    **{f"SwinV2-{s[0].upper()}/{w}": f"swinv2_{s}_window{w}_256" for s in ("tiny", "small", "base") for w in (8, 16)},
}
FAMILY = Family(
    name="swin", config=SwinConfig, build=Swin, presets=PRESETS, aliases=ALIASES, checkpoint=swin_names.CHECKPOINT
)
