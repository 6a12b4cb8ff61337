"""ConvNeXt (Liu 2022, arXiv 2201.03545): a convnet with the layout of a Swin; a strong teacher for ViTs.

B batch, C channels of the image, h·w positions of a feature map, D its channels; h, w and D change by stage. A block
mixes positions by a convolution within each channel, then channels by an MLP. Images may have any size; what does not
fill a patch at the right and the bottom is not read.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.block import Mlp, StochasticDepth
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, pair
from vitrail.models.base.contract import ImageSizes, Level
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_small
from vitrail.models.names.hf_names import make_hf_heading
from vitrail.models.parts.encoder import make_head, zero_head
from vitrail.models.parts.stages import ConvNet, check_stages, list_stage_rates

NORM_EPS, KERNEL = 1e-6, 7


@dataclass(frozen=True, kw_only=True)
class ConvNeXtConfig:
    image_size: Size = 224  # rows, columns; one number for a square; the intended size, any other works too
    patch_size: int = 4  # pixels per position of the first stage; each next stage halves the resolution
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    stages: tuple[int, ...] = (3, 3, 9, 3)  # blocks per stage
    widths: tuple[int, ...] = (96, 192, 384, 768)  # channels per stage
    layer_scale: float = 1e-6  # initial factor of each branch
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of the last block; linear from 0 at the first
    dynamic: ClassVar[bool] = True  # takes any size at run time

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self)
        check_size(pair(self.image_size), self.last_stride)

    @property
    def last_stride(self) -> int:
        """Pixels per position of the last stage."""
        return self.patch_size * 2 ** (len(self.stages) - 1)


def check_size(image: Grid, least: int) -> None:
    if min(image) < least:
        raise ConfigError(
            f"image of {image[0]}×{image[1]} pixels; expected at least {least}×{least}, a position of the last stage: "
            "enlarge it, or use a smaller patch_size or fewer stages"
        )


class ConvNeXt(ConvNet):
    """(B, C, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    config: ConvNeXtConfig
    first_filters = "stem.0.weight"

    def __init__(self, config: ConvNeXtConfig) -> None:
        super().__init__(config)
        self.levels, least = make_levels(config), 2 * config.last_stride  # more than one position in the last map
        self.sizes = ImageSizes(multiple=(1, 1), minimum=(least, least))
        self.classifiers = (("mean", "head.fc"),) if config.classes else ()
        first, patch = config.widths[0], config.patch_size
        self.stem = nn.Sequential(nn.Conv2d(config.channels, first, patch, patch), ChannelNorm(first))
        self.stages, depth_rates = nn.ModuleList(), list_stage_rates(config.stochastic_depth, config.stages)
        self.stage_names = [f"stages.{stage}" for stage in range(len(config.stages))]
        for stage, (width, rates) in enumerate(zip(config.widths, depth_rates, strict=True)):
            parts = OrderedDict[str, nn.Module]()
            parts["downsample"] = halve_resolution(config.widths[stage - 1], width) if stage else nn.Identity()
            parts["blocks"] = nn.Sequential(*(ConvNeXtBlock(width, config.layer_scale, rate) for rate in rates))
            self.stages.append(nn.Sequential(parts))
        norm = nn.LayerNorm(config.widths[-1], NORM_EPS)
        self.head = nn.ModuleDict({"norm": norm, "fc": make_head(config.widths[-1], config.classes)})
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code: every branch starts near 0; the head is zero."""
        init_small(self)
        for module in self.modules():
            if isinstance(module, ConvNeXtBlock):
                nn.init.constant_(module.gamma, self.config.layer_scale)
        zero_head(self.head["fc"])

    def check_images(self, images: Tensor) -> Grid:
        grid = super().check_images(images)
        check_size((images.shape[2], images.shape[3]), self.config.last_stride)
        return grid

    def run_stem(self, images: Tensor) -> Tensor:
        return self.stem(images)

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for the mean of all positions, after a norm: (B, h·w, D) → (B, classes)."""
        return self.head["fc"](self.head["norm"](tokens.mean(1)))


def make_levels(config: ConvNeXtConfig) -> tuple[Level, ...]:
    """Grids are rounded down."""
    (rows, columns), levels = pair(config.image_size), list[Level]()
    for stage, (depth, width) in enumerate(zip(config.stages, config.widths, strict=True)):
        stride = config.patch_size * 2**stage
        blocks = tuple(f"stages.{stage}.blocks.{number}" for number in range(depth))
        grid = (rows // stride, columns // stride)
        levels.append(Level(grid=grid, stride=(stride, stride), width=width, blocks=blocks))
    return tuple(levels)


class ChannelNorm(nn.LayerNorm):
    """Layer norm of the channels at each position: (B, D, h, w) → (B, D, h, w)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, NORM_EPS)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.LayerNorm
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def halve_resolution(width: int, out_width: int) -> nn.Sequential:
    """(B, D, h, w) → (B, D', h/2, w/2)"""
    return nn.Sequential(ChannelNorm(width), nn.Conv2d(width, out_width, 2, 2))


class ConvNeXtBlock(nn.Module):
    """x + γ·MLP(LN(7×7 convolution within each channel(x))): (B, D, h, w) → (B, D, h, w)."""

    def __init__(self, width: int, layer_scale: float, stochastic_depth: float) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, KERNEL, padding=KERNEL // 2, groups=width)
        self.norm = nn.LayerNorm(width, NORM_EPS)
        self.mlp = Mlp(width, 4 * width)
        self.gamma = nn.Parameter(torch.full((width,), layer_scale))
        self.drop_path = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_dw(x).movedim(1, -1)  # (B, h, w, D), for the norm and the MLP
        y = self.gamma * self.mlp(self.norm(y))
        return self.drop_path(y.movedim(-1, 1)) + x  # in this order, so that the sum has channels last in memory


SMALL = ConvNeXtConfig(stages=(2, 2, 6, 2))  # timm's sizes, smaller than the authors'
LARGE = ConvNeXtConfig(stages=(3, 3, 27, 3))
PRESETS = Presets(
    lambda: {
        "convnext_atto": replace(SMALL, widths=(40, 80, 160, 320)),
        "convnext_femto": replace(SMALL, widths=(48, 96, 192, 384)),
        "convnext_pico": replace(SMALL, widths=(64, 128, 256, 512)),
        "convnext_nano": replace(SMALL, widths=(80, 160, 320, 640), stages=(2, 2, 8, 2)),
        "convnext_tiny": ConvNeXtConfig(),
        "convnext_small": LARGE,
        "convnext_base": replace(LARGE, widths=(128, 256, 512, 1024)),
        "convnext_large": replace(LARGE, widths=(192, 384, 768, 1536)),
        "convnext_xlarge": replace(LARGE, widths=(256, 512, 1024, 2048)),
    }
)
LETTERS = {"tiny": "T", "small": "S", "base": "B", "large": "L", "xlarge": "XL"}
ALIASES = {f"ConvNeXt-{letter}": f"convnext_{size}" for size, letter in LETTERS.items()}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    _, channels, patch, _ = side.get_shape(shapes, "stem.0.weight", 4)
    stages = side.count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"stages.{stage}.blocks.0.norm.weight" for stage in range(len(stages))]
    widths = tuple(side.get_shape(shapes, name, 1)[0] for name in first)
    fields = side.describe_stages(shapes, channels, stages, widths, "head.fc.weight")
    initial = ConvNeXtConfig().layer_scale  # its initial value is not in the weights
    return side.InferredConfig(fields=fields | {"patch_size": patch, "layer_scale": initial})


def has_convolutions_for_mlps(config: side.ConfigFields) -> bool:
    """Whether timm stores the matrices of the MLPs as 1×1 convolutions, which compute the same."""
    return config["widths"] in [PRESETS[f"convnext_{size}"].widths for size in ("atto", "femto", "pico", "nano")]


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {
        "in_chans": config["channels"],
        "depths": config["stages"],
        "dims": config["widths"],
        "patch_size": config["patch_size"],
        "ls_init_value": config["layer_scale"],
        "conv_mlp": has_convolutions_for_mlps(config),
    }
    return {"architecture": "convnext_tiny", "num_classes": config["classes"], "model_args": arguments}


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    return make_hf_heading(config, "convnext", "ConvNext") | {
        "patch_size": config["patch_size"],
        "num_stages": len(config["stages"]),
        "depths": config["stages"],
        "hidden_sizes": config["widths"],
        "layer_scale_init_value": config["layer_scale"],
        "layer_norm_eps": NORM_EPS,  # its default for the last norm is 1e-12
        "hidden_act": "gelu",
        "drop_path_rate": config["stochastic_depth"],
        "dtype": "float32",
    }


AS_MATRIX = side.TensorTransform(lambda parts: parts[0].flatten(1), side.IDENTITY.to_theirs)  # may be a 1×1 convolution
AS_MAP = side.TensorTransform(lambda parts: parts[0].flatten(), lambda tensor, _: [tensor[:, None, None]])


def make_timm_table(matrix: side.TensorTransform) -> tuple[side.NameEntry, ...]:
    return side.parse_table(
        """
        {stem.0,stem.1,stages.#.downsample.0,stages.#.downsample.1,head.norm,head.fc}.*
        stages.#.blocks.#.:
            {conv_dw,norm}.*
            gamma
            {mlp.fc1,mlp.fc2}.weight | matrix
            {mlp.fc1,mlp.fc2}.bias
        """,
        matrix=matrix,
    )


AUTHORS_TABLE = """
    downsample_layers.0.{0,1}.* -> stem.{0,1}.*
    downsample_layers.#.{0,1}.* -> stages.#.downsample.{0,1}.*
    stages.#.#.{dwconv,norm,pwconv1,pwconv2}.* -> stages.#.blocks.#.{conv_dw,norm,mlp.fc1,mlp.fc2}.*
    stages.#.#.gamma -> stages.#.blocks.#.gamma
    {norm,head}.* -> {head.norm,head.fc}.*
"""
# stages have odd numbers, what halves the grid before them even ones
TORCHVISION_TABLE = """
    features.0.{0,1}.* -> stem.{0,1}.*
    features.{2,4,6}. -> stages.{1,2,3}.downsample.:
        {0,1}.*
    features.{1,3,5,7}.#. -> stages.{0,1,2,3}.blocks.#.:
        block.{0,2,3,5}.* -> {conv_dw,norm,mlp.fc1,mlp.fc2}.*
        layer_scale -> gamma | as_map
    classifier.{0,2}.* -> head.{norm,fc}.*
"""
HF_TABLE = """
    embeddings.{patch_embeddings,layernorm}.* -> stem.{0,1}.*
    encoder.stages.#.downsampling_layer.{0,1}.* -> stages.#.downsample.{0,1}.*
    encoder.stages.#.layers.#. -> stages.#.blocks.#.:
        {dwconv,layernorm,pwconv1,pwconv2}.* -> {conv_dw,norm,mlp.fc1,mlp.fc2}.*
        layer_scale_parameter -> gamma
    {layernorm,classifier}.* -> {head.norm,head.fc}.*
"""
RESIZED = {(96, 9): 236, (96, 27): 230}  # torchvision's short side before the crop, by width and depth; 232 otherwise


def find_torchvision_crop(config: side.ConfigFields) -> float:
    size = config["image_size"][0]
    return size / (size + RESIZED.get((config["widths"][0], max(config["stages"])), 232) - 224)


def make_timm_source(
    table: tuple[side.NameEntry, ...], *markers: str, accepts: Callable[[side.ConfigFields], bool] = lambda _: True
) -> side.SourceNames:
    return side.SourceNames(
        layout="timm",
        table=table,
        markers=markers,
        accepts=accepts,
        supported={"number of stages": (4,)},
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "model_args": (
                *("in_chans", "num_classes", "depths", "dims", "patch_size", "ls_init_value", "conv_mlp"),
                "drop_path_rate",
            ),
            "argument_fields": {"ls_init_value": "layer_scale"},
            "pretrained_cfg": {"crop_pct": 0.875},
            "refused_names": "^(convnext_xxlarge|test_convnext)",
            "refused_because": "has norms with an eps of 1e-5; expected another ConvNeXt, with 1e-6",
        },
    )


SOURCES = (
    make_timm_source(make_timm_table(side.MATRIX_AS_CONVOLUTION), accepts=has_convolutions_for_mlps),
    make_timm_source(
        make_timm_table(AS_MATRIX),
        *("stem.0.weight", "stages.0.blocks.0.conv_dw.weight", "stages.0.blocks.0.mlp.fc1.weight"),
    ),
    make_timm_source(side.parse_table(AUTHORS_TABLE), "downsample_layers.0.0.weight", "stages.0.0.dwconv.weight"),
    side.SourceNames(
        layout="torchvision",
        table=side.parse_table(TORCHVISION_TABLE, as_map=AS_MAP),
        markers=("features.0.0.weight", "features.1.0.block.0.weight", "features.1.0.layer_scale"),
        supported={"channels": (3,), "patch_size": (4,), "number of stages": (1, 2, 3, 4)},
        details={"crop": find_torchvision_crop, "interpolation": "bilinear"},
    ),
    side.SourceNames(
        layout="hf",
        table=side.parse_table(HF_TABLE),
        markers=("embeddings.patch_embeddings.weight", "encoder.stages.#.layers.#.dwconv.weight"),
        card=make_hf_card,
        details={
            "model_type": "convnext",
            "norm_eps": NORM_EPS,
            "imagenet_mean": True,
            "preprocessing": {"crop": 0.875, "fit": "short_side", "interpolation": "bicubic"},
            "argument_fields": {"layer_scale_init_value": "layer_scale"},
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={"stem.0.weight": "kernel"})
FAMILY = Family("convnext", ConvNeXtConfig, ConvNeXt, PRESETS, ALIASES, CHECKPOINT)
