"""MLP-Mixer (Tolstikhin 2021, arXiv 2105.01601): a ViT with an MLP over the patches in place of attention.

B batch, n = h·w patches, D width. The MLP over the patches has weights for each of them, so an image has one size.
"""

from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from vitrail.layers.block import Mlp, StochasticDepth
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import lecun_normal_
from vitrail.models.names.encoder_names import CONV, DENSE
from vitrail.models.parts.encoder import make_head, scale_rate, zero_head


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 16
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    width: int = 768  # channels of a token
    depth: int = 12  # blocks
    token_width: int | None = None  # hidden width of the MLP over the patches; default: width/2
    mlp_width: int | None = None  # hidden width of the MLP over the channels; default: 4·width
    activation: Literal["gelu", "gelu_tanh"] = "gelu"  # gelu_tanh: as the authors trained; logits differ by 1e-4
    norm_eps: float = 1e-6
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of the last block; linear from 0 at the first
    dynamic: ClassVar[bool] = False  # its weights are for one number of patches

    def __post_init__(self) -> None:
        check_fields(self)
        check_grid(pair(self.image_size), pair(self.patch_size))


class Mixer(ImageModel):
    """(B, C, H, W) → logits (B, classes), or without a head the mean of the tokens (B, D)."""

    config: MixerConfig
    first_filters = "stem.proj.weight"
    no_maps_reason = "it has no attention"
    no_dropping_reason = "its MLPs mix a fixed number of patches"

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        width, patch = config.width, pair(config.patch_size)
        self.declare_level(patch)
        self.stem, patches = PatchEmbed(width, patch, config.channels), self.grid[0] * self.grid[1]
        self.blocks = nn.ModuleList(
            MixerBlock(config, patches, scale_rate(config.stochastic_depth, layer, config.depth))
            for layer in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code: a variance of 1/fan-in, biases and the head zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                lecun_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        zero_head(self.head)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.check_images(images)
        return self.stem(images), grid

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        for block in self.blocks:
            x = block(x)
        return x


class MixerBlock(nn.Module):
    """An MLP over the patches of each channel, then one over the channels of each patch: (B, n, D) → (B, n, D)."""

    def __init__(self, config: MixerConfig, patches: int, rate: float) -> None:
        super().__init__()
        width, tanh = config.width, config.activation == "gelu_tanh"
        self.norm1, self.norm2 = nn.LayerNorm(width, config.norm_eps), nn.LayerNorm(width, config.norm_eps)
        self.mlp_tokens = Mlp(patches, config.token_width or width // 2, tanh=tanh)
        self.mlp_channels = Mlp(width, config.mlp_width or 4 * width, tanh=tanh)
        self.drop_path = StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mlp_tokens(self.norm1(x).mT).mT)
        return x + self.drop_path(self.mlp_channels(self.norm2(x)))


SIZES = {
    "s": MixerConfig(width=512, depth=8),
    "b": MixerConfig(),
    "l": MixerConfig(width=1024, depth=24),
    "h": MixerConfig(width=1280, depth=32),
}
PATCHES = {"s": (32, 16), "b": (32, 16), "l": (32, 16), "h": (14,)}
PRESETS = Presets(
    lambda: {
        f"mixer_{size}{patch}_224": replace(SIZES[size], patch_size=patch)
        for size, patches in PATCHES.items()
        for patch in patches
    }
)
ALIASES = {
    f"Mixer-{size.upper()}/{patch}": f"mixer_{size}{patch}_224"
    for size, patches in PATCHES.items()
    for patch in patches
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """The number of patches is known; a square of them is assumed."""
    width, channels, rows, columns = side.get_shape(shapes, "stem.proj.weight", 4)
    token_width, patches = side.get_shape(shapes, "blocks.0.mlp_tokens.fc1.weight", 2)
    mlp_width, sides = side.get_shape(shapes, "blocks.0.mlp_channels.fc1.weight", 2)[0], isqrt(patches)
    fields: dict[str, Any] = {
        "image_size": (sides * rows, sides * columns) if sides * sides == patches else None,
        "patch_size": (rows, columns),
        "channels": channels,
        "classes": side.count_classes(shapes, "head.weight"),
        "width": width,
        "depth": side.count_numbers(shapes, r"blocks\.(\d+)\."),
        "token_width": None if token_width == width // 2 else token_width,
        "mlp_width": None if mlp_width == 4 * width else mlp_width,
    }
    return side.InferredConfig(fields=fields)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    """timm opens a folder of one of its own models, at any image size."""
    free = {"activation": "gelu", "stochastic_depth": 0.0}
    card = side.make_preset_card({**config, **free}, FAMILY.name, PRESETS)
    return {**card, "model_args": {**card["model_args"], "img_size": config["image_size"]}}


TIMM_TABLE = """
    {stem.proj,norm,head}.*
    blocks.#.{norm1,mlp_tokens.fc1,mlp_tokens.fc2,norm2,mlp_channels.fc1,mlp_channels.fc2}.*
"""
GOOGLE_TABLE = """
    stem/kernel -> stem.proj.weight | conv
    stem/bias -> stem.proj.bias
    MixerBlock_#/ -> blocks.#.:
        {LayerNorm_0,LayerNorm_1}/scale -> {norm1,norm2}.weight
        {LayerNorm_0,LayerNorm_1}/bias -> {norm1,norm2}.bias
        {token_mixing,channel_mixing}/Dense_0/kernel -> {mlp_tokens,mlp_channels}.fc1.weight | dense
        {token_mixing,channel_mixing}/Dense_0/bias -> {mlp_tokens,mlp_channels}.fc1.bias
        {token_mixing,channel_mixing}/Dense_1/kernel -> {mlp_tokens,mlp_channels}.fc2.weight | dense
        {token_mixing,channel_mixing}/Dense_1/bias -> {mlp_tokens,mlp_channels}.fc2.bias
    pre_head_layer_norm/{scale,bias} -> norm.{weight,bias}
    head/kernel -> head.weight | dense
    head/bias -> head.bias
"""
SOURCES = (
    side.SourceNames(
        layout="timm",
        table=side.parse_table(TIMM_TABLE),
        markers=("stem.proj.weight", "blocks.0.mlp_tokens.fc1.weight", "blocks.0.mlp_channels.fc1.weight"),
        assumed={"activation": "gelu", "norm_eps": 1e-6},
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "model_args": ("img_size", "in_chans", "num_classes", "drop_path_rate"),
            "argument_fields": {"img_size": "image_size"},
            "pretrained_cfg": {"crop_pct": 0.875, "interpolation": "bicubic"},
            "refused_names": "^g(mixer|mlp)_",  # with gates
        },
    ),
    side.SourceNames(
        layout="google",
        table=side.parse_table(GOOGLE_TABLE, conv=CONV, dense=DENSE),
        markers=("stem/kernel", "MixerBlock_0/token_mixing/Dense_0/kernel"),
        assumed={"activation": "gelu_tanh", "norm_eps": 1e-6},
        details={
            "fields": {"activation": "gelu_tanh"},
            "preprocessing": {"crop": 0.875, "interpolation": "bicubic"},
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={"stem.proj.weight": "kernel"})
FAMILY = Family("mixer", MixerConfig, Mixer, PRESETS, ALIASES, CHECKPOINT)
