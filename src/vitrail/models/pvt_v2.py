"""PVTv2 (Wang 2021, arXiv 2106.13797): overlapping patches, attention to a few keys, convolutions in the MLPs.

B batch, C channels, n = h·w tokens, D width, M width of the MLP; h, w and D change by stage. The convolutions tell the
tokens their places, so images may have any size. Each stage ends with a norm, which the next one reads.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair
from vitrail.models.base.contract import ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_as_pvt
from vitrail.models.parts.attention import ReducedAttention, ReducedGrid
from vitrail.models.parts.convolutions import ConvEmbed
from vitrail.models.parts.encoder import DropRates, make_head, zero_head
from vitrail.models.parts.stages import (
    StagedModel,
    check_reductions,
    check_stages,
    flatten_map,
    make_halved_levels,
    make_stage_blocks,
    name_blocks,
    unflatten_map,
)

NORM_EPS = 1e-6
POOLED = 7  # rows and columns of keys of the pooled variant


@dataclass(frozen=True, kw_only=True)
class PVTv2Config(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, any other works too
    stride: int = 4  # pixels per token of the first stage; each next stage halves the grid
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    stages: tuple[int, ...] = (3, 4, 6, 3)  # blocks per stage
    widths: tuple[int, ...] = (64, 128, 320, 512)  # channels of a token, per stage
    heads: tuple[int, ...] = (1, 2, 5, 8)  # attention heads per stage, each width / heads wide
    reductions: tuple[int, ...] = (8, 4, 2, 1)  # rows and columns of tokens that become one key, per stage
    mlp_ratios: tuple[float, ...] = (8.0, 8.0, 4.0, 4.0)  # width of the MLP, in widths of a token, per stage
    pooled: bool = False  # keys are the means of 7×7 equal parts of the grid, so that the cost is linear: b2_li
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, "mlp_ratios", "reductions")
        if not self.pooled:
            check_reductions(self.reductions, make_levels(self))


def make_levels(config: PVTv2Config) -> tuple[Level, ...]:
    (rows, columns), stride = pair(config.image_size), config.stride
    blocks = name_blocks(config.stages, "stages.{}.blocks.{}")
    return make_halved_levels((-(-rows // stride), -(-columns // stride)), pair(stride), config.widths, blocks)


class PVTv2(StagedModel):
    """Overlapping patches, and keys of a strided convolution or of means."""

    config: PVTv2Config
    first_filters = "patch_embed.proj.weight"
    normed_maps = True
    one_size_export_reason = "its grids are rounded up, which torch.export does not trace"
    no_masking_reason = "they overlap"

    def __init__(self, config: PVTv2Config) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        strides = [level.stride[0] for level in self.levels]
        least = 1 if config.pooled else max(r * stride for r, stride in zip(config.reductions, strides, strict=True))
        self.sizes = ImageSizes(multiple=(1, 1), minimum=(least, least))
        self.final_norm = f"stages.{len(config.stages) - 1}.norm"
        self.classifiers = (("mean", "head"),) if config.classes else ()
        kernel = 2 * config.stride - 1
        self.patch_embed = ConvEmbed(config.channels, config.widths[0], kernel, config.stride, kernel // 2)
        self.stages = nn.ModuleList()
        for stage, width in enumerate(config.widths):
            hidden, make = round(config.mlp_ratios[stage] * width), partial(make_attention, config, stage)
            blocks = make_stage_blocks(config, stage, hidden, make, norm_eps=NORM_EPS, kind=ConvMlpBlock)
            for block in blocks:
                block.set_submodule("mlp", ConvMlp(width, hidden, config.dropout, relu=config.pooled))
            merge = ConvEmbed(config.widths[stage - 1], width, 3, 2, 1) if stage else None
            self.stages.append(PVTv2Stage(merge, blocks, width))
        self.head = make_head(config.widths[-1], config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code; the head is zero."""
        init_as_pvt(self)
        zero_head(self.head)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        self.check_images(images)
        return self.patch_embed(images)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        *body, last = self.stages
        for stage in body:
            x, grid = stage(x, grid)
            x = stage.get_submodule("norm")(x)
        return last(x, grid)[0]

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """One map per stage, after its norm: (B, C, H, W) → [(B, D, h, w), …]."""
        (x, grid), maps = self.embed(images), list[Tensor]()
        for stage in self.stages:
            x, grid = stage(x, grid)
            x = stage.get_submodule("norm")(x)
            maps.append(unflatten_map(x, grid))
        return maps


def make_attention(config: PVTv2Config, stage: int, _: int) -> ReducedAttention:
    """The attention of the blocks of a stage."""
    kind, ratio = (PooledAttention, 1) if config.pooled else (ReducedAttention, config.reductions[stage])
    return kind(config.widths[stage], config.heads[stage], ratio, dropout=config.attention_dropout)


class PVTv2Stage(nn.Module):
    """Halves the grid, then blocks: (B, n, D) and the grid → the same at half the size. The model applies its norm."""

    def __init__(self, downsample: ConvEmbed | None, blocks: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.downsample, self.blocks = downsample, blocks
        self.norm = nn.LayerNorm(width, NORM_EPS)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        if self.downsample is not None:
            x, grid = self.downsample(unflatten_map(x, grid))
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


class ConvMlpBlock(Block):
    """The block of a ViT, whose MLP needs the grid."""

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop_path(self.drop(self.attn(self.norm1(x), grid, mask=mask, queries=queries)))
        return x + self.drop_path(self.mlp(self.norm2(x), grid))


class ConvMlp(nn.Module):
    """fc2(GELU(depthwise 3×3 convolution(fc1(x)))), the pooled variant with a ReLU before: (B, n, D) → (B, n, D)."""

    def __init__(self, width: int, hidden: int, dropout: float, *, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.fc1 = nn.Linear(width, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = self.fc1(x)
        x = flatten_map(self.dwconv(unflatten_map(F.relu(x) if self.relu else x, grid)))
        return self.drop(self.fc2(self.drop(F.gelu(x))))


class PooledAttention(ReducedAttention):
    """Attention of all tokens to 7×7 keys, means of equal parts of the grid: (B, n, D) → (B, n, D)."""

    def __init__(self, width: int, heads: int, ratio: int, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, ratio, dropout=dropout)
        self.sr, self.norm = nn.Conv2d(width, width, 1), nn.LayerNorm(width, 1e-5)

    def reduce_grid(self, grid: Grid) -> ReducedGrid:
        return ReducedGrid(grid, (POOLED, POOLED))

    def reduce(self, x: Tensor, grid: Grid) -> Tensor:
        assert self.sr is not None
        assert self.norm is not None
        means = F.adaptive_avg_pool2d(unflatten_map(x, grid), POOLED)
        return F.gelu(self.norm(flatten_map(self.sr(means))))


SMALL = PVTv2Config(stages=(2, 2, 2, 2))
PRESETS = Presets(
    lambda: {
        "pvt_v2_b0": replace(SMALL, widths=(32, 64, 160, 256)),
        "pvt_v2_b1": SMALL,
        "pvt_v2_b2": PVTv2Config(),
        "pvt_v2_b2_li": PVTv2Config(pooled=True),
        "pvt_v2_b3": PVTv2Config(stages=(3, 4, 18, 3)),
        "pvt_v2_b4": PVTv2Config(stages=(3, 8, 27, 3)),
        "pvt_v2_b5": PVTv2Config(stages=(3, 6, 40, 3), mlp_ratios=(4.0, 4.0, 4.0, 4.0)),
    }
)
ALIASES = {f"PVTv2-B{number}": f"pvt_v2_b{number}" for number in range(6)} | {"PVTv2-B2-Li": "pvt_v2_b2_li"}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Heads are those of the published model of these widths; the first stage's kernel has 2·stride − 1 pixels."""
    _, channels, kernel, _ = side.get_shape(shapes, "patch_embed.proj.weight", 4)
    stages = side.count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"stages.{stage}.blocks.0." for stage in range(len(stages))]
    hidden = [side.get_shape(shapes, f"{name}mlp.fc1.weight", 2) for name in first]
    kernels = [shapes.get(f"{name}attn.sr.weight", (0,))[-1] for name in first]
    pooled, widths = set(kernels) == {1}, tuple(shape[1] for shape in hidden)
    halvings = range(len(stages) - 1, -1, -1)  # after each stage; pooled ones do not use their reductions
    fields = side.describe_stages(shapes, channels, stages, widths) | {
        "stride": (kernel + 1) // 2,
        "reductions": tuple(
            max(each, 2**later if pooled else 1) for each, later in zip(kernels, halvings, strict=True)
        ),
        "mlp_ratios": tuple(shape[0] / shape[1] for shape in hidden),
        "pooled": pooled,
    }
    return side.InferredConfig(fields=fields | side.find_published_heads(PRESETS, widths))


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {
        "in_chans": config["channels"],
        "embed_dims": config["widths"],
        "num_heads": config["heads"],
        "mlp_ratios": config["mlp_ratios"],
        "depths": config["stages"],
        "sr_ratios": config["reductions"],
        "linear": config["pooled"],
    }
    return {"architecture": "pvt_v2_b2", "num_classes": config["classes"], "model_args": arguments}


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    if any(ratio % 1 for ratio in config["mlp_ratios"]):
        raise CheckpointError(
            f"mlp_ratios is {config['mlp_ratios']}, which transformers cannot represent; expected whole numbers"
        )
    later = len(config["stages"]) - 1
    return {
        "architectures": ["PvtV2ForImageClassification" if config["classes"] else "PvtV2Model"],
        "model_type": "pvt_v2",
        "image_size": config["image_size"],
        "num_channels": config["channels"],
        "num_encoder_blocks": len(config["stages"]),
        "depths": config["stages"],
        "sr_ratios": config["reductions"],
        "hidden_sizes": config["widths"],
        "patch_sizes": [2 * config["stride"] - 1, *[3] * later],
        "strides": [config["stride"], *[2] * later],
        "num_attention_heads": config["heads"],
        "mlp_ratios": [int(ratio) for ratio in config["mlp_ratios"]],
        "hidden_act": "gelu",
        "hidden_dropout_prob": config["dropout"],
        "attention_probs_dropout_prob": config["attention_dropout"],
        "drop_path_rate": config["stochastic_depth"],
        "layer_norm_eps": NORM_EPS,
        "qkv_bias": True,
        "linear_attention": config["pooled"],
        "dtype": "float32",
    }


TIMM_TABLE = """
    {patch_embed,stages.#.downsample}.{proj,norm}.*
    {stages.#.norm,head}.*
    stages.#.blocks.#.{norm1,norm2,mlp.fc#,mlp.dwconv,attn.q,attn.kv,attn.proj,attn.sr,attn.norm}.*
"""
HF_TABLE = """
    encoder.layers.0.patch_embedding.{proj,layer_norm}.* -> patch_embed.{proj,norm}.*
    encoder.layers.#. -> stages.#.:
        patch_embedding.{proj,layer_norm}.* -> downsample.{proj,norm}.*
        layer_norm.* -> norm.*
        blocks.#.:
            {layer_norm_1,layer_norm_2}.* -> {norm1,norm2}.*
            attention.{query,[key,value],proj}.* -> attn.{q,kv,proj}.*
            attention.{spatial_reduction,layer_norm}.* -> attn.{sr,norm}.*
            mlp.{dense1,dense2,dwconv.dwconv}.* -> mlp.{fc1,fc2,dwconv}.*
    classifier.* -> head.*
"""
SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE),
        markers=("patch_embed.proj.weight", "stages.0.blocks.0.attn.kv.weight", "stages.0.blocks.0.mlp.dwconv.weight"),
        supported={"stride": (4,)},
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "model_args": (
                *("in_chans", "num_classes", "embed_dims", "num_heads", "mlp_ratios", "depths", "sr_ratios", "linear"),
            ),
            "argument_fields": {"num_heads": "heads"},
            "pretrained_cfg": {"crop_pct": 0.9},
        },
    ),
    side.SourceNames(
        layout="hf",
        table=side.parse_table(HF_TABLE),
        markers=("encoder.layers.0.patch_embedding.proj.weight", "encoder.layers.0.blocks.0.mlp.dwconv.dwconv.weight"),
        card=make_hf_card,
        details={
            "model_type": "pvt_v2",
            "norm_eps": NORM_EPS,
            "imagenet_mean": True,
            "argument_fields": {"num_attention_heads": "heads"},
            "any_size": True,
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={})
FAMILY = Family("pvt_v2", PVTv2Config, PVTv2, PRESETS, ALIASES, CHECKPOINT)
