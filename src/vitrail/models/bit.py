"""BiT (Kolesnikov 2019, arXiv 1912.11370): pre-activation ResNets for transfer, the convnets that ViT is compared with.

B batch, C channels of a feature map, h·w its positions, D channels of the last one. Group norms replace batch norms,
and filters are standardized. R50x3 has 50 layers, each three times as wide as a ResNet's. Images may have any size.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.names.encoder_names import CONV
from vitrail.models.parts.convolutions import StdConv2d
from vitrail.models.parts.encoder import make_head, zero_head
from vitrail.models.parts.stages import ConvNet, name_blocks

Constants = Literal["timm", "google"]  # of weight standardization: √(variance + 1e-8), or + 1e-10
GROUPS, EXPANSION = 32, 4  # of a group norm; channels after a block, in channels inside it


@dataclass(frozen=True, kw_only=True)
class BiTConfig:
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, any other works too
    stages: tuple[int, ...] = (3, 4, 6, 3)  # blocks per stage; each stage but the first halves the resolution
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    width: int = 64  # channels of the stem and the first stage's 3×3 convolutions, doubled by each next stage
    constants: Constants = "timm"  # google: as the authors trained; differs for filters of very small weights
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stages:
            raise ConfigError("stages is (); expected at least one number, the blocks of a stage")
        if self.width % GROUPS:
            raise ConfigError(f"width is {self.width}; expected a multiple of {GROUPS}, the groups of a norm")


class BiT(ConvNet):
    """(B, 3, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: BiTConfig
    first_filters = "stem.conv.weight"

    def __init__(self, config: BiTConfig) -> None:
        super().__init__(config)
        before, depths = config.width, config.stages
        self.stem = nn.ModuleDict({"conv": make_convolution(config, config.channels, before, 7, 2)})
        widths = [EXPANSION * config.width * 2**stage for stage in range(len(depths))]
        self.stages = nn.ModuleList()
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            blocks = nn.Sequential()
            for number in range(depth):
                blocks.append(PreActBottleneck(config, before, width, 2 if stage and not number else 1))
                before = width
            self.stages.append(nn.ModuleDict({"blocks": blocks}))
        self.stage_names = [f"stages.{stage}.blocks" for stage in range(len(depths))]
        self.declare_stages(pair(config.image_size), 4, widths, name_blocks(depths, "stages.{}.blocks.{}"))
        self.norm = nn.GroupNorm(GROUPS, before)
        self.classifiers = (("mean", "head.fc"),) if config.classes else ()
        self.head = nn.ModuleDict({"fc": make_head(before, config.classes)})
        self.init_weights()

    def draw_weights(self) -> None:
        """Filters are standardized, so that their scale sets only how fast they change; the head is zero."""
        for module in self.modules():
            if isinstance(module, StdConv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.GroupNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        zero_head(self.head["fc"])

    def run_stem(self, images: Tensor) -> Tensor:
        return pool_padded_with_zeros(self.stem["conv"](images))  # without a norm

    def run_end(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x))

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of all positions: (B, h·w, D) → (B, classes)."""
        return self.head["fc"](tokens.mean(1))


def pool_padded_with_zeros(x: Tensor) -> Tensor:
    """The largest of 3×3 values, with stride 2; zeros around the map count, as in the authors' code.

    Not by `max_pool2d`: ONNX Runtime merges the padding into a pool, where it does not count.
    """
    x = F.pad(x, (1, 1, 1, 1))
    x = torch.maximum(torch.maximum(x[:, :, :-2:2], x[:, :, 1:-1:2]), x[:, :, 2::2])
    return torch.maximum(torch.maximum(x[..., :-2:2], x[..., 1:-1:2]), x[..., 2::2])


def make_convolution(config: BiTConfig, before: int, width: int, kernel: int = 1, stride: int = 1) -> StdConv2d:
    eps = 1e-10 if config.constants == "google" else 1e-8
    return StdConv2d(before, width, kernel, stride, symmetric=True, eps=eps)


class PreActBottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, a norm and a ReLU before each, plus a shortcut; none after the sum (He 2016)."""

    def __init__(self, config: BiTConfig, before: int, width: int, stride: int) -> None:
        super().__init__()
        inner = width // EXPANSION
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, before), make_convolution(config, before, inner)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, inner), make_convolution(config, inner, inner, 3, stride)
        self.norm3, self.conv3 = nn.GroupNorm(GROUPS, inner), make_convolution(config, inner, width)
        self.downsample = nn.ModuleDict()
        if before != width or stride > 1:
            self.downsample["conv"] = make_convolution(config, before, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = self.downsample["conv"](y) if self.downsample else x
        y = self.conv2(F.relu(self.norm2(self.conv1(y))))
        return self.conv3(F.relu(self.norm3(y))) + shortcut


DEPTHS = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
SIZES = ((50, 1), (50, 2), (50, 3), (101, 1), (101, 3), (152, 1), (152, 2), (152, 4), (200, 3))  # layers, widths
PRESETS = Presets(
    lambda: {
        f"resnetv2_{layers}x{factor}_bit": BiTConfig(stages=DEPTHS[layers], width=64 * factor)
        for layers, factor in SIZES
    }
)
ALIASES = {f"BiT-R{layers}x{factor}": f"resnetv2_{layers}x{factor}_bit" for layers, factor in SIZES}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    width, channels, *_ = side.get_shape(shapes, "stem.conv.weight", 4)
    stages = side.count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    fields: dict[str, Any] = {
        "image_size": (224, 224),
        "stages": stages,
        "channels": channels,
        "classes": side.count_classes(shapes, "head.fc.weight"),
        "width": width,
    }
    return side.InferredConfig(fields=fields)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    return side.make_preset_card({**config, "constants": "timm"}, FAMILY.name, PRESETS)


AS_CONVOLUTION = side.MATRIX_AS_CONVOLUTION
HEAD = side.TensorTransform(
    lambda parts: AS_CONVOLUTION.to_ours([CONV.to_ours(parts)]),
    lambda matrix, heads: CONV.to_theirs(AS_CONVOLUTION.to_theirs(matrix, heads)[0], heads),
)
TIMM_TABLE = """
    stem.conv.weight
    stages.#.blocks.#.{conv1,conv2,conv3,downsample.conv}.weight
    {stages.#.blocks.#.norm1,stages.#.blocks.#.norm2,stages.#.blocks.#.norm3,norm}.*
    head.fc.weight | as_convolution
    head.fc.bias
"""
GOOGLE_TABLE = """
    resnet/root_block/standardized_conv2d/kernel -> stem.conv.weight | conv
    resnet/block%/unit@/ -> stages.#.blocks.#.:
        {a,b,c}/standardized_conv2d/kernel -> {conv1,conv2,conv3}.weight | conv
        {a,b,c}/group_norm/gamma -> {norm1,norm2,norm3}.weight
        {a,b,c}/group_norm/beta -> {norm1,norm2,norm3}.bias
        a/proj/standardized_conv2d/kernel -> downsample.conv.weight | conv
    resnet/group_norm/{gamma,beta} -> norm.{weight,bias}
    resnet/head/conv2d/kernel -> head.fc.weight | head
    resnet/head/conv2d/bias -> head.fc.bias
"""
SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE, as_convolution=AS_CONVOLUTION),
        markers=("stem.conv.weight", "stages.0.blocks.0.norm1.weight", "stages.0.blocks.0.downsample.conv.weight"),
        assumed={"constants": "timm"},
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "model_args": side.ARGUMENTS_IN_SHAPES,
            "pretrained_cfg": {"crop_pct": 0.875, "interpolation": "bilinear"},
            "refused_names": r"^resnetv2_\d+(d|t|s|_gn|_evo|_frn)",  # with another stem or norm
        },
    ),
    side.SourceNames(
        layout="google",
        table=side.parse_table(GOOGLE_TABLE, conv=CONV, head=HEAD),
        markers=("resnet/block1/unit01/a/group_norm/gamma", "resnet/group_norm/gamma"),
        assumed={"constants": "google"},
        details={
            "fields": {"constants": "google"},
            "numbered": r"(?<=standardized_conv2d)_\d+",  # in some files
            "preprocessing": {"crop": 0.875, "interpolation": "bilinear"},
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("bit", BiTConfig, BiT, PRESETS, ALIASES, CHECKPOINT)
