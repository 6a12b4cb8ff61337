"""RegNetY (Radosavovic 2020, arXiv 2003.13678): convnets whose widths grow linearly; DeiT's teacher is the 16GF.

B batch, C channels of a feature map, h·w its positions, D channels of the last one. A size is named by its billions of
multiply-adds. Images may have any size.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import groupby
from math import log, sqrt
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.parts.encoder import make_head
from vitrail.models.parts.stages import ConvNet

STEM_WIDTH = 32  # channels, the same in every size


@dataclass(frozen=True, kw_only=True)
class RegNetYConfig:
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, any other works too
    stages: tuple[int, ...] = (2, 6, 12, 2)  # blocks per stage; each stage halves the resolution, as the stem does
    widths: tuple[int, ...] = (128, 192, 512, 1088)  # channels per stage
    group_width: int = 64  # channels per group of a 3×3 convolution
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stages or len(self.stages) != len(self.widths):
            raise ConfigError(f"{len(self.stages)} stages of {len(self.widths)} widths; expected one width per stage")
        for width in self.widths:
            if width % self.group_width:
                raise ConfigError(
                    f"a width of {width} in groups of {self.group_width}; expected a multiple of {self.group_width}"
                )


class RegNetY(ConvNet):
    """(B, 3, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: RegNetYConfig
    first_filters = "stem.conv.weight"

    def __init__(self, config: RegNetYConfig) -> None:
        super().__init__(config)
        self.stem = ConvNorm(config.channels, STEM_WIDTH, 3, stride=2)
        before = STEM_WIDTH
        self.stage_names = [f"s{stage}" for stage in range(1, len(config.stages) + 1)]  # timm's names
        for name, depth, width in zip(self.stage_names, config.stages, config.widths, strict=True):
            blocks = OrderedDict[str, nn.Module]()
            for number in range(depth):
                blocks[f"b{number + 1}"] = RegNetYBlock(before, width, 1 if number else 2, config.group_width)
                before = width
            self.add_module(name, nn.Sequential(blocks))
        depths = zip(self.stage_names, config.stages, strict=True)
        names = [[f"{name}.b{n + 1}" for n in range(depth)] for name, depth in depths]
        self.declare_stages(pair(config.image_size), 4, config.widths, names)
        self.classifiers = (("mean", "head.fc"),) if config.classes else ()
        self.head = nn.ModuleDict({"fc": make_head(before, config.classes)})
        self.init_weights()

    def draw_weights(self) -> None:
        """Convolutions scaled for the next ReLU; the head and the last norm of each block are zero (Goyal 2017)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                kernel = module.weight[0, 0].numel()
                nn.init.normal_(module.weight, std=sqrt(2 * module.groups / (kernel * module.out_channels)))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, RegNetYBlock):
                nn.init.zeros_(module.conv3.bn.weight)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)

    def run_stem(self, images: Tensor) -> Tensor:
        return F.relu(self.stem(images))

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of all positions: (B, h·w, D) → (B, classes)."""
        return self.head["fc"](tokens.mean(1))


class ConvNorm(nn.Module):
    """A convolution without bias, then batch norm."""

    def __init__(self, before: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, width, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class RegNetYBlock(nn.Module):
    """1×1, grouped 3×3 and 1×1 convolutions of one width plus a shortcut; the Y stands for squeeze and excitation."""

    def __init__(self, before: int, width: int, stride: int, group_width: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(before, width, 1)
        self.conv2 = ConvNorm(width, width, 3, stride, width // group_width)
        self.se = SqueezeExcite(width, round(before / 4))
        self.conv3 = ConvNorm(width, width, 1)
        same = before == width and stride == 1
        self.downsample = nn.Identity() if same else ConvNorm(before, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x))
        y = self.se(F.relu(self.conv2(y)))
        return F.relu(self.conv3(y) + self.downsample(x))


class SqueezeExcite(nn.Module):
    """Scales each channel by a factor in (0, 1) computed from the means of all channels (Hu 2017): (B, C, h, w)."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * self.fc2(F.relu(self.fc1(means))).sigmoid()


def config_from_width_rule(depth: int, first: int, slope: float, step: float, group_width: int) -> RegNetYConfig:
    """The paper's rule: block n has the width first·step^k that is nearest to first + slope·n.

    Blocks with the same k form a stage, whose width is rounded to a multiple of 8, then of the group width.
    """
    powers = [round(log((first + slope * n) / first) / log(step)) for n in range(depth)]
    stages = [(len(list(blocks)), 8 * round(first * step**power / 8)) for power, blocks in groupby(powers)]
    return RegNetYConfig(
        stages=tuple(blocks for blocks, _ in stages),
        widths=tuple(group_width * round(width / group_width) for _, width in stages),
        group_width=group_width,
    )


PRESETS = Presets(
    lambda: {
        "regnety_040": config_from_width_rule(22, 96, 31.41, 2.24, 64),
        "regnety_080": config_from_width_rule(17, 192, 76.82, 2.19, 56),
        "regnety_120": config_from_width_rule(19, 168, 73.36, 2.37, 112),
        "regnety_160": config_from_width_rule(18, 200, 106.23, 2.48, 112),
    }
)
ALIASES = {
    "RegNetY-4GF": "regnety_040",
    "RegNetY-8GF": "regnety_080",
    "RegNetY-12GF": "regnety_120",
    "RegNetY-16GF": "regnety_160",
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    blocks = side.count_stage_blocks(shapes, r"s(\d+)\.", r"s{}\.b(\d+)\.")
    stages = range(1, len(blocks) + 1)
    widths = tuple(side.get_shape(shapes, f"s{stage}.b1.conv1.conv.weight", 4)[0] for stage in stages)
    group_width = side.get_shape(shapes, "s1.b1.conv2.conv.weight", 4)[1]
    channels = side.get_shape(shapes, "stem.conv.weight", 4)[1]
    fields = side.describe_stages(shapes, channels, blocks, widths, "head.fc.weight")
    return side.InferredConfig(fields=fields | {"group_width": group_width})


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    return side.make_preset_card(config, FAMILY.name, PRESETS)


TIMM_TABLE = """
    {stem,s#.b#.conv1,s#.b#.conv2,s#.b#.conv3,s#.b#.downsample}.{conv.weight,bn.+}
    {s#.b#.se.fc1,s#.b#.se.fc2,head.fc}.*
"""
TORCHVISION_TABLE = """
    stem.{0.weight,1.+} -> stem.{conv.weight,bn.+}
    trunk_output.block#.block=-~. -> s#.b~.:
        {f.a,f.b,f.c,proj}.{0.weight,1.+} -> {conv1,conv2,conv3,downsample}.{conv.weight,bn.+}
        f.se.{fc1,fc2}.* -> se.{fc1,fc2}.*
    fc.* -> head.fc.*
"""
SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE),
        markers=("s1.b1.conv1.conv.weight",),
        card=make_timm_card,
        details={
            "imagenet_mean": True,
            "model_args": side.ARGUMENTS_IN_SHAPES,
            "pretrained_cfg": {"crop_pct": 0.95, "interpolation": "bicubic"},
        },
    ),
    side.SourceNames(
        layout="torchvision",
        table=side.parse_table(TORCHVISION_TABLE),
        markers=("trunk_output.block#.block=-~.f.a.0.weight",),
        supported={"channels": (3,)},
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("regnety", RegNetYConfig, RegNetY, PRESETS, ALIASES, CHECKPOINT)
