"""A custom architecture, used by name without changing the package:

    vitrail summary examples/own_family.py:resmlp_tiny
    vitrail train --model examples/own_family.py:resmlp_tiny --image-size 28 --set patch_size=4 -o runs/resmlp
    vitrail eval runs/resmlp --trust-code examples/own_family.py:resmlp_tiny

ResMLP (Touvron 2021, arXiv 2105.03404): a ViT in which one linear map over the patches replaces attention, and a factor
and a bias for each channel replace layer norm.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrail.layers.block import Mlp
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import ImageModel, ImageSizes, make_single_level
from vitrail.models.base.family import Family
from vitrail.models.parts.encoder import make_head


@dataclass(frozen=True, kw_only=True)
class ResMLPConfig:
    image_size: Size = 224
    patch_size: Size = 16
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the mean of the tokens
    width: int = 192
    depth: int = 8
    layer_scale: float = 1e-4  # initial factor of each branch

    def __post_init__(self) -> None:
        check_fields(self)
        check_grid(pair(self.image_size), pair(self.patch_size))


class Affine(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x + self.beta


class ResMLPBlock(nn.Module):
    def __init__(self, patches: int, width: int, layer_scale: float) -> None:
        super().__init__()
        self.norm1, self.between = Affine(width), nn.Linear(patches, patches)
        self.norm2, self.within = Affine(width), Mlp(width, 4 * width)
        self.ls1, self.ls2 = (nn.Parameter(torch.full((width,), layer_scale)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # (B, n, D)
        x = x + self.ls1 * self.between(self.norm1(x).mT).mT
        return x + self.ls2 * self.within(self.norm2(x))


class ResMLP(ImageModel):
    first_filters = "patch_embed.proj.weight"
    no_maps_reason, no_dropping_reason = "it has no attention", "its linear maps mix a fixed number of patches"

    def __init__(self, config: ResMLPConfig) -> None:
        super().__init__(config)
        patch = pair(config.patch_size)
        self.levels = make_single_level(pair(config.image_size), patch, config.width, config.depth)
        self.sizes, self.classifiers = ImageSizes(), (("mean", "head"),) if config.classes else ()
        self.patch_embed = PatchEmbed(config.width, patch, config.channels)
        patches = self.grid[0] * self.grid[1]
        self.blocks = nn.Sequential(
            *(ResMLPBlock(patches, config.width, config.layer_scale) for _ in range(config.depth))
        )
        self.norm = Affine(config.width)
        self.head = make_head(config.width, config.classes)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002
        return self.blocks(x)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(tokens.mean(1))


PRESETS = {"resmlp_tiny": ResMLPConfig(), "resmlp_small": ResMLPConfig(width=384, depth=12)}
FAMILY = Family(name="resmlp", config=ResMLPConfig, build=ResMLP, presets=PRESETS)
