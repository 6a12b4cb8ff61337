"""SepViT (Li 2022, arXiv 2203.15380): attention within windows, then between windows, in one layer.

Each window has a learned token, which attends with the tokens of its window. The window tokens then attend to each
other, and with these weights whole windows are mixed, place by place. A grid of one window has neither. B batch,
n = h·w tokens, W windows of m tokens each, D width, H heads, K width of a head; h, w and D change by stage.
"""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention, merge_heads, split_heads
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair
from vitrail.models.base.contract import ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_as_pvt
from vitrail.models.parts.convolutions import ConvEmbed, Peg
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import PegModel, check_stages, flatten_map, list_stage_rates, make_stage_levels
from vitrail.models.parts.windows import TokenWindows, WindowAttention, WindowMixing, Windows, check_windows

NORM_EPS = 1e-6
WINDOW_NORM_EPS = 1e-5
TRAINED_SIZE = 224  # of the authors' models, for files without a config


@dataclass(frozen=True, kw_only=True)
class SepViTConfig(DropRates):
    image_size: Size = TRAINED_SIZE  # rows, columns; one number for a square
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    stride: int = 4  # pixels from one token of the first stage to the next; it reads 2·stride − 1
    stages: tuple[int, ...] = (1, 2, 6, 2)  # blocks per stage
    widths: tuple[int, ...] = (96, 192, 384, 768)  # channels of a token, per stage
    heads: tuple[int, ...] = (3, 6, 12, 24)  # attention heads per stage, each width / heads wide
    windows: tuple[int, ...] = (7, 7, 7, 7)  # rows and columns of a window of even blocks, per stage
    odd_windows: tuple[int, ...] = (7, 14, 14, 7)  # and of odd blocks; one that exceeds the grid shrinks to it
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    dynamic: bool = False  # accept other sizes of whole windows at run time; window tokens are resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, "windows", "odd_windows")
        rows, columns = pair(self.image_size)
        if not (self.has_whole_windows(rows) and self.has_whole_windows(columns)):
            raise ConfigError(
                f"image of {rows}×{columns} pixels; expected one of whole windows in every stage: resize or crop it, "
                f"for example to {self.find_nearest_side(rows)}×{self.find_nearest_side(columns)}, or use other windows"
            )
        windows = self.windows + self.odd_windows
        check_windows(windows, (rows, columns), pair(self.stride), pair(self.whole))

    def has_whole_windows(self, side: int) -> bool:
        """Whether the grids of all stages are made of whole windows along a side of so many pixels."""
        strides = [self.stride * 2**stage for stage in range(len(self.stages))]
        return side % strides[-1] == 0 and not any(
            side // stride % min(window, side // stride)
            for stage, stride in enumerate(strides)
            for window in self.list_windows(stage)
        )

    def find_nearest_side(self, side: int) -> int:
        """The side nearest to this one that has whole windows, in pixels."""
        last, least = self.stride * 2 ** (len(self.stages) - 1), self.stride * max(self.windows + self.odd_windows)
        near = sorted(range(last, 2 * side + last, last), key=lambda other: abs(other - side))
        return next((other for other in near if other >= least and self.has_whole_windows(other)), self.whole)

    @property
    def whole(self) -> int:
        """Pixels whose multiples have whole windows in every stage."""
        windows = [(stage, window) for stage in range(len(self.stages)) for window in self.list_windows(stage)]
        return math.lcm(*(self.stride * 2**stage * window for stage, window in windows))

    def list_windows(self, stage: int) -> list[int]:
        """The windows of the blocks of a stage."""
        return [(self.odd_windows if n % 2 else self.windows)[stage] for n in range(self.stages[stage])]


def make_levels(config: SepViTConfig) -> tuple[Level, ...]:
    return make_stage_levels(config.image_size, config.stride, config.widths, config.stages, "blocks.{}.{}")


class SepViT(PegModel):
    """Attention within windows, then between them, in each block."""

    config: SepViTConfig
    first_filters = "patch_embeds.0.proj.weight"

    def __init__(self, config: SepViTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        whole = pair(config.whole)
        self.sizes = ImageSizes(multiple=whole, minimum=whole) if config.dynamic else ImageSizes()
        self.classifiers = (("mean", "head"),) if config.classes else ()
        strides = (config.stride, *(2 for _ in config.widths[1:]))
        self.patch_embeds = nn.ModuleList(
            ConvEmbed(channels, width, 2 * stride - 1, stride, stride - 1)
            for channels, width, stride in zip((config.channels, *config.widths), config.widths, strides, strict=False)
        )
        self.pos_block = nn.ModuleList(Peg(width) for width in config.widths)  # after the first block of a stage
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            make_stage_blocks(config, stage, level.grid) for stage, level in enumerate(self.levels)
        )
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code; window tokens and the head are zero."""
        init_as_pvt(self)
        for block in [module for module in self.modules() if isinstance(module, WindowTokenBlock)]:
            nn.init.zeros_(block.win_tokens)
        zero_head(self.head)


def make_stage_blocks(config: SepViTConfig, stage: int, grid: Grid) -> nn.ModuleList:
    """The blocks of a stage; those of one window have no window tokens."""
    width, heads, dropout = config.widths[stage], config.heads[stage], config.dropout
    rates, blocks = list_stage_rates(config.stochastic_depth, config.stages)[stage], nn.ModuleList()
    for side_length, rate in zip(config.list_windows(stage), rates, strict=True):
        counts = (grid[0] // min(side_length, grid[0]), grid[1] // min(side_length, grid[1]))
        several = counts != (1, 1)
        kind, attention = (WindowTokenBlock, SeparableAttention) if several else (Block, DepthwiseAttention)
        hidden = round(config.mlp_ratio * width)
        block = kind(width, heads, hidden, norm_eps=NORM_EPS, dropout=dropout, stochastic_depth=rate)
        block.attn = attention(width, heads, pair(side_length), dropout=config.attention_dropout)
        if isinstance(block, WindowTokenBlock):
            block.win_tokens = nn.Parameter(torch.empty(1, width, *counts))
        blocks.append(block)
    return blocks


class WindowTokenBlock(Block):
    """A block whose attention also gets a learned token for each window: (B, n, D) → (B, n, D)."""

    win_tokens: nn.Parameter  # (1, D, rows and columns of windows)

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        assert grid is not None
        assert isinstance(self.attn, SeparableAttention)
        old, new = (self.win_tokens.shape[2], self.win_tokens.shape[3]), self.attn.cut(grid).counts
        tokens = resample(flatten_map(self.win_tokens), old, new).expand(x.shape[0], -1, -1)
        mixed = self.attn(self.norm1(torch.cat([tokens, x], dim=1)), grid, mask=mask, queries=queries)
        x = x + self.drop_path(self.drop(mixed))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class DepthwiseAttention(WindowAttention):
    """Attention of all tokens, as one window, plus its input: (B, n, D) → (B, n, D)."""

    def cut(self, grid: Grid) -> Windows:
        return Windows(grid, grid)

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        return self.proj(x + merge_heads(self.attend(*self.project(x, grid, mask, queries))))


class SeparableAttention(WindowAttention):
    """Attention within windows and their tokens, then between windows: (B, W + n, D) → (B, n, D)."""

    def __init__(self, width: int, heads: int, window: Grid, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, window, dropout=dropout)
        self.win_tokens_norm = nn.LayerNorm(width, WINDOW_NORM_EPS)
        self.window_qk = nn.Linear(width, 2 * width)
        self.mixing = WindowMixing(dropout)

    def cut(self, grid: Grid) -> TokenWindows:
        return TokenWindows(grid, (min(self.window[0], grid[0]), min(self.window[1], grid[1])))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        """q, k, v within the windows: (B·W, H, 1 + m, K)."""
        assert grid is not None
        assert mask is None, "windows have no masks"
        assert queries is None, "windows have no prefix tokens to compute alone"
        return SelfAttention.project(self, self.cut(grid).split(x))

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        inside = self.attend(*self.project(x, grid, mask, queries))
        assert grid is not None
        windows = self.cut(grid)
        y = windows.split(x) + merge_heads(inside)  # (B·W, 1 + m, D)
        count, size = math.prod(windows.counts), math.prod(windows.size)
        tokens, places = y[:, 0].unflatten(0, (-1, count)), y[:, 1:]
        q, k = self.project_windows(tokens)
        whole = (
            places.unflatten(0, (-1, count)).unflatten(3, (self.heads, -1)).permute(0, 3, 1, 2, 4)
        )  # (B, H, W, m, K)
        mixed = self.mixing(q, k, whole.flatten(3))  # (B, H, W, m·K)
        mixed = mixed.unflatten(3, (size, -1)).permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)  # (B·W, m, D)
        return self.proj(Windows(grid, windows.size).join(mixed + places))

    def project_windows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of the windows: (B, W, D) → (B, H, W, K) each."""
        q, k = self.window_qk(F.gelu(self.win_tokens_norm(tokens))).chunk(2, dim=-1)
        return split_heads(q, self.heads), split_heads(k, self.heads)


TINY = SepViTConfig()
PRESETS = Presets(
    lambda: {
        "sepvit_lite_224": replace(TINY, widths=(32, 64, 128, 256), heads=(1, 2, 4, 8)),
        "sepvit_tiny_224": TINY,
        "sepvit_small_224": replace(TINY, stages=(1, 2, 14, 2)),
        "sepvit_base_224": replace(TINY, stages=(1, 2, 14, 2), widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32)),
    }
)
ALIASES = {
    "SepViT-Lite": "sepvit_lite_224",
    **{f"SepViT-{size[0].upper()}": f"sepvit_{size}_224" for size in ("tiny", "small", "base")},
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Windows follow from the number of their tokens at 224 pixels; heads are those of the published widths."""
    _, channels, kernel, _ = side.get_shape(shapes, "patch_embeds.0.proj.weight", 4)
    stages = side.count_stage_blocks(shapes, r"blocks\.(\d+)\.", r"blocks\.{}\.(\d+)\.", first=0)
    numbers, stride = range(len(stages)), (kernel + 1) // 2
    widths = tuple(side.get_shape(shapes, f"patch_embeds.{stage}.proj.weight", 4)[0] for stage in numbers)
    fields = side.describe_stages(shapes, channels, stages, widths) | {
        "stride": stride,
        "mlp_ratio": side.get_shape(shapes, "blocks.0.0.mlp.fc1.weight", 2)[0] / widths[0],
    }
    for name, number in (("windows", 0), ("odd_windows", 1)):
        firsts = [f"blocks.{stage}.{min(number, stages[stage] - 1)}." for stage in numbers]
        counts = [shapes.get(f"{first}win_tokens", (1,))[-1] for first in firsts]
        fields[name] = tuple(TRAINED_SIZE // (stride * 2**stage) // counts[stage] for stage in numbers)
    return side.InferredConfig(fields=fields | side.find_published_heads(PRESETS, widths))


def unflatten_window_tokens(parts: list[Tensor]) -> Tensor:
    """(1, W, 1, D) → (1, D, √W, √W)"""
    extent = math.isqrt(parts[0].shape[1])
    return parts[0].squeeze(2).mT.unflatten(2, (extent, extent))


WINDOW_TOKENS = side.TensorTransform(unflatten_window_tokens, lambda tokens, _: [tokens.flatten(2).mT[:, :, None]])
AUTHORS = side.SourceNames(
    layout="authors",
    table=side.parse_table(
        """
        {patch_embeds.#.proj,patch_embeds.#.norm,pos_block.#.proj.#,norm,head}.*
        blocks.#.#.:
            {norm1,norm2,mlp.fc#,attn.proj,attn.win_tokens_norm}.*
            win_tokens | window
            attn.{DSA_qkv,PSA_qk}.* -> attn.{qkv,window_qk}.*
        """,
        window=WINDOW_TOKENS,
    ),
    markers=("patch_embeds.0.proj.weight", "blocks.0.0.attn.DSA_qkv.weight"),
    details={"wrapper": "model", "preprocessing": {"crop": 0.9}},
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=(AUTHORS,), resampled={"win_tokens": "map"})
FAMILY = Family("sepvit", SepViTConfig, SepViT, PRESETS, ALIASES, CHECKPOINT)
