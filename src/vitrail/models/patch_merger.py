"""PatchMerger (Renggli 2022, arXiv 2202.12015): halfway through a ViT, all tokens are merged to a few, say 8.

Y = softmax(WᵀXᵀ)·X, with the softmax over the tokens: each of the M merged tokens is a weighted mean of all tokens. The
second half of the blocks then costs almost nothing. B batch, n = h·w patches, M merged tokens, D width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.parts.encoder import EncoderConfig, PatchEncoder, make_encoder_blocks, make_head, zero_head


@dataclass(frozen=True, kw_only=True)
class PatchMergerConfig(EncoderConfig):
    merged: int = 8  # tokens after the merger
    merge_after: int | None = None  # blocks before the merger; default: half of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_after is not None and self.merge_after >= self.depth:
            raise ConfigError(
                f"merge_after is {self.merge_after}; expected less than {self.depth}, the number of blocks"
            )
        if self.depth == 1:
            raise ConfigError("depth is 1; expected 2 or more, with the merger between two blocks")


class MergedViT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the mean of the merged tokens (B, D)."""

    config: PatchMergerConfig
    final_norm = ""  # `norm` is of merged tokens
    merging_module = "merger"
    first_filters = "patch_embed.proj.weight"
    no_tokens_reason = "its merged tokens have no place in the image"
    no_masking_reason = "after its merger, there is no token per patch"

    def __init__(self, config: PatchMergerConfig) -> None:
        super().__init__(config)
        width, patch, eps = config.width, pair(config.patch_size), config.norm_eps
        self.declare_level(patch)
        self.merge_after = config.merge_after or config.depth // 2
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.pos_embed = nn.Parameter(torch.empty(1, math.prod(self.grid), width))
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_encoder_blocks(config, config.mlp_width or 4 * width)
        self.merger = PatchMerger(width, config.merged, bias=False)
        self.norm = nn.LayerNorm(width, eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in a ViT; the head is zero."""
        init_layers(self)
        nn.init.normal_(self.pos_embed, std=0.02)
        zero_head(self.head)

    def forward(self, images: Tensor) -> Tensor:
        x, grid = self.run_first_blocks(images)
        x = self.merger(x)
        for block in self.blocks[self.merge_after :]:
            x = block(x, grid)
        return self.logits(self.norm(x))

    def run_first_blocks(self, images: Tensor) -> tuple[Tensor, Grid]:
        """The tokens that are merged, (B, n, D), and their grid."""
        x, grid = self.embed(images)
        for block in self.blocks[: self.merge_after]:
            x = block(x, grid)
        return x, grid

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The map before the merger: (B, C, H, W) → [(B, D, h, w)]."""
        x, grid = self.run_first_blocks(images)
        return [x.transpose(1, 2).unflatten(2, grid)]


class PatchMerger(nn.Linear):
    """M weighted means of all tokens, with weights computed from each token: (B, n, D) → (B, M, D)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        return self.weights(input) @ input

    def weights(self, tokens: Tensor) -> Tensor:
        """The weight of each token in each merged one; rows sum to 1: (B, M, n)."""
        return super().forward(tokens).transpose(1, 2).softmax(-1)


PRESETS = Presets(
    lambda: {
        "patch_merger_tiny_patch16_224": PatchMergerConfig(width=192, heads=3),
        "patch_merger_small_patch16_224": PatchMergerConfig(width=384, heads=6),
        "patch_merger_base_patch16_224": PatchMergerConfig(),
    }
)
FAMILY = Family("patch_merger", PatchMergerConfig, MergedViT, PRESETS)
