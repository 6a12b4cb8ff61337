"""CvT (Wu 2021, arXiv 2103.15808): convolutions make the tokens of each stage, and the queries, keys and values.

B batch, C channels, E class tokens (1 in the last stage, else 0), n = h·w patches, N = E + n tokens, D width, H heads;
h, w and D change by stage. The convolutions tell the tokens their places, so images may have any size.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.layers.attention import Mask, Projected, split_heads
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.parts.attention import ReducedGrid, TwoGridAttention
from vitrail.models.parts.convolutions import ConvEmbed
from vitrail.models.parts.encoder import DropRates, make_head, prepend_tokens, scale_rate, zero_head
from vitrail.models.parts.stages import (
    check_stages,
    flatten_map,
    halve_grid,
    make_halved_levels,
    name_blocks,
    unflatten_map,
)

NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class CvTConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, any other works too
    stride: int = 4  # pixels per token of the first stage; each next stage halves the grid
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the class token
    stages: tuple[int, ...] = (1, 2, 10)  # blocks per stage
    widths: tuple[int, ...] = (64, 192, 384)  # channels of a token, per stage
    heads: tuple[int, ...] = (1, 3, 6)  # attention heads per stage, each width / heads wide
    mlp_ratio: float = 4.0  # width of the MLP, in widths of a token
    activation: Literal["quick_gelu", "gelu"] = "quick_gelu"  # the authors', or the one of transformers' code
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # of the last block; linear from 0 in the last stage
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self)
        count_tokens(pair(self.image_size), self.stride)


def describe_kernel(stride: int) -> tuple[int, int]:
    """Kernel and padding of the first convolution: 7 and 2 for a stride of 4, as in the authors' code."""
    return 2 * stride - 1, stride // 2


def count_tokens(image: Grid, stride: int) -> Grid:
    """Rows and columns of the first stage; an error if there are none."""
    kernel, padding = describe_kernel(stride)
    least = kernel - 2 * padding
    if min(image) < least:
        raise ConfigError(f"image of {image[0]}×{image[1]} pixels; expected at least {least}×{least}: resize it")
    return (image[0] - least) // stride + 1, (image[1] - least) // stride + 1


def make_levels(config: CvTConfig) -> tuple[Level, ...]:
    grid, blocks = count_tokens(pair(config.image_size), config.stride), name_blocks(config.stages, "stage{}.blocks.{}")
    return make_halved_levels(grid, pair(config.stride), config.widths, blocks)


class CvT(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the class token (B, D)."""

    config: CvTConfig
    first_filters = "stage0.patch_embed.proj.weight"
    prefix_tokens = classifier_tokens = ("class",)
    one_size_export_reason = "its grids are rounded up, which torch.export does not trace"
    no_masking_reason = "they overlap"
    no_dropping_reason = "its convolutions need a complete grid"

    def __init__(self, config: CvTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        kernel, padding = describe_kernel(config.stride)
        self.sizes = ImageSizes(multiple=(1, 1), minimum=pair(kernel - 2 * padding))
        self.prefix_level = len(config.stages) - 1
        self.classifiers = (("class", "head"),) if config.classes else ()
        embed = ConvEmbed(config.channels, config.widths[0], kernel, config.stride, padding)
        for stage, width in enumerate(config.widths):
            is_last = stage == self.prefix_level
            blocks = make_stage_blocks(config, stage, config.stochastic_depth if is_last else 0.0)
            self.add_module(f"stage{stage}", CvTStage(embed, blocks, config.dropout, class_token=is_last))
            embed = ConvEmbed(width, config.widths[min(stage + 1, self.prefix_level)], 3, 2, 1)
        self.norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """Linear maps and the class token small, as in the authors' code, convolutions as torch's; the head is zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm | nn.BatchNorm2d):
                module.reset_parameters()
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.get_parameter(f"stage{self.prefix_level}.cls_token"), std=0.02)
        zero_head(self.head)

    def check_images(self, images: Tensor) -> Grid:
        super().check_images(images)
        return count_tokens((images.shape[2], images.shape[3]), self.config.stride)

    def list_stages(self) -> list[Any]:
        return [self.get_submodule(f"stage{stage}") for stage, _ in enumerate(self.levels)]

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        self.check_images(images)
        return self.list_stages()[0].patch_embed(images)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:
        *body, last = self.list_stages()
        for stage, following in zip(body, [*body[1:], last], strict=True):
            x, grid = following.patch_embed(unflatten_map(stage(x, grid), grid))
        return last(x, grid, queries)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        (x, grid), maps = self.embed(images), list[Tensor]()
        for number, stage in enumerate(self.list_stages()):
            if number:
                x, grid = stage.patch_embed(maps[-1])
            x = stage(x, grid)
            maps.append(unflatten_map(x[:, x.shape[1] - grid[0] * grid[1] :], grid))
        return maps


class CvTStage(nn.Module):
    """Blocks, in the last stage with a class token; `patch_embed` makes its tokens: (B, n, D) → (B, N, D)."""

    def __init__(self, embed: ConvEmbed, blocks: nn.ModuleList, dropout: float, *, class_token: bool) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed.proj.out_channels)) if class_token else None
        self.patch_embed, self.blocks, self.drop = embed, blocks, nn.Dropout(dropout)

    def forward(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:
        x = self.drop(prepend_tokens(x, self.cls_token))
        *body, last = self.blocks
        for block in body:
            x = block(x, grid)
        return last(x, grid, queries)


def make_stage_blocks(config: CvTConfig, stage: int, stochastic_depth: float) -> nn.ModuleList:
    """The blocks of a ViT, with convolutions in the attention and, by default, QuickGELU in the MLP."""
    width, heads, depth = config.widths[stage], config.heads[stage], config.stages[stage]
    blocks = nn.ModuleList()
    for number in range(depth):
        hidden = round(config.mlp_ratio * width)
        depth_rate = scale_rate(stochastic_depth, number, depth)
        block = Block(width, heads, hidden, norm_eps=NORM_EPS, dropout=config.dropout, stochastic_depth=depth_rate)
        block.set_submodule("attn", ConvProjectedAttention(width, heads, dropout=config.attention_dropout))
        if config.activation == "quick_gelu":
            block.set_submodule("mlp.act", QuickGelu())
        blocks.append(block)
    return blocks


class QuickGelu(nn.Module):
    """x·σ(1.702·x), near GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()


class ConvProjection(nn.Module):
    """A 3×3 convolution within each channel, then batch norm: (B, D, h, w) → (B, n, D)."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return flatten_map(self.bn(self.conv(x)))


class ConvProjectedAttention(TwoGridAttention):
    """Attention of all tokens to keys at half the grid, all made by convolutions; the class token skips them.

    Scores are divided by √D, not by the √K of a head's width, as in the authors' code.
    """

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.conv_proj_q = ConvProjection(width, 1)
        self.conv_proj_k, self.conv_proj_v = ConvProjection(width, 2), ConvProjection(width, 2)
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def reduce_grid(self, grid: Grid) -> ReducedGrid:
        return ReducedGrid(queries=grid, keys=halve_grid(grid))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        assert grid is not None
        prefix, patches = x.tensor_split([x.shape[1] - grid[0] * grid[1]], dim=1)
        image = unflatten_map(patches, grid)
        q = prefix
        if queries is None or self.training:  # in training also for the statistics of the batch norm
            q = torch.cat([prefix, self.conv_proj_q(image)], dim=1)[:, :queries]
        k, v = (torch.cat([prefix, conv(image)], dim=1) for conv in (self.conv_proj_k, self.conv_proj_v))
        q, k, v = (split_heads(each, self.heads) for each in (self.proj_q(q), self.proj_k(k), self.proj_v(v)))
        return q / sqrt(self.heads), k, v, mask


PRESETS = Presets(
    lambda: {
        "cvt_13_224": CvTConfig(),
        "cvt_13_384": CvTConfig(image_size=384),
        "cvt_21_224": CvTConfig(stages=(1, 4, 16)),
        "cvt_21_384": CvTConfig(image_size=384, stages=(1, 4, 16)),
        "cvt_w24_384": CvTConfig(image_size=384, stages=(2, 2, 20), widths=(192, 768, 1024), heads=(3, 12, 16)),
    }
)
ALIASES = {
    **{f"CvT-{size}": f"cvt_{size}_224" for size in (13, 21)},
    **{f"CvT-{size}@384": f"cvt_{size}_384" for size in (13, 21)},
    "CvT-W24": "cvt_w24_384",
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Heads are those of the published model of these widths; the first kernel has 2·stride − 1 pixels."""
    _, channels, kernel, _ = side.get_shape(shapes, "stage0.patch_embed.proj.weight", 4)
    stages = side.count_stage_blocks(shapes, r"stage(\d+)\.", r"stage{}\.blocks\.(\d+)\.", first=0)
    hidden = [side.get_shape(shapes, f"stage{n}.blocks.0.mlp.fc1.weight", 2) for n in range(len(stages))]
    widths = tuple(shape[1] for shape in hidden)
    fields = {"stride": (kernel + 1) // 2, "mlp_ratio": hidden[0][0] / hidden[0][1]}
    common = side.describe_stages(shapes, channels, stages, widths)
    return side.InferredConfig(fields=common | fields | side.find_published_heads(PRESETS, widths))


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    stages, count = config["stages"], len(config["stages"])
    if short := [stage for stage, depth in enumerate(stages) if depth <= stage]:
        raise CheckpointError(
            f"stage {short[0]} (from 0) has {stages[short[0]]} blocks, which transformers cannot build; expected more "
            f"than {short[0]}"
        )
    kernel, padding = describe_kernel(config["stride"])
    return {
        "architectures": ["CvtForImageClassification"],
        "model_type": "cvt",
        "num_channels": config["channels"],
        "patch_sizes": [kernel, *[3] * (count - 1)],
        "patch_stride": [config["stride"], *[2] * (count - 1)],
        "patch_padding": [padding, *[1] * (count - 1)],
        "embed_dim": config["widths"],
        "num_heads": config["heads"],
        "depth": stages,
        "mlp_ratio": [config["mlp_ratio"]] * count,
        "drop_rate": [config["dropout"]] * count,
        "attention_drop_rate": [config["attention_dropout"]] * count,
        "drop_path_rate": [*[0.0] * (count - 1), config["stochastic_depth"]],
        "qkv_bias": [True] * count,
        "cls_token": [*[False] * (count - 1), True],
        "qkv_projection_method": ["dw_bn"] * count,
        "kernel_qkv": [3] * count,
        **{name: [1] * count for name in ("padding_q", "padding_kv", "stride_q")},
        "stride_kv": [2] * count,
        "dtype": "float32",
    }


AUTHORS_TABLE = """
    stage#.cls_token
    stage#.patch_embed.{proj,norm}.*
    stage#.blocks.#.{norm1,attn.proj_q,attn.proj_k,attn.proj_v,attn.proj,norm2,mlp.fc1,mlp.fc2}.*
    stage#.blocks.#.attn.conv_proj_{q,k,v}.{conv.weight,bn.+}
    {norm,head}.*
"""
HF_TABLE = """
    encoder.stages.#. -> stage#.:
        cls_token
        embedding.convolution_embeddings.{projection,normalization}.* -> patch_embed.{proj,norm}.*
        layers.#. -> blocks.#.:
            {layernorm_before,layernorm_after}.* -> {norm1,norm2}.*
            attention.attention.projection_{query,key,value}.* -> attn.proj_{q,k,v}.*
            attention.attention.convolution_projection_{query,key,value}. -> attn.conv_proj_{q,k,v}.:
                convolution_projection.{convolution.weight,normalization.+} -> {conv.weight,bn.+}
            {attention.output,intermediate,output}.dense.* -> {attn.proj,mlp.fc1,mlp.fc2}.*
    {layernorm,classifier}.* -> {norm,head}.*
"""
SOURCES = (
    side.SourceNames(
        layout="authors",
        table=side.parse_table(AUTHORS_TABLE),
        markers=("stage0.patch_embed.proj.weight", "stage0.blocks.0.attn.conv_proj_q.conv.weight"),
        supported={"activation": ("quick_gelu",)},
        details={"wrapper": ""},
    ),
    side.SourceNames(
        layout="hf",
        table=side.parse_table(HF_TABLE),
        markers=(
            "encoder.stages.#.embedding.convolution_embeddings.projection.weight",
            "encoder.stages.#.layers.#.attention.attention.projection_query.weight",
        ),
        supported={"has a head": (True,)},
        assumed={"activation": "gelu"},
        card=make_hf_card,
        details={
            "model_type": "cvt",
            "norm_eps": NORM_EPS,
            "imagenet_mean": True,
            "preprocessing": {"crop": 0.875, "fit": "short_side", "interpolation": "bicubic"},
            "argument_fields": {"num_heads": "heads"},
            "outside": ("layernorm.",),
            "any_size": True,
            "own_activation": True,
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={})
FAMILY = Family("cvt", CvTConfig, CvT, PRESETS, ALIASES, CHECKPOINT)
