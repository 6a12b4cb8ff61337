"""ScalableViT (Yang 2022, arXiv 2203.10790): attention within windows that a convolution connects, then to few keys.

Even blocks attend within windows; a convolution of the values, over the whole map, is added to the result. Odd blocks
attend to keys of a strided convolution, whose width is chosen per stage. There is no table of positions, so images may
have any multiple of the last stride; grids without whole windows are padded, and the padding is masked. B batch,
n = h·w tokens, k keys, D width, H heads; h, w and D change by stage.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import AttentionLayer, Mask, Projected, merge_heads, split_heads
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair
from vitrail.models.base.contract import ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_as_pvt
from vitrail.models.parts.attention import ReducedAttention
from vitrail.models.parts.convolutions import ConvEmbed, Peg
from vitrail.models.parts.encoder import DropRates, zero_head
from vitrail.models.parts.stages import (
    PegModel,
    check_reductions,
    check_stages,
    flatten_map,
    make_stage_blocks,
    make_stage_levels,
    unflatten_map,
)
from vitrail.models.parts.windows import MaskedWindowAttention, check_windows

NORM_EPS = 1e-6
KEY_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class ScalableViTConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, others work too
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    stride: int = 4  # pixels from one token of the first stage to the next; it reads 2·stride − 1
    stages: tuple[int, ...] = (2, 2, 20, 2)  # blocks per stage; even ones attend within windows
    widths: tuple[int, ...] = (64, 128, 256, 512)  # channels of a token, per stage
    heads: tuple[int, ...] = (2, 4, 8, 16)  # attention heads per stage, each width / heads wide
    windows: tuple[int, ...] = (7, 7, 7, 7)  # rows and columns of a window, per stage
    reductions: tuple[int, ...] = (8, 4, 2, 1)  # rows and columns of tokens that become a key of odd blocks, per stage
    key_ratios: tuple[float, ...] = (1.25, 1.25, 1.25, 1.0)  # width of these keys, in widths of a token, per stage
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    head_width: int = 4096  # of the layer before the logits
    dynamic: ClassVar[bool] = True  # takes other sizes at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, "key_ratios", "windows", "reductions")
        last = pair(self.stride * 2 ** (len(self.stages) - 1))
        check_windows(self.windows, pair(self.image_size), pair(self.stride), last)
        levels = make_levels(self)
        check_reductions(self.reductions, levels)
        for stage, level in enumerate(levels):
            ratio, keys = self.reductions[stage], self.key_ratios[stage]
            if ratio == 1 and keys != 1:
                raise ConfigError(
                    f"a key ratio of {keys} with a reduction of 1; expected 1, keys are as wide as tokens"
                )
            if keys * level.width % self.heads[stage]:
                given = f"keys of {keys} × {level.width} channels and {self.heads[stage]} heads"
                raise ConfigError(f"{given}; expected a multiple of the heads")


def make_levels(config: ScalableViTConfig) -> tuple[Level, ...]:
    return make_stage_levels(config.image_size, config.stride, config.widths, config.stages, "stages.{}.{}")


class ScalableViT(PegModel):
    """Attention within connected windows and of all tokens to a few keys, in turn."""

    config: ScalableViTConfig
    first_filters = "patch_embeds.0.proj.weight"
    stage_list = "stages"

    def __init__(self, config: ScalableViTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        last = self.levels[-1].stride[0]
        least = [ratio * level.stride[0] for ratio, level in zip(config.reductions, self.levels, strict=True)]
        self.sizes = ImageSizes(multiple=pair(last), minimum=pair(max(last, *least)))
        self.classifiers = (("mean", "head.3"),) if config.classes else ()
        strides = (config.stride, *(2 for _ in config.widths[1:]))
        self.patch_embeds = nn.ModuleList(
            ConvEmbed(channels, width, 2 * stride - 1, stride, stride - 1, NORM_EPS)
            for channels, width, stride in zip((config.channels, *config.widths), config.widths, strides, strict=False)
        )
        self.pos_block = nn.ModuleList(Peg(width) for width in config.widths)  # after the first block of a stage
        self.pos_drop = nn.Dropout(config.dropout)
        self.stages = nn.ModuleList(
            make_stage_blocks(config, stage, hidden, partial(make_attention, config, stage), norm_eps=NORM_EPS)
            for stage, hidden in enumerate(round(config.mlp_ratio * width) for width in config.widths)
        )
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_wide_head(config.widths[-1], config.head_width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code; the last layer is zero."""
        init_as_pvt(self)
        if isinstance(self.head, nn.Sequential):
            zero_head(self.head[-1])


def make_wide_head(width: int, hidden: int, classes: int) -> nn.Sequential | nn.Identity:
    """A linear map to many channels, a norm, GELU, and a linear map to the logits."""
    if not classes:
        return nn.Identity()
    norm = nn.LayerNorm(hidden, NORM_EPS)
    return nn.Sequential(nn.Linear(width, hidden), norm, nn.GELU(), nn.Linear(hidden, classes))


def make_attention(config: ScalableViTConfig, stage: int, number: int) -> nn.Module:
    """Within windows in even blocks, to few keys in odd ones."""
    width, heads, ratio = config.widths[stage], config.heads[stage], config.reductions[stage]
    dropout = config.attention_dropout
    if number % 2 == 0:
        return ConnectedWindowAttention(width, heads, pair(config.windows[stage]), dropout=dropout)
    if ratio == 1:
        return ReducedAttention(width, heads, 1, dropout=dropout)
    return ScaledKeyAttention(width, heads, ratio, round(config.key_ratios[stage] * width), dropout=dropout)


class ConnectedWindowAttention(MaskedWindowAttention):
    """Attention within windows plus a 3×3 convolution of the values, which crosses their borders: (B, n, D)."""

    def __init__(self, width: int, heads: int, window: Grid, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, window, dropout=dropout)
        self.lim_func = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        q, k, v, mask = self.project(x, grid, mask, queries)
        assert grid is not None
        windows = self.cut(grid)
        y = windows.join(merge_heads(self.attend(q, k, v, mask)))
        values = unflatten_map(windows.join(merge_heads(v)), grid)
        return self.proj(y + flatten_map(self.lim_func(values)))


class ScaledKeyAttention(ReducedAttention):
    """Attention of all tokens to keys of a strided convolution, with a width of its own for queries and keys."""

    def __init__(self, width: int, heads: int, ratio: int, key_width: int, *, dropout: float = 0.0) -> None:
        AttentionLayer.__init__(self)  # queries, keys and values have other widths than in ReducedAttention
        self.heads, self.ratio, self.dropout = heads, ratio, dropout
        self.q = nn.Linear(width, key_width)
        self.reduction = nn.Sequential(
            nn.Conv2d(width, width, ratio, ratio, groups=width), nn.Conv2d(width, key_width, 1)
        )
        self.norm_act = nn.Sequential(nn.LayerNorm(key_width, KEY_NORM_EPS), nn.GELU())
        self.k, self.v = nn.Linear(key_width, key_width), nn.Linear(key_width, width)
        self.proj = nn.Linear(width, width)

    def reduce(self, x: Tensor, grid: Grid) -> Tensor:
        """The tokens that keys and values are made of: (B, n, D) → (B, k, width of keys)."""
        self.reduce_grid(grid)
        return self.norm_act(flatten_map(self.reduction(unflatten_map(x, grid))))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        assert grid is not None
        assert queries is None, "there are no prefix tokens to compute alone"
        fewer = self.reduce(x, grid)
        q, k, v = (split_heads(each, self.heads) for each in (self.q(x), self.k(fewer), self.v(fewer)))
        return q, k, v, mask


PRESETS = Presets(
    lambda: {
        "scalablevit_small": ScalableViTConfig(),
        "scalablevit_base": ScalableViTConfig(
            stages=(2, 2, 14, 6), widths=(96, 192, 384, 768), heads=(3, 6, 12, 24), key_ratios=(2.0, 1.25, 1.25, 1.0)
        ),
        "scalablevit_large": ScalableViTConfig(
            stages=(2, 6, 12, 4), widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32), key_ratios=(0.25, 0.5, 1.0, 1.0)
        ),
    }
)
ALIASES = {f"ScalableViT-{size[0].upper()}": f"scalablevit_{size}" for size in ("small", "base", "large")}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Windows are not in the weights; heads are those of the published model of these widths."""
    _, channels, kernel, _ = side.get_shape(shapes, "patch_embeds.0.proj.weight", 4)
    stages = side.count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.(\d+)\.", first=0)
    numbers = range(len(stages))
    widths = tuple(side.get_shape(shapes, f"patch_embeds.{stage}.proj.weight", 4)[0] for stage in numbers)
    keys = [shapes.get(f"stages.{stage}.1.attn.q.weight", (widths[stage],))[0] for stage in numbers]
    fields = side.describe_stages(shapes, channels, stages, widths, "head.3.weight") | {
        "stride": (kernel + 1) // 2,
        "windows": (7,) * len(stages),
        "reductions": tuple(shapes.get(f"stages.{stage}.1.attn.reduction.0.weight", (1,))[-1] for stage in numbers),
        "key_ratios": tuple(key / width for key, width in zip(keys, widths, strict=True)),
        "mlp_ratio": side.get_shape(shapes, "stages.0.0.mlp.fc1.weight", 2)[0] / widths[0],
    }
    if "head.0.weight" in shapes:
        fields["head_width"] = side.get_shape(shapes, "head.0.weight", 2)[0]
    return side.InferredConfig(fields=fields | side.find_published_heads(PRESETS, widths))


AUTHORS = side.SourceNames(
    layout="authors",
    table=side.parse_table(
        """
        {patch_embeds.#.proj,patch_embeds.#.norm,pos_block.#.proj.#,norm,head.#}.*
        stages.#.#.{norm1,norm2,mlp.fc#}.*
        stages.#.#.attn.{qkv,lim_func,proj,q,k,v,kv,reduction.#,norm_act.#}.*
        """
    ),
    markers=("patch_embeds.0.proj.weight", "stages.0.0.attn.lim_func.weight"),
    assumed={"windows": (7, 7, 7, 7)},
    details={"wrapper": "model", "preprocessing": {"crop": 0.9}},
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=(AUTHORS,), resampled={})
FAMILY = Family("scalablevit", ScalableViTConfig, ScalableViT, PRESETS, ALIASES, CHECKPOINT)
