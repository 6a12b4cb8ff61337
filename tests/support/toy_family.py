"""A family as a newcomer would add it: one file, and one line in FAMILIES. An MLP on each patch, and their mean.

B batch, n = h·w patches, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.layers.block import Mlp
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample
from vitrail.models.base.checkpoint_side import (
    CheckpointSide,
    InferredConfig,
    SourceNames,
    TensorShapes,
    count_classes,
    count_numbers,
    get_shape,
    make_entry,
)
from vitrail.models.base.checks import Size, check_fields, pair
from vitrail.models.base.contract import ImageModel, make_patch_sizes, make_single_level
from vitrail.models.base.family import Family


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    image_size: Size = 32
    patch_size: Size = 8
    channels: int = 3
    classes: int = 3
    width: int = 8
    depth: int = 2

    def __post_init__(self) -> None:
        check_fields(self)


class Toy(ImageModel):
    final_norm, first_filters, no_maps_reason = "norm", "patch_embed.proj.weight", "it has no attention"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        patch, width = pair(config.patch_size), config.width
        self.levels = make_single_level(pair(config.image_size), patch, width, config.depth)
        self.sizes, self.classifiers = make_patch_sizes(patch, dynamic=False), (("mean", "head"),)
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.pos_embed = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1], width))
        self.blocks = nn.ModuleList(Mlp(width, 2 * width) for _ in range(config.depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.classes)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.pos_embed)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        return self.patch_embed(images), self.check_images(images)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        return patches + resample(self.pos_embed, self.grid, grid)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002
        for block in self.blocks:
            x = x + block(x)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(tokens.mean(1))


PRESETS = {"toy_small": ToyConfig(), "toy_large": ToyConfig(depth=4)}


def infer_config(shapes: TensorShapes) -> InferredConfig:
    width, channels, *patch = get_shape(shapes, "patch_embed.proj.weight", 4)
    fields = {
        "patch_size": (patch[0], patch[1]),
        "channels": channels,
        "classes": count_classes(shapes, "head.weight"),
        "width": width,
        "depth": count_numbers(shapes, r"blocks\.(\d+)\."),
    }
    return InferredConfig(fields=fields, stride=(patch[0], patch[1]))


TORCHVISION = SourceNames(
    layout="torchvision",
    table=(
        make_entry("stem.*", "patch_embed.proj.*"),
        make_entry("places", "pos_embed"),
        make_entry("layer%.fc#.*", "blocks.#.fc#.*"),
        make_entry("ln.*", "norm.*"),
        make_entry("classifier.*", "head.*"),
    ),
    markers=("stem.weight", "places"),
    supported={"channels": (3,)},
)
CHECKPOINT = CheckpointSide(infer_config=infer_config, sources=(TORCHVISION,))
FAMILY = Family(name="toy_family", config=ToyConfig, build=Toy, presets=PRESETS, checkpoint=CHECKPOINT)
