"""ResNet (He 2015, arXiv 1512.03385): the convnets that ViTs are compared with and distilled from.

B batch, C channels of a feature map, h·w its positions, D channels of the last one. The stride of a bottleneck is in
its 3×3 convolution, as in timm and torchvision. Images may have any size.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.parts.encoder import make_head
from vitrail.models.parts.stages import ConvNet

ShortcutKind = Literal["projection", "padding"]


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, any other works too
    stages: tuple[int, ...] = (3, 4, 6, 3)  # blocks per stage; each stage but the first halves the resolution
    block: Literal["basic", "bottleneck"] = "bottleneck"
    stem: Literal["imagenet", "cifar"] = "imagenet"  # 7×7 and a max pool: 1/4 of the size; 3×3: full size
    shortcut: ShortcutKind = "projection"  # where the shape changes: a 1×1 convolution, or zeros for the new channels
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    width: int = 64  # channels of the stem and the first stage's 3×3 convolutions, doubled by each next stage
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stages:
            raise ConfigError("stages is (); expected at least one number, the blocks of a stage")


class ResNet(ConvNet):
    """(B, 3, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: ResNetConfig
    first_filters = "conv1.weight"

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        small = config.stem == "cifar"
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(config.channels, config.width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        block = BasicBlock if config.block == "basic" else Bottleneck
        before = config.width
        self.stage_names = [f"layer{stage}" for stage in range(1, len(config.stages) + 1)]  # timm's names for stages
        for stage, (name, depth) in enumerate(zip(self.stage_names, config.stages, strict=True)):
            width, stride = config.width * 2**stage, 1 if stage == 0 else 2
            first = block(before, width, stride, config.shortcut)
            before = block.expansion * width
            rest = (block(before, width, 1, config.shortcut) for _ in range(depth - 1))
            self.add_module(name, nn.Sequential(first, *rest))
        names = [
            [f"{name}.{n}" for n in range(depth)] for name, depth in zip(self.stage_names, config.stages, strict=True)
        ]
        widths = [block.expansion * config.width * 2**stage for stage in range(len(names))]
        self.declare_stages(pair(config.image_size), 1 if small else 4, widths, names)
        self.classifiers = (("mean", "fc"),) if config.classes else ()
        self.fc = make_head(before, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """Convolutions scaled for the next ReLU; the head and the last norm of each block are zero (Goyal 2017)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, BasicBlock | Bottleneck):
                nn.init.zeros_((module.bn2 if isinstance(module, BasicBlock) else module.bn3).weight)
        if isinstance(self.fc, nn.Linear):
            nn.init.zeros_(self.fc.weight)
            nn.init.zeros_(self.fc.bias)

    def run_stem(self, images: Tensor) -> Tensor:
        return self.maxpool(F.relu(self.bn1(self.conv1(images))))

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of all positions: (B, h·w, D) → (B, classes)."""
        return self.fc(tokens.mean(1))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions plus a shortcut."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int, shortcut: ShortcutKind) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = make_shortcut(before, width, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions plus a shortcut; the last convolution is four times as wide."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int, shortcut: ShortcutKind) -> None:
        super().__init__()
        out = self.expansion * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = make_shortcut(before, out, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def make_shortcut(before: int, out: int, stride: int, kind: ShortcutKind) -> nn.Module:
    if before == out and stride == 1:
        return nn.Identity()
    if kind == "padding":
        return PaddedShortcut(out - before, stride)
    return nn.Sequential(nn.Conv2d(before, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class PaddedShortcut(nn.Module):
    """The paper's option A, without weights: every other position, the channels padded with zeros on both sides."""

    def __init__(self, missing: int, stride: int) -> None:
        super().__init__()
        self.around, self.stride = (missing // 2, missing - missing // 2), stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, *self.around))


def make_cifar_config(depth: int) -> ResNetConfig:
    """The paper's networks for CIFAR-10: 6n + 2 layers, including stem and head."""
    return ResNetConfig(
        image_size=32,
        stages=((depth - 2) // 6,) * 3,
        block="basic",
        stem="cifar",
        shortcut="padding",
        classes=10,
        width=16,
    )


PRESETS = Presets(
    lambda: {
        "resnet18": ResNetConfig(stages=(2, 2, 2, 2), block="basic"),
        "resnet50": ResNetConfig(),
        "resnet101": ResNetConfig(stages=(3, 4, 23, 3)),
        "resnet152": ResNetConfig(stages=(3, 8, 36, 3)),
        "resnet20_cifar": make_cifar_config(20),
        "resnet32_cifar": make_cifar_config(32),
        "resnet56_cifar": make_cifar_config(56),
    }
)
ALIASES = {
    "ResNet-18": "resnet18",
    "ResNet-50": "resnet50",
    "ResNet-101": "resnet101",
    "ResNet-152": "resnet152",
    "ResNet-20": "resnet20_cifar",
    "ResNet-32": "resnet32_cifar",
    "ResNet-56": "resnet56_cifar",
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    stem = side.get_shape(shapes, "conv1.weight", 4)
    if stem[2:] not in ((3, 3), (7, 7)):
        raise CheckpointError(f"conv1.weight has shape {stem}; expected a 7×7 kernel, or 3×3 as for CIFAR")
    fields = {
        "image_size": (224, 224) if stem[2] == 7 else (32, 32),
        "stages": side.count_stage_blocks(shapes, r"layer(\d+)\.", r"layer{}\.(\d+)\."),
        "block": "bottleneck" if "layer1.0.conv3.weight" in shapes else "basic",
        "stem": "imagenet" if stem[2] == 7 else "cifar",
        "shortcut": "projection" if any(".downsample." in name for name in shapes) else "padding",
        "channels": stem[1],
        "classes": side.count_classes(shapes, "fc.weight"),
        "width": stem[0],
    }
    return side.InferredConfig(fields=fields)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    return side.make_preset_card(config, FAMILY.name, PRESETS)


BLOCK_TABLE = side.parse_table("{,layer#.#.}{conv1.weight,bn1.+}") + side.parse_table(
    "layer#.#.{conv2.weight,conv3.weight,bn2.+,bn3.+}"
)
NAME_TABLE = BLOCK_TABLE + side.parse_table("{layer#.#.downsample.0.weight,layer#.#.downsample.1.+,fc.*}")
SOURCES = (
    side.SourceNames(
        layout="timm",
        table=NAME_TABLE,
        markers=("layer1.0.conv1.weight",),
        supported={"stem": ("imagenet",), "shortcut": ("projection",)},
        card=make_timm_card,
        details={
            "imagenet_mean": True,
            "model_args": side.ARGUMENTS_IN_SHAPES,
            "pretrained_cfg": {"crop_pct": 0.875, "interpolation": "bilinear"},
            "refused_names": r"^resnet(blur|aa)",  # with fixed filters, which are not in the file
        },
    ),
    side.SourceNames(
        layout="torchvision",
        table=NAME_TABLE,
        markers=("layer1.0.conv1.weight",),
        supported={
            "stem": ("imagenet",),
            "shortcut": ("projection",),
            "channels": (3,),
            "width": (64,),
            "number of stages": (4,),
        },
    ),
    side.SourceNames(  # its shortcuts have no weights
        layout="akamaster",
        table=BLOCK_TABLE + side.parse_table("linear.* -> fc.*"),
        markers=("layer1.0.conv1.weight",),
        supported={
            "block": ("basic",),
            "stem": ("cifar",),
            "shortcut": ("padding",),
            "channels": (3,),
            "classes": (10,),
            "width": (16,),
            "number of stages": (3,),
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("resnet", ResNetConfig, ResNet, PRESETS, ALIASES, CHECKPOINT)
