"""MaxViT (Tu 2022, arXiv 2204.01697): in each block a convolution, attention within windows, attention across the map.

B batch, n = h·w tokens, D width, H heads, r×c tokens of a window; h, w and D change by stage. The second attention of a
block is among r×c tokens that are spread over the whole map in equal steps. `constants` are those of the authors'
TensorFlow code, which timm's models `_tf` have, or torchvision's: other padding, pooling, biases and GELU.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.layers.block import Block, StochasticDepth
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.parts.convolutions import ConvSame
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import (
    check_stages,
    flatten_map,
    list_stage_rates,
    make_halved_levels,
    name_blocks,
    unflatten_map,
)
from vitrail.models.parts.windows import OFFSETS_BY_QUERY, OffsetBias, WindowAttention, Windows

NORM_EPS, BATCH_NORM_EPS = 1e-5, 1e-3
EXPANSION, SQUEEZE = 4, 0.25  # width of MLPs and inverted bottlenecks, and of channel gates, in widths of a token
Constants = Literal["google", "torchvision"]


@dataclass(frozen=True, kw_only=True)
class MaxViTConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no classifier, returns the input of the last layer
    stem_width: int = 64  # channels of the two convolutions before the first stage
    stem_stride: int = 2  # pixels per position after them; each stage halves the grid
    stages: tuple[int, ...] = (2, 2, 5, 2)  # blocks per stage
    widths: tuple[int, ...] = (64, 128, 256, 512)  # channels of a token, per stage
    heads: tuple[int, ...] = (2, 4, 8, 16)  # attention heads per stage, each width / heads wide
    window: int | None = None  # rows and columns of a window; none: as many as the last stage has
    constants: Constants = "google"  # torchvision: those of its maxvit_t
    dynamic: bool = False  # accept any multiple of the windows of the last stage at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self)
        image, stride = pair(self.image_size), self.stem_stride * 2 ** len(self.stages)
        last = check_grid(image, (stride, stride))
        if self.window is not None and (last[0] % self.window or last[1] % self.window):
            step = stride * self.window
            rows, columns = (max(round(side / step), 1) * step for side in image)
            raise ConfigError(
                f"image of {image[0]}×{image[1]} pixels, {last[0]}×{last[1]} tokens in the last stage, and a window of "
                f"{self.window}; expected whole windows: for example {rows}×{columns} pixels, or window=none"
            )


def make_levels(config: MaxViTConfig) -> tuple[Level, ...]:
    """Each block is declared as its two attentions; the convolution before them belongs to the first."""
    (rows, columns), stride = pair(config.image_size), 2 * config.stem_stride
    blocks = [
        [f"{name}.{part}" for name in names for part in ("attn_block", "attn_grid")]
        for names in name_blocks(config.stages, "stages.{}.blocks.{}")
    ]
    return make_halved_levels((rows // stride, columns // stride), (stride, stride), config.widths, blocks)


class MaxViT(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a classifier the input of the last layer (B, D)."""

    config: MaxViTConfig
    first_filters = "stem.conv1.weight"
    one_size_export_reason = "its windows are cut for one grid"
    no_masking_reason = "its convolutions mix patches before they become tokens"
    no_dropping_reason = "its windows need a complete grid"

    def __init__(self, config: MaxViTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        window = self.grid if config.window is None else pair(config.window)
        stride = self.levels[-1].stride[0]
        multiple = (window[0] * stride, window[1] * stride)
        self.sizes = ImageSizes(multiple=multiple, minimum=multiple) if config.dynamic else ImageSizes()
        self.classifiers = (("mean", "head.fc"),) if config.classes else ()
        self.stem = MaxViTStem(config.channels, config.stem_width, config.stem_stride, config.constants)
        self.stages, before, constants = nn.ModuleList(), config.stem_width, config.constants
        depth_rates = list_stage_rates(config.stochastic_depth, config.stages)
        for width, heads, stage_rates in zip(config.widths, config.heads, depth_rates, strict=True):
            blocks = list[nn.Module]()
            for number, rate in enumerate(stage_rates):
                rates = (config.dropout, config.attention_dropout, rate)
                blocks.append(MaxViTBlock(before, width, heads, window, 1 if number else 2, rates, constants))
                before = width
            self.stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks))))
        self.norm = nn.Identity()  # that of the head follows the mean
        self.head = make_mlp_head(before, config.classes, bias=config.constants == "google")
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code; the last layer is zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, OffsetBias):
                nn.init.normal_(module.table, std=0.02)
        zero_head(self.head["fc"])

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        """The output of the stem, whose grid is finer than that of the first stage."""
        self.check_images(images)
        x = self.stem(images)
        return flatten_map(x), (x.shape[2], x.shape[3])

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        x = unflatten_map(x, grid)
        for stage in self.stages:
            x = stage(x)
        return flatten_map(x)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        maps = [unflatten_map(*self.embed(images))]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return maps[1:]

    def logits(self, tokens: Tensor) -> Tensor:
        """fc(tanh(a linear map of the norm of the mean of all tokens)): (B, n, D) → (B, classes)."""
        return self.head["fc"](self.head["pre_logits"](self.head["norm"](tokens.mean(1))))


def make_mlp_head(width: int, classes: int, *, bias: bool) -> nn.ModuleDict:
    fc = make_head(width, classes) if bias or not classes else nn.Linear(width, classes, bias=False)
    hidden = nn.Sequential(OrderedDict(fc=nn.Linear(width, width), act=nn.Tanh()))
    return nn.ModuleDict({"norm": nn.LayerNorm(width, NORM_EPS), "pre_logits": hidden, "fc": fc})


def make_conv(
    channels: int, width: int, stride: int, constants: Constants, *, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """A 3×3 convolution; TensorFlow pads even maps by one row and column at the end if the stride is 2."""
    if constants == "google" and stride > 1:
        return ConvSame(channels, width, 3, stride, groups=groups, bias=bias)
    return nn.Conv2d(channels, width, 3, stride, 1, groups=groups, bias=bias)


def make_gelu(constants: Constants) -> nn.GELU:
    return nn.GELU("tanh" if constants == "google" else "none")


class MaxViTStem(nn.Module):
    """Two 3×3 convolutions: (B, C, H, W) → (B, D, H/stride, W/stride)."""

    def __init__(self, channels: int, width: int, stride: int, constants: Constants) -> None:
        super().__init__()
        self.act = make_gelu(constants)
        self.conv1 = make_conv(channels, width, stride, constants, bias=constants == "google")
        self.norm1 = nn.BatchNorm2d(width, BATCH_NORM_EPS)
        self.conv2 = make_conv(width, width, 1, constants, bias=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv2(self.act(self.norm1(self.conv1(images))))


class MaxViTBlock(nn.Module):
    """A convolution, a transformer block within windows and one across the map: (B, C, h, w) → (B, D, h', w')."""

    def __init__(
        self,
        before: int,
        width: int,
        heads: int,
        window: Grid,
        stride: int,
        rates: tuple[float, float, float],
        constants: Constants,
    ) -> None:
        super().__init__()
        dropout, attention_dropout, stochastic_depth = rates
        self.conv = MbConv(before, width, stride, stochastic_depth, constants)
        blocks = list[Block]()
        for kind in (WindowAttention, GridAttention):
            block = Block(
                width,
                heads,
                EXPANSION * width,
                activation="gelu_tanh" if constants == "google" else "gelu",
                norm_eps=NORM_EPS,
                dropout=dropout,
                stochastic_depth=stochastic_depth,
            )
            block.attn = kind(width, heads, window, OffsetBias(heads, window), dropout=attention_dropout)
            blocks.append(block)
        self.attn_block, self.attn_grid = blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        grid = (x.shape[2], x.shape[3])
        tokens = flatten_map(x).contiguous()  # or each norm would copy them
        return unflatten_map(self.attn_grid(self.attn_block(tokens, grid), grid), grid)


class GridAttention(WindowAttention):
    """Attention among r×c tokens in equal steps over the whole map: (B, n, D) → (B, n, D)."""

    def cut(self, grid: Grid) -> Windows:
        return Windows(grid, self.window, interval=(grid[0] // self.window[0], grid[1] // self.window[1]))


class MbConv(nn.Module):
    """An inverted bottleneck with a norm first and a gate of its channels (Sandler 2018, Hu 2017), plus a shortcut."""

    def __init__(self, before: int, width: int, stride: int, stochastic_depth: float, constants: Constants) -> None:
        super().__init__()
        hidden, self.act = EXPANSION * width, make_gelu(constants)
        self.shortcut = nn.Identity() if stride == 1 else PooledShortcut(before, width, constants)
        self.pre_norm = nn.BatchNorm2d(before, BATCH_NORM_EPS)
        self.conv1_1x1 = nn.Conv2d(before, hidden, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(hidden, BATCH_NORM_EPS)
        self.conv2_kxk = make_conv(hidden, hidden, stride, constants, groups=hidden)
        self.norm2 = nn.BatchNorm2d(hidden, BATCH_NORM_EPS)
        self.se = ChannelGate(hidden, int(SQUEEZE * width))
        self.conv3_1x1 = nn.Conv2d(hidden, width, 1)
        self.drop_path = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1_1x1(self.pre_norm(x))))
        y = self.se(self.act(self.norm2(self.conv2_kxk(y))))
        return self.drop_path(self.conv3_1x1(y)) + self.shortcut(x)


class PooledShortcut(nn.Module):
    """The mean of each 2×2 square (torchvision: of overlapping 3×3), then a 1×1 convolution if the width changes."""

    def __init__(self, before: int, width: int, constants: Constants) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(2) if constants == "google" else nn.AvgPool2d(3, 2, 1)
        same = before == width and constants == "google"
        self.expand = nn.Identity() if same else nn.Conv2d(before, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.pool(x))


class ChannelGate(nn.Module):
    """Scales each channel by a factor in (0, 1) computed from the means of all channels: (B, C, h, w)."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()


BASE = MaxViTConfig(stages=(2, 6, 14, 2), widths=(96, 192, 384, 768), heads=(3, 6, 12, 24))
SIZES = {
    "tiny": MaxViTConfig(),
    "small": replace(BASE, stages=(2, 2, 5, 2)),
    "base": BASE,
    "large": replace(BASE, stem_width=128, widths=(128, 256, 512, 1024), heads=(4, 8, 16, 32)),
    "xlarge": replace(BASE, stem_width=192, widths=(192, 384, 768, 1536), heads=(6, 12, 24, 48)),
}
RESOLUTIONS = (224, 384, 512)
PRESETS = Presets(
    lambda: {
        **{
            f"maxvit_{size}_tf_{px}": replace(each, image_size=px) for size, each in SIZES.items() for px in RESOLUTIONS
        },
        "maxvit_t": MaxViTConfig(constants="torchvision"),
    }
)
LETTERS = {"tiny": "T", "small": "S", "base": "B", "large": "L", "xlarge": "XL"}
ALIASES = {
    f"MaxViT-{LETTERS[size]}" + (f"@{px}" if px > 224 else ""): f"maxvit_{size}_tf_{px}"
    for size in SIZES
    for px in RESOLUTIONS
}

HEAD_WIDTH = 32  # of all published models


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """A window fills the map of the last stage, as in all published models; torchvision's stem has no bias."""
    stem_width, channels, _, _ = side.get_shape(shapes, "stem.conv1.weight", 4)
    stages = side.count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"stages.{stage}.blocks.0.attn_block." for stage in range(len(stages))]
    tables = [side.get_shape(shapes, f"{name}attn.position_bias.table", 3) for name in first]
    stride = 2 ** (len(stages) + 1)
    widths = tuple(side.get_shape(shapes, f"{name}norm1.weight", 1)[0] for name in first)
    fields = side.describe_stages(shapes, channels, stages, widths, "head.fc.weight") | {
        "image_size": ((tables[0][1] + 1) // 2 * stride, (tables[0][2] + 1) // 2 * stride),
        "stem_width": stem_width,
        "heads": tuple(table[0] for table in tables),
        "constants": "google" if "stem.conv1.bias" in shapes else "torchvision",
    }
    return side.InferredConfig(fields=fields)


def check_head_width(config: side.ConfigFields, library: str) -> int:
    """The width of all heads; an error if they differ."""
    widths = {width // heads for width, heads in zip(config["widths"], config["heads"], strict=True)}
    if len(widths) > 1 or (library == "torchvision" and widths != {HEAD_WIDTH}):
        expected = f"heads of width {HEAD_WIDTH}" if library == "torchvision" else "heads of one width"
        raise CheckpointError(f"heads is {config['heads']}, which {library} cannot represent; expected {expected}")
    return widths.pop()


def get_window(config: side.ConfigFields) -> Grid:
    if config["window"] is not None:
        return pair(config["window"])
    rows, columns = (side // (config["stem_stride"] * 2 ** len(config["stages"])) for side in config["image_size"])
    return rows, columns


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {
        "img_size": config["image_size"],
        "in_chans": config["channels"],
        "stem_width": config["stem_width"],
        "embed_dim": config["widths"],
        "depths": config["stages"],
        "head_hidden_size": config["widths"][-1],
        "transformer_dim_head": check_head_width(config, "timm"),
    }
    if config["window"] is None:
        arguments["transformer_partition_ratio"] = config["stem_stride"] * 2 ** len(config["stages"])
    else:
        arguments |= dict.fromkeys(("transformer_window_size", "transformer_grid_size"), config["window"])
    return {"architecture": "maxvit_tiny_tf_224", "num_classes": config["classes"], "model_args": arguments}


def make_torchvision_buffers(config: side.ConfigFields) -> dict[str, Tensor]:
    """The index of each pair's offset, which torchvision stores for every attention."""
    check_head_width(config, "torchvision")
    rows, columns = get_window(config)
    if rows != columns:
        raise CheckpointError(f"a window of {rows}×{columns}, which torchvision cannot represent; expected a square")
    place = (torch.arange(rows)[:, None] * (2 * rows - 1) + torch.arange(rows)).flatten()
    names = [f"blocks.{stage}.layers.{n}.layers." for stage, depth in enumerate(config["stages"]) for n in range(depth)]
    kinds = [f"{kind}.attn_layer.1.relative_position_index" for kind in ("window_attention", "grid_attention")]
    return {name + kind: place[:, None] - place + (rows - 1) * 2 * rows for name in names for kind in kinds}


def scale_queries(tensor: Tensor, power: float) -> Tensor:
    """torchvision divides scores by the root of the width, not of a head's: the rest becomes part of the queries."""
    q, k, v = tensor.chunk(3)
    return torch.cat([q * (len(q) // HEAD_WIDTH) ** power, k, v])


BY_WIDTH = side.TensorTransform(
    lambda parts: scale_queries(parts[0], -0.5), lambda tensor, _: [scale_queries(tensor, 0.5)]
)


TIMM_TABLE = """
    stem.{conv1,conv2}.*
    stem.norm1.+
    stages.#.blocks.#.conv.:
        {conv1_1x1,conv2_kxk,conv3_1x1,se.fc1,se.fc2,shortcut.expand}.*
        {pre_norm,norm1,norm2}.+
    stages.#.blocks.#.{attn_block,attn_grid}.:
        {norm1,attn.qkv,attn.proj,norm2,mlp.fc1,mlp.fc2}.*
        attn.rel_pos.relative_position_bias_table -> attn.position_bias.table
    head.{norm,pre_logits.fc,fc}.*
"""
TORCHVISION_TABLE = """
    stem.{0.0,1.0}.* -> stem.{conv1,conv2}.*
    stem.0.1.+ -> stem.norm1.+
    blocks.#.layers.#.layers. -> stages.#.blocks.#.:
        MBconv.layers.{conv_a.0,conv_b.0,conv_c}.* -> conv.{conv1_1x1,conv2_kxk,conv3_1x1}.*
        MBconv.layers.{pre_norm,conv_a.1,conv_b.1}.+ -> conv.{pre_norm,norm1,norm2}.+
        MBconv.layers.squeeze_excitation.{fc1,fc2}.* -> conv.se.{fc1,fc2}.*
        MBconv.proj.1.* -> conv.shortcut.expand.*
        {window,grid}_attention. -> {attn_block,attn_grid}.:
            attn_layer.{0,1.merge}.* -> {norm1,attn.proj}.*
            attn_layer.1.to_qkv.* -> attn.qkv.* | by_width
            attn_layer.1.relative_position_bias_table -> attn.position_bias.table | by_query
            mlp_layer.{0,1,3}.* -> {norm2,mlp.fc1,mlp.fc2}.*
    classifier.{2,3,5}.* -> head.{norm,pre_logits.fc,fc}.*
"""


def find_torchvision_crop(config: side.ConfigFields) -> float:  # noqa: ARG001  # the same for all
    """The share of an image that torchvision's weights see."""
    return 1.0


SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE),
        markers=(
            *("stem.conv1.weight", "stages.#.blocks.#.attn_block.attn.qkv.weight"),
            "stages.#.blocks.#.conv.conv1_1x1.weight",
        ),
        supported={"constants": ("google",), "stem_stride": (2,)},
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "model_args": (
                *("img_size", "in_chans", "num_classes", "stem_width", "embed_dim", "depths", "head_hidden_size"),
                *(
                    "transformer_dim_head",
                    "transformer_window_size",
                    "transformer_grid_size",
                    "transformer_partition_ratio",
                ),
                "drop_path_rate",
            ),
            "argument_fields": {"img_size": "image_size", "transformer_window_size": "window"},
            "pretrained_cfg": {"crop_pct": 0.95},
        },
    ),
    side.SourceNames(
        layout="torchvision",
        table=side.parse_table(TORCHVISION_TABLE, by_width=BY_WIDTH, by_query=OFFSETS_BY_QUERY),
        markers=("stem.0.0.weight", "blocks.#.layers.#.layers.MBconv.layers.conv_a.0.weight"),
        supported={"channels": (3,), "constants": ("torchvision",), "stem_stride": (2,)},
        details={
            "ignored": r".*\.relative_position_index",
            "buffers": make_torchvision_buffers,
            "crop": find_torchvision_crop,
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={"position_bias.table": "map"})
FAMILY = Family("maxvit", MaxViTConfig, MaxViT, PRESETS, ALIASES, CHECKPOINT)
