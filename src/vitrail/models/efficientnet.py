"""EfficientNet (Tan 2019, arXiv 1905.11946): convnets whose width, depth and image size grow together; DeiT's baseline.

B batch, C channels of a feature map, h·w its positions, D channels that the head reads. `padding` and the constants of
the batch norms are those of torchvision and of most of timm's models, or TensorFlow's, which its authors' weights
(`tf_efficientnet_b0`) need. Images may have any size.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from operator import mul
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.layers.block import StochasticDepth
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, pair
from vitrail.models.base.contract import ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import draw_scaled_convolution
from vitrail.models.parts.convolutions import ConvSame
from vitrail.models.parts.encoder import make_head, zero_head
from vitrail.models.parts.stages import ConvNet, check_stages, name_blocks

Padding = Literal["symmetric", "same"]


@dataclass(frozen=True, kw_only=True)
class EfficientNetConfig:
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, any other works too
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    stages: tuple[int, ...] = (1, 2, 2, 3, 3, 4, 1)  # blocks per stage
    widths: tuple[int, ...] = (16, 24, 40, 80, 112, 192, 320)  # channels per stage
    kernels: tuple[int, ...] = (3, 3, 5, 3, 5, 5, 3)  # rows and columns of a filter, per stage
    strides: tuple[int, ...] = (1, 2, 2, 2, 1, 2, 1)  # of the first block of each stage, after a stem of stride 2
    stem_width: int = 32  # channels of the stem
    head_width: int = 1280  # channels that the head reads
    expansion: int = 6  # channels inside a block, in channels of its input; the first stage has 1
    padding: Padding = "symmetric"  # same: TensorFlow's, which differs where the stride is 2 and a side is even
    norm_eps: float = 1e-5  # of batch norms
    norm_momentum: float = field(default=0.1, metadata=RATE)  # share of a new batch in their running statistics
    dropout: float = field(default=0.0, metadata=RATE)  # of the features that the head reads
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # grows from 0 at the first block by rate/blocks
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, "kernels", "strides")
        if even := [kernel for kernel in self.kernels if kernel % 2 == 0]:
            raise ConfigError(f"a kernel of {even[0]}; expected odd numbers")
        if wide := [stride for stride in self.strides if stride > 2]:
            raise ConfigError(f"a stride of {wide[0]}; expected 1 or 2")
        for width in (self.stem_width, *self.widths):
            if width % 4:
                raise ConfigError(f"a width of {width} channels; expected a multiple of 4")


def make_levels(config: EfficientNetConfig) -> tuple[Level, ...]:
    """The stages of one resolution form a level, whose width is that of its last stage."""
    (rows, columns), levels = pair(config.image_size), dict[int, Level]()
    blocks, strides = name_blocks(config.stages, "blocks.{}.{}"), accumulate(config.strides, mul, initial=2)
    for names, width, stride in zip(blocks, config.widths, list(strides)[1:], strict=True):
        before = levels[stride].blocks if stride in levels else ()
        grid = (ceil(rows / stride), ceil(columns / stride))
        levels[stride] = Level(grid=grid, stride=(stride, stride), width=width, blocks=(*before, *names))
    return tuple(levels.values())


class EfficientNet(ConvNet):
    """(B, 3, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: EfficientNetConfig
    first_filters = "conv_stem.weight"

    def __init__(self, config: EfficientNetConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        least = self.levels[-1].stride[0] + 1  # more than one position in the last map
        self.sizes = ImageSizes(multiple=(1, 1), minimum=(least, least))
        if config.padding == "same":
            self.one_size_export_reason = "its padding depends on the size of the image"
        self.classifiers = (("mean", "classifier"),) if config.classes else ()
        self.conv_stem = make_convolution(config, config.channels, config.stem_width, 3, 2)
        self.bn1, before, number = make_norm(config, config.stem_width), config.stem_width, 0
        self.stage_names, self.blocks = [f"blocks.{stage}" for stage in range(len(config.stages))], nn.Sequential()
        for stage, (depth, width) in enumerate(zip(config.stages, config.widths, strict=True)):
            kernel, blocks = config.kernels[stage], list[nn.Module]()
            for stride in (config.strides[stage], *[1] * (depth - 1)):
                rate = config.stochastic_depth * number / sum(config.stages)
                block = ExpandedBlock if stage else SeparableBlock
                blocks.append(block(config, before, width, kernel, stride, rate))
                before, number = width, number + 1
            self.blocks.append(nn.Sequential(*blocks))
        self.conv_head, self.bn2 = (
            make_convolution(config, before, config.head_width),
            make_norm(config, self.feature_width),
        )
        self.drop, self.classifier = nn.Dropout(config.dropout), make_head(self.feature_width, config.classes)
        self.init_weights()

    @property
    def feature_width(self) -> int:
        return self.config.head_width

    def draw_weights(self) -> None:
        """Convolutions scaled by their outputs, as in the authors' code; the head is zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                draw_scaled_convolution(module)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        zero_head(self.classifier)

    def run_stem(self, images: Tensor) -> Tensor:
        return F.silu(self.bn1(self.conv_stem(images)))

    def run_end(self, x: Tensor) -> Tensor:
        return F.silu(self.bn2(self.conv_head(x)))

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The output of the last stage of each level: (B, C, H, W) → [(B, D, h, w), …]."""
        ends = {f"blocks.{len(self.blocks) - 1}"}
        ends |= {f"blocks.{stage - 1}" for stage, stride in enumerate(self.config.strides) if stage and stride == 2}
        maps = zip(self.stage_names, super().feature_maps(images), strict=True)
        return [each for name, each in maps if name in ends]

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of all positions: (B, h·w, D) → (B, classes)."""
        return self.classifier(self.drop(tokens.mean(1)))


def make_convolution(
    config: EfficientNetConfig, before: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    if config.padding == "same" and stride > 1:
        return ConvSame(before, width, kernel, stride, groups=groups, bias=False)
    return nn.Conv2d(before, width, kernel, stride, kernel // 2, groups=groups, bias=False)


def make_norm(config: EfficientNetConfig, width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, config.norm_eps, config.norm_momentum)


class SeparableBlock(nn.Module):
    """A convolution within each channel, then one of all channels at each position, plus the input if shapes agree."""

    def __init__(
        self, config: EfficientNetConfig, before: int, width: int, kernel: int, stride: int, rate: float
    ) -> None:
        super().__init__()
        self.adds = before == width and stride == 1
        self.conv_dw = make_convolution(config, before, before, kernel, stride, before)
        self.bn1, self.se = make_norm(config, before), SqueezeGate(before, before // 4)
        self.conv_pw, self.bn2 = make_convolution(config, before, width), make_norm(config, width)
        self.drop_path = StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.se(F.silu(self.bn1(self.conv_dw(x))))
        y = self.bn2(self.conv_pw(y))
        return self.drop_path(y) + x if self.adds else y


class ExpandedBlock(nn.Module):
    """The same inside more channels: the inverted residual of MobileNetV2 (Sandler 2018)."""

    def __init__(
        self, config: EfficientNetConfig, before: int, width: int, kernel: int, stride: int, rate: float
    ) -> None:
        super().__init__()
        self.adds, hidden = before == width and stride == 1, config.expansion * before
        self.conv_pw, self.bn1 = make_convolution(config, before, hidden), make_norm(config, hidden)
        self.conv_dw = make_convolution(config, hidden, hidden, kernel, stride, hidden)
        self.bn2, self.se = make_norm(config, hidden), SqueezeGate(hidden, before // 4)
        self.conv_pwl, self.bn3 = make_convolution(config, hidden, width), make_norm(config, width)
        self.drop_path = StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn1(self.conv_pw(x)))
        y = self.se(F.silu(self.bn2(self.conv_dw(y))))
        y = self.bn3(self.conv_pwl(y))
        return self.drop_path(y) + x if self.adds else y


class SqueezeGate(nn.Module):
    """Squeeze and excitation: each channel times a factor in (0, 1), from the means of all: (B, C, h, w)."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * self.conv_expand(F.silu(self.conv_reduce(means))).sigmoid()


def scale_config(width_factor: float, depth_factor: float, image_size: int) -> EfficientNetConfig:
    """B0 with more channels, rounded to multiples of 8 but never down by more than a tenth, and more blocks."""

    def scale(width: int) -> int:
        rounded = max(8, int(width * width_factor + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * width * width_factor else rounded

    smallest = EfficientNetConfig()
    return EfficientNetConfig(
        image_size=image_size,
        stages=tuple(ceil(depth * depth_factor) for depth in smallest.stages),
        widths=tuple(map(scale, smallest.widths)),
        stem_width=scale(smallest.stem_width),
        head_width=scale(smallest.head_width),
    )


FACTORS = {  # width, depth, image size
    "b0": (1.0, 1.0, 224),
    "b1": (1.0, 1.1, 240),
    "b2": (1.1, 1.2, 260),
    "b3": (1.2, 1.4, 300),
    "b4": (1.4, 1.8, 380),
    "b5": (1.6, 2.2, 456),
    "b6": (1.8, 2.6, 528),
    "b7": (2.0, 3.1, 600),
    "b8": (2.2, 3.6, 672),
    "l2": (4.3, 5.3, 800),
}
TENSORFLOW: dict[str, Any] = {"padding": "same", "norm_eps": 1e-3, "norm_momentum": 0.01}


def make_presets() -> dict[str, EfficientNetConfig]:
    sizes = {name: scale_config(*factors) for name, factors in FACTORS.items()}
    theirs = {f"tf_efficientnet_{name}": replace(size, **TENSORFLOW) for name, size in sizes.items()}
    return {f"efficientnet_{name}": size for name, size in sizes.items() if name not in ("b8", "l2")} | theirs


PRESETS = Presets(make_presets)
ALIASES = {f"EfficientNet-{name.upper()}": f"tf_efficientnet_{name}" for name in FACTORS}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Strides are those of the published models; the size of the images is that of the model of these widths."""
    stages = side.count_stage_blocks(shapes, r"blocks\.(\d+)\.", r"blocks\.{}\.(\d+)\.", first=0)
    last = [f"blocks.{stage}.0.conv_pw{'l' if stage else ''}.weight" for stage in range(len(stages))]
    kernels = [side.get_shape(shapes, f"blocks.{stage}.0.conv_dw.weight", 4)[2] for stage in range(len(stages))]
    stem_width, channels, *_ = side.get_shape(shapes, "conv_stem.weight", 4)
    widths = tuple(side.get_shape(shapes, name, 4)[0] for name in last)
    fields = side.describe_stages(shapes, channels, stages, widths, "classifier.weight") | {
        "kernels": tuple(kernels),
        "stem_width": stem_width,
        "head_width": side.get_shape(shapes, "conv_head.weight", 4)[0],
    }
    published = next((each for each in PRESETS.values() if (each.stages, each.widths) == (stages, widths)), None)
    return side.InferredConfig(fields=fields | ({"image_size": published.image_size} if published else {}))


FREE_FIELDS = {"image_size", "channels", "classes", "norm_momentum", "dropout", "stochastic_depth"}


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    """timm opens a folder of one of its own models, whose name tells the padding and the eps."""
    fixed = config.keys() - FREE_FIELDS
    for name, preset in PRESETS.items():
        if all(vars(preset)[each] == config[each] for each in fixed):
            return {
                "architecture": name,
                "num_classes": config["classes"],
                "model_args": {"in_chans": config["channels"]},
            }
    raise CheckpointError(
        "timm cannot open a folder of a custom efficientnet; expected OUT.safetensors or OUT.pth, or a preset: "
        f"{', '.join(PRESETS)}"
    )


TIMM_TABLE = """
    {conv_stem,conv_head}.weight
    {bn1,bn2}.+
    blocks.#.#.:
        {conv_dw,conv_pw,conv_pwl}.weight
        {bn1,bn2,bn3}.+
        se.{conv_reduce,conv_expand}.*
    classifier.*
"""
TORCHVISION_TABLE = """
    features.0.{0.weight,1.+} -> {conv_stem.weight,bn1.+}
    features.8.{0.weight,1.+} -> {conv_head.weight,bn2.+}
    features.1.#.block. -> blocks.0.#.:
        {0.0.weight,0.1.+} -> {conv_dw.weight,bn1.+}
        1.{fc1,fc2}.* -> se.{conv_reduce,conv_expand}.*
        {2.0.weight,2.1.+} -> {conv_pw.weight,bn2.+}
    features.%.#.block. -> blocks.#.#.:
        {0.0.weight,0.1.+} -> {conv_pw.weight,bn1.+}
        {1.0.weight,1.1.+} -> {conv_dw.weight,bn2.+}
        2.{fc1,fc2}.* -> se.{conv_reduce,conv_expand}.*
        {3.0.weight,3.1.+} -> {conv_pwl.weight,bn3.+}
    classifier.1.* -> classifier.*
"""
DEEP = 5  # blocks of the second stage of B5, from which on torchvision has TensorFlow's batch norms
RESIZED = {  # torchvision's short side before the crop and its crop, by channels that the head reads and blocks
    (1280, 2): (256, 224),
    (1280, 3): (256, 240),
    (1408, 3): (288, 288),
    (1536, 3): (320, 300),
    (1792, 4): (384, 380),
}


def find_torchvision_crop(config: side.ConfigFields) -> float:
    resized, cropped = RESIZED.get((config["head_width"], config["stages"][1]), (1, 1))
    return cropped / resized


def make_torchvision_source(*markers: str, deep: bool) -> side.SourceNames:
    norms: dict[str, Any] = {"norm_eps": 1e-3, "norm_momentum": 0.01} if deep else {"norm_eps": 1e-5}
    return side.SourceNames(
        layout="torchvision",
        table=side.parse_table(TORCHVISION_TABLE),
        markers=("features.1.0.block.1.fc1.weight", "features.8.0.weight", *markers),
        accepts=lambda config: (max(config["stages"]) > 0 and config["stages"][1:2] >= (DEEP,)) is deep,
        supported={"channels": (3,), "padding": ("symmetric",), "number of stages": (7,)},
        assumed={"norm_eps": norms["norm_eps"]},
        details={
            "fields": {"padding": "symmetric", **norms},
            "crop": find_torchvision_crop,
        },
    )


SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE),
        markers=("conv_stem.weight", "blocks.0.0.se.conv_reduce.weight", "conv_head.weight", "bn2.running_var"),
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "model_args": ("in_chans", "num_classes", "drop_rate", "drop_path_rate"),
            "preset_fields": ("padding", "norm_eps", "norm_momentum"),
            "pretrained_cfg": {"crop_pct": 0.875, "interpolation": "bicubic"},
        },
    ),
    make_torchvision_source("features.2.4.block.0.0.weight", deep=True),
    make_torchvision_source(deep=False),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("efficientnet", EfficientNetConfig, EfficientNet, PRESETS, ALIASES, CHECKPOINT)
