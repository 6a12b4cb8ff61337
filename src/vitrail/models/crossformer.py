"""CrossFormer (Wang 2021, arXiv 2108.00154) and CrossFormer++ (Wang 2023, arXiv 2303.06908): tokens of several scales.

A token reads patches of four sizes around its place. Even blocks attend within groups of neighbors, odd ones within
groups of tokens that are spread over a larger part of the grid. The biases of the attention are computed from offsets,
so that images may have any multiple of the last stride; grids without whole groups are padded, and the padding is
masked. B batch, n = h·w tokens, m = r·c tokens of a group, D width, H heads; h, w and D change by stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_used, pair
from vitrail.models.base.contract import ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_small_linear
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import (
    StagedModel,
    check_stages,
    flatten_map,
    list_stage_rates,
    make_stage_levels,
    unflatten_map,
)
from vitrail.models.parts.windows import MaskedWindowAttention, Windows, check_windows, look_up_offsets

NORM_EPS = 1e-5
BIAS_RATIO = 16  # widths of a token per width of the MLP that computes biases


@dataclass(frozen=True, kw_only=True)
class CrossFormerConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, others work too
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    kernels: tuple[int, ...] = (4, 8, 16, 32)  # pixels of the patches of one token; the first is its stride
    merge_kernels: tuple[int, ...] = (2, 4)  # tokens of the patches that the next stage reads; the first is its stride
    stages: tuple[int, ...] = (2, 2, 6, 2)  # blocks per stage; odd ones attend at intervals
    widths: tuple[int, ...] = (96, 192, 384, 768)  # channels of a token, per stage
    heads: tuple[int, ...] = (3, 6, 12, 24)  # attention heads per stage, each width / heads wide
    windows: tuple[int, ...] = (7, 7, 7, 7)  # rows and columns of a group, per stage
    intervals: tuple[int, ...] = (8, 4, 2, 1)  # rows and columns between the tokens of a group of odd blocks, per stage
    cooling: bool = False  # a convolution and a norm after every third block but the last, as in CrossFormer++
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    dynamic: ClassVar[bool] = True  # takes other sizes at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, "windows", "intervals")
        for width in self.widths:
            if width < BIAS_RATIO:
                raise ConfigError(f"a width of {width}; expected {BIAS_RATIO} or more, for the MLP of the biases")
        check_used("cooling", self.cooling, False, used=max(self.stages) > 3, users="a stage of more than 3 blocks")
        for name in ("kernels", "merge_kernels"):
            check_kernels(name, vars(self)[name])
        for kernels, widths in ((self.kernels, self.widths[:1]), (self.merge_kernels, self.widths[1:])):
            for width in widths:
                split_width(width, len(kernels))
        first, last = self.kernels[0], self.kernels[0] * self.merge_kernels[0] ** (len(self.stages) - 1)
        check_windows(self.windows, pair(self.image_size), pair(first), pair(last))
        make_levels(self)


def check_kernels(name: str, kernels: tuple[int, ...]) -> None:
    """Check that all kernels can be centered on the same places."""
    if not kernels or any(each < kernels[0] or (each - kernels[0]) % 2 for each in kernels):
        raise ConfigError(f"{name} is {kernels}; expected the smallest first, and all even or all odd")


def split_width(width: int, parts: int) -> list[int]:
    """The channels of each kernel, half as many for each larger one: for 3 parts, D/2, D/4 and D/4."""
    if width % 2 ** (parts - 1):
        raise ConfigError(f"a width of {width} for {parts} kernels; expected a multiple of {2 ** (parts - 1)}")
    return [width >> min(number + 1, parts - 1) for number in range(parts)]


class CrossFormer(StagedModel):
    """Attention within groups of neighbors and of tokens at an interval, in turn."""

    config: CrossFormerConfig
    first_filters = "patch_embed.projs.0.weight"
    one_size_export_reason = "its groups are cut for one grid"

    def __init__(self, config: CrossFormerConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        self.sizes = ImageSizes(multiple=self.levels[-1].stride, minimum=self.levels[-1].stride)
        self.classifiers = (("mean", "head"),) if config.classes else ()
        self.patch_embed = CrossScaleEmbed(config.channels, config.widths[0], config.kernels)
        self.pos_drop = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(CrossFormerStage(config, stage) for stage in range(len(config.stages)))
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code; the head is zero."""
        init_small_linear(self)
        zero_head(self.head)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        self.check_images(images)
        return self.patch_embed(images)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002  # each attention adds its own
        return self.pos_drop(patches)

    def run_stages(self, x: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Grid]]:
        stages: list[Any] = list(self.layers)
        for stage in stages:
            x = stage(x, grid)
            yield x, grid
            if stage.downsample is not None:
                x, grid = stage.downsample(x, grid)


def make_levels(config: CrossFormerConfig) -> tuple[Level, ...]:
    first, factor, name = config.kernels[0], config.merge_kernels[0], "layers.{}.blocks.{}"
    return make_stage_levels(config.image_size, first, config.widths, config.stages, name, factor)


class CrossFormerStage(nn.Module):
    """Blocks that attend to neighbors and at intervals, in turn: (B, n, D); and what makes the next stage's tokens."""

    def __init__(self, config: CrossFormerConfig, stage: int) -> None:
        super().__init__()
        width, heads, dropout = config.widths[stage], config.heads[stage], config.dropout
        self.blocks, last = nn.ModuleList(), stage + 1 == len(config.stages)
        rates = list_stage_rates(config.stochastic_depth, config.stages)[stage]
        for number, rate in enumerate(rates):
            cooled = config.cooling and number % 3 == 2 and number < len(rates) - 1
            kind, hidden = CoolingBlock if cooled else Block, round(config.mlp_ratio * width)
            block = kind(width, heads, hidden, norm_eps=NORM_EPS, dropout=dropout, stochastic_depth=rate)
            window, interval = config.windows[stage], config.intervals[stage] if number % 2 else 1
            block.attn = GroupAttention(width, heads, window, interval, dropout=config.attention_dropout)
            self.blocks.append(block)
        self.downsample = None if last else CrossScaleMerge(width, config.widths[stage + 1], config.merge_kernels)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        for block in self.blocks:
            x = block(x, grid)
        return x


def make_convolutions(channels: int, width: int, kernels: tuple[int, ...]) -> nn.ModuleList:
    """Convolutions of several sizes around the same places, whose channels together are `width`."""
    stride, widths = kernels[0], split_width(width, len(kernels))
    return nn.ModuleList(
        nn.Conv2d(channels, part, kernel, stride, (kernel - stride) // 2)
        for part, kernel in zip(widths, kernels, strict=True)
    )


def concatenate_scales(convolutions: nn.ModuleList, x: Tensor) -> tuple[Tensor, Grid]:
    """(B, C, H, W) → (B, n, D) and their grid."""
    x = torch.cat([each(x) for each in convolutions], dim=1)
    return flatten_map(x), (x.shape[2], x.shape[3])


class CrossScaleEmbed(nn.Module):
    """Tokens that read patches of several sizes: (B, C, H, W) → (B, n, D) and their grid."""

    def __init__(self, channels: int, width: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.projs = make_convolutions(channels, width, kernels)
        self.norm = nn.LayerNorm(width, NORM_EPS)

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        x, grid = concatenate_scales(self.projs, images)
        return self.norm(x), grid


class CrossScaleMerge(nn.Module):
    """The tokens of the next stage, from patches of several sizes of this one: (B, n, D) → (B, n/4, 2·D)."""

    def __init__(self, width: int, out_width: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, NORM_EPS)
        self.reductions = make_convolutions(width, out_width, kernels)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        return concatenate_scales(self.reductions, unflatten_map(self.norm(x), grid))


class CoolingBlock(Block):
    """A block, then a convolution within each channel and a norm without a residual, so that activations stay small."""

    def __init__(
        self, width: int, heads: int, mlp_width: int, *, norm_eps: float, dropout: float, stochastic_depth: float
    ) -> None:
        super().__init__(width, heads, mlp_width, norm_eps=norm_eps, dropout=dropout, stochastic_depth=stochastic_depth)
        self.ex_conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.ex_ln = nn.LayerNorm(width, norm_eps)

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        assert grid is not None
        x = super().compute(x, grid, queries, mask)
        return self.ex_ln(flatten_map(self.ex_conv(unflatten_map(x, grid))))


class GroupAttention(MaskedWindowAttention):
    """Attention within groups of neighbors, or of tokens at an interval; a small grid is one group."""

    def __init__(self, width: int, heads: int, window: int, interval: int, *, dropout: float = 0.0) -> None:
        bias = ComputedBias(width // BIAS_RATIO, heads)
        super().__init__(width, heads, pair(window), bias, dropout=dropout)
        self.interval = interval

    def cut(self, grid: Grid) -> Windows:
        if min(grid) <= self.window[0]:
            return Windows(grid, grid)
        return Windows(grid, self.window, interval=pair(self.interval))


class ComputedBias(nn.Module):
    """The bias of each offset, query − key in steps of the group, computed by an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.pos_proj = nn.Linear(2, width)
        self.pos1, self.pos2, self.pos3 = (
            nn.Sequential(nn.LayerNorm(width, NORM_EPS), nn.ReLU(), nn.Linear(width, out))
            for out in (width, width, heads)
        )

    def forward(self, size: Grid) -> Tensor:
        """For all pairs of tokens of a group: (H, m, m)."""
        weight = self.pos_proj.weight
        rows, columns = (torch.arange(side - 1, -side, -1, device=weight.device) for side in size)
        offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)  # (2r−1, 2c−1, 2)
        table = self.pos3(self.pos2(self.pos1(self.pos_proj(offsets.to(weight.dtype)))))
        return look_up_offsets(table.permute(2, 0, 1), size)


SMALL = CrossFormerConfig()
TINY = CrossFormerConfig(stages=(1, 1, 8, 6), widths=(64, 128, 256, 512), heads=(2, 4, 8, 16))
BASE = replace(SMALL, stages=(2, 2, 18, 2))
LARGE = replace(BASE, widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32))


def add_cooling(config: CrossFormerConfig, stages: tuple[int, ...] = BASE.stages) -> CrossFormerConfig:
    """The same as a CrossFormer++, with groups that grow with depth."""
    return replace(config, stages=stages, windows=(4, 4, 14, 7), intervals=(4, 2, 1, 1), cooling=True)


PRESETS = Presets(
    lambda: {
        "crossformer_tiny_patch4_group7_224": TINY,
        "crossformer_small_patch4_group7_224": SMALL,
        "crossformer_base_patch4_group7_224": BASE,
        "crossformer_large_patch4_group7_224": LARGE,
        "crossformer_pp_small_patch4_group_const_224": add_cooling(TINY),
        "crossformer_pp_base_patch4_group_const_224": add_cooling(BASE),
        "crossformer_pp_large_patch4_group_const_224": add_cooling(LARGE),
        "crossformer_pp_huge_patch4_group_const_224": add_cooling(LARGE, stages=(6, 6, 18, 2)),
    }
)
ALIASES = {
    **{f"CrossFormer-{s[0].upper()}": f"crossformer_{s}_patch4_group7_224" for s in ("tiny", "small", "base", "large")},
    **{
        f"CrossFormer++-{s[0].upper()}": f"crossformer_pp_{s}_patch4_group_const_224"
        for s in ("small", "base", "large", "huge")
    },
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Groups and intervals are not in the weights: those of the published models."""
    stages = side.count_stage_blocks(shapes, r"layers\.(\d+)\.", r"layers\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"layers.{stage}.blocks.0." for stage in range(len(stages))]
    hidden = [side.get_shape(shapes, f"{name}mlp.fc1.weight", 2) for name in first]
    cooling = any(name.endswith("ex_ln.weight") for name in shapes)
    published = PRESETS[f"crossformer_{'pp_base_patch4_group_const' if cooling else 'base_patch4_group7'}_224"]
    channels = side.get_shape(shapes, "patch_embed.projs.0.weight", 4)[1]
    fields = side.describe_stages(shapes, channels, stages, tuple(shape[1] for shape in hidden)) | {
        "kernels": list_kernels(shapes, "patch_embed.projs"),
        "merge_kernels": list_kernels(shapes, "layers.0.downsample.reductions") or published.merge_kernels,
        "heads": tuple(side.get_shape(shapes, f"{name}attn.position_bias.pos3.2.weight", 2)[0] for name in first),
        "windows": published.windows[: len(stages)],
        "intervals": published.intervals[: len(stages)],
        "cooling": cooling,
        "mlp_ratio": hidden[0][0] / hidden[0][1],
    }
    return side.InferredConfig(fields=fields)


def list_kernels(shapes: side.TensorShapes, convolutions: str) -> tuple[int, ...]:
    count = side.count_numbers(shapes, rf"{convolutions}\.(\d+)\.weight")
    return tuple(side.get_shape(shapes, f"{convolutions}.{number}.weight", 4)[2] for number in range(count))


def has_cooling(config: side.ConfigFields) -> bool:
    return config["cooling"]


PLAIN = side.SourceNames(
    layout="authors",
    table=side.parse_table(
        """
        {patch_embed.projs.#,patch_embed.norm,norm,head}.*
        layers.#.downsample.{norm,reductions.#}.*
        layers.#.blocks.#.{norm1,norm2,mlp.fc#,attn.qkv,attn.proj,ex_conv,ex_ln}.*
        layers.#.blocks.#.attn.pos. -> layers.#.blocks.#.attn.position_bias.:
            {pos_proj,pos#.#}.*
        """
    ),
    markers=("patch_embed.projs.0.weight", "layers.0.blocks.0.attn.pos.pos_proj.weight"),
    accepts=lambda config: not config["cooling"],
    assumed={"windows": SMALL.windows, "intervals": SMALL.intervals},
    details={"wrapper": "model"},
)
COOLED = replace(
    PLAIN,
    markers=(*PLAIN.markers, "layers.#.blocks.#.ex_ln.weight"),
    accepts=has_cooling,
    assumed={name: vars(add_cooling(BASE))[name] for name in ("windows", "intervals")},
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=(PLAIN, COOLED), resampled={})
FAMILY = Family("crossformer", CrossFormerConfig, CrossFormer, PRESETS, ALIASES, CHECKPOINT)
