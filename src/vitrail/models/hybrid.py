"""The hybrid ViT (Dosovitskiy 2020): patches are cut from the feature map of a ResNet.

B batch, n = h·w patches of the feature map, N = 1 + n tokens, D width; the ResNet has BiT's group norms and
weight-standardized convolutions (Kolesnikov 2019).
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_grid, check_heads, pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers, lecun_normal_
from vitrail.models.names import encoder_names
from vitrail.models.names.encoder_names import make_resnet_table
from vitrail.models.parts.convolutions import MaxPoolSame, StdConv2d
from vitrail.models.parts.encoder import DropRates, PatchEncoder, make_encoder_blocks, make_head, zero_head

Constants = Literal["timm", "google"]  # of GELU (exact or tanh), group norms and weight standardization


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DropRates):
    image_size: Size = 224  # rows, columns; one number for a square
    stages: tuple[int, ...] = (3, 4, 9)  # bottleneck blocks per stage of the ResNet; (): only its stem
    patch_size: Size = 1  # on the feature map
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the features
    width: int = 768  # channels of a token
    depth: int = 12  # blocks of the encoder
    heads: int = 12  # attention heads, each width / heads wide
    norm_eps: float = 1e-6
    constants: Constants = "timm"  # google: as the models were trained; logits differ by 1e-3
    dynamic: bool = False  # accept any multiple of the stride at run time; the table is resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.heads)
        check_grid(pair(self.image_size), self.stride)

    @property
    def stride(self) -> tuple[int, int]:
        """Pixels per token: 4 from the stem, doubled by each stage but the first, times the patch."""
        stride = 4 * 2 ** max(len(self.stages) - 1, 0)
        return (stride * pair(self.patch_size)[0], stride * pair(self.patch_size)[1])


class Hybrid(PatchEncoder):
    """(B, C, H, W) → logits (B, classes)."""

    config: HybridConfig
    prefix_tokens = classifier_tokens = ("class",)
    no_masking_reason = "its convolutions mix patches before they become tokens"

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.first_filters = f"patch_embed.backbone.{'stem.' if config.stages else ''}conv.weight"
        width = config.width
        self.declare_level(config.stride)

        self.patch_embed = HybridEmbed(width, pair(config.patch_size), config.stages, config.channels, config.constants)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + prod(self.grid), width))
        self.pos_drop = nn.Dropout(config.dropout)
        activation = "gelu_tanh" if config.constants == "google" else "gelu"
        self.blocks = make_encoder_blocks(config, 4 * width, activation=activation)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """Every weight as in the ViT authors' code; the head and the last norm of each bottleneck are zero."""
        init_layers(self)
        nn.init.zeros_(self.cls_token)
        for module in self.modules():
            if isinstance(module, StdConv2d):
                lecun_normal_(module.weight)
            elif isinstance(module, HybridBottleneck):
                nn.init.zeros_(module.norm3.weight)
        nn.init.normal_(self.pos_embed, std=0.02)
        zero_head(self.head)


class HybridEmbed(nn.Module):
    """Embeds patches of the ResNet's feature map: (B, C, H, W) → (B, n, D)."""

    def __init__(
        self, width: int, patch: tuple[int, int], stages: tuple[int, ...], channels: int, constants: Constants
    ) -> None:
        super().__init__()
        self.backbone = HybridResNet(stages, channels, constants) if stages else make_resnet_stem(channels, constants)
        self.proj = nn.Conv2d(get_stage_channels(len(stages)), width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(self.backbone(images)).flatten(2).transpose(1, 2)


def get_stage_channels(stage: int) -> int:
    """Channels after a stage, counted from 1; 0 is the stem."""
    return 64 if stage == 0 else 128 * 2**stage


def group_norm(width: int, constants: Constants) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6 if constants == "google" else 1e-5)


def make_resnet_stem(channels: int, constants: Constants) -> nn.Sequential:
    """A quarter of the resolution in two strides: (B, C, H, W) → (B, 64, H/4, W/4)."""
    layers = OrderedDict[str, nn.Module]()
    layers["conv"] = make_convolution(channels, get_stage_channels(0), 7, 2, constants)
    layers["norm"] = group_norm(get_stage_channels(0), constants)
    layers["act"] = nn.ReLU()
    layers["pool"] = MaxPoolSame()
    return nn.Sequential(layers)


class HybridResNet(nn.Module):
    """Stem and stages of bottlenecks; each stage but the first halves the resolution."""

    def __init__(self, stages: tuple[int, ...], channels: int, constants: Constants) -> None:
        super().__init__()
        self.stem = make_resnet_stem(channels, constants)
        self.stages = nn.Sequential(
            *(HybridStage(stage, depth, constants) for stage, depth in enumerate(stages, start=1))
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(self.stem(images))


class HybridStage(nn.Module):
    def __init__(self, stage: int, depth: int, constants: Constants) -> None:
        super().__init__()
        width, stride = get_stage_channels(stage), 1 if stage == 1 else 2
        first = HybridBottleneck(get_stage_channels(stage - 1), width, stride, constants)
        self.blocks = nn.Sequential(first, *(HybridBottleneck(width, width, 1, constants) for _ in range(depth - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class HybridBottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions plus a shortcut, which the first block of a stage projects."""

    def __init__(self, width: int, out_width: int, stride: int, constants: Constants) -> None:
        super().__init__()
        inner, same = out_width // 4, width == out_width and stride == 1
        self.downsample = nn.Identity() if same else HybridShortcut(width, out_width, stride, constants)
        self.conv1, self.norm1 = make_convolution(width, inner, 1, 1, constants), group_norm(inner, constants)
        self.conv2, self.norm2 = make_convolution(inner, inner, 3, stride, constants), group_norm(inner, constants)
        self.conv3, self.norm3 = make_convolution(inner, out_width, 1, 1, constants), group_norm(out_width, constants)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.downsample(x))


class HybridShortcut(nn.Module):
    def __init__(self, width: int, out_width: int, stride: int, constants: Constants) -> None:
        super().__init__()
        self.conv, self.norm = (
            make_convolution(width, out_width, 1, stride, constants),
            group_norm(out_width, constants),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def make_convolution(
    width: int, out_width: int, kernel: int, stride: int = 1, constants: Constants = "timm"
) -> StdConv2d:
    google = constants == "google"
    return StdConv2d(width, out_width, kernel, stride, eps=1e-5 if google else 1e-8, eps_in_root=not google)


R26, R50 = (2, 2, 2, 2), (3, 4, 6, 3)
TINY = HybridConfig(stages=(), patch_size=8, width=192, heads=3)
SMALL = HybridConfig(stages=R26, width=384, heads=6)
BASE = HybridConfig()  # R50 with its third and fourth stage merged
LARGE = HybridConfig(stages=R50, width=1024, depth=24, heads=16)
PRESETS = Presets(
    lambda: {
        "vit_tiny_r_s16_p8_224": TINY,
        "vit_tiny_r_s16_p8_384": replace(TINY, image_size=384),
        "vit_small_r26_s32_224": SMALL,
        "vit_small_r26_s32_384": replace(SMALL, image_size=384),
        "vit_base_r26_s32_224": replace(BASE, stages=R26),
        "vit_base_r50_s32_224": replace(BASE, stages=R50),
        "vit_base_r50_s32_384": replace(BASE, stages=R50, image_size=384),
        "vit_base_r50_s16_224": BASE,
        "vit_base_r50_s16_384": replace(BASE, image_size=384),
        "vit_large_r50_s16_224": replace(LARGE, stages=BASE.stages),
        "vit_large_r50_s16_384": replace(LARGE, stages=BASE.stages, image_size=384),
        "vit_large_r50_s32_224": LARGE,
        "vit_large_r50_s32_384": replace(LARGE, image_size=384),
    }
)
ALIASES = {
    "R+ViT-Ti/16": "vit_tiny_r_s16_p8_224",
    "R+ViT-Ti/16@384": "vit_tiny_r_s16_p8_384",
    "R26+ViT-S/32": "vit_small_r26_s32_224",
    "R26+ViT-S/32@384": "vit_small_r26_s32_384",
    "R26+ViT-B/32": "vit_base_r26_s32_224",
    "R50+ViT-B/32": "vit_base_r50_s32_224",
    "R50+ViT-B/32@384": "vit_base_r50_s32_384",
    "R50+ViT-B/16": "vit_base_r50_s16_224",
    "R50+ViT-B/16@384": "vit_base_r50_s16_384",
    "R50+ViT-L/16": "vit_large_r50_s16_224",
    "R50+ViT-L/16@384": "vit_large_r50_s16_384",
    "R50+ViT-L/32": "vit_large_r50_s32_224",
    "R50+ViT-L/32@384": "vit_large_r50_s32_384",
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    fields, stages = encoder_names.infer_encoder_fields(shapes), r"patch_embed\.backbone\.stages\."
    fields["stages"] = side.count_stage_blocks(shapes, rf"{stages}(\d+)\.", stages + r"{}\.blocks\.(\d+)\.", first=0)
    root = ROOT if f"{ROOT}conv.weight" in shapes else STEM
    fields["channels"] = side.get_shape(shapes, f"{root}conv.weight", 4)[1]
    rows, columns = fields["patch_size"]
    scale = 4 * 2 ** max(len(fields["stages"]) - 1, 0)
    return side.InferredConfig(fields=fields, stride=(scale * rows, scale * columns), prefix=1)


def has_no_stages(config: side.ConfigFields) -> bool:
    return not config["stages"]


ROOT, STEM = "patch_embed.backbone.", "patch_embed.backbone.stem."
STAGE_TABLE = side.parse_table(
    """
    patch_embed.backbone.{stem.,}conv.weight
    patch_embed.backbone.{stem.,}norm.*
    patch_embed.backbone.stages.#.blocks.#.{conv1,conv2,conv3,downsample.conv}.weight
    patch_embed.backbone.stages.#.blocks.#.{norm1,norm2,norm3,downsample.norm}.*
    """
)
GOOGLE = replace(
    encoder_names.GOOGLE,
    table=encoder_names.GOOGLE.table + make_resnet_table(STEM),
    markers=("embedding/kernel", "conv_root/kernel", "block1/unit1/conv1/kernel"),
    assumed={"constants": "google", "norm_eps": 1e-6},
    details={"fields": {"constants": "google"}},
)
SOURCES = (
    replace(
        encoder_names.TIMM,
        table=encoder_names.TIMM_TABLE + STAGE_TABLE,
        markers=(encoder_names.PATCH_KERNEL, "patch_embed.backbone."),
        assumed={"constants": "timm", "norm_eps": 1e-6},
        card=None,
        details={**encoder_names.TIMM_DETAILS, "only_in_timm": True},
    ),
    replace(  # a ResNet without stages
        GOOGLE,
        table=encoder_names.GOOGLE.table + make_resnet_table(ROOT),
        markers=GOOGLE.markers[:2],
        accepts=has_no_stages,
    ),
    GOOGLE,
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
FAMILY = Family("hybrid", HybridConfig, Hybrid, PRESETS, ALIASES, CHECKPOINT)
