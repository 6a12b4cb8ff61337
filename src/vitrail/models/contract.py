"""What every model offers, and what it declares about itself. Read this file after vit.py.

The rest of the package never probes a model for attributes and never asks for its family: it reads these declarations.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from vitrail.layers.positions import Grid


@dataclass(frozen=True, kw_only=True)
class Level:
    """Blocks that work at one resolution: a plain ViT has one level, a pyramid several."""

    grid: Grid  # rows and columns of tokens for images of the size in the config
    stride: Grid  # pixels per row and per column of the grid
    width: int  # channels
    blocks: tuple[str, ...]  # names of its blocks in the module, in order: blocks.0, …


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """The sizes of images that a model takes: the one in its config, or all multiples from a minimum on."""

    multiple: Grid | None = None  # rows and columns; (1, 1) takes any size, None only the size in the config
    minimum: Grid = (1, 1)


class Model(nn.Module):
    """A module that is built from its config."""

    config: Any
    reads: ClassVar[Literal["images", "text"]]


class ImageModel(Model):
    """(B, C, H, W) → logits (B, classes), or without a head the pooled features (B, D)."""

    reads = "images"
    levels: tuple[Level, ...]  # from the finest grid to the coarsest
    sizes: ImageSizes
    prefix_tokens: tuple[str, ...] = ()  # before the patches: class, distill, register0, …
    heads: tuple[tuple[str, str], ...] = ()  # what each classifier head reads, and its name in the module
    no_maps_reason: str = ""  # why its attention has no maps; empty if it has
    no_masking_reason: str = ""  # why patches cannot be masked or dropped before the blocks; empty if they can

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.tokens(images))

    def tokens(self, images: Tensor) -> Tensor:
        """All tokens after the final norm, prefix first: (B, C, H, W) → (B, N, D)."""
        raise NotImplementedError

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for `tokens`: (B, N, D) → (B, classes)."""
        raise NotImplementedError

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """One map per level, before the final norm and without prefix tokens: (B, C, H, W) → [(B, D, h, w), …]."""
        raise NotImplementedError
