"""NesT (Zhang 2021, arXiv 2105.12723): attention within blocks of the image, four of which become one at each level.

B batch, n = h·w tokens, D width, H heads, K width of a head; h, w and D change by level. The first of L levels is cut
into 2^(L−1) × 2^(L−1) blocks, the last one is a single block; a block always has as many tokens. A convolution and a
max pool between levels let neighbors across a border meet. Public weights were trained with the tanh approximation of
GELU and TensorFlow's padding: timm runs them with the exact GELU, and its models without `_jx` have symmetric padding.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError
from vitrail.layers.attention import Mask
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import Level, make_patch_sizes
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_small
from vitrail.models.parts.convolutions import MaxPoolSame
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import (
    StagedModel,
    check_stages,
    flatten_map,
    make_stage_blocks,
    make_stage_levels,
    unflatten_map,
)
from vitrail.models.parts.windows import WindowAttention, Windows

NORM_EPS = 1e-6
MAX_STAGES = 5  # in files of timm


@dataclass(frozen=True, kw_only=True)
class NesTConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: int = 4
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    stages: tuple[int, ...] = (2, 2, 8)  # layers per level; each level but the first halves the grid
    widths: tuple[int, ...] = (96, 192, 384)  # channels of a token, per level
    heads: tuple[int, ...] = (3, 6, 12)  # attention heads per level, each width / heads wide
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"  # gelu: as in timm; logits differ by about 1e-3
    padding: Literal["same", "symmetric"] = "same"  # of the max pools; symmetric: as in timm's models without _jx
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of the last layer; linear from 0 at the first
    dynamic: bool = False  # accept any multiple of the patches of the blocks at run time; the tables are resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self)
        check_grid(pair(self.image_size), (self.last_stride, self.last_stride))

    @property
    def last_stride(self) -> int:
        """Pixels per token of the last level, and also per token of all blocks of the first one."""
        return self.patch_size * 2 ** (len(self.stages) - 1)


def make_levels(config: NesTConfig) -> tuple[Level, ...]:
    return make_stage_levels(config.image_size, config.patch_size, config.widths, config.stages, "stages.{}.blocks.{}")


class NesT(StagedModel):
    """Attention within blocks of tokens, four of which become one from level to level."""

    config: NesTConfig
    first_filters = "patch_embed.proj.weight"
    one_size_export_reason = "its blocks of tokens are cut for one grid"

    def __init__(self, config: NesTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        self.sizes = make_patch_sizes(pair(config.last_stride), dynamic=config.dynamic)
        self.classifiers = (("mean", "head"),) if config.classes else ()
        self.patch_embed = PatchEmbed(config.widths[0], pair(config.patch_size), config.channels)
        self.stages = nn.ModuleList()
        for stage, level in enumerate(self.levels):
            hidden, make = 4 * level.width, partial(make_attention, config, stage, level.grid)
            blocks = make_stage_blocks(config, stage, hidden, make, norm_eps=NORM_EPS, activation=config.activation)
            pool = ConvPool(config.widths[stage - 1], level.width, config.padding) if stage else None
            self.stages.append(NesTStage(pool, level.width, level.grid, blocks))
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code; the head is zero."""
        init_small(self)
        for module in self.modules():
            if isinstance(module, NesTStage):
                nn.init.trunc_normal_(module.pos_embed, std=0.02)
        zero_head(self.head)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        self.check_images(images)
        size = self.config.patch_size
        return self.patch_embed(images), (images.shape[2] // size, images.shape[3] // size)

    def tables(self, grid: Grid) -> Tensor:
        """The positions of the first level: (1, n, D)."""
        first = self.stages[0]
        assert isinstance(first, NesTStage)
        return first.tables(grid)

    def run_stages(self, x: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Grid]]:
        for stage in self.stages:
            x, grid = stage(x, grid)
            yield x, grid


def make_attention(config: NesTConfig, stage: int, grid: Grid, _: int) -> "BlockAttention":
    """The attention of the layers of a level."""
    per_side = 2 ** (len(config.stages) - 1 - stage)
    return BlockAttention(config.widths[stage], config.heads[stage], grid, per_side, config.attention_dropout)


class NesTStage(nn.Module):
    """Pools the map, adds positions, then blocks: (B, n, D) and the grid → the same at half the size."""

    def __init__(self, pool: "ConvPool | None", width: int, grid: Grid, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.pool, self.grid, self.blocks = pool, grid, blocks
        self.pos_embed = nn.Parameter(torch.empty(1, width, *grid))

    def tables(self, grid: Grid) -> Tensor:
        return resample(flatten_map(self.pos_embed), self.grid, grid)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        if self.pool is not None:
            pooled = self.pool(unflatten_map(x, grid))
            x, grid = flatten_map(pooled), (pooled.shape[2], pooled.shape[3])
        x = x + self.tables(grid)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


class ConvPool(nn.Module):
    """A 3×3 convolution, a norm and a 3×3 max pool of stride 2: (B, D, h, w) → (B, D', h/2, w/2)."""

    def __init__(self, width: int, out_width: int, padding: Literal["same", "symmetric"]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out_width, 3, padding=1)
        self.norm = nn.LayerNorm(out_width, NORM_EPS)
        self.pool = MaxPoolSame() if padding == "same" else nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.conv(x).movedim(1, -1)).movedim(-1, 1))


class BlockAttention(WindowAttention):
    """Attention within a fixed number of blocks of the map, whose size follows from it: (B, n, D) → (B, n, D)."""

    def __init__(self, width: int, heads: int, grid: Grid, per_side: int, dropout: float) -> None:
        super().__init__(width, heads, (grid[0] // per_side, grid[1] // per_side), dropout=dropout)
        self.per_side = per_side  # blocks along the rows and the columns

    def cut(self, grid: Grid) -> Windows:
        return Windows(grid, (grid[0] // self.per_side, grid[1] // self.per_side))

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        y = self.attend(*self.project(x, grid, mask, queries))  # (B·W, H, m, K)
        y = y.permute(0, 2, 3, 1).flatten(2)  # in `proj`, the heads of a channel are neighbors, as in the authors' code
        assert grid is not None
        return self.cut(grid).join(self.proj(y))


TINY = NesTConfig()
SIZES = {
    "tiny": TINY,
    "small": replace(TINY, stages=(2, 2, 20)),
    "base": replace(TINY, stages=(2, 2, 20), widths=(128, 256, 512), heads=(4, 8, 16)),
}
PRESETS = Presets(
    lambda: {
        **{f"nest_{size}_jx": config for size, config in SIZES.items()},
        **{f"nest_{size}": replace(each, activation="gelu", padding="symmetric") for size, each in SIZES.items()},
    }
)
ALIASES = {f"NesT-{size[0].upper()}": f"nest_{size}_jx" for size in SIZES}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Heads are those of the published model of these widths."""
    _, channels, patch, _ = side.get_shape(shapes, "patch_embed.proj.weight", 4)
    stages = side.count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    tables = [side.get_shape(shapes, f"stages.{stage}.pos_embed", 4) for stage in range(len(stages))]
    widths = tuple(table[1] for table in tables)
    fields = {"image_size": (tables[0][2] * patch, tables[0][3] * patch), "patch_size": patch}
    common = side.describe_stages(shapes, channels, stages, widths)
    return side.InferredConfig(fields=common | fields | side.find_published_heads(PRESETS, widths))


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    """timm opens a folder only of its own sizes."""
    shape = ("patch_size", "stages", "widths", "heads", "padding")
    same = (name for name, each in PRESETS.items() if all(asdict(each)[key] == config[key] for key in shape))
    name = next(same, None)
    if name is None:
        raise CheckpointError(
            "timm cannot open a folder of a custom nest; expected OUT.safetensors or OUT.pth, or a preset: "
            f"{', '.join(PRESETS)}"
        )
    arguments = {"img_size": config["image_size"], "in_chans": config["channels"]}
    return {"architecture": name, "num_classes": config["classes"], "model_args": arguments}


def positions_to_ours(parts: list[Tensor]) -> Tensor:
    """Block by block, (1, blocks, tokens of a block, D) → (1, D, h, w), for square images."""
    blocks, tokens = isqrt(parts[0].shape[1]), isqrt(parts[0].shape[2])
    x = parts[0].unflatten(2, (tokens, tokens)).unflatten(1, (blocks, blocks))  # (1, rows, columns, rows, columns, D)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def positions_to_theirs(table: Tensor, _: int, *, per_side: int) -> list[Tensor]:
    if table.shape[2] != table.shape[3]:
        rows, columns = table.shape[2:]
        raise CheckpointError(f"a grid of {rows}×{columns} tokens, which timm cannot represent; expected a square")
    x = table.unflatten(3, (per_side, -1)).unflatten(2, (per_side, -1))  # (1, D, rows, rows, columns, columns)
    return [x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)]


TABLE = side.parse_table(
    """
    {patch_embed.proj,norm,head}.*
    levels.#. -> stages.#.:
        transformer_encoder.#. -> blocks.#.:
            {norm1,attn.qkv,attn.proj,norm2,mlp.fc#}.*
        {pool.conv,pool.norm}.*
    """
)


def make_timm_source(stages: int, *markers: str) -> side.SourceNames:
    """For a number of levels, on which the blocks of each depend; all files are read alike."""
    tables = list[side.NameEntry]()
    for stage in range(MAX_STAGES):
        per_side = 2 ** max(stages - 1 - stage, 0)
        transform = side.TensorTransform(positions_to_ours, partial(positions_to_theirs, per_side=per_side))
        tables.append(side.make_entry(f"levels.{stage}.pos_embed", f"stages.{stage}.pos_embed", transform))
    return side.SourceNames(
        layout="timm",
        table=(*TABLE, *tables),
        markers=markers,
        accepts=lambda config: len(config["stages"]) == stages or stages == MAX_STAGES,  # the last one refuses more
        supported={"number of stages": tuple(range(1, MAX_STAGES + 1))},
        assumed={"activation": "gelu"},
        card=make_timm_card,
        details={
            "imagenet_mean": True,
            "model_args": ("img_size", "in_chans", "num_classes", "drop_path_rate"),
            "argument_fields": {"img_size": "image_size"},
            "preset_fields": ("activation", "padding"),
            "pretrained_cfg": {"crop_pct": 0.875},
        },
    )


SOURCES = (
    make_timm_source(3, "patch_embed.proj.weight", "levels.0.pos_embed", "levels.0.transformer_encoder.0.norm1.weight"),
    *(make_timm_source(stages) for stages in range(1, MAX_STAGES + 1) if stages != 3),
)
CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config, sources=SOURCES, resampled={"pos_embed": "map", "patch_embed.proj.weight": "kernel"}
)
FAMILY = Family("nest", NesTConfig, NesT, PRESETS, ALIASES, CHECKPOINT)
