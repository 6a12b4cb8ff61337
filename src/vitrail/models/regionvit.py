"""RegionViT (Chen 2021, arXiv 2106.02689): every region of 7×7 local tokens has a token of its own.

In a block, the tokens of all regions attend to each other; then each one and the local tokens of its region do. The
head reads the mean of the region tokens. B batch, n = h·w local tokens, R regions of m = r·r tokens each, D width,
H heads; h, w, R and D change by stage. Images may have any multiple of a region; later grids are padded to whole ones.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention, join_masks, merge_heads
from vitrail.layers.block import Block
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_small_linear
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import (
    check_stages,
    flatten_map,
    make_halved_levels,
    make_stage_blocks,
    name_blocks,
    unflatten_map,
)
from vitrail.models.parts.windows import OffsetBias, TokenWindows, WindowAttention, WindowMixing, init_offset_biases

NORM_EPS = 1e-6
MAP_NORM_EPS = 1e-5  # of norms between convolutions


@dataclass(frozen=True, kw_only=True)
class RegionViTConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, others work too
    patch_size: int = 4  # pixels of a local token in the first stage; each next stage joins 2×2 tokens
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the region tokens
    window: int = 7  # rows and columns of local tokens in a region
    convolutions: bool = True  # three convolutions of 3×3 make the local tokens; False: one of twice the patch size
    position_convolution: bool = False  # a convolution within each channel after the first block of a stage
    stages: tuple[int, ...] = (2, 2, 8, 2)  # blocks per stage
    widths: tuple[int, ...] = (64, 128, 256, 512)  # channels of a token, per stage; each a multiple of the one before
    heads: tuple[int, ...] = (2, 4, 8, 16)  # attention heads per stage, each width / heads wide
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    dynamic: ClassVar[bool] = True  # takes other sizes at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self)
        for width, following in zip(self.widths, self.widths[1:], strict=False):
            if following % width:
                raise ConfigError(f"a width of {following} after {width}; expected a multiple, channels become several")
        if self.convolutions and (self.patch_size != 4 or self.widths[0] % 4):
            raise ConfigError(
                f"convolutions for patches of {self.patch_size} pixels and a width of {self.widths[0]}; expected "
                "4 pixels and a multiple of 4, or convolutions=False"
            )
        tokens = f"a region of {self.window}×{self.window} tokens"
        check_grid(pair(self.image_size), pair(self.patch_size * self.window), tokens)


class RegionViT(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the mean of the region tokens (B, D)."""

    config: RegionViTConfig
    prefix_tokens = classifier_tokens = ("region",)  # one per region
    final_norm = ""  # of region tokens only
    no_tokens_reason = "it has tokens of regions and of their parts, and the head reads those of regions"
    one_size_export_reason = "its regions are cut for one grid"
    no_masking_reason = "its levels have different grids"
    no_dropping_reason = "its regions need a complete grid"

    def __init__(self, config: RegionViTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        region = pair(config.patch_size * config.window)
        self.sizes = ImageSizes(multiple=region, minimum=region)
        self.classifiers = (("region", "head"),) if config.classes else ()
        self.first_filters = f"patch_embed.proj{'.0' if config.convolutions else ''}.weight"
        self.patch_embed = LocalEmbed(config)
        self.cls_token = PatchEmbed(config.widths[0], region, config.channels)
        self.pos_drop = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(RegionStage(config, stage) for stage in range(len(config.stages)))
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code; the head is zero."""
        init_small_linear(self)
        init_offset_biases(self)
        zero_head(self.head)

    def run_stages(self, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The maps of the regions and of the local tokens after each stage, (B, D, h, w)."""
        grid = self.check_images(images)
        regions = unflatten_map(self.cls_token(images), grid)
        local = self.pos_drop(self.patch_embed(images))
        for stage in self.layers:
            regions, local = stage(regions, local)
            yield regions, local

    def forward(self, images: Tensor) -> Tensor:
        *_, (regions, _) = self.run_stages(images)
        return self.logits(self.norm(flatten_map(regions)))

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of the region tokens: (B, R, D) → (B, classes)."""
        return self.head(tokens.mean(1))

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The maps of the local tokens, one per stage: (B, C, H, W) → [(B, D, h, w), …]."""
        return [local for _, local in self.run_stages(images)]


def make_levels(config: RegionViTConfig) -> tuple[Level, ...]:
    stride = pair(config.patch_size)
    blocks = [names[1:] for names in name_blocks([depth + 1 for depth in config.stages], "layers.{}.block.{}")]
    return make_halved_levels(check_grid(pair(config.image_size), stride), stride, config.widths, blocks)


class MapNorm(nn.LayerNorm):
    """A norm over the channels of each place: (B, D, h, w)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, MAP_NORM_EPS)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.LayerNorm
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class LocalEmbed(nn.Module):
    """The local tokens, of overlapping patches: (B, C, H, W) → (B, D, h, w)."""

    def __init__(self, config: RegionViTConfig) -> None:
        super().__init__()
        width, patch = config.widths[0], config.patch_size
        if config.convolutions:
            self.proj = nn.Sequential(
                nn.Conv2d(config.channels, width // 4, 3, 2, 1),
                MapNorm(width // 4),
                nn.GELU(),
                nn.Conv2d(width // 4, width // 2, 3, 2, 1),
                MapNorm(width // 2),
                nn.GELU(),
                nn.Conv2d(width // 2, width, 3, 1, 1),
            )
        else:
            self.proj = nn.Conv2d(config.channels, width, 2 * patch, patch, patch - 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images)


class RegionStage(nn.Module):
    """Halves both grids, but in the first stage; then blocks: the maps of regions and local tokens, (B, D, h, w)."""

    def __init__(self, config: RegionViTConfig, stage: int) -> None:
        super().__init__()
        width, heads, window = config.widths[stage], config.heads[stage], config.window
        dropout, self.window = config.attention_dropout, window
        self.block = nn.ModuleList([RegionDownsample(config.widths[stage - 1], width) if stage else nn.Identity()])
        for block in make_stage_blocks(
            config,
            stage,
            round(config.mlp_ratio * width),
            lambda _: RegionAttention(width, heads, window, dropout=dropout),
            norm_eps=NORM_EPS,
            kind=RegionBlock,
        ):
            block.norm0 = nn.LayerNorm(width, NORM_EPS)
            self.block.append(block)
        peg = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.peg = peg if config.position_convolution else None

    def forward(self, regions: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        downsample, *blocks = self.block
        regions, local = downsample(regions), downsample(local)
        grid, real = (self.window * regions.shape[2], self.window * regions.shape[3]), (local.shape[2], local.shape[3])
        mask = mask_padding(real, TokenWindows(grid, pair(self.window)), local.device)
        x = join_tokens(regions, local, grid)
        for number, block in enumerate(blocks):
            x = block(x, grid, mask=mask)
            if self.peg is not None and number == 0:
                maps = [each + self.peg(each) for each in split_tokens(x, grid, real, self.window)]
                x = join_tokens(maps[0], maps[1], grid)
        return split_tokens(x, grid, real, self.window)


def join_tokens(regions: Tensor, local: Tensor, grid: Grid) -> Tensor:
    """The tokens of all regions, then the local ones, padded with zeros to the grid: maps → (B, R + n, D)."""
    padding = (0, grid[1] - local.shape[3], 0, grid[0] - local.shape[2])
    return torch.cat([flatten_map(regions), flatten_map(F.pad(local, padding))], dim=1)


def split_tokens(x: Tensor, grid: Grid, real: Grid, window: int) -> tuple[Tensor, Tensor]:
    """The inverse of `join_tokens`, without the padding."""
    regions, local = x.split([x.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], dim=1)
    maps = unflatten_map(regions, (grid[0] // window, grid[1] // window)), unflatten_map(local, grid)
    return maps[0], maps[1][:, :, : real[0], : real[1]]


def mask_padding(real: Grid, windows: TokenWindows, device: torch.device) -> Tensor | None:
    """Which tokens of a window attend to each other if only the `real` part of the grid is not padding: (R, 1+m, 1+m).

    As in the authors' code, the last window hides only what is beyond both ends of the grid.
    """
    if real == windows.grid:
        return None
    sides = [torch.arange(extent, device=device) < end for extent, end in zip(windows.grid, real, strict=True)]
    shown = list[Tensor]()
    for side_shown in (sides[0][:, None].expand(windows.grid), sides[1].expand(windows.grid)):
        token = torch.cat([torch.ones(math.prod(windows.counts), device=device), side_shown.flatten().float()])
        places = windows.split(token[None, :, None]) > 0  # (R, 1 + m, 1)
        shown.append(places & places.mT)
    itself = torch.eye(shown[0].shape[-1], dtype=torch.bool, device=device)  # padding needs something to attend to
    return torch.cat([(shown[0] & shown[1])[:-1], (shown[0] | shown[1])[-1:]]) | itself


class RegionDownsample(nn.Module):
    """Halves a map with a convolution of few channels each: (B, D, h, w) → (B, 2·D, h/2, w/2)."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        convolution = nn.Conv2d(width, out_width, 3, 2, 1, groups=width)
        self.proj = nn.Sequential(MapNorm(width), nn.GELU(), convolution)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class RegionBlock(Block):
    """Attention between regions, then within each region, then an MLP: (B, R + n, D) → (B, R + n, D)."""

    norm0: nn.LayerNorm
    attn: "RegionAttention"

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        assert grid is not None
        regions, local = x.split([x.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], dim=1)
        regions = regions + self.drop_path(self.drop(self.attn.mix_regions(self.norm0(regions))))
        return super().compute(torch.cat([regions, local], dim=1), grid, queries, mask)


class RegionAttention(WindowAttention):
    """Attention within regions, with a bias between local tokens; and with the same weights between regions."""

    def __init__(self, width: int, heads: int, window: int, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, pair(window), OffsetBias(heads, pair(window)), dropout=dropout)
        self.mixing = WindowMixing(dropout)

    def cut(self, grid: Grid) -> TokenWindows:
        return TokenWindows(grid, self.window)

    def mix_regions(self, regions: Tensor) -> Tensor:
        """(B, R, D) → (B, R, D)"""
        q, k, v, _ = SelfAttention.project(self, regions)
        return self.proj(merge_heads(self.mixing(q, k, v)))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        assert grid is not None
        assert queries is None, "the last block computes all tokens"
        q, k, v, _ = SelfAttention.project(self, self.cut(grid).split(x))
        assert self.position_bias is not None
        bias = F.pad(self.position_bias(self.window), (1, 0, 1, 0))[None]  # (1, H, 1 + m, 1 + m)
        if mask is None:
            return q, k, v, bias
        mask = join_masks(mask[:, None], bias)  # (R, H, 1 + m, 1 + m)
        assert mask is not None
        return q, k, v, mask.repeat(q.shape[0] // mask.shape[0], 1, 1, 1)


TINY = RegionViTConfig()
SMALL = RegionViTConfig(widths=(96, 192, 384, 768), heads=(3, 6, 12, 24))
MEDIUM = replace(SMALL, stages=(2, 2, 14, 2), convolutions=False)
BASE = replace(MEDIUM, widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32))
PRESETS = Presets(
    lambda: {
        "regionvit_tiny_224": TINY,
        "regionvit_small_224": SMALL,
        "regionvit_small_w14_224": replace(SMALL, window=14),
        "regionvit_small_w14_peg_224": replace(SMALL, window=14, position_convolution=True),
        "regionvit_medium_224": MEDIUM,
        "regionvit_base_224": BASE,
        "regionvit_base_w14_224": replace(BASE, window=14),
        "regionvit_base_w14_peg_224": replace(BASE, window=14, position_convolution=True),
    }
)
ALIASES = {
    "RegionViT-Ti": "regionvit_tiny_224",
    **{f"RegionViT-{size[0].upper()}": f"regionvit_{size}_224" for size in ("small", "medium", "base")},
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    blocks = side.count_stage_blocks(shapes, r"layers\.(\d+)\.", r"layers\.{}\.block\.(\d+)\.norm0\.weight", first=0)
    first = [f"layers.{stage}.block.1." for stage in range(len(blocks))]
    hidden = [side.get_shape(shapes, f"{name}mlp.fc1.weight", 2) for name in first]
    tables = [side.get_shape(shapes, f"{name}attn.position_bias.table", 3) for name in first]
    convolutions, window = "patch_embed.proj.0.weight" in shapes, (tables[0][1] + 1) // 2
    _, channels, pixels, _ = side.get_shape(shapes, "cls_token.proj.weight", 4)
    fields = side.describe_stages(shapes, channels, blocks, tuple(shape[1] for shape in hidden)) | {
        "patch_size": pixels // window,
        "window": window,
        "convolutions": convolutions,
        "position_convolution": "layers.0.peg.weight" in shapes,
        "heads": tuple(table[0] for table in tables),
        "mlp_ratio": hidden[0][0] / hidden[0][1],
    }
    return side.InferredConfig(fields=fields)


def turn_to_our_table(parts: list[Tensor]) -> Tensor:
    """The authors' table starts at the offset −r//2 and wraps; ours has offset 0 in the middle."""
    table = parts[0]
    extent = math.isqrt(table.shape[1])
    return turn_table(table.unflatten(1, (extent, extent)), 1)


def turn_table(table: Tensor, sign: int) -> Tensor:
    window = (table.shape[1] + 1) // 2
    shift = sign * (window - 1 - window // 2)
    return table.roll((shift, shift), (1, 2))


OFFSETS = side.TensorTransform(turn_to_our_table, lambda table, _: [turn_table(table, -1).flatten(1)])
PER_CHANNEL = side.TensorTransform(lambda parts: parts[0].flatten(), lambda tensor, _: [tensor[None, :, None, None]])
TWICE = side.TensorTransform(lambda parts: parts[0], lambda tensor, _: [tensor, tensor])
PER_CHANNEL_TWICE = side.TensorTransform(
    PER_CHANNEL.to_ours, lambda tensor, heads: 2 * PER_CHANNEL.to_theirs(tensor, heads)
)
AUTHORS = side.SourceNames(
    layout="authors",
    table=(
        *side.parse_table(
            """
            patch_embed.proj.{1,4}.* | per_channel
            {patch_embed.proj.#,patch_embed.proj,cls_token.proj,norm,head}.*
            layers.#.peg.weight
            layers.#.block.#.{norm0,norm1,norm2,mlp.fc#,attn.qkv,attn.proj}.*
            layers.#.block.#.attn.rel_pos -> layers.#.block.#.attn.position_bias.table | offsets
            """,
            per_channel=PER_CHANNEL,
            offsets=OFFSETS,
        ),
        *(
            side.make_entry(  # both names of the same weights, which regions and local tokens share
                (f"layers.#.block.0.{each}.{number}.*" for each in ("proj", "proj_cls")),
                f"layers.#.block.0.proj.{number}.*",
                transform,
            )
            for number, transform in ((0, PER_CHANNEL_TWICE), (2, TWICE))
        ),
    ),
    markers=("cls_token.proj.weight", "layers.0.block.1.attn.rel_pos"),
    details={"wrapper": "model", "preprocessing": {"crop": 0.9}},
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=(AUTHORS,), resampled={})
FAMILY = Family("regionvit", RegionViTConfig, RegionViT, PRESETS, ALIASES, CHECKPOINT)
