"""DeepViT (Zhou 2021, arXiv 2103.11886): a deeper ViT, in whose last blocks each head's map mixes those of all heads.

Re-attention keeps maps of deep layers from becoming equal: after the softmax, a 1×1 convolution over the heads and
batch norm. B batch, n = h·w patches, N = 1 + n tokens, D width, H heads, K width of a head.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, SelfAttention, attention_weights, merge_heads
from vitrail.layers.block import Block
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import pair
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_as_deit
from vitrail.models.names import encoder_names
from vitrail.models.parts.encoder import EncoderConfig, PatchEncoder, make_encoder_blocks, make_head, zero_head

STEM_WIDTH = 64  # channels of the convolutional stem, the same in every size


@dataclass(frozen=True, kw_only=True)
class DeepViTConfig(EncoderConfig):
    stem: Literal["patches", "convolutions"] = "patches"
    width: int = 384  # channels of a token
    depth: int = 16  # blocks
    reattending: int | None = None  # blocks with re-attention, the last ones; default: all
    scaled_maps: bool = False  # whether the mixed maps are multiplied by 1/√K too
    branch_scale: float = 1.0  # norms read the tokens times this, and branches are divided by it
    mlp_width: int | None = None  # default: 3·width

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reattending is not None and self.reattending > self.depth:
            raise ConfigError(f"{self.reattending} reattending of {self.depth} blocks; expected at most {self.depth}")
        if self.stem == "convolutions" and any(side % 2 for side in pair(self.patch_size)):
            raise ConfigError(f"patch_size {self.patch_size}; expected even numbers, since the first stride is 2")


class DeepViT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the class token (B, D)."""

    config: DeepViTConfig
    prefix_tokens = classifier_tokens = ("class",)

    def __init__(self, config: DeepViTConfig) -> None:
        super().__init__(config)
        width, patch, eps = config.width, pair(config.patch_size), config.norm_eps
        self.declare_level(patch)
        if config.stem == "convolutions":
            self.first_filters = "patch_embed.conv1.weight"
            self.no_masking_reason = "the convolutions of its stem mix patches before they become tokens"
            self.patch_embed = ConvStem(width, patch, config.channels)
        else:
            self.first_filters = "patch_embed.proj.weight"
            self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + math.prod(self.grid), width))
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_encoder_blocks(config, config.mlp_width or 3 * width, kind=ScaledBlock)
        first = config.depth - (config.reattending or config.depth)
        blocks: list[Any] = list(self.blocks)
        for number, block in enumerate(blocks):
            block.branch_scale = config.branch_scale
            if number >= first:
                block.attn = ReAttention(
                    width, config.heads, scaled=config.scaled_maps, dropout=config.attention_dropout
                )
        self.norm = nn.LayerNorm(width, eps)
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """As in the authors' code, which is based on DeiT's; the head is zero."""
        init_as_deit(self, self.cls_token, self.pos_embed)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, ReAttention):
                module.reatten_matrix.reset_parameters()
        zero_head(self.head)


class ConvStem(nn.Module):
    """Two convolutions, of which the first halves the resolution, then patches: (B, C, H, W) → (B, n, D)."""

    def __init__(self, width: int, patch: tuple[int, int], channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, STEM_WIDTH, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        self.conv2 = nn.Conv2d(STEM_WIDTH, STEM_WIDTH, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(STEM_WIDTH)
        half = (patch[0] // 2, patch[1] // 2)
        self.proj = nn.Conv2d(STEM_WIDTH, width, half, half)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.proj(x).flatten(2).transpose(1, 2)


class ScaledBlock(Block):
    """z += MSA(LN(s·z))/s; z += MLP(LN(s·z))/s, with s the `branch_scale`: (B, N, D) → (B, N, D)."""

    branch_scale = 1.0

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        mixed = self.attn(self.norm1(x * self.branch_scale), grid, mask=mask, queries=queries)
        x = x[:, :queries] + self.drop_path(self.drop(mixed)) / self.branch_scale
        return x + self.drop_path(self.mlp(self.norm2(x * self.branch_scale))) / self.branch_scale


class ReAttention(SelfAttention):
    """Self-attention whose maps, one per head, are mixed and normalized over the batch after the softmax."""

    no_shares_reason: ClassVar[str] = "its heads are mixed after the softmax, so attention rows do not sum to 1"

    def __init__(self, width: int, heads: int, *, scaled: bool, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout=dropout)
        self.reatten_matrix = nn.Conv2d(heads, heads, 1)
        self.var_norm = nn.BatchNorm2d(heads)
        self.map_scale = math.sqrt(heads / width) if scaled else 1.0

    def mix(self, maps: Tensor) -> Tensor:
        """(B, H, Nq, N) → (B, H, Nq, N)."""
        return self.var_norm(self.reatten_matrix(maps)) * self.map_scale

    def weigh(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        return self.mix(attention_weights(q, k, mask).to(self.reatten_matrix.weight.dtype))

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        # in training, the statistics of a map are those of all its rows
        q, k, v, mask = self.project(x, grid, mask, None if self.training else queries)
        maps = self.mix(F.dropout(attention_weights(q, k, mask), self.dropout, self.training))
        return self.proj(merge_heads(maps @ v)[:, :queries])


PLAIN = DeepViTConfig()
CONV = DeepViTConfig(stem="convolutions", branch_scale=0.5)
PRESETS = Presets(
    lambda: {
        **{f"deepvit_patch16_224_re_attn_{depth}b": replace(PLAIN, depth=depth) for depth in (16, 24, 32)},
        "deepvit_S": replace(CONV, width=396, reattending=5, scaled_maps=True),
        "deepvit_L": replace(CONV, width=420, depth=32, reattending=12),
        "deepvit_L_384": replace(CONV, width=420, depth=32, reattending=12, image_size=384),
    }
)
ALIASES = {
    **{f"DeepViT-{depth}B": f"deepvit_patch16_224_re_attn_{depth}b" for depth in (16, 24, 32)},
    "DeepViT-S": "deepvit_S",
    "DeepViT-L": "deepvit_L",
    "DeepViT-L@384": "deepvit_L_384",
}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    fields = encoder_names.infer_encoder_fields(shapes)
    hidden, width = side.get_shape(shapes, "blocks.0.mlp.fc1.weight", 2)
    mixed = r"blocks\.(\d+)\.attn\.reatten_matrix\.weight"
    reattending = side.count_numbers(shapes, mixed)
    matrix = f"blocks.{fields['depth'] - 1}.attn.reatten_matrix.weight"
    fields |= {
        "mlp_width": None if hidden == 3 * width else hidden,
        "reattending": None if reattending == fields["depth"] else reattending,
        "heads": side.get_shape(shapes, matrix, 4)[0],
    }
    if "patch_embed.conv1.weight" in shapes:
        p, q = fields["patch_size"]
        fields |= {
            "stem": "convolutions",
            "channels": side.get_shape(shapes, "patch_embed.conv1.weight", 4)[1],
            "patch_size": (2 * p, 2 * q),
            "branch_scale": CONV.branch_scale,
            "scaled_maps": has_width_of_s(fields),
        }
    return side.InferredConfig(fields=fields, stride=fields["patch_size"], prefix=1)


def has_width_of_s(config: side.ConfigFields) -> bool:
    """The published S is the only model with scaled maps, of which its file says nothing."""
    return config["width"] == PRESETS["deepvit_S"].width


NAME_TABLE = side.parse_table(
    """
    {cls_token,pos_embed}
    {patch_embed.proj,norm,head}.*
    patch_embed.{conv1.weight,conv2.weight,bn1.+,bn2.+}
    blocks.#.{norm1,attn.qkv,attn.proj,attn.reatten_matrix,norm2,mlp.fc1,mlp.fc2}.*
    blocks.#.attn.var_norm.+
    """
)
ASSUMED = {"norm_eps": 1e-6, "scaled_maps": False, "branch_scale": PLAIN.branch_scale}
AUTHORS = side.SourceNames(
    layout="authors",
    table=NAME_TABLE,
    markers=(encoder_names.PATCH_KERNEL, "blocks.#.attn.reatten_matrix.weight"),
    accepts=lambda config: config["stem"] == "patches",
    assumed=ASSUMED,
    details={"preprocessing": {"crop": 0.9}},
)
WITH_CONVOLUTIONS = (  # only to write: what its readers assume follows from the shapes
    replace(
        AUTHORS,
        markers=(),
        accepts=has_width_of_s,
        assumed={**ASSUMED, "branch_scale": CONV.branch_scale, "scaled_maps": True},
    ),
    side.SourceNames(layout="authors", table=NAME_TABLE, assumed={**ASSUMED, "branch_scale": CONV.branch_scale}),
)
CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config,
    sources=(AUTHORS, *WITH_CONVOLUTIONS),
    resampled={"pos_embed": "grid", "patch_embed.proj.weight": "kernel"},
    mlp_ratio=3,
)
FAMILY = Family("deepvit", DeepViTConfig, DeepViT, PRESETS, ALIASES, CHECKPOINT)
