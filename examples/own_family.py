"""A custom architecture, used by name without changing the package:

    vitrail summary examples/own_family.py:mixer_tiny

MLP-Mixer (Tolstikhin 2021): a ViT in which an MLP over the patches replaces attention.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.layers.embed import PatchEmbed
from vitrail.layers.mlp import Mlp
from vitrail.models.checks import Size, check_fields, check_grid, pair
from vitrail.models.family import Family


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    image_size: Size = 224
    patch_size: Size = 16
    channels: int = 3
    classes: int = 1000
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


class Mixer(nn.Module):
    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        rows, columns = check_grid(pair(config.image_size), pair(config.patch_size))
        self.patch_embed = PatchEmbed(config.width, pair(config.patch_size), config.channels)
        self.blocks = nn.Sequential(*(MixerBlock(rows * columns, config.width) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def tokens(self, images: Tensor) -> Tensor:
        return self.norm(self.blocks(self.patch_embed(images)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.tokens(images).mean(1))


PRESETS = {"mixer_tiny": MixerConfig(), "mixer_small": MixerConfig(width=384, depth=12)}
FAMILY = Family(name="mixer", config=MixerConfig, build=Mixer, presets=PRESETS)
