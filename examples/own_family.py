"""A custom architecture, used by name without changing the package:

    vitrail summary examples/own_family.py:mixer_tiny
    vitrail train --model examples/own_family.py:mixer_tiny --image-size 28 --set patch_size=4 -o runs/mixer
    vitrail eval runs/mixer --trust-code examples/own_family.py:mixer_tiny

MLP-Mixer (Tolstikhin 2021): a ViT in which an MLP over the patches replaces attention.
"""

from dataclasses import dataclass, field

from torch import Tensor, nn

from vitrail.layers.embed import PatchEmbed
from vitrail.layers.mlp import Mlp
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, make_single_level
from vitrail.models.base.family import Family
from vitrail.models.parts.encoder import make_head


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    image_size: Size = 224
    patch_size: Size = 16
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    width: int = 192
    depth: int = 8

    def __post_init__(self) -> None:
        check_fields(self)
        check_grid(pair(self.image_size), pair(self.patch_size))


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.between = nn.LayerNorm(width), Mlp(patches, 2 * patches)
        self.norm2, self.within = nn.LayerNorm(width), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, D)
        x = x + self.between(self.norm1(x).mT).mT
        return x + self.within(self.norm2(x))


class Mixer(ImageModel):
    first_filters = "patch_embed.proj.weight"
    no_maps_reason, no_dropping_reason = "it has no attention", "its MLPs mix a fixed number of patches"

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        patch = pair(config.patch_size)
        self.levels = make_single_level(pair(config.image_size), patch, config.width, config.depth)
        self.sizes, self.classifiers = ImageSizes(), (("mean", "head"),) if config.classes else ()
        self.patch_embed = PatchEmbed(config.width, patch, config.channels)
        patches = self.grid[0] * self.grid[1]
        self.blocks = nn.Sequential(*(MixerBlock(patches, config.width) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.width)
        self.head = make_head(config.width, config.classes)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002
        return self.blocks(x)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(tokens.mean(1))


PRESETS = {"mixer_tiny": MixerConfig(), "mixer_small": MixerConfig(width=384, depth=12)}
FAMILY = Family(name="mixer", config=MixerConfig, build=Mixer, presets=PRESETS)
