"""MobileViT (Mehta 2021, arXiv 2110.02178): a small convnet, with transformers in its last stages.

B batch, C channels, n = h·w tokens, D width of the tokens; h, w and the channels change by stage. A map is cut into
squares of 2×2 places; the places at the top left of all squares attend to each other, as do those at the top right, …:
four sequences of n/4 tokens. The convolutions around them mix neighbors. Images may have any size.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import AttentionLayer, Mask, Projected, SelfAttention
from vitrail.layers.block import Block
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, check_heads, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.names.hf_names import make_hf_heading
from vitrail.models.parts.encoder import make_head, zero_head
from vitrail.models.parts.stages import (
    check_stages,
    flatten_map,
    halve_grid,
    make_halved_levels,
    name_blocks,
    unflatten_map,
)
from vitrail.models.parts.windows import WindowAttention, Windows

NORM_EPS = 1e-5
FINAL_RATIO = 4  # channels that the head reads, in channels of the last stage


@dataclass(frozen=True, kw_only=True)
class MobileViTConfig:
    image_size: Size = 256  # rows, columns; one number for a square; the intended size, any other works too
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the features
    stem_width: int = 16  # channels after the first convolution, which halves the image
    convolutions: tuple[int, ...] = (1, 3, 1, 1, 1)  # convolutional blocks per stage; all but the first halve the map
    stages: tuple[int, ...] = field(default=(0, 0, 2, 4, 3), metadata=MAY_BE_ZERO)  # transformer blocks per stage
    widths: tuple[int, ...] = (32, 64, 96, 128, 160)  # channels per stage
    token_widths: tuple[int, ...] = field(default=(0, 0, 144, 192, 240), metadata=MAY_BE_ZERO)  # of the transformers
    heads: int = 4  # attention heads, each token width / heads wide
    expansion: int = 4  # channels inside a convolutional block, in channels of its input
    mlp_ratio: float = 2.0  # width of the MLP, in widths of a token
    dropout: float = field(default=0.0, metadata=RATE)
    attention_dropout: float = field(default=0.0, metadata=RATE)
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, "convolutions", "token_widths")
        for width in (self.stem_width, *self.widths):
            if width % 8:
                raise ConfigError(f"a width of {width} channels; expected a multiple of 8")
        for depth, width in zip(self.stages, self.token_widths, strict=True):
            if bool(depth) != bool(width):
                raise ConfigError(f"{depth} transformer blocks of width {width}; expected both, or 0 and 0")
            check_heads(width, self.heads if depth else 1)


def make_levels(config: MobileViTConfig) -> tuple[Level, ...]:
    counts = [count + bool(depth) for count, depth in zip(config.convolutions, config.stages, strict=True)]
    grid = halve_grid(pair(config.image_size))
    return make_halved_levels(grid, (2, 2), config.widths, name_blocks(counts, "stages.{}.{}"))


class MobileViT(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the features (B, 4·D of the last stage)."""

    config: MobileViTConfig
    first_filters = "stem.conv.weight"
    final_norm = ""
    one_size_export_reason = "its grids are rounded up, which torch.export does not trace"
    no_masking_reason = no_dropping_reason = "its convolutions need a complete map"

    def __init__(self, config: MobileViTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        self.sizes = ImageSizes(multiple=(1, 1))
        self.classifiers = (("mean", "head.fc"),) if config.classes else ()
        self.stem = SiluConv(config.channels, config.stem_width, 3, 2)
        self.stages, before = nn.ModuleList(), config.stem_width
        for stage, width in enumerate(config.widths):
            blocks = list[nn.Module]()
            for number in range(config.convolutions[stage]):
                blocks.append(InvertedResidual(before, width, 2 if stage and not number else 1, config.expansion))
                before = width
            if config.stages[stage]:
                blocks.append(MobileViTBlock(width, config.token_widths[stage], make_token_blocks(config, stage)))
            self.stages.append(nn.Sequential(*blocks))
        self.final_conv = SiluConv(before, self.feature_width)
        self.head = nn.ModuleDict({"fc": make_head(self.feature_width, config.classes)})
        self.init_weights()

    @property
    def feature_width(self) -> int:
        return FINAL_RATIO * self.config.widths[-1]

    def draw_weights(self) -> None:
        """Convolutions keep the variance of their inputs, linear maps are small; the head is zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                module.reset_parameters()
        zero_head(self.head["fc"])

    def encode(self, images: Tensor, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        """The last map, each of its places a token: (B, C, H, W) → (B, n, D)."""
        self.check_images(images)
        x = self.stem(images)
        for stage in self.stages:  # not by `feature_maps`, which keeps the memory of all maps
            x = stage(x)
        return flatten_map(x)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The output of each stage: (B, C, H, W) → [(B, D, h, w), …]."""
        self.check_images(images)
        maps = [self.stem(images)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return maps[1:]

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of the expanded tokens: (B, n, D) → (B, classes)."""
        expanded = self.final_conv(tokens.transpose(1, 2).unsqueeze(3))  # (B, 4·D, n, 1)
        return self.head["fc"](expanded.mean((2, 3)))


class SiluConv(nn.Module):
    """A convolution without bias, batch norm, then SiLU: (B, C, h, w)."""

    def __init__(
        self, before: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1, *, linear: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, width, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn, self.act = nn.BatchNorm2d(width), nn.Identity() if linear else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class InvertedResidual(nn.Module):
    """More channels, a 3×3 convolution within each, fewer channels (Sandler 2018); adds its input if shapes agree."""

    def __init__(self, before: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden, self.adds = expansion * before, before == width and stride == 1
        self.conv1_1x1 = SiluConv(before, hidden)
        self.conv2_kxk = SiluConv(hidden, hidden, 3, stride, hidden)
        self.conv3_1x1 = SiluConv(hidden, width, linear=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x)))
        return x + y if self.adds else y


class MobileViTBlock(nn.Module):
    """Convolutions, a transformer over four sequences of places, and a convolution of its output and the input."""

    def __init__(self, width: int, token_width: int, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.conv_kxk = SiluConv(width, width, 3)
        self.conv_1x1 = nn.Conv2d(width, token_width, 1, bias=False)
        self.transformer, self.norm = blocks, nn.LayerNorm(token_width, NORM_EPS)
        self.conv_proj = SiluConv(token_width, width)
        self.conv_fusion = SiluConv(2 * width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, size = self.conv_1x1(self.conv_kxk(x)), (x.shape[2], x.shape[3])
        whole = (size[0] + size[0] % 2, size[1] + size[1] % 2)
        if whole != size:  # squares of 2×2 places need even sides
            y = F.interpolate(y, size=whole, mode="bilinear", align_corners=False)
        windows = cut_into_sequences(whole)
        tokens = windows.split(flatten_map(y))  # (4·B, n/4, D)
        for block in self.transformer:
            tokens = block(tokens, whole)
        y = unflatten_map(windows.join(self.norm(tokens)), whole)
        if whole != size:
            y = F.interpolate(y, size=size, mode="bilinear", align_corners=False)
        return self.conv_fusion(torch.cat([x, self.conv_proj(y)], dim=1))


def cut_into_sequences(grid: Grid) -> Windows:
    """The four sequences of places of a grid with even sides."""
    return Windows(grid, (grid[0] // 2, grid[1] // 2), interval=(2, 2))


def make_token_blocks(config: MobileViTConfig, stage: int) -> nn.ModuleList:
    """The blocks of a ViT, with SiLU in the MLP."""
    width, blocks = config.token_widths[stage], nn.ModuleList()
    for _ in range(config.stages[stage]):
        block = Block(width, config.heads, round(config.mlp_ratio * width), norm_eps=NORM_EPS, dropout=config.dropout)
        block.set_submodule("attn", SequenceAttention(width, config.heads, dropout=config.attention_dropout))
        block.set_submodule("mlp.act", nn.SiLU())
        blocks.append(block)
    return blocks


class SequenceAttention(WindowAttention):
    """Self-attention within four sequences that are already in the batch: (4·B, n/4, D) → (4·B, n/4, D)."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(width, heads, (1, 1), dropout=dropout)

    def cut(self, grid: Grid) -> Windows:
        return cut_into_sequences(grid)

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        return SelfAttention.project(self, x, grid, mask, queries)

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        return AttentionLayer.forward(self, x, grid, mask, queries)


PRESETS = Presets(
    lambda: {
        "mobilevit_xxs": MobileViTConfig(widths=(16, 24, 48, 64, 80), token_widths=(0, 0, 64, 80, 96), expansion=2),
        "mobilevit_xs": MobileViTConfig(widths=(32, 48, 64, 80, 96), token_widths=(0, 0, 96, 120, 144)),
        "mobilevit_s": MobileViTConfig(),
    }
)
ALIASES = {f"MobileViT-{size.upper()}": f"mobilevit_{size}" for size in ("xxs", "xs", "s")}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """All published models have four heads."""
    stages = range(side.count_numbers(shapes, r"stages\.(\d+)\."))
    counts = [side.count_numbers(shapes, rf"stages\.{n}\.(\d+)\.conv1_1x1\.") for n in stages]
    depths = [side.count_numbers(shapes, rf"stages\.{n}\.\d+\.transformer\.(\d+)\.") for n in stages]
    last = [f"stages.{n}.{count - 1}.conv3_1x1.conv.weight" for n, count in enumerate(counts)]
    tokens = [f"stages.{n}.{count}.conv_1x1.weight" if depths[n] else "" for n, count in enumerate(counts)]
    hidden, stem_width, _, _ = side.get_shape(shapes, "stages.0.0.conv1_1x1.conv.weight", 4)
    fields: dict[str, Any] = {
        "image_size": (256, 256),
        "channels": side.get_shape(shapes, "stem.conv.weight", 4)[1],
        "classes": side.count_classes(shapes, "head.fc.weight"),
        "stem_width": stem_width,
        "convolutions": tuple(counts),
        "stages": tuple(depths),
        "widths": tuple(side.get_shape(shapes, name, 4)[0] for name in last),
        "token_widths": tuple(side.get_shape(shapes, name, 4)[0] if name else 0 for name in tokens),
        "expansion": hidden // stem_width,
    }
    if first := next((name for name in tokens if name), ""):
        rows, columns = side.get_shape(shapes, first.replace("conv_1x1", "transformer.0.mlp.fc1"), 2)
        fields["mlp_ratio"] = rows / columns
    published = {each.token_widths for each in PRESETS.values()}
    return side.InferredConfig(fields=fields | ({"heads": 4} if fields["token_widths"] in published else {}))


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    return side.make_preset_card(config, FAMILY.name, PRESETS)


TIMM_TABLE = """
    {stem,final_conv}.{conv.weight,bn.+}
    stages.#.#.{conv1_1x1,conv2_kxk,conv3_1x1,conv_kxk,conv_proj,conv_fusion}.{conv.weight,bn.+}
    stages.#.#.{conv_1x1.weight,norm.*}
    stages.#.#.transformer.#.{norm1,attn.qkv,attn.proj,norm2,mlp.fc1,mlp.fc2}.*
    head.fc.*
"""
# the last three stages, after a convolution that halves the map, which has a name of its own, end with a transformer
HF_TABLE = """
    {conv_stem,conv_1x1_exp}.{convolution.weight,normalization.+} -> {stem,final_conv}.{conv.weight,bn.+}
    classifier.* -> head.fc.*
    encoder.layer.{0,1}.layer.#. -> stages.{0,1}.#.:
        {expand_1x1,conv_3x3,reduce_1x1}. -> {conv1_1x1,conv2_kxk,conv3_1x1}.:
            {convolution.weight,normalization.+} -> {conv.weight,bn.+}
    encoder.layer.{2,3,4}.downsampling_layer. -> stages.{2,3,4}.0.:
        {expand_1x1,conv_3x3,reduce_1x1}. -> {conv1_1x1,conv2_kxk,conv3_1x1}.:
            {convolution.weight,normalization.+} -> {conv.weight,bn.+}
    encoder.layer.#. -> stages.#.1.:
        {conv_kxk,conv_projection,fusion}. -> {conv_kxk,conv_proj,conv_fusion}.:
            {convolution.weight,normalization.+} -> {conv.weight,bn.+}
        conv_1x1.convolution.weight -> conv_1x1.weight
        layernorm.* -> norm.*
        transformer.layer.#. -> transformer.#.:
            {layernorm_before,layernorm_after}.* -> {norm1,norm2}.*
            attention.{attention.[query,key,value],output.dense}.* -> attn.{qkv,proj}.*
            {intermediate,output}.dense.* -> mlp.{fc1,fc2}.*
"""
# stages are counted from 1; the norm after the last block of a transformer is counted as a block
AUTHORS_TABLE = """
    conv_1.block.conv.weight -> stem.conv.weight | flip
    {conv_1,conv_1x1_exp}.block.{conv.weight,norm.+} -> {stem,final_conv}.{conv.weight,bn.+}
    layer_%.#. -> stages.#.#.:
        block.{exp_1x1,conv_3x3,red_1x1}.block. -> {conv1_1x1,conv2_kxk,conv3_1x1}.:
            {conv.weight,norm.+} -> {conv.weight,bn.+}
        {local_rep.conv_3x3,conv_proj,fusion}.block. -> {conv_kxk,conv_proj,conv_fusion}.:
            {conv.weight,norm.+} -> {conv.weight,bn.+}
        local_rep.conv_1x1.block.conv.weight -> conv_1x1.weight
    layer_{3.#.global_rep.2,4.#.global_rep.4,5.#.global_rep.3}.* -> stages.{2,3,4}.#.norm.*
    layer_%.#.global_rep.#. -> stages.#.#.transformer.#.:
        pre_norm_mha.{0,1.qkv_proj,1.out_proj}.* -> {norm1,attn.qkv,attn.proj}.*
        pre_norm_ffn.{0,1,4}.* -> {norm2,mlp.fc1,mlp.fc2}.*
    classifier.fc.* -> head.fc.*
"""


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    return make_hf_heading(config, "mobilevit", "MobileViT") | {
        "patch_size": 2,
        "hidden_sizes": config["token_widths"][2:],
        "neck_hidden_sizes": [config["stem_width"], *config["widths"], FINAL_RATIO * config["widths"][-1]],
        "num_attention_heads": config["heads"],
        "mlp_ratio": config["mlp_ratio"],
        "expand_ratio": float(config["expansion"]),
        "hidden_act": "silu",
        "layer_norm_eps": NORM_EPS,
        "hidden_dropout_prob": config["dropout"],
        "attention_probs_dropout_prob": config["attention_dropout"],
        "dtype": "float32",
    }


FLIP = side.TensorTransform(lambda parts: parts[0].flip(1), lambda kernel, _: [kernel.flip(1)])  # blue comes first
PLAIN_PIXELS = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}  # from 0 to 1
SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE),
        markers=("stem.conv.weight", "stages.0.0.conv1_1x1.conv.weight", "stages.#.#.conv_fusion.conv.weight"),
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "model_args": ("in_chans", "num_classes"),
            "pretrained_cfg": {"crop_pct": 0.9, **PLAIN_PIXELS},
        },
    ),
    side.SourceNames(
        layout="authors",
        table=side.parse_table(AUTHORS_TABLE, flip=FLIP),
        markers=("conv_1.block.conv.weight", "layer_3.1.fusion.block.conv.weight"),
        supported={"stages": (MobileViTConfig().stages,)},
        details={"wrapper": "", "preprocessing": {"crop": 256 / 288, "interpolation": "bilinear", **PLAIN_PIXELS}},
    ),
    side.SourceNames(
        layout="hf",
        table=side.parse_table(HF_TABLE),
        markers=("conv_stem.convolution.weight", "encoder.layer.#.fusion.convolution.weight"),
        supported={"convolutions": (MobileViTConfig().convolutions,), "stages": (MobileViTConfig().stages,)},
        card=make_hf_card,
        details={
            "model_type": "mobilevit",
            "norm_eps": NORM_EPS,
            "own_activation": True,
            "preprocessing": {"crop": 256 / 288, "fit": "short_side", **PLAIN_PIXELS},
            "bgr_kernel": ("conv_stem.convolution.weight", "stem.conv.weight"),
            "processor": "MobileViTImageProcessor",
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={})
FAMILY = Family("mobilevit", MobileViTConfig, MobileViT, PRESETS, ALIASES, CHECKPOINT)
